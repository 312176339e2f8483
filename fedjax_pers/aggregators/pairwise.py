"""How near clients are to each other: ``[clients, clients]``, by half a product of matrices a leaf."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from fedjax_pers.base import Array, Leaves


def products(each: Leaves) -> Array:
    """Inner products of stacked trees, over their floating leaves; infinite or NaN beyond float32."""
    total: Any = 0
    for name in sorted(each):
        if jnp.issubdtype(each[name].dtype, jnp.floating):
            flat = each[name].reshape(each[name].shape[0], -1).astype(jnp.float32)
            total += _with_each_other(flat)
    return total


def _with_each_other(rows: Array) -> Array:
    """``rows rows^T``, half of which is the mirror of the other: little more than half of the product is computed."""
    half = rows.shape[0] // 2
    if half < 1000:
        return jnp.matmul(rows, rows.T, precision="highest")
    first, second = rows[:half], rows[half:]
    across = jnp.matmul(second, first.T, precision="highest")
    return jnp.block([[_with_each_other(first), across.T], [across, _with_each_other(second)]])


def squared_distances(each: Leaves) -> Array:
    """``|x_i - x_j|^2``; infinite beyond float32. Digits are lost where norms are far above distances: centre first."""
    inner = products(each)
    squares = jnp.diagonal(inner)
    found = squares[:, None] + squares[None] - 2 * inner
    return jnp.where(jnp.isnan(found), jnp.inf, jnp.maximum(found, 0))


def cosines(each: Leaves) -> Array:
    """``<x_i, x_j> / (|x_i| |x_j|)`` over all leaves together; 0 beside a tree of zeros, 1 of a client with itself."""
    inner = products(each)
    norms = jnp.sqrt(jnp.diagonal(inner))
    scale = norms[:, None] * norms[None]
    found = jnp.where(scale > 0, inner / jnp.where(scale > 0, scale, 1), 0)
    found = jnp.where(jnp.isnan(found), 0, jnp.clip(found, -1, 1))
    return jnp.where(jnp.eye(found.shape[0], dtype=bool), 1, found)
