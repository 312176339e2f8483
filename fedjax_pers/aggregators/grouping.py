"""Clusters that one round makes and later comers join: FedGroup.

k-means is scikit-learn's and runs on the host, in that one round; all else is compiled. The server keeps what
:mod:`~fedjax_pers.aggregators.members` says, and in ``Server.aux`` besides ``"first"`` (the model before the cold
start) and ``"directions"`` (``[groups, ...]``, the mean difference of each group in the cold start).
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_pers.aggregators.base import Aggregator, Collected, Sender, Server
from fedjax_pers.aggregators.mean import Weights
from fedjax_pers.aggregators.members import Move, by_first_member, cluster_of, grouped, regrouped
from fedjax_pers.aggregators.pairwise import norms, products, rows
from fedjax_pers.aggregators.similarity import mixtures
from fedjax_pers.base import Array, Leaves
from fedjax_pers.checks import number, one_of, positive_int, require
from fedjax_pers.trees import where

Embedding = Literal["edc", "differences"]


def fedgroup(
    groups: int = 2,
    mixing: Any = 0.0,
    embedding: Embedding = "edc",
    optimizer: optax.GradientTransformation | None = None,
    *,
    weights: Weights = "examples",
) -> Aggregator:
    """Clients of one round are grouped by their differences; later ones join the group whose direction is theirs.

    The cold start is the first round with at least as many clients as groups: k-means++ on an embedding of their
    differences, and each group's model and direction move by its members' mean. Later a client without a group receives
    the first model; its difference decides, ``argmax_g cos(D_i, direction_g)``, and moves nothing; from then on it is a
    member. In each group the model moves by the mean of its members, and then, with ``mixing`` above 0,
    ``w_g <- (w_g + mixing sum_h w_h / |w_h|) / (1 + mixing sum_h 1 / |w_h|)`` over the other groups h.

    A client that predicts without ever having been there takes the group with the least loss on its training data.

    Args:
      groups: how many; fewer are made where fewer differences differ.
      mixing: how much groups are drawn to each other, the paper's ``eta_G``.
      embedding: ``"edc"`` (:func:`decomposed_cosines`, one direction for each group) or ``"differences"`` themselves.
      optimizer: as in :func:`~fedjax_pers.aggregators.mean`; each group has one.
      weights: within a group, by examples or uniform.

    Source: Duan, Liu, Ji, Liu, Liang, Chen, Tan, "FedGroup: Efficient Clustered Federated Learning via Decomposed
    Data-Driven Measure", 2020; the journal's version is FlexCFL, IEEE TPDS 2022.
    """
    positive_int("groups", groups)
    number("mixing", mixing, low=0)
    one_of("embedding", embedding, ("edc", "differences"))

    def labelled(differences: np.ndarray, there: np.ndarray, seed: np.ndarray) -> np.ndarray:
        labels, points = np.zeros(len(there), np.int32), np.asarray(differences, np.float64)[there]
        if there.any():
            labels[there] = k_means(decomposed_cosines(points, groups) if embedding == "edc" else points, groups, seed)
        return labels

    def cold_started(server: Server, received: Collected, differences: Leaves) -> Server:
        seed = jax.random.bits(server.draws("groups"), dtype=jnp.uint32)
        shape, points = jax.ShapeDtypeStruct(received.ids.shape, jnp.int32), jnp.concatenate(rows(differences), axis=1)
        labels = jax.pure_callback(labelled, shape, points, received.accepted, seed, vmap_method="sequential")
        members = _joined(server, received, labels)
        share = jax.nn.one_hot(labels, groups, axis=0) * received.weight
        share /= jnp.maximum(share.sum(1, keepdims=True), jnp.finfo(jnp.float32).tiny)
        after = regrouped(server, members, labels.max() + 1, jnp.arange(groups, dtype=jnp.int32))
        return after._replace(aux=after.aux | {"directions": mixtures(share, differences)})

    def joined(server: Server, received: Collected, differences: Leaves) -> Server:
        directions = server.aux["directions"]
        lengths = norms(directions)
        along = products(differences, directions) / jnp.where(lengths > 0, lengths, 1)
        nearest = jnp.argmax(jnp.where(_made(server), along, -jnp.inf), axis=1)
        return server._replace(aux=server.aux | {"members": _joined(server, received, nearest)})

    def finish(move: Move, server: Server, received: Collected, differences: Leaves) -> Server:
        places, there = received.ids.shape[0], received.accepted
        require(
            places >= groups, f"groups: found {groups}; the cold start needs as many clients in a round, found {places}"
        )
        started, due = server.aux["clusters"] > 0, there.sum() >= groups
        knows = cluster_of(server.aux["members"], received.ids) >= 0
        ways = [lambda server, *_: server, cold_started, joined]
        after = jax.lax.switch(jnp.where(started, 2, due), ways, server, received, differences)
        counts = there & jnp.where(started, knows, due)
        after = move(after, received._replace(weight=jnp.where(counts, received.weight, 0)))
        trained = {name: after.shared[name] for name in differences}
        mixed = mixtures(_pulls(norms(trained), _made(after), mixing), trained)
        return after._replace(shared=after.shared | where(there.any(), mixed, trained))

    plain = grouped(finish, groups, weights, optimizer)

    def init(shared: Leaves, trainable: frozenset[str], num_clients: int) -> Server:
        require(groups <= max(num_clients, 1), f"groups: found {groups}; allowed are 1 .. {num_clients}, the clients")
        server = plain.init(shared, trainable, num_clients)
        none = {
            "members": jnp.full(num_clients, -1, jnp.int32),
            "clusters": jnp.int32(0),
            "made": jnp.full(groups, -1, jnp.int32),
        }
        directions = {
            name: jnp.zeros((groups, *shared[name].shape), jnp.promote_types(shared[name].dtype, jnp.float32))
            for name in sorted(trainable)
        }
        return server._replace(aux=server.aux | none | {"first": dict(shared), "directions": directions})

    def render(server: Server, client: Array) -> Leaves:
        own = cluster_of(server.aux["members"], client)
        return jax.tree.map(lambda first, x: jnp.where(own < 0, first, x[own]), server.aux["first"], server.shared)

    def weigh(server: Server, sender: Sender) -> Array:
        newcomer = (server.aux["clusters"] > 0) & (cluster_of(server.aux["members"], sender.id) < 0)
        return jnp.where(newcomer, 0, plain.weigh(server, sender))

    return plain._replace(init=init, render=render, weigh=weigh)


def decomposed_cosines(differences: np.ndarray, directions: int) -> np.ndarray:
    """Cosines of clients to the first right singular vectors of their differences, ``[clients, directions]`` (EDC).

    ``E_ij = <D_i, v_j> / |D_i|`` with ``D = U S V^T``, not centred; 0 beside zeros and along what is rounding alone.

    Args:
      differences: ``[clients, parameters]``, float64.
      directions: how many, at most one for each client.

    Source: Duan et al., 2020.
    """
    inner = differences @ differences.T  # U S^2 U^T: nothing but this matrix is decomposed, however long the rows
    squares, left = (x[..., ::-1][..., :directions] for x in np.linalg.eigh(inner))
    strong = squares > len(inner) * np.finfo(np.float64).eps * squares[0]
    along = inner @ left / np.sqrt(np.where(strong, squares, np.inf))
    lengths = np.linalg.norm(differences, axis=1, keepdims=True)
    return along / np.where(lengths > 0, lengths, 1)


def k_means(points: np.ndarray, groups: int, seed: Any) -> np.ndarray:
    """The group of each point, ``[points]``, numbered in the order of their first members.

    The best of ten starts by k-means++. Fewer groups where fewer points differ by a millionth of the largest number.

    Args:
      points: ``[points, ...]``.
      groups: how many.
      seed: of the starts.
    """
    from sklearn.cluster import KMeans  # takes a second, which those who do not group need not wait

    points = points / (np.abs(points).max() or 1)
    different = len(np.unique(points.round(6), axis=0))
    found = KMeans(min(groups, different), n_init=10, random_state=int(seed)).fit_predict(points)
    return by_first_member(found)


def _made(server: Server) -> Array:
    return server.aux["made"] >= 0


def _joined(server: Server, received: Collected, group: Array) -> Array:
    """The members, with each client that is there and has no group in the one that is found for it."""
    members = server.aux["members"]
    joins = received.accepted & (cluster_of(members, received.ids) < 0)
    return members.at[jnp.where(joins, received.ids, members.shape[0])].set(group.astype(jnp.int32), mode="drop")


def _pulls(lengths: Array, there: Array, strength: Any) -> Array:
    """How much of each group's model goes into that of another, ``[groups, groups]``; rows add up to 1."""
    pull = jnp.where(there & (lengths > 0), strength / jnp.where(lengths > 0, lengths, 1), 0)
    own = jnp.eye(len(lengths), dtype=bool)
    found = jnp.where(own, 1, jnp.where(there[:, None], pull, 0))
    return found / found.sum(1, keepdims=True)
