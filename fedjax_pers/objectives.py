"""What a client minimises: the task's loss on a view of its leaves, and penalties that add to it.

An objective is ``objective(layout, parts, received, batch, key) -> (loss, tracked)``: ``parts`` are the client's leaves
now, ``received`` those at the start of the round (the anchor: never an alias of what is trained), and ``tracked`` the
new running statistics by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from fedjax_pers.base import Array, Batch, Leaves, Parts
from fedjax_pers.layouts import Layout, trainable_leaves

Objective = Callable[[Layout, Parts, Parts, Batch, Array], tuple[Array, Leaves]]


def task_loss(view: str = "model") -> Objective:
    """The task's own loss of one of the layout's views (``"model"``, ``"shared"``, ``"own"``)."""

    def objective(layout: Layout, parts: Parts, received: Parts, batch: Batch, key: Array) -> tuple[Array, Leaves]:
        chosen = layout.view(view)
        loss, tracked = layout.task.loss(chosen.read(parts), batch, key)
        return loss, chosen.tracked(parts, tracked)

    return objective


def squared_distance(a: Leaves, b: Leaves) -> Array:
    """``sum (a - b)^2`` over all leaves: never the square of a norm, whose gradient at zero is NaN."""
    return sum((jnp.sum(jnp.square(a[name] - b[name])) for name in sorted(a)), start=jnp.zeros(()))


def proximal(strength: Any, role: str = "shared") -> Objective:
    """``strength / 2 * sum (x - x_received)^2`` over the trainable leaves of a role (FedProx's term).

    Source: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.
    """

    def objective(layout: Layout, parts: Parts, received: Parts, batch: Batch, key: Array) -> tuple[Array, Leaves]:
        now, then = (trainable_leaves(layout, each, role) for each in (parts, received))
        return 0.5 * strength * squared_distance(now, then), {}

    return objective


def pull_to_shared(strength: Any) -> Objective:
    """``strength / 2 * sum (v - w)^2``: a client's own model tied to the shared one *as received* (Ditto)."""

    def objective(layout: Layout, parts: Parts, received: Parts, batch: Batch, key: Array) -> tuple[Array, Leaves]:
        own, shared = layout.view("own").keys, layout.view("shared").keys
        pairs = {own[path]: shared[path] for path in own if own[path] in layout.trainable}
        now = {name: parts.personal[name] for name in pairs}
        anchor = {name: received.shared[twin] for name, twin in pairs.items()}
        return 0.5 * strength * squared_distance(now, anchor), {}

    return objective


def l2(strength: Any, role: str = "all") -> Objective:
    """``strength / 2 * sum x^2`` over the trainable leaves of a role."""

    def objective(layout: Layout, parts: Parts, received: Parts, batch: Batch, key: Array) -> tuple[Array, Leaves]:
        now = trainable_leaves(layout, parts, role)
        return 0.5 * strength * sum((jnp.sum(jnp.square(x)) for x in now.values()), start=jnp.zeros(())), {}

    return objective


def add(*objectives: Objective) -> Objective:
    """The sum of objectives; their tracked leaves are merged."""

    def objective(layout: Layout, parts: Parts, received: Parts, batch: Batch, key: Array) -> tuple[Array, Leaves]:
        total = jnp.zeros(())
        tracked: Leaves = {}
        for each in objectives:
            loss, names = each(layout, parts, received, batch, key)
            total, tracked = total + loss, {**tracked, **names}
        return total, tracked

    return objective
