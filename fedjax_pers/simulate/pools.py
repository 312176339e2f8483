"""Where examples lie while rounds run: all of them on the device, or on the host, from which each block takes its own.

Streamed rounds give the bytes of resident ones: a sampler is a pure function of key and round, so the clients of the
next rounds are known before these are dispatched, and a client's batches do not depend on where its rows lie.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pers.base import Array
from fedjax_pers.data import SPLITS, Federation
from fedjax_pers.simulate.placement import everywhere, place_of
from fedjax_pers.simulate.programs import Pool
from fedjax_pers.simulate.sampling import Sampler

Visitors = Callable[[int, int], np.ndarray]
"""``visitors(first, count)``: the ids of all clients that take part in so many rounds from the first on, ascending."""


def place_of_examples(federation: Federation, data_on: str) -> str:
    """``"device"`` or ``"host"``; ``"auto"`` is the host where a device says that it has too little memory."""
    return place_of("data_on", data_on, lambda: _bytes(federation))


def _bytes(federation: Federation) -> int:
    return sum(x.nbytes for name in SPLITS for x in federation.split(name).data.values())


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
    federation: Federation, visitors: Visitors, data_on: str, devices: int
) -> Callable[[int, int], Pool]:
    """``pool(first, count)`` holds, on each of the devices, what the rounds from ``first`` on need."""
    if place_of_examples(federation, data_on) == "device":
        whole = everywhere(pool_of(federation, "train"), devices)
        return lambda first, count: whole
    return lambda first, count: everywhere(pool_of_clients(federation, "train", visitors(first, count)), devices)


def visitors_of(sampler: Sampler, key: Array, num_clients: int) -> Visitors:
    """Who takes part, which is known before any round is dispatched."""
    draw = _draw(sampler, num_clients)

    def of_rounds(first: int, count: int) -> np.ndarray:
        ids = np.unique([np.asarray(draw(key, jnp.int32(round))) for round in range(first, first + count)])
        return ids[ids < num_clients]

    return of_rounds


def most_visitors(sampler: Sampler, rounds: int, num_clients: int) -> int:
    """A bound of the clients that take part in so many rounds."""
    ids = jax.eval_shape(lambda key: sampler(key, jnp.int32(0), num_clients), jax.random.key(0))
    return min(rounds * ids.shape[0], num_clients)


@functools.lru_cache(maxsize=64)
def _draw(sampler: Sampler, num_clients: int) -> Callable[[Array, Array], Array]:
    return jax.jit(lambda key, round: sampler(key, round, num_clients))


def pools_for(federation: Federation, split: str, data_on: str, devices: int) -> Callable[[np.ndarray], Pool]:
    """``pool(clients)`` holds, on each of the devices, a split's rows of these clients at least."""
    if place_of_examples(federation, data_on) == "device":
        whole = everywhere(pool_of(federation, split), devices)
        return lambda clients: whole
    return lambda clients: everywhere(pool_of_clients(federation, split, clients), devices)


def pool_for_all(federation: Federation, split: str, rows: np.ndarray) -> Pool:
    """Some rows of a split, each of them every client's."""
    data = {name: jnp.asarray(x[rows]) for name, x in federation.split(split).data.items()}
    start = np.zeros(federation.num_clients, np.int64)
    return _pool(federation, data, start, start + len(rows), len(rows))


def _pool(federation: Federation, data: dict[str, Array], start: np.ndarray, sizes: np.ndarray, largest: int) -> Pool:
    return Pool(
        data=data,
        start=jnp.asarray(start, jnp.int32),
        size=jnp.asarray(sizes, jnp.int32),
        tags=jnp.asarray(federation.tags, jnp.uint32),
        ids=jnp.asarray(np.arange(federation.num_clients) + federation.first_id, jnp.int32),
        room=jnp.zeros((int(largest), 0)),
    )
