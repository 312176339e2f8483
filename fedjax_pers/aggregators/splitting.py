"""Clusters that the server finds by looking at updates: CFL splits them, FL+HC makes them in one round.

Hierarchical clustering is SciPy's and runs on the host, in the few rounds in which it is due; all else is compiled.
Shared leaves are ``[most, ...]``, a place for each cluster; ``Server.aux`` holds ``"members"`` (``[num_clients]``, the
cluster of each client by its id), ``"clusters"`` (how many there are), ``"rounds"`` (done) and ``"made"`` (``[most]``,
the round in which each cluster was made, -1 for none yet).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist, squareform

from fedjax_pers.aggregators.base import Aggregator, Collected, Server
from fedjax_pers.aggregators.clustered import least_loss
from fedjax_pers.aggregators.mean import Weights, client_weight, server_step, weighted_difference
from fedjax_pers.aggregators.pairwise import cosines
from fedjax_pers.base import Array, Context, Leaves, Parts
from fedjax_pers.checks import number, one_of, positive_int, whole_number
from fedjax_pers.layouts import Layout

Metric = Literal["euclidean", "cityblock", "cosine"]
Linkage = Literal["single", "complete", "average", "ward"]
Finish = Callable[[Callable[[Server], Server], Server, Collected, Leaves], Server]
"""``finish(move, server, received, differences) -> Server``; ``move`` takes every cluster along its members' mean."""
MEMBER = "/member"
"""Beside the models of all clusters, which of them is the client's: no leaf has such a name."""


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
    number("eps1", eps1, low=0)
    number("eps2", eps2, low=0)
    whole_number("warm_up", warm_up)

    def split(server: Server, received: Collected, differences: Leaves) -> tuple[Array, Array, Array]:
        members, clusters = server.aux["members"], server.aux["clusters"]
        group = _group_of(members, received)
        norms = _norms(differences)
        alike = cosines(differences)

        def one(cluster: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            members, count, parent = carry
            inside = received.accepted & (group == cluster)
            size = inside.sum()
            mean = jax.tree.map(lambda x: jnp.tensordot(inside / jnp.maximum(size, 1), x, 1)[None], differences)
            due = (_norms(mean)[0] < eps1) & (jnp.where(inside, norms, 0).max(initial=0) > eps2)
            due &= (size > 2) & (size == (server.aux["members"] == cluster).sum())
            due &= (count < most) & (server.aux["rounds"] >= warm_up)
            second = jax.lax.cond(due, _second_half, lambda alike, inside: jnp.zeros_like(inside), alike, inside)
            moved = jnp.where(second, received.ids, members.shape[0])
            return (
                members.at[moved].set(count, mode="drop"),
                count + due,
                parent.at[jnp.where(due, count, most)].set(cluster, mode="drop"),
            )

        start = (members, clusters, jnp.arange(most))
        return jax.lax.fori_loop(0, clusters, one, start)

    def finish(move: Callable[[Server], Server], server: Server, received: Collected, differences: Leaves) -> Server:
        after = move(server)
        return _regrouped(after, *split(after, received, differences))

    return _grouped(finish, most, "uniform", optimizer)


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
    whole_number("at", at)
    number("distance", distance, low=0)
    one_of("metric", metric, ("euclidean", "cityblock", "cosine"))
    one_of("method", method, ("single", "complete", "average", "ward"))
    if method == "ward":
        one_of("metric (of ward)", metric, ("euclidean",))

    def labelled(points: np.ndarray, there: np.ndarray, distance: np.ndarray) -> np.ndarray:
        labels = np.zeros(len(there), np.int32)
        if there.sum() > 1:
            tree = linkage(pdist(np.asarray(points, np.float64)[there], metric), method)
            found = fcluster(tree, float(distance), "distance")
            found = found if found.max() <= most else fcluster(tree, most, "maxclust")
            labels[there] = _by_first_member(found)
        return labels

    def regroup(server: Server, received: Collected, differences: Leaves) -> tuple[Array, Array, Array]:
        members, clusters = server.aux["members"], server.aux["clusters"]
        count = received.accepted.shape[0]
        points = jnp.concatenate([differences[name].reshape(count, -1) for name in sorted(differences)], axis=1)
        due = server.aux["rounds"] == at

        def now(points: Array, there: Array, distance: Array) -> Array:
            shape = jax.ShapeDtypeStruct((count,), jnp.int32)
            return jax.pure_callback(labelled, shape, points, there, distance, vmap_method="sequential")

        cut = jnp.asarray(distance, jnp.float32)
        labels = jax.lax.cond(due, now, lambda *_: jnp.zeros(count, jnp.int32), points, received.accepted, cut)
        where = jnp.where(received.accepted & due, received.ids, members.shape[0])
        made = jnp.where(due, labels.max(initial=0) + 1, clusters)
        parent = jnp.where(due & (jnp.arange(most) < made), 0, jnp.arange(most))
        return members.at[where].set(labels, mode="drop"), made, parent

    def finish(move: Callable[[Server], Server], server: Server, received: Collected, differences: Leaves) -> Server:
        return move(_regrouped(server, *regroup(server, received, differences)))

    return _grouped(finish, most, weights, optimizer)


def _by_first_member(labels: np.ndarray) -> np.ndarray:
    """Numbered in the order of their first members."""
    _, first, found = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[found]


def _second_half(alike: Array, inside: Array) -> Array:
    """Which of those inside are in the part without the lowest id."""

    def halved(alike: np.ndarray, inside: np.ndarray) -> np.ndarray:
        among = np.flatnonzero(inside)
        apart = np.clip(1 - np.asarray(alike, np.float64)[np.ix_(among, among)], 0, None)
        np.fill_diagonal(apart, 0)
        tree = linkage(squareform((apart + apart.T) / 2, checks=False), "complete")
        second = np.zeros(len(inside), bool)
        second[among] = _by_first_member(fcluster(tree, 2, "maxclust")) > 0
        return second

    shape = jax.ShapeDtypeStruct(inside.shape, bool)
    return jax.pure_callback(halved, shape, alike, inside, vmap_method="sequential")


def _norms(differences: Leaves) -> Array:
    squares = [jnp.square(x).reshape(x.shape[0], -1).sum(1) for _, x in sorted(differences.items())]
    return jnp.sqrt(sum(squares, start=jnp.zeros(())))


def _model(models: Leaves, cluster: Array) -> Leaves:
    return jax.tree.map(lambda x: x[cluster], models)


def _group_of(members: Array, received: Collected) -> Array:
    return members[jnp.minimum(received.ids, members.shape[0] - 1)]


def _regrouped(server: Server, members: Array, clusters: Array, parent: Array) -> Server:
    """The server with those members of so many clusters; each cluster's model is a copy of its parent's."""
    places, rounds = jnp.arange(parent.shape[0]), server.aux["rounds"]
    new = (places < clusters) & (places >= server.aux["clusters"])
    shared, opt = jax.tree.map(lambda x: x[parent], (server.shared, server.opt))
    made = jnp.where(new, rounds + 1, server.aux["made"])
    return Server(shared, opt, {"members": members, "clusters": clusters, "rounds": rounds, "made": made})


def _grouped(
    finish_round: Finish, most: int, weights: Weights, optimizer: optax.GradientTransformation | None
) -> Aggregator:
    """A model for each cluster, which moves by the mean of its members."""
    positive_int("most", most)
    step = server_step(optimizer)

    def init(shared: Leaves, trainable: frozenset[str], num_clients: int) -> Server:
        stacked = jax.tree.map(lambda x: jnp.tile(x[None], (most, *[1] * x.ndim)), shared)
        opt = jax.vmap(lambda leaves: step.init(leaves, trainable, num_clients).opt)(stacked)
        aux = {
            "members": jnp.zeros(num_clients, jnp.int32),
            "clusters": jnp.int32(1),
            "rounds": jnp.int32(0),
            "made": jnp.where(jnp.arange(most) == 0, jnp.int32(0), jnp.int32(-1)),
        }
        return Server(stacked, opt, aux)

    def render(server: Server, client: Array) -> Leaves:
        members = server.aux["members"]
        own = jnp.where(client < members.shape[0], members[jnp.minimum(client, members.shape[0] - 1)], 0)
        return jax.tree.map(lambda x: x[own], server.shared)

    def moved(server: Server, received: Collected, trainable: frozenset[str]) -> Server:
        group = _group_of(server.aux["members"], received)

        def add(total: tuple[Leaves, Array], item: tuple[Leaves, Array, Array]) -> tuple[Any, None]:
            difference, weight, cluster = item
            summed, mass = total
            summed = jax.tree.map(lambda t, x: t.at[cluster].add(x * weight.astype(x.dtype)), summed, difference)
            return (summed, mass.at[cluster].add(weight)), None

        zeros = jax.tree.map(lambda x: jnp.zeros((most, *x.shape[1:]), x.dtype), received.each)
        (summed, mass), _ = jax.lax.scan(add, (zeros, jnp.zeros(most)), (received.each, received.weight, group))

        def move(shared: Leaves, opt: Any, summed: Leaves, mass: Array) -> Server:
            share = jax.tree.map(lambda x: x / jnp.where(mass > 0, mass, 1).astype(x.dtype), summed)
            return step.move(Server(shared, opt, ()), share, mass > 0, trainable)

        after = jax.vmap(move)(server.shared, server.opt, summed, mass)
        return Server(after.shared, after.opt, server.aux)

    def finish(server: Server, received: Collected, trainable: frozenset[str]) -> Server:
        differences = {name: x for name, x in received.each.items() if name in trainable}
        after = finish_round(lambda server: moved(server, received, trainable), server, received, differences)
        anyone = received.accepted.any()
        return after._replace(aux=after.aux | {"rounds": after.aux["rounds"] + anyone})

    def settle(layout: Layout, parts: Parts, context: Context) -> Leaves:
        """A client of the training has its cluster; another takes the one with the least loss on its training data."""
        own = parts.shared[MEMBER]
        models = {name: x for name, x in parts.shared.items() if name != MEMBER}
        best, _ = least_loss(layout, parts._replace(shared=models), context, _model, most)
        return jax.tree.map(lambda x: x[jnp.where(context.unseen, best, own)], models)

    def deliver(server: Server, client: Array) -> Leaves:
        members, made = server.aux["members"], server.aux["made"]
        own = members[jnp.minimum(client, members.shape[0] - 1)]
        # Places without a cluster hold a copy of the first, which is never chosen before it.
        there = jax.tree.map(lambda x: x[jnp.where(made >= 0, jnp.arange(most), 0)], server.shared)
        return there | {MEMBER: own}

    return Aggregator(
        init,
        render,
        client_weight(weights),
        lambda weight, received, upload, sender: (),
        finish,
        collect=lambda received, upload, sender: weighted_difference(jnp.float32(1), received, upload),
        deliver=deliver,
        settle=settle,
        whole=None,
    )
