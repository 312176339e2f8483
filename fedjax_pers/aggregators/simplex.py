"""The projection of many long rows onto the simplex, without a sort: XLA sorts them slowly on a CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_pers.base import Array


def onto_simplex(x: Array) -> Array:
    """The nearest numbers to each row that are not negative and add up to 1: ``max(x - t, 0)``, with that sum.

    Newton's steps from below, ``t <- t + (sum max(x - t, 0) - 1) / |{x > t}|``, until none leaves a number behind: then
    the last was exact. About ten for random rows and few more for any: at each, the excess of the sum times the numbers
    above ``t`` falls to a quarter at most.

    Example:
      >>> onto_simplex(jnp.array([[0.5, 1.0, -3.0]])).tolist()
      [[0.25, 0.75, 0.0]]

    Args:
      x: ``[..., n]``, below infinity; a number of minus infinity gets 0, and some number of each row must be more.

    Source: Michelot, "A Finite Algorithm for Finding the Projection of a Point onto the Canonical Simplex of R^n",
    Journal of Optimization Theory and Applications, 1986. *Differences from the paper:* begins 1 below the largest
    number, where what is far below no longer costs digits or steps.
    """
    n = x.shape[-1]
    below = x - x.max(-1, keepdims=True)

    def closer(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        threshold, step, fewest, _ = carry
        # Where n numbers are equal it is -1 / n, and never more: rounding must not lift it above them all.
        threshold = jnp.minimum(threshold + step, -1 / n)
        excess = jnp.maximum(below - threshold, 0).sum(-1, keepdims=True) - 1
        above = (below > threshold).sum(-1, keepdims=True, dtype=jnp.int32)
        return threshold, excess / above.astype(x.dtype), jnp.minimum(fewest, above), (above < fewest).any()

    first = jnp.full_like(below[..., :1], -1)
    start = (first, jnp.zeros_like(first), jnp.full(first.shape, n + 1, jnp.int32), jnp.array(True))
    threshold, step, _, _ = jax.lax.while_loop(lambda carry: carry[-1], closer, start)
    # The last step is smaller than a digit of the threshold, but not than one of small shares.
    return jnp.maximum(below - threshold - step, 0)
