"""Max-pooling: the element of each window that XLA selects, as a mask."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core.primitives import reduce_window_max_p, select_and_gather_add_p, select_and_scatter_add_p

from fedjax_pers.base import Array
from fedjax_pers.executors.fast.rewriting import twin_of

# Pooling windows of more elements would make long programs.
LARGEST_WINDOW = 64


def _is_covered(equation: Any) -> bool:
    params = equation.params
    window = tuple(params["window_dimensions"])
    apart = window == tuple(params["window_strides"])
    dense = {*params.get("base_dilation", ()), *params.get("window_dilation", ())} <= {1}
    return apart and dense and math.prod(window) <= LARGEST_WINDOW and params.get("select_prim", lax.ge_p) is lax.ge_p


def _max_pooling(operand: Array, *, window_dimensions: Any, padding: Any, **_: Any) -> Array:
    return functools.reduce(lax.max, _corners(_tiled(operand, window_dimensions, padding, -np.inf), window_dimensions))


def _select_and_gather(tangent: Array, operand: Array, *, window_dimensions: Any, padding: Any, **_: Any) -> Array:
    tangent = _in_windows(_tiled(tangent, window_dimensions, padding, 0), window_dimensions)
    selected = _selected(_tiled(operand, window_dimensions, padding, -np.inf), window_dimensions)
    return jnp.where(selected, tangent, 0).sum(range(1, tangent.ndim, 2))


def _select_and_scatter(source: Array, operand: Array, *, window_dimensions: Any, padding: Any, **_: Any) -> Array:
    tiled = _tiled(operand, window_dimensions, padding, -np.inf)
    source = jnp.expand_dims(source, range(1, 2 * source.ndim, 2))
    scattered = jnp.where(_selected(tiled, window_dimensions), source, 0).reshape(tiled.shape)
    ends = [n - low - size for n, (low, _), size in zip(tiled.shape, padding, operand.shape, strict=True)]
    back = [(-low, -end, 0) for (low, _), end in zip(padding, ends, strict=True)]
    return lax.pad(scattered, jnp.zeros((), scattered.dtype), back)


def _tiled(operand: Array, window: Any, padding: Any, fill: float) -> Array:
    """Padded, and cut to whole windows."""
    config = []
    for size, length, (low, high) in zip(operand.shape, window, padding, strict=True):
        config.append((low, (low + size + high) // length * length - low - size, 0))
    return lax.pad(operand, jnp.asarray(fill, operand.dtype), config)


def _in_windows(tiled: Array, window: Any) -> Array:
    """``[n, ...] -> [n / window, window, ...]``."""
    pairs = [(size // length, length) for size, length in zip(tiled.shape, window, strict=True)]
    return tiled.reshape([size for pair in pairs for size in pair])


def _corners(tiled: Array, window: Any) -> list[Array]:
    """Element by element of the window, the arrays of these elements of all windows."""
    return [lax.slice(tiled, corner, tiled.shape, window) for corner in np.ndindex(*window)]


def _selected(tiled: Array, window: Any) -> Array:
    """True at one element of each window, ``[n / window, window, ...]``.

    XLA keeps what it has while that is greater or equal, else takes the next: so it selects the first maximum, and
    leaves a NaN for whatever comes next.
    """
    best, *others = _corners(tiled, window)
    place = jnp.zeros(best.shape, jnp.int32)
    for index, candidate in enumerate(others, start=1):
        keep = best >= candidate
        best, place = jnp.where(keep, best, candidate), jnp.where(keep, place, index)
    shape = _in_windows(tiled, window).shape
    here = jnp.zeros(shape, jnp.int32)
    for axis, length in enumerate(window):
        here = here * length + lax.broadcasted_iota(jnp.int32, shape, 2 * axis + 1)
    return jnp.expand_dims(place, range(1, 2 * place.ndim, 2)) == here


twin_of(reduce_window_max_p, _max_pooling, _is_covered)
twin_of(select_and_gather_add_p, _select_and_gather, _is_covered)
twin_of(select_and_scatter_add_p, _select_and_scatter, _is_covered)
