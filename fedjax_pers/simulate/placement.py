"""Where a run's arrays lie: clients' rows shared out over the devices, everything else on each of them."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from fedjax_pers.base import State
from fedjax_pers.compose import Algorithm
from fedjax_pers.executors.default import default_executor
from fedjax_pers.executors.lanes import CLIENTS, devices_of, mesh_of


def devices_for(algorithm: Algorithm, state: State) -> int:
    """Devices on which the algorithm's rounds run."""
    return devices_of(algorithm.executor or default_executor((state.shared, state.fresh)))


def everywhere(tree: Any, devices: int) -> Any:
    """A copy on each device; outside ``jit`` and within."""
    return tree if devices == 1 else jax.device_put(tree, NamedSharding(mesh_of(devices), PartitionSpec()))


def placed(state: State, devices: int) -> State:
    """The state on the devices. Rows are shared out where the number of clients divides."""
    share = devices > 1 and state.seen.shape[0] % devices == 0
    rows = NamedSharding(mesh_of(devices), PartitionSpec(CLIENTS)) if share else None
    whole = everywhere(state._replace(rows={}), devices)
    return whole._replace(rows=jax.device_put(state.rows, rows) if share else everywhere(state.rows, devices))
