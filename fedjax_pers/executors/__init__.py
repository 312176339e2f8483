"""How the clients of a cohort are mapped onto the machine."""

from fedjax_pers.executors.lanes import Executor, chunked, looped, vectorised

__all__ = ["Executor", "chunked", "looped", "vectorised"]
