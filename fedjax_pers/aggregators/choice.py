"""Which layers are personal, chosen by the server for all clients while a run goes on.

The first rounds are full: everything is shared and sent, and each layer is scored. Then the layers with the highest
scores become personal, and only the others are sent. In later *measuring* rounds everything is sent once more, so that
personal layers are scored (and averaged: what the server holds of them is what a client begins from where they are
shared again); clients go on with their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from fedjax_pers.aggregators.base import Aggregator, Collected, Sender, Server
from fedjax_pers.aggregators.masked import masked_mean
from fedjax_pers.aggregators.mean import Weights, not_zero
from fedjax_pers.base import Array, Leaves
from fedjax_pers.checks import number, positive_int, require, whole_number
from fedjax_pers.masks import ALL_SENT, MASK, masks_of

Groups = Mapping[str, frozenset[str]]
"""Leaves by layer: what is chosen together."""


class LayerScore(NamedTuple):
    """By what a layer becomes personal.

    Attributes:
      lift: ``lift(weight, received, upload, groups) -> summand`` of a client.
      collect: ``collect(upload, groups) -> kept`` of each client.
      read: ``read(received, summand, groups) -> [layers]``; NaN where the round says nothing of a layer.
      highest: layers with the highest scores become personal, or those with the lowest.
      sees: what the server must know of a single client, in words.
    """

    lift: Callable[[Array, Leaves, Leaves, Groups], Any]
    collect: Callable[[Leaves, Groups], Leaves]
    read: Callable[[Collected, Any, Groups], Array]
    highest: bool
    sees: str


def divergence(eps: float = 1e-8) -> LayerScore:
    """``d_l = sum_i p_i |w_il - w_l| / (|w_l| + eps)`` of what clients upload, ``w_l`` being their mean.

    Measured before the mean replaces them. The server sees each upload. Kernel and bias are one vector: a small bias
    alone would look divergent. NaN with fewer than two clients.
    """

    def collect(upload: Leaves, groups: Groups) -> Leaves:
        return {name: upload[name].astype(jnp.float32) for members in groups.values() for name in members}

    def read(received: Collected, summand: Any, groups: Groups) -> Array:
        share = received.weight / not_zero(received.weight.sum())
        leaves = received.each
        mean = {name: jnp.tensordot(share, x, 1, precision="highest") for name, x in leaves.items()}

        def one(members: frozenset[str]) -> Array:
            apart = [((leaves[n] - mean[n]) ** 2).reshape(share.shape[0], -1).sum(1) for n in sorted(members)]
            size = sum(jnp.sum(mean[n] ** 2) for n in sorted(members))
            found = (share * jnp.sqrt(sum(apart))).sum() / (jnp.sqrt(size) + eps)
            return jnp.where(received.accepted.sum() > 1, found, jnp.nan)

        return jnp.stack([one(members) for members in groups.values()])

    return LayerScore(lambda *_: (), collect, read, highest=True, sees="each client's upload")


def agreement() -> LayerScore:
    """``s_l = sum_{i<j} cos(D_il, D_jl) / (m (m - 1) / 2) = (|sum_i u_il|^2 - m) / (m (m - 1))``, from sums alone.

    ``u_il`` is the direction of client i's difference from what the server holds, m the number of clients that have
    one. The server needs no single upload, so secure aggregation stays possible. NaN with fewer than two clients.
    """

    def lift(weight: Array, received: Leaves, upload: Leaves, groups: Groups) -> Any:
        def one(members: frozenset[str]) -> tuple[Leaves, Array]:
            moved = {name: (upload[name] - received[name]).astype(jnp.float32) for name in sorted(members)}
            length = jnp.sqrt(sum(jnp.sum(x**2) for x in moved.values()))
            counts = (weight > 0) & (length > 0)
            return {n: jnp.where(counts, x / not_zero(length), 0) for n, x in moved.items()}, counts.astype(jnp.float32)

        return {name: one(members) for name, members in groups.items()}

    def read(received: Collected, summand: Any, groups: Groups) -> Array:
        def one(directions: Leaves, count: Array) -> Array:
            squared = sum(jnp.sum(x**2) for x in directions.values())
            return jnp.where(count > 1, (squared - count) / not_zero(count * (count - 1)), jnp.nan)

        return jnp.stack([one(*summand[name]) for name in groups])

    return LayerScore(lift, lambda *_: {}, read, highest=False, sees="")


SCORES: dict[str, Callable[[], LayerScore]] = {"divergence": divergence, "agreement": agreement}


def selected(scores: Array, personal: Array, count: int, hysteresis: Any) -> Array:
    """The ``count`` layers with the highest scores; one that is personal keeps its place up to ``hysteresis`` below.

    Example:
      >>> now, before = jnp.array([0.5, 0.6, 0.1]), jnp.array([True, False, False])
      >>> selected(now, before, 1, 0.2).tolist(), selected(now, before, 1, 0.05).tolist()
      ([True, False, False], [False, True, False])

    Args:
      scores: ``[layers]``; of equal ones the first layer is chosen.
      personal: ``bool [layers]``, the choice so far.
      count: how many.
      hysteresis: in units of the score.
    """
    order = jnp.argsort(-(scores + jnp.where(personal, hysteresis, 0)), stable=True)
    return jnp.zeros(scores.shape, bool).at[order[:count]].set(True)


def layer_choice(
    groups: Groups,
    score: LayerScore,
    *,
    scored: Collection[str],
    count: int = 1,
    warm_up: int = 5,
    reselect_every: int = 0,
    hysteresis: Any = 0.0,
    weights: Weights = "examples",
) -> Aggregator:
    """The masked mean, with one choice of personal layers for all clients, made by the scores of layers.

    After ``warm_up`` full rounds, and then in every ``reselect_every``-th round, the ``count`` layers with the highest
    (lowest) scores are personal. A round that should decide and says nothing of some layer, for there were not two
    clients, is repeated. ``Server.aux`` holds ``"personal"`` (``bool [layers]``), ``"scores"`` (of the last measuring
    round, ``[layers]``) and ``"rounds"`` (done, without repeated ones and those in which nobody uploaded anything).

    Args:
      groups: leaves by layer; leaves of no layer are always shared.
      score: :func:`divergence` or :func:`agreement`.
      scored: names of the leaves by which layers are scored: those that are trained.
      count: how many layers are personal.
      warm_up: full rounds, at least 1.
      reselect_every: rounds from one choice to the next, the last of which measures; 0 holds the first for ever.
      hysteresis: by how much a layer's score must be above that of a personal one to take its place.
      weights: of the mean, by examples or uniform.
    """
    positive_int("warm_up", warm_up)
    whole_number("reselect_every", reselect_every)
    whole_number("layers", count)
    require(count <= len(groups), f"layers: found {count}; allowed are 0 .. {len(groups)}, of {', '.join(groups)}")
    number("hysteresis", hysteresis, low=0)
    base = masked_mean(weights=weights)
    layer_of = {name: place for place, members in enumerate(groups.values()) for name in members}
    by_layer = {layer: members & frozenset(scored) for layer, members in groups.items()}
    still = [layer for layer, members in by_layer.items() if not members]
    require(not still, f"groups: {still} have no leaf that is trained, by which they could be scored")
    sign = 1.0 if score.highest else -1.0

    def init(shared: Leaves, trainable: frozenset[str], num_clients: int) -> Server:
        aux = {"personal": jnp.zeros(len(groups), bool), "scores": jnp.zeros(len(groups), jnp.float32)}
        return base.init(shared, trainable, num_clients)._replace(aux=aux | {"rounds": jnp.zeros((), jnp.int32)})

    def measures(server: Server) -> Array:
        rounds = server.aux["rounds"]
        later = (rounds - warm_up + 1) % reselect_every == 0 if reselect_every else jnp.array(False)
        return jnp.where(rounds < warm_up, True, later)

    def render(server: Server, client: Array) -> Leaves:
        personal = server.aux["personal"]
        asked = {
            MASK + name: ~personal[layer_of[name]] if name in layer_of else jnp.array(True)
            for name in masks_of(server.shared)
        }
        return server.shared | asked | {ALL_SENT: measures(server)}

    def lift(weight: Array, received: Leaves, upload: Leaves, sender: Sender) -> Any:
        return base.lift(weight, received, upload, sender), score.lift(weight, received, upload, by_layer)

    def finish(server: Server, received: Collected, trainable: frozenset[str]) -> Server:
        averaged, summand = received.total
        after = base.finish(server, averaged, trainable)
        found = score.read(received, summand, by_layer).astype(jnp.float32)
        anybody = received.accepted.any()
        rounds, personal = server.aux["rounds"], server.aux["personal"]
        told = measures(server) & jnp.isfinite(found).all()
        decides = measures(server) & (rounds + 1 >= warm_up)
        chosen = selected(sign * jnp.where(told, found, 0), personal, count, hysteresis)
        aux = {
            "personal": jnp.where(told & decides, chosen, personal),
            "scores": jnp.where(told, found, server.aux["scores"]),
            "rounds": rounds + (anybody & (told | ~decides)),
        }
        return after._replace(aux=aux)

    return base._replace(
        init=init,
        render=render,
        lift=lift,
        finish=finish,
        collect=lambda received, upload, sender: score.collect(upload, by_layer),
        sees=score.sees,
    )
