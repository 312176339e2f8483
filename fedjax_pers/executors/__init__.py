"""How the clients of a cohort are mapped onto the machine."""

from fedjax_pers.executors.cores import use_cores
from fedjax_pers.executors.lanes import Executor, chunked, looped, sharded, vectorised

__all__ = ["Executor", "chunked", "looped", "sharded", "use_cores", "vectorised"]
