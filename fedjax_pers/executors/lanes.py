"""How a cohort is mapped onto the machine: devices x lanes x queue.

Clients are dealt, the longest first, onto devices; each device takes ``lanes`` clients at a time from its queue in a
compiled loop, and vectorises over them. One lane is the plain loop, as many lanes as clients the plain ``vmap``, more
devices the sharded form: one code path. Loops have as many steps as their longest client needs, and no client is padded
to the largest.

Summands are added client by client in the order of the queue, whatever the number of lanes (with one lane the compiler
may still round a client's last product and its addition at once); sums of devices are added at the end. No
``[clients, parameters]`` array is ever kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from fedjax_pers.base import Array
from fedjax_pers.checks import one_of, positive_int, require
from fedjax_pers.executors.dealing import dealt
from fedjax_pers.executors.fast import fast_convolutions
from fedjax_pers.once import traced

CLIENTS = "clients"
"""The axis of the mesh over which clients are spread."""


class Executor(NamedTuple):
    """How clients are run.

    Attributes:
      lanes: clients that a device vectorises over; ``None`` for all that it has.
      convolutions: ``"fast"`` re-emits convolutions in the layout that XLA's CPU compiler runs well inside loops,
        ``"plain"`` leaves them, ``"auto"`` is fast on CPU and plain elsewhere.
      devices: devices of this process that share the clients; ``None`` for all.
    """

    lanes: int | None = None
    convolutions: str = "auto"
    devices: int | None = 1


def looped() -> Executor:
    """One client after another in a compiled loop."""
    return Executor(1)


def chunked(lanes: int) -> Executor:
    """Groups of ``lanes`` clients, each group vectorised."""
    positive_int("lanes", lanes)
    return Executor(lanes)


def vectorised() -> Executor:
    """The whole cohort at once."""
    return Executor(None)


def sharded(lanes: int | None = 1, devices: int | None = None) -> Executor:
    """The cohort spread over devices (all of them), each of which runs ``lanes`` clients at a time."""
    return Executor(lanes, devices=devices)


def prepared(executor: Executor, client: Callable) -> Callable:
    """The client function as this executor runs it on this machine."""
    one_of("convolutions", executor.convolutions, ("auto", "fast", "plain"))
    fast = executor.convolutions == "fast" or (executor.convolutions == "auto" and jax.default_backend() == "cpu")
    return fast_convolutions(client) if fast else client


def map_reduce(
    executor: Executor, client: Callable[[Any, Any], tuple[Any, Any]], common: Any, items: Any, cost: Array
) -> tuple[Any, Any]:
    """``summand, output = client(common, item)`` for every item; the sum of summands, and the outputs stacked.

    Args:
      executor: how many at once.
      client: a function of what all have in common and of one item. Arrays that lie on several devices must come in by
        these two.
      common: held once on each device.
      items: leaves ``[clients, ...]``. The number of clients must be a multiple of devices times lanes (see
        :func:`padding`).
      cost: how long each client takes, ``[clients]``, in any unit.
    """
    count = cost.shape[0]
    devices, lanes = split(executor, count)
    places = dealt(cost, devices, lanes)
    ready = prepared(executor, client)
    if devices == 1:
        total, outputs = _queue(ready, lanes, common, items, places[0])
    else:

        def on_each_device(common: Any, items: Any, places: Array) -> tuple[Any, Any]:
            total, outputs = _queue(ready, lanes, common, items, places[0])
            return jax.lax.psum(total, CLIENTS), outputs

        share, whole = PartitionSpec(CLIENTS), PartitionSpec()
        total, outputs = jax.shard_map(
            on_each_device,
            mesh=mesh_of(devices),
            in_specs=(whole, whole, share),
            out_specs=(whole, share),
            check_vma=False,
        )(common, items, places)
    back = jnp.argsort(places.reshape(-1))
    return total, jax.tree.map(lambda x: x[back], outputs)


def _queue(client: Callable, lanes: int, common: Any, items: Any, places: Array) -> tuple[Any, Any]:
    """Runs the items at ``places``, ``[groups, lanes]``, a group at a time: their sum, and outputs in this order."""
    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), items)
    client, (summand, _) = traced(functools.partial(client, common), first)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), summand)

    def add(total: Any, summand: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, summand), None

    def one(total: Any, place: Array) -> tuple[Any, Any]:
        summand, output = client(jax.tree.map(lambda x: x[place], items))
        return add(total, summand)[0], output

    def group(total: Any, places: Array) -> tuple[Any, Any]:
        summands, outputs = jax.vmap(client)(jax.tree.map(lambda x: x[places], items))
        return jax.lax.scan(add, total, summands, length=lanes)[0], outputs

    if lanes == 1:
        return jax.lax.scan(one, nothing, places.reshape(-1))
    total, outputs = jax.lax.scan(group, nothing, places)
    return total, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs)


def mesh_of(devices: int) -> Mesh:
    """The first devices of this process, in a row."""
    return Mesh(np.array(jax.local_devices()[:devices]), (CLIENTS,))


def devices_of(executor: Executor) -> int:
    """Devices that are used; ValueError where there are not so many. Within one device (of a sweep) it is the one."""
    if jax.sharding.get_abstract_mesh().manual_axes:
        return 1
    there = jax.local_device_count()
    if executor.devices is None:
        return there
    positive_int("devices", executor.devices)
    require(executor.devices <= there, f"devices: found {executor.devices}; this process has {there}")
    return executor.devices


def split(executor: Executor, clients: int) -> tuple[int, int]:
    """Devices and lanes that are used for so many clients."""
    if executor.lanes is not None:
        positive_int("lanes", executor.lanes)
    devices = devices_of(executor)
    share = max(-(-clients // devices), 1)
    return devices, share if executor.lanes is None else min(executor.lanes, share)


def padding(executor: Executor, clients: int) -> int:
    """Items to add so that the number of clients is a multiple of devices times lanes, and not 0."""
    devices, lanes = split(executor, clients)
    return -clients % (devices * lanes) if clients else devices * lanes
