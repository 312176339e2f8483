"""Features of a frozen body: computed once an example in a phase, instead of once an example and epoch."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pers.base import Array, Batch, Context, Leaves, Parts
from fedjax_pers.batches import batch_shapes, sweep
from fedjax_pers.layouts import Layout, leaves_of, replace
from fedjax_pers.objectives import Objective
from fedjax_pers.per_example import split

MOST_BYTES = 8 * 2**20
"""Features of one client that are stored; with more, they are computed again in every epoch. (Clients side by side each
have theirs.)"""


def remembered(
    layout: Layout, parts: Parts, context: Context, moving: Leaves, objective: Objective, batch_size: int
) -> tuple[Context, Objective]:
    """A context with the features of all examples, and the objective that goes on from there: the same values.

    Both come back as they were where there is nothing to store: where every example passes leaves that train, where
    examples are mixed before (batch normalisation), where it would be too much, or where nothing says how many examples
    a client may have (:attr:`Cohort.room`).

    Args:
      layout: the client's.
      parts: at the start of the phase.
      context: the client's.
      moving: leaves that the phase changes.
      objective: what the phase minimises.
      batch_size: examples at a time.
    """
    if context.room is None:
        return context, objective

    # A row's weight is no property of the example: the rows that fill up a short batch have none.
    def loss(changing: tuple[Leaves, Array], examples: Batch, key: Array) -> tuple[Array, Leaves]:
        moving, weight = changing
        return objective(layout, replace(parts, moving), context.received, {**examples, "weight": weight}, key)

    key = jax.ShapeDtypeStruct(context.key.shape, context.key.dtype)
    examples = batch_shapes(context, batch_size)
    weight = examples.pop("weight")
    found = split(loss, (moving, weight), examples, key)
    room = -(-context.room.shape[0] // batch_size) * batch_size
    if found is None or room * sum(_row_bytes(x) for x in found.shapes) > MOST_BYTES:
        return context, objective
    names = [f"features/{number}" for number in range(len(found.shapes))]

    def store(carry: tuple[Array, list[Array]], batch: Batch) -> tuple[Array, list[Array]]:
        place, stored = carry
        rows = found.features({name: batch[name] for name in examples})
        stored = [jax.lax.dynamic_update_slice_in_dim(x, row, place, 0) for x, row in zip(stored, rows, strict=True)]
        return place + batch_size, stored

    empty = [jnp.zeros((room, *x.shape[1:]), x.dtype) for x in found.shapes]
    _, stored = sweep(store, (jnp.int32(0), empty), context, batch_size=batch_size)

    def from_features(layout: Layout, parts: Parts, received: Parts, batch: Batch, key: Array) -> tuple[Array, Leaves]:
        now = leaves_of(parts)
        changing = {name: now[name] for name in moving}, batch["weight"]
        return found.rest(changing, {name: batch[name] for name in examples}, key, [batch[name] for name in names])

    return context._replace(features=dict(zip(names, stored, strict=True))), from_features


def _row_bytes(shape: Any) -> int:
    return math.prod(shape.shape[1:]) * shape.dtype.itemsize
