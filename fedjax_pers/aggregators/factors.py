"""Low-rank factors on the server: products that are averaged exactly, and clients of different ranks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_pers.adapters import Slot
from fedjax_pers.aggregators.base import Aggregator, Sender, Server
from fedjax_pers.aggregators.mean import Weights, mean, not_zero
from fedjax_pers.base import Array, Context, Leaves, Parts, Report
from fedjax_pers.checks import positive_int, require
from fedjax_pers.layouts import Layout
from fedjax_pers.local import ClientUpdate

RANK = "rank"


def residual(places: tuple[Slot, ...], scale: Any, *, weights: Weights = "examples") -> Aggregator:
    """Averages factors, and puts into the weights what the product of the averages lacks (FedEx-LoRA).

    ``A, B <- sum_i p_i A_i, sum_i p_i B_i`` and ``W <- W + s (sum_i p_i A_i B_i - A B)``: the model ``W + s A B`` is
    then the mean of the clients' models. The weights are among the server's leaves and travel down; only factors (and
    other leaves that train) come back.

    Example:
      >>> from fedjax_pers import aggregators as ag
      >>> slot = Slot("w", (2, 2), 1, False, jnp.float32)
      >>> start = {"w": jnp.zeros((2, 2))} | slot.fresh(jax.random.key(0), 1)
      >>> server = residual((slot,), 1.0).init(start, frozenset(slot.names), 2)
      >>> a, b = jnp.array([[[1.0], [0.0]], [[0.0], [1.0]]]), jnp.array([[[2.0, 0.0]], [[0.0, 4.0]]])
      >>> uploads = dict(zip(slot.names, (a, b)))
      >>> server, _ = ag.aggregate(residual((slot,), 1.0), server, uploads, trainable=frozenset(slot.names))
      >>> (server.shared["w"] + slot.product(server.shared)).tolist()
      [[1.0, 0.0], [0.0, 2.0]]

    Args:
      places: the adapted weights, of :func:`fedjax_pers.adapters.slots`.
      scale: s, of :func:`fedjax_pers.adapters.scale_of`.
      weights: as in :func:`mean`.

    Source: Singhal, Ponkshe, Vepakomma, "FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of
    Foundation Models", arXiv:2410.09432, 2024.
    """

    def merge(before: Leaves, products: Leaves, factors: Leaves, server: Server) -> tuple[Leaves, Leaves]:
        return factors, {p.path: before[p.path] + scale * (products[p.path] - p.product(factors)) for p in places}

    return _merging(places, weights, merge)


def stacking(places: tuple[Slot, ...], scale: Any, rank: int, *, weights: Weights = "examples") -> Aggregator:
    """Merges the mean of the clients' products into the weights, and starts new factors in every round (FLoRA).

    ``W <- W + s sum_i p_i A_i B_i``, the product of all factors stacked; A is drawn anew, B is zero.

    Args:
      places: the adapted weights.
      scale: s.
      rank: of the new factors.
      weights: as in :func:`mean`.

    Source: Wang et al., "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank Adaptations",
    NeurIPS 2024.
    """

    def merge(before: Leaves, products: Leaves, factors: Leaves, server: Server) -> tuple[Leaves, Leaves]:
        key = server.draws("factors")
        fresh = {name: x for place in places for name, x in place.fresh(key, rank).items()}
        return factors | fresh, {p.path: before[p.path] + scale * products[p.path] for p in places}

    return _merging(places, weights, merge)


def _merging(places: tuple[Slot, ...], weights: Weights, merge: Any) -> Aggregator:
    """The mean of what clients send, after which ``merge`` changes the weights by the mean of the products."""
    base, paths = mean(weights=weights), {place.path for place in places}

    def split(leaves: Leaves) -> tuple[Leaves, Leaves]:
        return {n: x for n, x in leaves.items() if n in paths}, without(leaves, paths)

    def init(shared: Leaves, trainable: frozenset[str], num_clients: int) -> Server:
        held, sent = split(shared)
        server = base.init(sent, trainable - paths, num_clients)
        return server._replace(shared=held | server.shared)

    def pick(download: Leaves, said: dict[str, Array]) -> Leaves:
        return without(download, paths)

    def lift(weight: Array, received: Leaves, upload: Leaves, sender: Sender) -> Any:
        products = {place.path: weight * place.product(upload) for place in places}
        return base.lift(weight, received, upload, sender), products

    def finish(server: Server, total: Any, trainable: frozenset[str]) -> Server:
        (_, mass), products = total
        held, sent = split(server.shared)
        after = base.finish(server._replace(shared=sent), total[0], trainable)
        shares = jax.tree.map(lambda x: x / not_zero(mass), products)
        factors, weights = merge(held, shares, after.shared, server)
        moved = {n: x.astype(server.shared[n].dtype) for n, x in (weights | factors).items()}
        shared = {n: jnp.where(mass > 0, moved[n], x) for n, x in server.shared.items()}
        return after._replace(shared=shared)

    return base._replace(init=init, pick=pick, lift=lift, finish=finish, sees="each client's factors")


def of_ranks(aggregator: Aggregator, places: tuple[Slot, ...], ranks: tuple[int, ...]) -> Aggregator:
    """The aggregator, whose clients have factors of rank ``ranks[id % len(ranks)]``: the rest of them is zero.

    A row and a column that are both zero have no gradient, so that they stay zero while a client trains. A client is
    told its rank (:func:`padding_spared` takes the zeros off its traffic).

    Args:
      aggregator: of factors of the largest rank.
      places: the adapted weights.
      ranks: at least 1 each.
    """
    checked_ranks(ranks)

    def render(server: Server, client_id: Array) -> Leaves:
        rank = jnp.asarray(ranks, jnp.int32)[client_id % len(ranks)]
        download = aggregator.render(server, client_id)
        return download | {n: x for place in places for n, x in place.truncated(download, rank).items()} | {RANK: rank}

    def pick(download: Leaves, said: dict[str, Array]) -> Leaves:
        return aggregator.pick(without(download, {RANK}), said)

    return aggregator._replace(render=render, pick=pick)


def padding_spared(update: ClientUpdate, places: tuple[Slot, ...], rank: int) -> ClientUpdate:
    """The client update, whose report says how many bytes are the padding of factors from its own rank to ``rank``."""
    numbers = sum(sum(place.size) * jnp.dtype(place.dtype).itemsize for place in places)  # of one unit of rank

    def padded(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
        parts, report = update(layout, parts, context)
        spared = jnp.int32(numbers) * (rank - context.download[RANK])
        return parts, report._replace(spared_up=report.spared_up + spared, spared_down=report.spared_down + spared)

    return padded


def sparsity_weighted(places: tuple[Slot, ...], *, weights: Weights = "examples") -> Aggregator:
    """Averages factors of different ranks, padded with zeros, by the size of their product (HetLoRA).

    ``A <- sum_i q_i A_i``, B likewise, ``q_i = |A_i B_i|_F / sum_j |A_j B_j|_F`` for each adapted weight. Where all
    products are zero the factors stay. Other leaves are averaged as in :func:`mean`.

    Args:
      places: the adapted weights.
      weights: of the other leaves.

    Source: Cho, Liu, Xu, Fahrezi, Joshi, "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models",
    EMNLP 2024.
    """
    base = mean(weights=weights)
    factors = {name for place in places for name in place.names}

    def lift(weight: Array, received: Leaves, upload: Leaves, sender: Sender) -> Any:
        counted = (weight > 0).astype(jnp.float32)
        sizes = {p.path: counted * optax.tree.norm(p.product(upload).astype(jnp.float32)) for p in places}
        padded = {name: sizes[p.path] * upload[name] for p in places for name in p.names}
        return base.lift(weight, received, upload, sender), padded, sizes

    def finish(server: Server, total: Any, trainable: frozenset[str]) -> Server:
        averaged, padded, sizes = total
        after = base.finish(server, averaged, trainable)
        met = {
            name: jnp.where(sizes[p.path] > 0, padded[name] / not_zero(sizes[p.path]), server.shared[name])
            for p in places
            for name in p.names
        }
        return after._replace(shared=after.shared | {n: x.astype(after.shared[n].dtype) for n, x in met.items()})

    require(bool(factors), "places: found none; expected the adapted weights")
    return base._replace(lift=lift, finish=finish)


def checked_ranks(ranks: tuple[int, ...]) -> int:
    """The largest rank; ValueError unless there is one and all are whole numbers of at least 1."""
    require(
        isinstance(ranks, tuple) and len(ranks) > 0, f"ranks: found {ranks!r}; allowed is a tuple such as (2, 4, 8)"
    )
    for rank in ranks:
        positive_int("ranks", rank)
    return max(ranks)


def without(leaves: Leaves, names: Collection[str]) -> Leaves:
    """The leaves but those."""
    return {name: x for name, x in leaves.items() if name not in names}
