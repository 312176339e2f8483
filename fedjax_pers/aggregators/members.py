"""A model for each cluster of clients; the server knows whose member each client is.

Shared leaves are ``[most, ...]``, a place for each cluster; ``Server.aux`` holds ``"members"`` (``[num_clients]``, the
cluster of each client by its id, -1 for none yet), ``"clusters"`` (how many there are), ``"rounds"`` (done), ``"made"``
(``[most]``, the round in which each cluster was made, -1 for none yet) and ``"parent"`` (``[most]``, the cluster that
each was cut from, -1 for none).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_pers.aggregators.base import Aggregator, Collected, Server, nothing_added
from fedjax_pers.aggregators.clustered import least_loss
from fedjax_pers.aggregators.mean import Weights, client_weight, server_step, weighted_difference
from fedjax_pers.base import Array, Context, Leaves, Parts
from fedjax_pers.layouts import Layout
from fedjax_pers.trees import entry

Move = Callable[[Server, Collected], Server]
Finish = Callable[[Move, Server, Collected, Leaves], Server]
"""``finish(move, server, received, differences) -> Server``; ``move`` takes every cluster along its members' mean."""
MEMBER = "/member"
"""Beside the models of all clusters, which of them is the client's: no leaf has such a name."""


def by_first_member(labels: np.ndarray) -> np.ndarray:
    """Numbered in the order of their first members."""
    _, first, found = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[found]


def cluster_of(members: Array, clients: Array) -> Array:
    """The cluster of each of these clients; that of the last one for padding."""
    return members[jnp.minimum(clients, members.shape[0] - 1)]


def regrouped(server: Server, members: Array, clusters: Array, parent: Array) -> Server:
    """The server with those members of so many clusters; each cluster's model is a copy of its parent's."""
    places, aux = jnp.arange(parent.shape[0]), server.aux
    new = (places < clusters) & (places >= aux["clusters"])
    shared, opt = jax.tree.map(lambda x: x[parent], (server.shared, server.opt))
    history = {
        "made": jnp.where(new, aux["rounds"] + 1, aux["made"]),
        "parent": jnp.where(new & (parent != places), parent, aux["parent"]),
    }
    return server._replace(shared=shared, opt=opt, aux=aux | history | {"members": members, "clusters": clusters})


def grouped(
    finish_round: Finish, most: int, weights: Weights, optimizer: optax.GradientTransformation | None
) -> Aggregator:
    """A model for each cluster, which moves by the mean of its members. All clients are in the first one at first.

    Args:
      finish_round: puts clients into clusters, and moves those.
      most: clusters that there may be.
      weights: within a cluster, by examples or uniform.
      optimizer: as in :func:`~fedjax_pers.aggregators.mean`; each cluster has one.
    """
    step = server_step(optimizer)

    def init(shared: Leaves, trainable: frozenset[str], num_clients: int) -> Server:
        stacked = jax.tree.map(lambda x: jnp.tile(x[None], (most, *[1] * x.ndim)), shared)
        opt = jax.vmap(lambda leaves: step.init(leaves, trainable, num_clients).opt)(stacked)
        aux = {
            "members": jnp.zeros(num_clients, jnp.int32),
            "clusters": jnp.int32(1),
            "rounds": jnp.int32(0),
            "made": jnp.where(jnp.arange(most) == 0, jnp.int32(0), jnp.int32(-1)),
            "parent": jnp.full(most, -1, jnp.int32),
        }
        return Server(stacked, opt, aux)

    def render(server: Server, client: Array) -> Leaves:
        members = server.aux["members"]
        own = jnp.where(client < members.shape[0], cluster_of(members, client), 0)
        return entry(server.shared, own)

    def moved(server: Server, received: Collected, trainable: frozenset[str]) -> Server:
        differences, size = received.each
        # The longest first, as a device's queue adds: one cluster is FedAvg to the bit.
        order = jnp.argsort(-size)
        queue = jax.tree.map(lambda x: x[order], (differences, received.weight, received.ids))

        def add(total: tuple[Leaves, Array], item: tuple[Leaves, Array, Array]) -> tuple[Any, None]:
            difference, weight, client = item
            (summed, mass), cluster = total, cluster_of(server.aux["members"], client)
            summed = jax.tree.map(lambda t, x: t.at[cluster].add(x * weight.astype(x.dtype)), summed, difference)
            return (summed, mass.at[cluster].add(weight)), None

        zeros = jax.tree.map(lambda x: jnp.zeros((most, *x.shape[1:]), x.dtype), differences)
        (summed, mass), _ = jax.lax.scan(add, (zeros, jnp.zeros(most)), queue)

        def move(shared: Leaves, opt: Any, summed: Leaves, mass: Array) -> Server:
            share = jax.tree.map(lambda x: x / jnp.where(mass > 0, mass, 1).astype(x.dtype), summed)
            return step.move(Server(shared, opt, ()), share, mass > 0, trainable)

        after = jax.vmap(move)(server.shared, server.opt, summed, mass)
        return server._replace(shared=after.shared, opt=after.opt)

    def finish(server: Server, received: Collected, trainable: frozenset[str]) -> Server:
        differences = {name: x for name, x in received.each[0].items() if name in trainable}

        def move(server: Server, received: Collected) -> Server:
            return moved(server, received, trainable)

        after = finish_round(move, server, received, differences)
        anyone = received.accepted.any()
        return after._replace(aux=after.aux | {"rounds": after.aux["rounds"] + anyone})

    def settle(layout: Layout, parts: Parts, context: Context) -> Leaves:
        """A member has its cluster; any other client takes the one with the least loss on its training data."""
        own = parts.shared[MEMBER]
        models = {name: x for name, x in parts.shared.items() if name != MEMBER}
        best, _ = least_loss(layout, parts._replace(shared=models), context, entry, most)
        return entry(models, jnp.where(context.unseen | (own < 0), best, own))

    def deliver(server: Server, client: Array) -> Leaves:
        # Places without a cluster hold a copy of the first, which is never chosen before it.
        there = entry(server.shared, jnp.where(server.aux["made"] >= 0, jnp.arange(most), 0))
        return there | {MEMBER: cluster_of(server.aux["members"], client)}

    return Aggregator(
        init,
        render,
        client_weight(weights),
        nothing_added,
        finish,
        collect=lambda received, upload, sender: (weighted_difference(jnp.float32(1), received, upload), sender.size),
        deliver=deliver,
        settle=settle,
        whole=None,
    )
