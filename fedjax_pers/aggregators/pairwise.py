"""How near clients are to each other: ``[clients, clients]``, by half a product of matrices a leaf.

``each`` is a stacked tree ``[clients, ...]``; only its floating leaves are looked at.
"""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_pers.base import Array, Leaves


def rows(each: Leaves) -> list[Array]:
    """The leaves as matrices ``[clients, parameters of the leaf]``, by name."""
    floats = [x for _, x in sorted(each.items()) if jnp.issubdtype(x.dtype, jnp.floating)]
    return [x.reshape(x.shape[0], -1).astype(jnp.float32) for x in floats]


def norms(each: Leaves) -> Array:
    """``|x_i|``, ``[clients]``."""
    return jnp.sqrt(sum((jnp.square(x).sum(1) for x in rows(each)), start=jnp.zeros(())))


def products(each: Leaves, others: Leaves) -> Array:
    """Inner products of two stacked trees, ``[clients, others]``; infinite or NaN beyond float32."""
    pairs = zip(rows(each), rows(others), strict=True)
    return sum((jnp.matmul(x, y.T, precision="highest") for x, y in pairs), start=jnp.zeros(()))


def inner_products(each: Leaves) -> Array:
    """Inner products of a stacked tree with itself, ``[clients, clients]``; infinite or NaN beyond float32."""
    return sum((_with_each_other(x) for x in rows(each)), start=jnp.zeros(()))


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
    inner = inner_products(each)
    squares = jnp.diagonal(inner)
    found = squares[:, None] + squares[None] - 2 * inner
    return jnp.where(jnp.isnan(found), jnp.inf, jnp.maximum(found, 0))


def cosines(each: Leaves) -> Array:
    """``<x_i, x_j> / (|x_i| |x_j|)`` over all leaves together; 0 beside a tree of zeros, 1 of a client with itself."""
    inner = inner_products(each)
    lengths = jnp.sqrt(jnp.diagonal(inner))
    scale = lengths[:, None] * lengths[None]
    found = jnp.where(scale > 0, inner / jnp.where(scale > 0, scale, 1), 0)
    found = jnp.where(jnp.isnan(found), 0, jnp.clip(found, -1, 1))
    return jnp.where(jnp.eye(found.shape[0], dtype=bool), 1, found)
