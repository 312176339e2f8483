"""Clusters that the server finds by looking at updates: CFL splits them, FL+HC makes them in one round.

Hierarchical clustering is SciPy's and runs on the host, in the few rounds in which it is due; all else is compiled.
The server keeps what :mod:`~fedjax_pers.aggregators.members` says.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist, squareform

from fedjax_pers.aggregators.base import Aggregator, Collected, Server
from fedjax_pers.aggregators.mean import Weights
from fedjax_pers.aggregators.members import Move, by_first_member, cluster_of, grouped, regrouped
from fedjax_pers.aggregators.pairwise import cosines, norms, rows
from fedjax_pers.base import Array, Leaves
from fedjax_pers.checks import number, one_of, positive_int, whole_number

Metric = Literal["euclidean", "cityblock", "cosine"]
Linkage = Literal["single", "complete", "average", "ward"]


def cfl(
    eps1: Any = 0.4,
    eps2: Any = 1.6,
    warm_up: int = 20,
    most: int = 8,
    optimizer: optax.GradientTransformation | None = None,
) -> Aggregator:
    """Clustered federated learning: a cluster that is at rest while some member is not is cut in two.

    In each cluster the model moves by the uniform mean of its members' differences. Afterwards a cluster of more than
    two clients, all of whom took part, is cut in two when ``|mean D_i| < eps1`` and ``max |D_i| > eps2``, so that the
    largest cosine similarity across the parts is small (complete linkage). Both start from the same model; the part
    with the lowest id keeps the number.

    Args:
      eps1: norm of the mean difference below which a cluster is at rest; with 0 nothing is ever split.
      eps2: norm of a difference above which a member is not.
      warm_up: rounds before the first split.
      most: clusters that there may be.
      optimizer: as in :func:`~fedjax_pers.aggregators.mean`; each cluster has one.

    Source: Sattler, Müller, Samek, "Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization
    Under Privacy Constraints", IEEE TNNLS 2021.
    """
    positive_int("most", most)
    number("eps1", eps1, low=0)
    number("eps2", eps2, low=0)
    whole_number("warm_up", warm_up)

    def split(server: Server, received: Collected, differences: Leaves) -> tuple[Array, Array, Array]:
        members, clusters = server.aux["members"], server.aux["clusters"]
        group = cluster_of(members, received.ids)
        lengths = norms(differences)
        alike = cosines(differences)

        def one(cluster: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            members, count, parent = carry
            inside = received.accepted & (group == cluster)
            size = inside.sum()
            mean = jax.tree.map(lambda x: jnp.tensordot(inside / jnp.maximum(size, 1), x, 1)[None], differences)
            due = (norms(mean)[0] < eps1) & (jnp.where(inside, lengths, 0).max(initial=0) > eps2)
            due &= (size > 2) & (size == (server.aux["members"] == cluster).sum())
            due &= (count < most) & (server.aux["rounds"] >= warm_up)
            second = jax.lax.cond(due, _second_half, lambda alike, inside: jnp.zeros_like(inside), alike, inside)
            moved = jnp.where(second, received.ids, members.shape[0])
            return (
                members.at[moved].set(count, mode="drop"),
                count + due,
                parent.at[jnp.where(due, count, most)].set(cluster, mode="drop"),
            )

        start = (members, clusters, jnp.arange(most, dtype=jnp.int32))
        return jax.lax.fori_loop(0, clusters, one, start)

    def finish(move: Move, server: Server, received: Collected, differences: Leaves) -> Server:
        after = move(server, received)
        return regrouped(after, *split(after, received, differences))

    return grouped(finish, most, "uniform", optimizer)


def hierarchical(
    at: int = 10,
    distance: Any = 1.0,
    metric: Metric = "euclidean",
    method: Linkage = "ward",
    most: int = 8,
    optimizer: optax.GradientTransformation | None = None,
    *,
    weights: Weights = "examples",
) -> Aggregator:
    """FL+HC: some rounds of FedAvg, then clusters of the differences of one round, each of which goes its own way.

    ``Server.aux`` has besides ``"tree"`` (``[num_clients, 4]``, a row for each merger as SciPy's ``linkage`` writes
    them, then zeros) and ``"leaves"`` (``[num_clients]``, the clients that were there, by which the tree counts; -1
    after the last).

    Args:
      at: rounds of FedAvg before the round in which everybody is put into a cluster; one that is absent then stays in
        cluster 0.
      distance: at which the tree is cut: large is one cluster, 0 a cluster for each client.
      metric: between differences.
      method: of linkage; ``"ward"`` needs the Euclidean metric.
      most: clusters that there may be; the tree is cut higher where it would be more.
      optimizer: as in :func:`~fedjax_pers.aggregators.mean`; each cluster has one.
      weights: within a cluster, by examples or uniform.

    Source: Briggs, Fan, Andras, "Federated Learning with Hierarchical Clustering of Local Updates to Improve Training
    on Non-IID Data", IJCNN 2020.
    """
    positive_int("most", most)
    whole_number("at", at)
    number("distance", distance, low=0)
    one_of("metric", metric, ("euclidean", "cityblock", "cosine"))
    one_of("method", method, ("single", "complete", "average", "ward"))
    if method == "ward":
        one_of("metric (of ward)", metric, ("euclidean",))

    def found(points: np.ndarray, there: np.ndarray, distance: np.ndarray, empty: np.ndarray) -> tuple[np.ndarray, ...]:
        labels, tree = np.zeros(len(there), np.int32), np.array(empty)
        if there.sum() > 1:
            # By cosine, a difference of zero is like nobody.
            apart = np.nan_to_num(pdist(np.asarray(points, np.float64)[there], metric), nan=1.0)
            mergers = linkage(apart, method)
            clusters = fcluster(mergers, float(distance), "distance")
            clusters = clusters if clusters.max() <= most else fcluster(mergers, most, "maxclust")
            labels[there], tree[: len(mergers)] = by_first_member(clusters), mergers
        return labels, tree

    def cut(server: Server, received: Collected, differences: Leaves) -> Server:
        members, there = server.aux["members"], received.accepted
        given = jnp.concatenate(rows(differences), axis=1), there, jnp.asarray(distance, jnp.float32)
        shapes = jax.ShapeDtypeStruct(there.shape, jnp.int32), jax.ShapeDtypeStruct((len(members), 4), jnp.float32)
        labels, tree = jax.pure_callback(found, shapes, *given, server.aux["tree"], vmap_method="sequential")
        present = jnp.where(there, received.ids, len(members))
        members, clusters = members.at[present].set(labels, mode="drop"), labels.max(initial=0) + 1
        places = jnp.arange(most, dtype=jnp.int32)
        parent = jnp.where(places < clusters, 0, places)
        after = regrouped(server, members, clusters, parent)
        leaves = server.aux["leaves"].at[jnp.where(there, jnp.cumsum(there) - 1, len(members))]
        return after._replace(aux=after.aux | {"tree": tree, "leaves": leaves.set(received.ids, mode="drop")})

    def finish(move: Move, server: Server, received: Collected, differences: Leaves) -> Server:
        due = server.aux["rounds"] == at
        return move(jax.lax.cond(due, cut, lambda server, *_: server, server, received, differences), received)

    plain = grouped(finish, most, weights, optimizer)

    def init(shared: Leaves, trainable: frozenset[str], num_clients: int) -> Server:
        server = plain.init(shared, trainable, num_clients)
        tree = {"tree": jnp.zeros((num_clients, 4), jnp.float32), "leaves": jnp.full(num_clients, -1, jnp.int32)}
        return server._replace(aux=server.aux | tree)

    return plain._replace(init=init)


def _second_half(alike: Array, inside: Array) -> Array:
    """Which of those inside are in the part without the lowest id."""

    def halved(alike: np.ndarray, inside: np.ndarray) -> np.ndarray:
        among, second = np.flatnonzero(inside), np.zeros(len(inside), bool)
        if len(among) < 2:  # under vmap it is asked for clusters that are not due
            return second
        apart = np.clip(1 - np.asarray(alike, np.float64)[np.ix_(among, among)], 0, None)
        np.fill_diagonal(apart, 0)
        tree = linkage(squareform((apart + apart.T) / 2, checks=False), "complete")
        tree[:, 2] = np.arange(len(tree))  # mergers of one height would not be told apart
        second[among] = by_first_member(fcluster(tree, 2, "maxclust")) > 0
        return second

    shape = jax.ShapeDtypeStruct(inside.shape, bool)
    return jax.pure_callback(halved, shape, alike, inside, vmap_method="sequential")
