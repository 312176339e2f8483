"""What an aggregator is, and how to use one on its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pers.base import Array, Context, Leaves, Report
from fedjax_pers.trees import all_finite


class Server(NamedTuple):
    """What an aggregator changes: the shared leaves, its optimiser state, and whatever else it keeps."""

    shared: Leaves
    opt: Any
    aux: Any


class Aggregator(NamedTuple):
    """How uploads change the server, as pure functions that add up over clients.

    Attributes:
      init: ``init(shared, trainable, num_clients) -> Server``. ``trainable`` are the names that the server optimiser
        may act on; all others (running statistics, counters) are averaged plainly.
      render: ``render(server, id) -> download``, what a client receives; the default is a copy of the shared leaves.
      weigh: ``weigh(context, report) -> scalar``, how much a client counts; not normalised.
      lift: ``lift(weight, download, upload) -> summand``; summands of the cohort are added in ascending order of id.
      finish: ``finish(server, total, trainable) -> Server``; must leave the server as it was when nothing was received.
      collect: ``collect(download, upload) -> kept``, for aggregators that must see all clients at once (a median).
        Where it is given, ``total`` is :class:`Collected`; else no array ``[clients, parameters]`` is ever made.
    """

    init: Callable[[Leaves, frozenset[str], int], Server]
    render: Callable[[Server, Array], Leaves]
    weigh: Callable[[Context, Report], Array]
    lift: Callable[[Array, Leaves, Leaves], Any]
    finish: Callable[[Server, Any, frozenset[str]], Server]
    collect: Callable[[Leaves, Leaves], Any] | None = None


class Collected(NamedTuple):
    """What an aggregator that collects is given at the end.

    Attributes:
      total: the sum of the summands.
      each: what was collected of each client, ``[clients, ...]`` in ascending order of id.
      weight: ``[clients]``; 0 for padding and for those that were left out.
    """

    total: Any
    each: Any
    weight: Array


def copy_to_all(server: Server, client_id: Array) -> Leaves:
    """The broadcast of most methods: every client receives the shared leaves."""
    return server.shared


def taken(aggregator: Aggregator, weight: Array, accepted: Array, download: Leaves, upload: Leaves) -> tuple[Any, Any]:
    """The summand of a client and what is collected of it.

    Where it is not accepted the summand is exactly zero, and what is collected that of an upload that changes nothing:
    select first, then scale (0 * NaN is NaN).
    """
    upload = jax.tree.map(lambda up, down: jnp.where(accepted, up, down), upload, download)
    kept = None if aggregator.collect is None else aggregator.collect(download, upload)
    return aggregator.lift(jnp.where(accepted, weight, 0.0), download, upload), kept


def finished(
    aggregator: Aggregator, server: Server, total: Any, each: Any, weight: Array, trainable: frozenset[str]
) -> Server:
    """The server after all clients."""
    received = total if aggregator.collect is None else Collected(total, each, weight)
    return aggregator.finish(server, received, trainable)


def aggregate(
    aggregator: Aggregator, server: Server, uploads: Leaves, weights: Any, *, trainable: frozenset[str] | None = None
) -> tuple[Server, dict[str, Array]]:
    """One server step on stacked uploads, outside any simulation.

    Uploads that are not finite are left out and counted. With nothing left, the server stays as it was.

    Example:
      >>> from fedjax_pers.aggregators import aggregate, mean
      >>> server = mean().init({"w": jnp.zeros(2)}, frozenset({"w"}), 2)
      >>> server, info = aggregate(mean(), server, {"w": jnp.array([[1.0, 2.0], [3.0, 4.0]])}, [1.0, 3.0])
      >>> server.shared["w"].tolist(), int(info["rejected"].sum())
      ([2.5, 3.5], 0)

    Args:
      aggregator: for example :func:`~fedjax_pers.aggregators.mean`.
      server: made by ``aggregator.init``.
      uploads: leaves ``[clients, ...]`` with the names of ``server.shared``.
      weights: ``[clients]``, finite and not negative (checked where they are not traced).
      trainable: the names that ``aggregator.init`` was given; all leaves by default.

    Returns:
      The server, and ``{"rejected": bool [clients], "skipped": bool}``.
    """
    trainable = frozenset(server.shared) if trainable is None else trainable
    _check(server, uploads, weights, trainable)
    weights = jnp.asarray(weights, jnp.float32)
    ids = jnp.arange(weights.shape[0])
    accepted = jax.vmap(all_finite)(uploads) if uploads else jnp.ones(ids.shape, bool)

    def add(total: Any, item: tuple[Any, Array, Array, Array]) -> tuple[Any, Any]:
        upload, weight, ok, client_id = item
        summand, kept = taken(aggregator, weight, ok, aggregator.render(server, client_id), upload)
        return jax.tree.map(jnp.add, total, summand), kept

    first = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), uploads)
    shape = jax.eval_shape(lambda u: aggregator.lift(jnp.float32(0), aggregator.render(server, jnp.int32(0)), u), first)
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)
    total, each = jax.lax.scan(add, zero, (uploads, weights, accepted, ids))
    counted = jnp.where(accepted, weights, 0.0)
    info = {"rejected": ~accepted, "skipped": ~(counted.sum() > 0)}
    return finished(aggregator, server, total, each, counted, trainable), info


def _check(server: Server, uploads: Leaves, weights: Any, trainable: frozenset[str]) -> None:
    strangers = sorted(trainable - set(server.shared))
    if strangers:
        raise ValueError(f"trainable: found {strangers}; the server has {sorted(server.shared)}")
    if set(uploads) != set(server.shared):
        raise ValueError(f"uploads: found leaves {sorted(uploads)}; the server has {sorted(server.shared)}")
    clients = np.shape(weights)
    for name, x in uploads.items():
        if np.shape(x) != (*clients, *np.shape(server.shared[name])) or len(clients) != 1:
            raise ValueError(
                f"uploads[{name!r}]: found shape {np.shape(x)}; expected [clients, ...] = "
                f"{(*clients, *np.shape(server.shared[name]))} for weights of shape {clients}"
            )
    if not isinstance(weights, jax.core.Tracer):
        found = np.asarray(weights, np.float64)
        bad = np.flatnonzero(~np.isfinite(found) | (found < 0))
        if bad.size:
            client = int(bad[0])
            raise ValueError(f"weights: client {client} has {found[client]}; allowed are finite numbers of at least 0")
