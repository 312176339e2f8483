"""Where examples lie while rounds run: all of them on the device, or on the host, from which each block takes its own.

Streamed rounds give the bytes of resident ones: a sampler is a pure function of key and round, so the clients of the
next rounds are known before these are dispatched, and a client's batches do not depend on where its rows lie.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pers.base import Array
from fedjax_pers.checks import one_of
from fedjax_pers.data import SPLITS, Federation
from fedjax_pers.simulate.placement import everywhere
from fedjax_pers.simulate.programs import Pool
from fedjax_pers.simulate.sampling import Sampler

PLACES = ("auto", "device", "host")
SHARE = 0.5
"""Examples that take more of a device's memory than this stay on the host."""


def place_of(federation: Federation, data_on: str) -> str:
    """``"device"`` or ``"host"``; ``"auto"`` is the host where a device says that it has too little memory."""
    one_of("data_on", data_on, PLACES)
    if data_on != "auto":
        return data_on
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    needed = sum(x.nbytes for name in SPLITS for x in federation.split(name).data.values())
    return "host" if limit is not None and needed > SHARE * limit else "device"


def pool_of(federation: Federation, split: str) -> Pool:
    """A split on the device."""
    part = federation.split(split)
    return _pool(federation, federation.pool(split), part.offsets[:-1], part.sizes, part.sizes.max())


def pool_of_clients(federation: Federation, split: str, clients: np.ndarray) -> Pool:
    """The rows of some clients on the device; to everybody else it has none.

    The number of rows is filled up to a power of two, so that parts of like size share a compiled program.
    """
    whole = federation.split(split)
    part = whole.of_clients(clients)
    start, sizes = np.zeros(federation.num_clients, np.int64), np.zeros(federation.num_clients, np.int64)
    start[clients], sizes[clients] = part.offsets[:-1], part.sizes
    rows = 1 << max(part.num_rows - 1, 0).bit_length()
    data = {
        name: jnp.asarray(np.concatenate([x, np.zeros((rows - len(x), *x.shape[1:]), x.dtype)]))
        for name, x in part.data.items()
    }
    return _pool(federation, data, start, sizes, whole.sizes.max())


def training_pools(
    federation: Federation, sampler: Sampler, key: Array, data_on: str, devices: int
) -> Callable[[int, int], Pool]:
    """``pool(first, count)`` holds, on each of the devices, what the rounds from ``first`` on need."""
    if place_of(federation, data_on) == "device":
        whole = everywhere(pool_of(federation, "train"), devices)
        return lambda first, count: whole
    draw = _draw(sampler, federation.num_clients)

    def of_rounds(first: int, count: int) -> Pool:
        ids = np.unique([np.asarray(draw(key, jnp.int32(round))) for round in range(first, first + count)])
        there = ids[ids < federation.num_clients]
        return everywhere(pool_of_clients(federation, "train", there), devices)

    return of_rounds


@functools.lru_cache(maxsize=64)
def _draw(sampler: Sampler, num_clients: int) -> Callable[[Array, Array], Array]:
    return jax.jit(lambda key, round: sampler(key, round, num_clients))


def evaluation_pools(
    federation: Federation, split: str, groups: np.ndarray, data_on: str, devices: int
) -> Iterable[tuple[np.ndarray, Pool, Pool]]:
    """Groups of clients ``[groups, clients]`` with the pools to train on and to judge on that serve them."""
    names = ("train", split)
    if place_of(federation, data_on) == "device":
        yield groups, *(everywhere(pool_of(federation, name), devices) for name in names)
        return
    for group in groups:
        clients = np.unique(group)
        yield group[None], *(everywhere(pool_of_clients(federation, name, clients), devices) for name in names)


def _pool(federation: Federation, data: dict[str, Array], start: np.ndarray, sizes: np.ndarray, largest: int) -> Pool:
    return Pool(
        data=data,
        start=jnp.asarray(start, jnp.int32),
        size=jnp.asarray(sizes, jnp.int32),
        tags=jnp.asarray(federation.tags, jnp.uint32),
        ids=jnp.asarray(np.arange(federation.num_clients) + federation.first_id, jnp.int32),
        room=jnp.zeros((int(largest), 0)),
    )
