"""Order statistics along clients, exact and without a sort: XLA sorts columns on a CPU an order of magnitude slower."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_pers.base import Array

_WHOLE = {4: jnp.uint32, 8: jnp.uint64}


def ranked(x: Array, there: Array, rank: Array) -> Array:
    """The ``rank``-th smallest, from 0, of each coordinate among the clients that are there.

    Numbers are mapped to whole ones of the same order, whose bits are found from the highest on: one is set where no
    more than ``rank`` clients are below what it makes. As many passes over ``x`` as a number has bits.

    Example:
      >>> ranked(jnp.array([[3.0], [1.0], [2.0]]), jnp.array([True, True, True]), jnp.int32(1)).tolist()
      [2.0]

    Args:
      x: ``[clients, ...]``, float32 or float64 without NaN.
      there: bool ``[clients]``.
      rank: below the number of clients that are there.
    """
    bits = 8 * x.dtype.itemsize
    whole = _WHOLE[x.dtype.itemsize]
    top = whole(1) << (bits - 1)
    raw = jax.lax.bitcast_convert_type(x, whole)
    order = jnp.where(raw & top != 0, ~raw, raw | top)
    counts = there.reshape(-1, *[1] * (x.ndim - 1))

    def decide(place: Array, found: Array) -> Array:
        tried = found | (whole(1) << (bits - 1 - place).astype(whole))
        below = (counts & (order < tried)).sum(0, dtype=jnp.int32)
        return jnp.where(below <= rank, tried, found)

    found = jax.lax.fori_loop(0, bits, decide, jnp.zeros(x.shape[1:], whole))
    return jax.lax.bitcast_convert_type(jnp.where(found & top != 0, found & ~top, ~found), x.dtype)


def middle(x: Array, there: Array) -> Array:
    """The median of each coordinate; of an even number of clients, the mean of the middle two."""
    count = there.sum()
    lower = ranked(x, there, jnp.maximum(count - 1, 0) // 2)
    counts = there.reshape(-1, *[1] * (x.ndim - 1))
    at_most = (counts & (x <= lower)).sum(0)
    above = jnp.where(counts & (x > lower), x, jnp.inf).min(0)
    upper = jnp.where(at_most > count // 2, lower, above)
    return lower / 2 + upper / 2


def inner_mean(x: Array, there: Array, cut: Array) -> Array:
    """The mean of each coordinate without the ``cut`` smallest and as many of the largest."""
    count = there.sum()
    low, high = (ranked(x, there, jnp.maximum(rank, 0)) for rank in (cut, count - cut - 1))
    counts = there.reshape(-1, *[1] * (x.ndim - 1))
    between = jnp.where(counts & (x > low) & (x < high), x, 0).sum(0)
    lows = jnp.minimum((counts & (x <= low)).sum(0), count - cut) - cut
    highs = count - cut - jnp.maximum((counts & (x < high)).sum(0), cut)
    total = between + low * lows + high * highs
    return jnp.where(low == high, low, total / jnp.maximum(count - 2 * cut, 1))


def sum_of_least(x: Array, there: Array, count: Array) -> Array:
    """The sum of the ``count`` smallest of each coordinate; infinite where one of them is."""
    last = ranked(x, there, jnp.maximum(count - 1, 0))
    counts = there.reshape(-1, *[1] * (x.ndim - 1))
    less = counts & (x < last)
    ties = count - less.sum(0)
    return jnp.where(less, x, 0).sum(0) + jnp.where(ties > 0, ties * last, 0)
