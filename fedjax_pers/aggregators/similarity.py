"""A model for every client, mixed from the models of those that are like it.

The server keeps a model for each client, ``[num_clients, parameters]``, and sees all uploads of a round at once. Only
shared leaves are looked at and mixed. A client receives its own mixture; one that was never seen in training, the mean
of the models that the last round mixed.

``Server.aux`` holds ``"mixed"`` (``[num_clients, ...]``, what each client receives next) and ``"weights"``
(``[num_clients, num_clients]``: row i says from whom the mixture of client i was made last; zeros before its first).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pers.aggregators.base import Aggregator, Ask, Collected, Server, nothing_added, nothing_asked
from fedjax_pers.aggregators.mean import Weights, client_weight, not_zero
from fedjax_pers.aggregators.measures import Crowd, of_updates
from fedjax_pers.aggregators.pairwise import cosines, squared_distances
from fedjax_pers.aggregators.simplex import onto_simplex
from fedjax_pers.base import Array, Leaves
from fedjax_pers.checks import number, positive, require
from fedjax_pers.trees import as_dtype, gather_rows, scatter_rows, stack_rows

MixingRule = Callable[[Crowd], Array]
"""``rule(crowd) -> [clients, clients]``: row i says how much of each client's model goes into that of client i."""


def mixing(
    rule: MixingRule, *, weights: Weights = "examples", ask: Ask = nothing_asked, says: tuple[str, ...] = ()
) -> Aggregator:
    """``u_i = sum_j a_ij w_j`` over the clients of a round, with ``a`` from a rule; absent clients keep their ``u_i``.

    Example:
      >>> alone = mixing(lambda crowd: jnp.eye(crowd.share.shape[0]))

    Args:
      rule: a pure function. Columns of clients that are not there (share 0) count as 0; rows are divided by their sum.
      weights: the ``share`` of a crowd.
      ask: numbers that clients compute before they train, for the rule (``input_moments``).
      says: their names.
    """

    def finish(server: Server, received: Collected, trainable: frozenset[str]) -> Server:
        models, differences, said = received.each
        share = received.weight / not_zero(received.weight.sum())
        found = _rows_that_add_up(rule(Crowd(models, differences, share, said)), received.accepted)
        ids = jnp.where(received.accepted, received.ids, _count(server))
        place = jnp.full(_count(server), ids.shape[0]).at[ids].set(jnp.arange(ids.shape[0]), mode="drop")
        # A gather of columns: to scatter them takes several times as long on a CPU.
        whole = jnp.take(found, place, axis=1, mode="fill", fill_value=0)
        aux = {
            "mixed": scatter_rows(server.aux["mixed"], ids, mixtures(found, models)),
            "weights": server.aux["weights"].at[ids].set(whole, mode="drop"),
        }
        return server._replace(shared=mean_of_models(received.weight, models, server.shared), aux=aux)

    return _keeping(finish, _own_mixture, weights)._replace(ask=ask, says=says)


def mixing_all(rule: Callable[[Leaves], Array], *, weights: Weights = "examples") -> Aggregator:
    """As :func:`mixing`, but over the last models of *all* clients (of those that never came, the first model).

    A client predicts with what it trained last, ``Server.aux["trained"]``, not with the mixture.

    Args:
      rule: from the models of all clients, ``[num_clients, ...]``, to ``[num_clients, num_clients]``.
      weights: of the mean that clients receive which were never seen.
    """

    def init(shared: Leaves, trainable: frozenset[str], num_clients: int) -> Server:
        server = _first(shared, trainable, num_clients)
        return server._replace(aux=server.aux | {"trained": server.aux["mixed"]})

    def finish(server: Server, received: Collected, trainable: frozenset[str]) -> Server:
        models, _, _ = received.each
        ids = jnp.where(received.accepted, received.ids, _count(server))
        trained = scatter_rows(server.aux["trained"], ids, models)
        found = _rows_that_add_up(rule(trained), jnp.ones(_count(server), bool))
        aux = {"mixed": mixtures(found, trained), "weights": found, "trained": trained}
        after = server._replace(shared=mean_of_models(received.weight, models, server.shared), aux=aux)
        return jax.tree.map(lambda new, old: jnp.where(received.accepted.any(), new, old), after, server)

    def own_trained(server: Server, client: Array) -> Leaves:
        return row_of(server.aux["trained"], client, server.shared)

    return _keeping(finish, own_trained, weights)._replace(init=init)


def _keeping(
    finish: Callable[[Server, Collected, frozenset[str]], Server],
    deliver: Callable[[Server, Array], Leaves],
    weights: Weights,
) -> Aggregator:
    return Aggregator(
        _first,
        _own_mixture,
        client_weight(weights),
        nothing_added,
        finish,
        collect=lambda received, upload, sender: (upload, jax.tree.map(jnp.subtract, upload, received), sender.said),
        deliver=deliver,
    )


def _first(shared: Leaves, trainable: frozenset[str], num_clients: int) -> Server:
    aux = {"mixed": stack_rows(shared, num_clients), "weights": jnp.zeros((num_clients, num_clients))}
    return Server(shared, (), aux)


def _count(server: Server) -> int:
    return server.aux["weights"].shape[0]


