"""Rows of clients and other trees of arrays: what ``optax.tree`` does not have."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pers.base import Array

NOWHERE = 2**31 - 1
"""The place of a row that is not there: past the end of any array of rows."""


def where(condition: Array, if_true: Any, if_false: Any) -> Any:
    """Leaf by leaf ``if_true`` or ``if_false``; a selection, so NaN on the other side does no harm."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), if_true, if_false)


def all_finite(tree: Any) -> Array:
    """Whether every floating leaf is finite.

    Example:
      >>> bool(all_finite({"a": jnp.ones(2), "b": jnp.array([1.0, jnp.nan])}))
      False
    """
    finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.stack(finite).all() if finite else jnp.array(True)


def stack_rows(row: Any, count: int) -> Any:
    """``count`` copies of one row, ``[count, ...]``."""
    return jax.tree.map(lambda x: jnp.tile(x[None], (count, *([1] * jnp.ndim(x)))), row)


def gather_rows(rows: Any, places: Array, fresh: Any) -> Any:
    """The rows ``[clients, ...]`` at these places; a place past the end gets a copy of ``fresh``."""

    def pick(stacked: Array, new: Array) -> Array:
        count = stacked.shape[0]
        known = (places < count).reshape(-1, *([1] * new.ndim))
        if count == 0:
            return jnp.broadcast_to(new, (*places.shape, *new.shape))
        return jnp.where(known, stacked[jnp.minimum(places, count - 1)], new)

    return jax.tree.map(pick, rows, fresh)


def scatter_rows(rows: Any, places: Array, new: Any) -> Any:
    """Writes ``new [clients, ...]`` at these places; what is past the end (padding) is dropped."""
    return jax.tree.map(lambda stacked, row: stacked.at[places].set(row, mode="drop"), rows, new)


def entry(stacked: Any, place: Any) -> Any:
    """One tree of a stacked one: ``[place]`` of every leaf."""
    return jax.tree.map(lambda x: x[place], stacked)


def as_dtype(x: Array, dtype: Any) -> Array:
    """An average in the dtype of what it is of: of whole numbers (counters) the nearest, so that equal ones stay.

    Example:
      >>> as_dtype(jnp.array([6.9999995, 2.4]), jnp.int32).tolist()
      [7, 2]
    """
    return (jnp.round(x) if jnp.issubdtype(dtype, jnp.integer) else x).astype(dtype)


def num_bytes(tree: Any) -> int:
    """Bytes of all leaves; works on shapes as well as on arrays.

    Example:
      >>> num_bytes({"kernel": jnp.zeros((10, 4)), "bias": jnp.zeros(4)})
      176
    """
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def wire_bytes(tree: Any) -> int:
    """Bytes of all leaves as they are sent: as :func:`num_bytes`, but what is true or false takes one bit.

    Example:
      >>> wire_bytes({"kernel": jnp.zeros((10, 4)), "mask": jnp.zeros((10, 4), bool)})
      165
    """
    bits = [x for x in jax.tree.leaves(tree) if x.dtype == bool]
    others = [x for x in jax.tree.leaves(tree) if x.dtype != bool]
    return num_bytes(others) + -(-num_bytes(bits) // 8)
