"""The executor that is used where none is asked for, from the measurements in ``benchmarks/results/lanes.json``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax

from fedjax_pers.executors.lanes import Executor
from fedjax_pers.trees import num_bytes

# On a CPU, operations on small models are dominated by their overhead, so many lanes win; the weights of several larger
# models do not fit into a core's cache. Convolutions with a kernel for each lane run one lane after another anyway.
SMALL, LANES_OF_SMALL = 64 * 1024, 32
_chosen: ContextVar[Executor | None] = ContextVar("executor", default=None)


def default_executor(leaves: Any) -> Executor:
    """All devices of this process, and lanes by the leaves of a client, frozen ones too; on an accelerator everyone."""
    if (chosen := _chosen.get()) is not None:
        return chosen
    if jax.default_backend() != "cpu":
        return Executor(None, devices=None)
    if any(len(x.shape) >= 4 for x in jax.tree.leaves(leaves)):
        return Executor(1, devices=None)
    return Executor(LANES_OF_SMALL if num_bytes(leaves) <= SMALL else 1, devices=None)


@contextlib.contextmanager
def overridden(executor: Executor) -> Iterator[None]:
    """Algorithms that were composed without an executor are traced with this one inside the ``with`` block."""
    token = _chosen.set(executor)
    try:
        yield
    finally:
        _chosen.reset(token)