def row_of(rows: Leaves, client: Array, fresh: Leaves) -> Leaves:
    """The row of one client; a copy of ``fresh`` for one that has none."""
    return jax.tree.map(lambda x: x[0], gather_rows(rows, client[None], fresh))


def _own_mixture(server: Server, client: Array) -> Leaves:
    return row_of(server.aux["mixed"], client, server.shared)


def _rows_that_add_up(found: Array, there: Array) -> Array:
    """Without columns of those that are not there; a row in which nothing is left is the client's own model."""
    square = (there.shape[0],) * 2
    require(found.shape == square, f"rule: found shape {found.shape}; expected [clients, clients] = {square}")
    found = jnp.where(there[None], found, 0)
    total = found.sum(1, keepdims=True)
    return jnp.where(total > 0, found / not_zero(total), jnp.eye(found.shape[0]))


def mixtures(found: Array, models: Leaves) -> Leaves:
    """``u_i = sum_j found_ij w_j`` of stacked models; a leaf that is not floating stays as it is."""

    def mixed(x: Array) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x  # a counter is nobody else's
        return jnp.tensordot(found.astype(x.dtype), x, 1, precision="highest")

    return jax.tree.map(mixed, models)


def mean_of_models(weight: Array, models: Leaves, otherwise: Leaves) -> Leaves:
    """The mean of models ``[clients, ...]`` (of counters the nearest number); ``otherwise`` where weights are all 0."""
    share = weight / not_zero(weight.sum())

    def one(x: Array, old: Array) -> Array:
        mean = jnp.tensordot(share, x.astype(jnp.promote_types(x.dtype, jnp.float32)), 1, precision="highest")
        return jnp.where(share.sum() > 0, as_dtype(mean, old.dtype), old)

    return jax.tree.map(one, models, otherwise)


# Rules


def fedamp(alpha: Any = 1.0, sigma: Any = 1.0) -> Callable[[Leaves], Array]:
    """``xi_ij = alpha exp(-|w_i - w_j|^2 / sigma) / sigma``, and ``xi_ii`` what is left of 1. For :func:`mixing_all`.

    Where nothing would be left (``alpha (clients - 1) > sigma`` allows that), the others are scaled to add up to 1.

    Source: Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, "Personalized Cross-Silo Federated Learning on Non-IID Data",
    AAAI 2021.
    """
    number("alpha", alpha, low=0)
    positive("sigma", sigma)

    def rule(models: Leaves) -> Array:
        centred = jax.tree.map(lambda x: x - x.mean(0), models)
        near = alpha * jnp.exp(-squared_distances(centred) / sigma) / sigma
        others = jnp.where(jnp.eye(near.shape[0], dtype=bool), 0, near)
        total = others.sum(1, keepdims=True)
        others = others / jnp.maximum(total, 1)
        return others + jnp.diag(jnp.maximum(1 - total[:, 0], 0))

    return rule


def heurfedamp(own: Any = 0.5, sigma: Any = 1.0) -> Callable[[Leaves], Array]:
    """``xi_ii = own``, others ``(1 - own) softmax_j(sigma cos(w_i, w_j))``. For :func:`mixing_all`.

    Source: Huang et al., AAAI 2021 (HeurFedAMP).
    """
    number("own", own, 0, 1)
    number("sigma", sigma)

    def rule(models: Leaves) -> Array:
        alike = sigma * cosines(models)
        alone = alike.shape[0] == 1
        diagonal = jnp.eye(alike.shape[0], dtype=bool)
        others = jax.nn.softmax(jnp.where(diagonal, -jnp.inf, alike), axis=1) if not alone else jnp.zeros((1, 1))
        return jnp.where(diagonal, own, (1 - own) * others)

    return rule


def pfedgraph(lam: Any = 1.0) -> MixingRule:
    """``a_i = argmin_{a on the simplex} lam |a|^2 + (d_i - 2 lam p)^T a = project(p - d_i / (2 lam))``.

    ``d_ij = -cos(D_i, D_j)`` of differences, ``p`` the shares. ``lam -> infinity`` is the mean, ``lam -> 0`` the most
    alike alone. For :func:`mixing`.

    Source: Ye, Ni, Wu, Chen, Wang, "Personalized Federated Learning with Inferred Collaboration Graphs", ICML 2023.
    """
    positive("lam", lam)

    def rule(crowd: Crowd) -> Array:
        there = crowd.share > 0
        towards = jnp.where(there[None], crowd.share + cosines(crowd.differences) / (2 * lam), -jnp.inf)
        return onto_simplex(jnp.where(there.any(), towards, 0))

    return rule


def by_similarity(measure: Callable[[Crowd], Array] = of_updates, temperature: Any = 0.1) -> MixingRule:
    """``a_ij`` in proportion to ``p_j exp(s_ij / temperature)``, ``s`` being how alike clients are. For :func:`mixing`.

    Args:
      measure: ``measure(crowd) -> [clients, clients]``, such as :func:`~fedjax_pers.aggregators.of_updates`.
      temperature: above 0; a large one is the mean, a small one the client's own model.
    """
    positive("temperature", temperature)

    def rule(crowd: Crowd) -> Array:
        alike = measure(crowd)
        there = crowd.share > 0
        logits = jnp.where(there[None], alike / temperature + jnp.log(not_zero(crowd.share)), -jnp.inf)
        return jax.nn.softmax(jnp.where(there.any(), logits, 0), axis=1)

    return rule
