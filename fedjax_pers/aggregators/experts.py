"""Means of experts, each weighted by how much a client uses it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax.numpy as jnp

from fedjax_pers.aggregators.base import Aggregator, Sender, Server, copy_to_all
from fedjax_pers.aggregators.mean import client_weight, not_zero, server_step, weighted_difference
from fedjax_pers.base import Array, Context, Leaves, Parts
from fedjax_pers.checks import require
from fedjax_pers.layouts import Layout
from fedjax_pers.mixtures import EXPERTS

USAGE = "usage"


def expert_means(usage: Callable[[Layout, Parts, Context], Array], common: Collection[str] = ()) -> Aggregator:
    """``w_k <- w_k + sum_i rho_ik (w_ik - w_k) / sum_i rho_ik``, for the experts ``k`` of a mixture.

    ``rho_ik = n_i usage_ik`` is in how many of a client's examples the expert answers. An expert that nobody uses stays
    as it is. Clients say their usage to the server; sums over clients are all that it needs of it.

    Args:
      usage: ``usage(layout, parts, context) -> [experts]`` of a client, before it trains; not negative, of sum 1.
      common: names of shared leaves that belong to all experts: clients count there by their examples.

    Source: Reisser, Louizos, Gavves, Welling, "Federated Mixture of Experts", 2021, arXiv:2107.06724.
    """
    step = server_step(None)

    def mass_of(name: str, mass: Array) -> Array:
        """Of a leaf: ``experts/2/params/head/bias`` is of expert 2, what is common comes last."""
        return mass[-1] if name in common else mass[int(name.split("/")[1])]

    def init(shared: Leaves, trainable: frozenset[str], num_clients: int) -> Server:
        others = sorted(name for name in shared if name not in common and not name.startswith(f"{EXPERTS}/"))
        require(not others, f"shared: found {others}, which belong to no expert; their mean would have no weight")
        return step.init(shared, trainable, num_clients)

    def lift(weight: Array, received: Leaves, upload: Leaves, sender: Sender) -> Any:
        mass = weight * jnp.append(sender.said[USAGE], 1.0)
        changes = {name: weighted_difference(mass_of(name, mass), received[name], upload[name]) for name in received}
        return changes, mass

    def finish(server: Server, total: Any, trainable: frozenset[str]) -> Server:
        changes, mass = total
        share = {name: x / not_zero(mass_of(name, mass)).astype(x.dtype) for name, x in changes.items()}
        return step.move(server, share, jnp.any(mass > 0), trainable)

    return Aggregator(
        init,
        copy_to_all,
        client_weight("examples"),
        lift,
        finish,
        ask=lambda layout, parts, context: {USAGE: usage(layout, parts, context)},
        says=(USAGE,),
        whole=None,
    )
