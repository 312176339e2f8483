"""Where a run's arrays lie: clients' rows shared out over the devices, everything else on each of them."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from fedjax_pers.base import State
from fedjax_pers.compose import Algorithm
from fedjax_pers.executors.default import default_executor
from fedjax_pers.executors.lanes import CLIENTS, devices_of, mesh_of


def devices_for(algorithm: Algorithm) -> int:
    """Devices on which the algorithm's rounds run."""
    return devices_of(algorithm.executor or default_executor(()))


def everywhere(tree: Any, devices: int) -> Any:
    """A copy on each device; outside ``jit`` and within."""
    return tree if devices == 1 else jax.device_put(tree, NamedSharding(mesh_of(devices), PartitionSpec()))


def placed(state: State, devices: int) -> State:
    """The state on the devices; outside ``jit`` and, for several devices, within."""
    return jax.tree.map(_on_one, state) if devices == 1 else jax.device_put(state, places(state, devices))


def _on_one(array: jax.Array) -> jax.Array:
    # What lies on several devices would be computed on each of them.
    return array if len(array.devices()) == 1 else jax.device_put(array, jax.local_devices()[0])


def places(state: State, devices: int) -> State:
    """Where each array of a state lies. Rows are shared out where the number of clients divides."""
    whole, share = (NamedSharding(mesh_of(devices), PartitionSpec(*axes)) for axes in ((), (CLIENTS,)))
    rows = share if state.seen.shape[0] % devices == 0 else whole
    return jax.tree.map(lambda _: whole, state)._replace(rows=jax.tree.map(lambda _: rows, state.rows))
