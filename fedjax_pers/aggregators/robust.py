"""Aggregators that a minority of bad uploads cannot move far.

They see all uploads at once, so memory holds ``[clients, parameters]``, and secure aggregation is out of the question.
Uploads that are not finite are left out before, as everywhere; what is left out does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_pers.aggregators.base import Aggregator, Collected, Sender, Server, copy_to_all, nothing_added
from fedjax_pers.aggregators.mean import Weights, client_weight, clipped, mean, server_step, weighted_difference
from fedjax_pers.aggregators.pairwise import squared_distances
from fedjax_pers.aggregators.ranks import inner_mean, middle, sum_of_least
from fedjax_pers.base import Array, Leaves
from fedjax_pers.checks import number, positive, positive_int, whole_number

Rule = Callable[[Leaves, Array], Leaves]
"""``rule(differences [clients, ...], weight [clients]) -> difference``; weight 0 is a client that is not there."""


def by_rule(
    rule: Rule, optimizer: optax.GradientTransformation | None = None, *, weights: Weights = "uniform"
) -> Aggregator:
    """``w + server_step(rule(w_1 - w, ..., w_m - w))``: an aggregator from a rule on stacked differences.

    Example:
      >>> largest = by_rule(lambda each, weight: jax.tree.map(lambda x: x.max(0), each))

    Args:
      rule: a pure function of differences ``[clients, ...]`` and weights ``[clients]``.
      optimizer: as in :func:`~fedjax_pers.aggregators.mean`.
      weights: what the rule is given: 1 for every client, or its examples.
    """
    step = server_step(optimizer)

    def finish(server: Server, received: Collected, trainable: frozenset[str]) -> Server:
        # Without anybody a rule may divide by zero; nothing of that is kept.
        return step.move(server, rule(received.each, received.weight), received.weight.sum() > 0, trainable)

    return Aggregator(
        step.init,
        copy_to_all,
        client_weight(weights),
        nothing_added,
        finish,
        lambda received, upload, sender: weighted_difference(jnp.float32(1), received, upload),
    )


def median(optimizer: optax.GradientTransformation | None = None) -> Aggregator:
    """The median of each coordinate of the differences; of an even number, the mean of the middle two.

    Args:
      optimizer: as in :func:`~fedjax_pers.aggregators.mean`.

    Source: Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical
    Rates", ICML 2018.
    """

    def rule(each: Leaves, weight: Array) -> Leaves:
        return jax.tree.map(lambda x: middle(x, weight > 0), each)

    return by_rule(rule, optimizer)


def trimmed_mean(share: Any = 0.1, optimizer: optax.GradientTransformation | None = None) -> Aggregator:
    """The mean of each coordinate without the ``floor(share * m)`` smallest and as many of the largest.

    Args:
      share: cut at each end; at least 0 and below 1/2.
      optimizer: as in :func:`~fedjax_pers.aggregators.mean`.

    Source: Yin et al., ICML 2018.
    """
    number("share", share, 0, 0.49999)

    def rule(each: Leaves, weight: Array) -> Leaves:
        there = weight > 0
        # 0.29 of 100 is 29, whatever float32 makes of it
        cut = jnp.floor(share * there.sum() + 1e-3).astype(jnp.int32)
        return jax.tree.map(lambda x: inner_mean(x, there, cut), each)

    return by_rule(rule, optimizer)


def krum(byzantine: int, chosen: int = 1, optimizer: optax.GradientTransformation | None = None) -> Aggregator:
    """The mean of the ``chosen`` uploads with the least sum of squared distances to ``m - byzantine - 2`` others.

    The others are those that are nearest.

    Args:
      byzantine: bad uploads that are expected.
      chosen: 1 is Krum, more is Multi-Krum.
      optimizer: as in :func:`~fedjax_pers.aggregators.mean`.

    Source: Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries: Byzantine Tolerant Gradient
    Descent", NeurIPS 2017.
    """
    whole_number("byzantine", byzantine)
    positive_int("chosen", chosen)

    def rule(each: Leaves, weight: Array) -> Leaves:
        there = weight > 0
        count = there.sum()
        distances = jnp.where(jnp.eye(weight.shape[0], dtype=bool), jnp.inf, squared_distances(each))
        # Of those that are there: an upload so far away that its distances overflow has an infinite score, not none.
        near = jnp.minimum(jnp.maximum(count - byzantine - 2, 1), count - 1)
        score = sum_of_least(distances, there, near)
        rank = jnp.argsort(jnp.argsort(jnp.where(there, score, jnp.inf), stable=True))
        best = ((rank < chosen) & there).astype(jnp.float32)
        return jax.tree.map(lambda x: jnp.tensordot(best / jnp.maximum(best.sum(), 1), x, 1), each)

    return by_rule(rule, optimizer)


def geometric_median(
    steps: int = 8,
    smoothing: Any = 1e-6,
    optimizer: optax.GradientTransformation | None = None,
    *,
    weights: Weights = "examples",
) -> Aggregator:
    """The point with the least weighted sum of distances to the differences, by smoothed Weiszfeld steps.

    ``z <- sum_i b_i x_i / sum_i b_i`` with ``b_i = p_i / max(smoothing, |z - x_i|)``, from the weighted mean.

    Args:
      steps: of Weiszfeld's iteration.
      smoothing: the least distance that counts.
      optimizer: as in :func:`~fedjax_pers.aggregators.mean`.
      weights: ``p_i``, by examples or uniform.

    Source: Pillutla, Kakade, Harchaoui, "Robust Aggregation for Federated Learning", IEEE TSP 2022 (3 to 5 steps).
    """
    positive_int("steps", steps)
    positive("smoothing", smoothing)

    def rule(each: Leaves, weight: Array) -> Leaves:
        def centre(share: Array) -> Leaves:
            share = share / jnp.where(share.sum() > 0, share.sum(), 1)
            return jax.tree.map(lambda x: jnp.tensordot(share, x, 1), each)

        def closer(_: Array, z: Leaves) -> Leaves:
            squares = [jnp.square(each[name] - z[name]).reshape(weight.shape[0], -1).sum(1) for name in sorted(each)]
            return centre(weight / jnp.maximum(jnp.sqrt(sum(squares)), smoothing))

        return jax.lax.fori_loop(0, steps, closer, centre(weight))

    return by_rule(rule, optimizer, weights=weights)


def norm_clipping(
    bound: Any, optimizer: optax.GradientTransformation | None = None, *, weights: Weights = "examples"
) -> Aggregator:
    """The weighted mean of differences cut to the L2 norm ``bound``: no upload moves the server by more than that.

    Needs no upload but the sum.

    Args:
      bound: of the norm over all shared leaves.
      optimizer: as in :func:`~fedjax_pers.aggregators.mean`.
      weights: as in :func:`~fedjax_pers.aggregators.mean`.

    Source: Sun, Kairouz, Suresh, McMahan, "Can You Really Backdoor Federated Learning?", 2019, arXiv:1911.07963.
    """
    positive("bound", bound)
    plain = mean(optimizer, weights=weights)

    def lift(weight: Array, received: Leaves, upload: Leaves, sender: Sender) -> Any:
        cut = clipped(weighted_difference(jnp.float32(1), received, upload), bound)
        return jax.tree.map(lambda x: x * weight.astype(x.dtype), cut), weight

    return plain._replace(lift=lift)
