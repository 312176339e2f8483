"""Bytes that cross between server and clients, counted from the trees that do cross."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pers.base import Metrics, State
from fedjax_pers.compose import Algorithm
from fedjax_pers.trees import num_bytes, wire_bytes

METADATA_UP = 8
"""A client that uploads says how many examples it has: one 64-bit number."""


class Traffic(NamedTuple):
    """Bytes of one client in a round in which it communicates, before what it spares (see ``Report.spared_up``).

    Attributes:
      down: the leaves it receives.
      up: the leaves it sends.
      metadata_up: what it sends besides (the number of its examples).
      row: personal leaves that it keeps.
      first_down: sent once, before the first round: everything but what the client makes itself (frozen leaves).
      upload_paths: the names of the leaves it sends.
      personal_paths: the names of the leaves it keeps.
    """

    down: int
    up: int
    metadata_up: int
    row: int
    first_down: int
    upload_paths: tuple[str, ...]
    personal_paths: tuple[str, ...]


def traffic(algorithm: Algorithm, state: State, pool: Any) -> Traffic:
    """Counts the trees that cross: the download, the upload and the row of a client, as the round itself makes them.

    Args:
      algorithm: from :func:`fedjax_pers.compose`, or with an ``exchange`` of its own; without one nothing is counted.
      state: any state of it.
      pool: examples; only their shapes are used.
    """
    if algorithm.exchange is None:
        return Traffic(0, 0, 0, 0, 0, (), ())
    leaves, structure = jax.tree.flatten((state, pool))
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    down, up, row = _crossing(algorithm.exchange, structure, shapes)
    metadata = METADATA_UP if up else 0
    names = (tuple(sorted(up)), tuple(sorted(row)))
    return Traffic(wire_bytes(down), wire_bytes(up), metadata, num_bytes(row), num_bytes(state.frozen), *names)


@functools.lru_cache(maxsize=64)  # to trace a client's round takes as long as many rounds
def _crossing(exchange: Callable[..., Any], structure: Any, shapes: tuple[jax.ShapeDtypeStruct, ...]) -> Any:
    state, pool = jax.tree.unflatten(structure, shapes)
    first = jnp.zeros(1, jnp.int32)
    return jax.eval_shape(lambda s, p, key: exchange(s, p.cohort(first), key), state, pool, jax.random.key(0))


def crossed(costs: Traffic, metrics: Metrics) -> tuple[np.ndarray, np.ndarray]:
    """Bytes up and down of each client, ``[..., clients]``: those of the trees that it exchanged, less what it spared.

    Example:
      >>> costs = Traffic(down=40, up=40, metadata_up=8, row=0, first_down=0, upload_paths=(), personal_paths=())
      >>> there = np.array([True, True, False])
      >>> metrics = Metrics(*[None] * 7, there, None, {}, spared_up=np.array([0, 30, 0]), spared_down=np.zeros(3, int))
      >>> [x.tolist() for x in crossed(costs, metrics)]
      [[48, 18, 0], [40, 40, 0]]
    """
    sent = np.asarray(metrics.transmitted)
    up = costs.up + costs.metadata_up - np.asarray(metrics.spared_up, np.int64)
    return np.where(sent, up, 0), np.where(sent, costs.down - np.asarray(metrics.spared_down, np.int64), 0)


def megabytes(costs: Traffic, metrics: Metrics) -> tuple[np.ndarray, np.ndarray]:
    """Megabytes (10^6 bytes) up and down of all clients together, by round ``[rounds]``."""
    up, down = crossed(costs, metrics)
    return up.sum(axis=1) / 1e6, down.sum(axis=1) / 1e6
