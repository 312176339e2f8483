"""What an aggregator is, and how to use one on its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pers.base import Array, Cohort, Context, Leaves, Parts, Report
from fedjax_pers.checks import require
from fedjax_pers.keys import as_key, fold_name
from fedjax_pers.layouts import Layout
from fedjax_pers.trees import all_finite


class Server(NamedTuple):
    """What an aggregator changes: the shared leaves, its optimiser state, and whatever else it keeps.

    ``key`` is the server's key of the round, for what it draws; nothing that is kept.
    """

    shared: Leaves
    opt: Any
    aux: Any
    key: Array | None = None

    def draws(self, purpose: str) -> Array:
        """The key of something that the server draws in this round."""
        require(self.key is not None, f"key: found none, but this aggregator draws ({purpose}); give the round's key")
        return fold_name(self.key, purpose)


class Sender(NamedTuple):
    """What the server knows of a client whose upload arrives (scalars).

    Attributes:
      id: its row.
      size: its number of training examples.
      report: of its training.
      said: what ``Aggregator.ask`` made it say.
      cohort: rows of all clients of the round, ``[clients]``.
      sizes: their numbers of training examples, ``[clients]``; 0 for padding.
    """

    id: Array
    size: Array
    report: Report
    said: dict[str, Array]
    cohort: Array
    sizes: Array


Ask = Callable[[Layout, Parts, Context], dict[str, Array]]
"""``ask(layout, parts, context) -> said``: what a client computes of its download before it trains, and sends."""


def nothing_asked(layout: Layout, parts: Parts, context: Context) -> dict[str, Array]:
    """Clients send their leaves and no more."""
    return {}


def whole_download(download: Leaves, said: dict[str, Array]) -> Leaves:
    """A client trains what it received."""
    return download


def shared_leaves(server: Server) -> Leaves:
    """The global model of most methods."""
    return server.shared


def nothing_added(weight: Array, received: Leaves, upload: Leaves, sender: Sender) -> tuple[()]:
    """No summand: ``finish`` looks at what was collected alone."""
    return ()


def everybody(server: Server, cohort: Cohort) -> Cohort:
    """All clients of the cohort take part."""
    return cohort


def nothing_drawn(server: Server, key: Array) -> Server:
    """The model is all that is random at the start."""
    return server


class Aggregator(NamedTuple):
    """How uploads change the server, as pure functions that add up over clients.

    Attributes:
      init: ``init(shared, trainable, num_clients) -> Server``. ``trainable`` are the names that the server optimiser
        may act on; all others (running statistics, counters) are averaged plainly.
      render: ``render(server, id) -> download``, what a client receives; the default is a copy of the shared leaves.
      weigh: ``weigh(server, sender) -> scalar``, how much a client counts; not normalised.
      lift: ``lift(weight, received, upload, sender) -> summand``, from the leaves that training began and ended with;
        summands of the cohort are added in ascending order of id.
      finish: ``finish(server, total, trainable) -> Server``; must leave the server as it was when nothing was received.
      collect: ``collect(received, upload, sender) -> kept``, for aggregators that must see all clients at once (a
        median, weights by client). Where it is given, ``total`` is :class:`Collected`; what it returns is kept of each
        client, so that an array ``[clients, parameters]`` is made only by aggregators that return leaves here.
      ask: ``ask(layout, parts, context) -> said``, numbers that a client computes of its download (``parts.shared``)
        before it trains, and sends along: a loss, the number of the model that fits best. Single numbers are recorded.
      says: the names of those numbers.
      pick: ``pick(download, said) -> received``, the leaves that it trains.
      deliver: ``deliver(server, id) -> download`` of a client that predicts; ``render`` where it is ``None``.
      settle: ``settle(layout, parts, context) -> received``, what that client makes of it; ``ask`` and ``pick`` where
        it is ``None``.
      whole: ``whole(server) -> leaves`` of the global model; ``None`` where there is no such model.
      invite: ``invite(server, cohort) -> cohort``: which of the clients that are there take part, by what the server
        knows, in ascending order of id, padding last; all of them by default.
      draw: ``draw(server, key) -> Server``: what of a run's first server is random, beside the model.
      starts: shared leaves are stacked from so many random starts, ``[starts, ...]``, where it is more than 1.
      sees: what the server must know of a single client, in words; by default the upload of each where ``collect`` is
        given, and nothing where it is not: sums over clients are enough, so that secure aggregation is possible.
    """

    init: Callable[[Leaves, frozenset[str], int], Server]
    render: Callable[[Server, Array], Leaves]
    weigh: Callable[[Server, Sender], Array]
    lift: Callable[[Array, Leaves, Leaves, Sender], Any]
    finish: Callable[[Server, Any, frozenset[str]], Server]
    collect: Callable[[Leaves, Leaves, Sender], Any] | None = None
    ask: Ask = nothing_asked
    says: tuple[str, ...] = ()
    pick: Callable[[Leaves, dict[str, Array]], Leaves] = whole_download
    deliver: Callable[[Server, Array], Leaves] | None = None
    settle: Callable[[Layout, Parts, Context], Leaves] | None = None
    whole: Callable[[Server], Leaves] | None = shared_leaves
    invite: Callable[[Server, Cohort], Cohort] = everybody
    draw: Callable[[Server, Array], Server] = nothing_drawn
    starts: int = 1
    sees: str | None = None


class Survey(NamedTuple):
    """A second cohort: clients that are asked for numbers in the same round, once the server has moved.

    Attributes:
      invite: ``invite(server, cohort) -> cohort``, as of an aggregator.
      render: ``render(server, id) -> download``, the leaves that they receive.
      ask: ``ask(layout, parts, context) -> said``.
      finish: ``finish(server, answers) -> Server``; ``answers.each`` is what they said, ``[clients, ...]``.
    """

    invite: Callable[[Server, Cohort], Cohort]
    render: Callable[[Server, Array], Leaves]
    ask: Ask
    finish: Callable[[Server, Collected], Server]


class Collected(NamedTuple):
    """What an aggregator that collects is given at the end; everything else has the leading axis ``[clients]``.

    Attributes:
      total: the sum of the summands.
      each: what was collected of each client, ``[clients, ...]`` in ascending order of id.
      weight: 0 for padding and for those that were left out.
      ids: rows of the clients; the number of clients for padding.
      accepted: neither padding, nor left out, nor without a step.
    """

    total: Any
    each: Any
    weight: Array
    ids: Array
    accepted: Array


def seen_of_one(aggregator: Aggregator) -> str:
    """What the server must know of a single client, ``""`` where sums over clients are enough."""
    if aggregator.sees is not None:
        return aggregator.sees
    return "" if aggregator.collect is None else "each client's upload"


def copy_to_all(server: Server, client_id: Array) -> Leaves:
    """The broadcast of most methods: every client receives the shared leaves."""
    return server.shared


def taken(
    aggregator: Aggregator, weight: Array, accepted: Array, received: Leaves, upload: Leaves, sender: Sender
) -> tuple[Any, Any]:
    """The summand of a client and what is collected of it.

    Where it is not accepted the summand is exactly zero, and what is collected that of an upload that changes nothing:
    select first, then scale (0 * NaN is NaN).
    """
    upload = jax.tree.map(lambda up, down: jnp.where(accepted, up, down), upload, received)
    sender = sender._replace(said={name: jnp.where(accepted, x, jnp.zeros_like(x)) for name, x in sender.said.items()})
    kept = None if aggregator.collect is None else aggregator.collect(received, upload, sender)
    return aggregator.lift(jnp.where(accepted, weight, 0.0), received, upload, sender), kept


def finished(aggregator: Aggregator, server: Server, collected: Collected, trainable: frozenset[str]) -> Server:
    """The server after all clients."""
    return aggregator.finish(server, collected.total if aggregator.collect is None else collected, trainable)


def aggregate(
    aggregator: Aggregator,
    server: Server,
    uploads: Leaves,
    weights: Any = None,
    *,
    ids: Any = None,
    said: Mapping[str, Any] | None = None,
    trainable: frozenset[str] | None = None,
    key: Array | int | None = None,
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
      weights: ``[clients]``, finite and not negative (checked where they are not traced); by default what the
        aggregator gives clients of one example each.
      ids: rows of the clients, ``[clients]``; ``0 .. clients - 1`` by default.
      said: what clients sent along, ``{name: [clients, ...]}``, for aggregators that ask (a loss: ``{"loss": ...}``).
      trainable: the names that ``aggregator.init`` was given; all leaves by default.
      key: the round's own, another one in every round, for aggregators that draw something.

    Returns:
      The server, and ``{"rejected": bool [clients], "skipped": bool, "weights": [clients]}``.
    """
    trainable = frozenset(server.shared) if trainable is None else trainable
    server = server._replace(key=None if key is None else as_key(key))
    uploads, said = dict(uploads), {name: jnp.asarray(x) for name, x in (said or {}).items()}
    if weights is not None and np.ndim(weights) != 1:
        raise ValueError(f"weights: found shape {np.shape(weights)}; expected [clients], a number for each client")
    clients = np.shape(next(iter(uploads.values())) if weights is None else weights)[0]
    ids = jnp.arange(clients) if ids is None else jnp.asarray(ids, jnp.int32)
    unknown = Report(jnp.float32(jnp.nan), jnp.int32(1), jnp.array(True))

    def sender_of(client: Array, said: dict[str, Array]) -> Sender:
        return Sender(client, jnp.int32(1), unknown, said, ids, jnp.ones_like(ids))

    def received_by(sender: Sender) -> Leaves:
        return aggregator.pick(aggregator.render(server, sender.id), sender.said)

    if set(said) != set(aggregator.says):
        raise ValueError(f"said: found {sorted(said)}; clients of this aggregator say {sorted(aggregator.says)}")
    one_said = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), said)
    received = jax.eval_shape(lambda said: received_by(sender_of(jnp.int32(0), said)), one_said)
    _check(received, uploads, clients, trainable)
    if weights is None:
        weights = jax.vmap(lambda client, said: aggregator.weigh(server, sender_of(client, said)))(ids, said)
    _check_weights(weights)
    weights = jnp.asarray(weights, jnp.float32)
    accepted = jax.vmap(all_finite)((uploads, said)) if uploads or said else jnp.ones(ids.shape, bool)

    def one(item: Any) -> tuple[Any, Any]:
        upload, said, weight, ok, client = item
        sender = sender_of(client, said)
        return taken(aggregator, weight, ok, received_by(sender), upload, sender)

    def add(total: Any, item: Any) -> tuple[Any, Any]:
        summand, kept = one(item)
        return jax.tree.map(jnp.add, total, summand), kept

    items = (uploads, said, weights, accepted, ids)
    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), items)
    shape, _ = jax.eval_shape(one, first)
    total, each = jax.lax.scan(add, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape), items)
    counted = jnp.where(accepted, weights, 0.0)
    info = {"rejected": ~accepted, "skipped": ~(counted.sum() > 0), "weights": counted}
    after = finished(aggregator, server, Collected(total, each, counted, ids, accepted), trainable)
    return after._replace(key=None), info


def _check(received: Leaves, uploads: Leaves, clients: int, trainable: frozenset[str]) -> None:
    strangers = sorted(trainable - set(received))
    if strangers:
        raise ValueError(f"trainable: found {strangers}; the server has {sorted(received)}")
    if set(uploads) != set(received):
        raise ValueError(f"uploads: found leaves {sorted(uploads)}; the server has {sorted(received)}")
    for name, x in uploads.items():
        if np.shape(x) != (clients, *received[name].shape):
            raise ValueError(
                f"uploads[{name!r}]: found shape {np.shape(x)}; expected [clients, ...] = "
                f"{(clients, *received[name].shape)} for {clients} clients"
            )


def _check_weights(weights: Any) -> None:
    if not isinstance(weights, jax.core.Tracer):
        found = np.asarray(weights, np.float64)
        bad = np.flatnonzero(~np.isfinite(found) | (found < 0))
        if bad.size:
            client = int(bad[0])
            raise ValueError(f"weights: client {client} has {found[client]}; allowed are finite numbers of at least 0")
