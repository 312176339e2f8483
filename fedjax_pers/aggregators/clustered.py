"""Clusters of clients, each with a model of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_pers.aggregators.base import Aggregator, Collected, Sender, Server, copy_to_all
from fedjax_pers.aggregators.mean import Weights, client_weight, server_step, weighted_difference
from fedjax_pers.base import Array, Context, Leaves, Parts
from fedjax_pers.checks import positive_int, require
from fedjax_pers.judging import mean_loss
from fedjax_pers.layouts import Layout

CLUSTER, LOSS = "cluster", "loss"


def hypotheses(
    clusters: int,
    optimizer: optax.GradientTransformation | None = None,
    *,
    weights: Weights = "examples",
    common: Iterable[str] = (),
) -> Aggregator:
    """IFCA: every client receives all models, trains the one with the least loss on its training data, and sends that.

    ``j_i = argmin_j f_i(w_j)`` (the lowest number of several, a loss that is not finite never), then in each cluster
    ``w_j <- w_j + server_step(sum_{i: j_i = j} p_i (w_i - w_j))``. A cluster that nobody chose stays as it is, its
    optimiser's state too. A client that predicts chooses in the same way, one never seen in training likewise.

    Shared leaves are ``[clusters, ...]``, from as many random starts; ``Server.aux`` holds ``"members"``
    (``[clients]``, the last choice of each, -1 before the first) and ``"counts"`` (``[clusters]``, of the last round).

    Args:
      clusters: number of models.
      optimizer: as in :func:`~fedjax_pers.aggregators.mean`; each cluster has one.
      weights: within a cluster, by examples or uniform.
      common: names of shared leaves that are averaged over everyone, whatever the cluster.

    Source: Ghosh, Chung, Yin, Ramchandran, "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020.
    """
    positive_int("clusters", clusters)
    step, common = server_step(optimizer), frozenset(common)

    def split(leaves: Leaves) -> tuple[Leaves, Leaves]:
        """Those of clusters and those of everyone."""
        of_clusters = {name: x for name, x in leaves.items() if name not in common}
        return of_clusters, {name: x for name, x in leaves.items() if name in common}

    def init(shared: Leaves, trainable: frozenset[str], num_clients: int) -> Server:
        require(
            clusters <= max(num_clients, 1), f"clusters: found {clusters}; allowed are 1 .. {num_clients}, the clients"
        )
        stacked = {name: x if clusters > 1 else x[None] for name, x in shared.items()}
        _check_stacked(stacked, clusters)
        several, one = split(stacked)
        one = {name: x[0] for name, x in one.items()}
        opts = [jax.vmap(lambda leaves: step.init(leaves, trainable & set(several), num_clients).opt)(several)]
        opts.append(step.init(one, trainable & set(one), num_clients).opt)
        aux = {"members": jnp.full(num_clients, -1, jnp.int32), "counts": jnp.zeros(clusters, jnp.int32)}
        return Server(several | one, tuple(opts), aux)

    def pick(download: Leaves, said: dict[str, Array]) -> Leaves:
        several, one = split(download)
        return {name: x[said[CLUSTER]] for name, x in several.items()} | one

    def ask(layout: Layout, parts: Parts, context: Context) -> dict[str, Array]:
        best, loss = least_loss(layout, parts, context, lambda x, cluster: pick(x, {CLUSTER: cluster}), clusters)
        return {CLUSTER: best, LOSS: loss}

    def lift(weight: Array, received: Leaves, upload: Leaves, sender: Sender) -> Any:
        chosen = jax.nn.one_hot(sender.said[CLUSTER], clusters)
        several, one = split(weighted_difference(weight, received, upload))
        return jax.tree.map(lambda x: jnp.multiply.outer(chosen.astype(x.dtype), x), several), one, chosen * weight

    def finish(server: Server, received: Collected, trainable: frozenset[str]) -> Server:
        several, one, mass = received.total
        clustered, everyone = split(server.shared)

        def move(shared: Leaves, opt: Any, summed: Leaves, mass: Array) -> Server:
            share = jax.tree.map(lambda x: x / jnp.where(mass > 0, mass, 1).astype(x.dtype), summed)
            return step.move(Server(shared, opt, ()), share, mass > 0, trainable & frozenset(shared))

        apart = jax.vmap(move)(clustered, server.opt[0], several, mass)
        together = move(everyone, server.opt[1], one, mass.sum())
        choice, there = received.each, received.accepted
        where = jnp.where(there, received.ids, server.aux["members"].shape[0])
        counts = jnp.zeros(clusters, jnp.int32).at[choice].add(there.astype(jnp.int32))
        aux = {
            "members": server.aux["members"].at[where].set(choice, mode="drop"),
            "counts": jnp.where(there.any(), counts, server.aux["counts"]),
        }
        return Server(apart.shared | together.shared, (apart.opt, together.opt), aux)

    return Aggregator(
        init,
        copy_to_all,
        client_weight(weights),
        lift,
        finish,
        collect=lambda received, upload, sender: sender.said[CLUSTER],
        ask=ask,
        says=(CLUSTER, LOSS),
        pick=pick,
        whole=None,
        starts=clusters,
        sees="which model each client chose",
    )


def least_loss(
    layout: Layout, parts: Parts, context: Context, model_of: Callable[[Leaves, Array], Leaves], clusters: int
) -> tuple[Array, Array]:
    """The number of the model with the least loss over a client's examples, the lowest of several, and that loss."""

    def loss_of(cluster: Array) -> Array:
        chosen = parts._replace(shared=model_of(parts.shared, cluster))
        return mean_loss(layout.task, layout.view("model").read(chosen), context)

    losses = jax.lax.map(loss_of, jnp.arange(clusters))
    losses = jnp.where(jnp.isfinite(losses), losses, jnp.inf)  # NaN would win
    return jnp.argmin(losses).astype(jnp.int32), losses.min()


def _check_stacked(shared: Leaves, clusters: int) -> None:
    for name, x in shared.items():
        require(
            x.ndim > 0 and x.shape[0] == clusters,
            f"shared[{name!r}]: found shape {x.shape}; expected [{clusters}, ...], a model for each cluster",
        )
