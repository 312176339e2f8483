"""Operations that are fast on the CPU, put in the place of those that are not."""

from fedjax_pers.executors.fast import convolutions, pooling, sums  # noqa: F401 (each registers its twins)
from fedjax_pers.executors.fast.rewriting import fast_convolutions

__all__ = ["fast_convolutions"]
