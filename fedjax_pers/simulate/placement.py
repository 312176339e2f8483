"""Where a run's arrays lie: clients' rows shared out over the devices, everything else on each of them.

Examples and rows that would fill the devices stay on the host (:mod:`~fedjax_pers.simulate.pools` and
:mod:`~fedjax_pers.simulate.rows`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fedjax_pers.base import State
from fedjax_pers.checks import one_of
from fedjax_pers.compose import Algorithm
from fedjax_pers.executors.default import default_executor
from fedjax_pers.executors.lanes import CLIENTS, devices_of, mesh_of

PLACES = ("auto", "device", "host")
SHARE = 0.4
"""What takes more of a device's memory than this stays on the host: examples and rows may both be there."""


def place_of(name: str, asked: str, needed: Callable[[], int]) -> str:
    """``"device"`` or ``"host"`` for what needs so many bytes of one device; a CPU does not say how many it has."""
    one_of(name, asked, PLACES)
    if asked != "auto":
        return asked
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return "host" if limit is not None and needed() > SHARE * limit else "device"


def devices_for(algorithm: Algorithm) -> int:
    """Devices on which the algorithm's rounds run."""
    return devices_of(algorithm.executor or default_executor(()))


def everywhere(tree: Any, devices: int) -> Any:
    """A copy on each device; outside ``jit`` and within."""
    return tree if devices == 1 else jax.device_put(tree, NamedSharding(mesh_of(devices), PartitionSpec()))


def on_host(state: State) -> bool:
    """Whether the state's rows lie on the host, as numpy arrays."""
    return any(isinstance(x, np.ndarray) for x in state.rows.values())


def placed(state: State, devices: int) -> State:
    """The state on the devices; outside ``jit`` and, for several devices, within. Rows on the host stay there."""
    if on_host(state):
        return placed(state._replace(rows={}), devices)._replace(rows=state.rows)
    return jax.tree.map(_on_one, state) if devices == 1 else jax.device_put(state, places(state, devices))


def _on_one(array: jax.Array) -> jax.Array:
    # What lies on several devices would be computed on each of them.
    return array if len(array.devices()) == 1 else jax.device_put(array, jax.local_devices()[0])


def places(state: State, devices: int) -> State:
    """Where each array of a state lies. Rows are shared out where their number divides."""
    whole, share = (NamedSharding(mesh_of(devices), PartitionSpec(*axes)) for axes in ((), (CLIENTS,)))
    return jax.tree.map(lambda _: whole, state)._replace(
        rows=jax.tree.map(lambda x: whole if x.shape[0] % devices else share, state.rows)
    )
