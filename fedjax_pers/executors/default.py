"""The executor that is used where none is asked for, from measurements kept in ``benchmarks/lanes.json``."""

from __future__ import annotations

from typing import Any

import jax

from fedjax_pers.executors.lanes import Executor
from fedjax_pers.trees import num_bytes

# On a CPU, operations on small models are dominated by their overhead, so many lanes win; the weights of a few lanes of
# a larger model still fit into the cache; beyond that every lane more is a loss.
_CPU_LANES = ((64 * 1024, 32), (1024 * 1024, 4))


def default_executor(leaves: Any) -> Executor:
    """Lanes for a client's leaves on this kind of device: everything at once on an accelerator, few on a CPU."""
    if jax.default_backend() != "cpu":
        return Executor(None)
    size = num_bytes(leaves)
    return Executor(next((lanes for limit, lanes in _CPU_LANES if size <= limit), 1))
