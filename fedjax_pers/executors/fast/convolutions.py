"""Convolutions in the layout of XLA's fast kernel for CPUs, or as products where that kernel is slow."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core.primitives import conv_general_dilated_p

from fedjax_pers.base import Array
from fedjax_pers.executors.fast.rewriting import twin_of
from fedjax_pers.once import unfused

# A convolution whose outputs are sums of at most so many products is written out as multiplications and additions:
# XLA's kernel is slow with few inputs. One with at most so many outputs a channel (the gradient of such a kernel) is
# one product of matrices.
FEW = 36


def _is_covered(equation: Any) -> bool:
    sharding = equation.params["out_sharding"]
    unsharded = sharding is None or all(axis is None for axis in sharding.spec)
    return unsharded and equation.invars[0].aval.ndim > 2


def _convolution(lhs: Array, rhs: Array, **params: Any) -> Array:
    (batch, features, *space), (out_features, in_features, *kernel), out = params["dimension_numbers"]
    groups = max(params["feature_group_count"], params["batch_group_count"])
    few_products = rhs.size // rhs.shape[out_features] <= FEW and params["batch_group_count"] == 1
    if groups > 1 and not few_products:
        axis = features if params["batch_group_count"] == 1 else batch
        alone = functools.partial(_convolution, **params | {"feature_group_count": 1, "batch_group_count": 1})
        pairs = _split(lhs, axis, groups), _split(rhs, out_features, groups)
        return _merge(lax.map(lambda pair: alone(*pair), pairs), out[1])
    inputs = lhs.transpose(batch, *space, features)
    weights = rhs.transpose(*kernel, in_features, out_features)
    if few_products:
        outputs = unfused(functools.partial(_written_out, **params), inputs, weights)
    elif inputs.shape[0] * math.prod(_places(inputs, weights, **params)) <= FEW:
        # Positions are summed in the order in which they lie in memory, so that the larger operand is not copied.
        order = np.argsort((*kernel, in_features))
        outputs = _as_product(inputs, weights, order, **params)
    else:
        outputs = _in_fast_layout(inputs, weights, **params)
    return outputs.transpose(np.argsort((out[0], *out[2:], out[1])))


def _split(array: Array, axis: int, groups: int) -> Array:
    shape = array.shape[:axis] + (groups, array.shape[axis] // groups) + array.shape[axis + 1 :]
    return jnp.moveaxis(array.reshape(shape), axis, 0)


def _merge(array: Array, axis: int) -> Array:
    array = jnp.moveaxis(array, 0, axis)
    return array.reshape(array.shape[:axis] + (-1,) + array.shape[axis + 2 :])


def _in_fast_layout(inputs: Array, weights: Array, **params: Any) -> Array:
    """``[batch, *space, in]`` with ``[*kernel, in, out]``, the layout of XLA's fast kernel on CPUs."""
    first, *space, last = range(inputs.ndim)
    layout = lax.ConvDimensionNumbers((first, last, *space), (last, last - 1, *range(last - 1)), (first, last, *space))
    return conv_general_dilated_p.bind(inputs, weights, **params | {"dimension_numbers": layout, "out_sharding": None})


def _padded(inputs: Array, *, padding: Any, lhs_dilation: Any, **_: Any) -> Array:
    inside = [(low, high, dilation - 1) for (low, high), dilation in zip(padding, lhs_dilation, strict=True)]
    return lax.pad(inputs, jnp.zeros((), inputs.dtype), [(0, 0, 0), *inside, (0, 0, 0)])


def _written_out(inputs: Array, weights: Array, **params: Any) -> Array:
    """The sum over the kernel and a group's input features, product by product: XLA makes one loop of it."""
    dtype = jnp.promote_types(inputs.dtype, jnp.float32)
    result_dtype = params["preferred_element_type"] or inputs.dtype
    strides, dilations, groups = params["window_strides"], params["rhs_dilation"], params["feature_group_count"]
    inputs, weights = _padded(inputs.astype(dtype), **params), weights.astype(dtype)
    reach = [(size - 1) * dilation + 1 for size, dilation in zip(weights.shape, dilations, strict=False)]
    weights = weights.reshape(*weights.shape[:-1], groups, -1)
    total: Any = 0
    for tap in np.ndindex(weights.shape[:-3]):
        starts = [index * dilation for index, dilation in zip(tap, dilations, strict=True)]
        ends = [start + size - length + 1 for start, size, length in zip(starts, inputs.shape[1:], reach, strict=False)]
        window = lax.slice(inputs, (0, *starts, 0), (inputs.shape[0], *ends, inputs.shape[-1]), (1, *strides, 1))
        window = window.reshape(*window.shape[:-1], groups, -1)
        for feature in range(weights.shape[-3]):
            total += window[..., feature, None] * weights[*tap, feature]
    return total.reshape(*total.shape[:-2], -1).astype(result_dtype)


def _places(inputs: Array, weights: Array, **params: Any) -> tuple[int, ...]:
    """Places of the output, along each spatial dimension."""
    padded = jax.eval_shape(functools.partial(_padded, **params), inputs).shape[1:-1]
    reach = [(size - 1) * step + 1 for size, step in zip(weights.shape, params["rhs_dilation"], strict=False)]
    strides = params["window_strides"]
    return tuple((size - length) // step + 1 for size, length, step in zip(padded, reach, strides, strict=True))


def _as_product(inputs: Array, weights: Array, order: np.ndarray, **params: Any) -> Array:
    """Rows, one for each output of a channel, times columns, one for each channel; sums run over axes in ``order``."""
    dtype = jnp.promote_types(inputs.dtype, jnp.float32)
    dilations, sums = params["rhs_dilation"], math.prod(weights.shape[:-1])
    places, padded, windows = _places(inputs, weights, **params), _padded(inputs, **params), []
    for place in np.ndindex(places):
        starts = [index * stride for index, stride in zip(place, params["window_strides"], strict=True)]
        lengths = [(size - 1) * step + 1 for size, step in zip(weights.shape, dilations, strict=False)]
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        windows.append(lax.slice(padded, (0, *starts, 0), (len(padded), *ends, padded.shape[-1]), (1, *dilations, 1)))
    rows = jnp.stack(windows, 1).transpose(0, 1, *(order + 2)).reshape(-1, sums)
    columns = weights.transpose(*order, len(order)).reshape(sums, -1)
    products = jnp.matmul(rows, columns, precision=params["precision"], preferred_element_type=dtype)
    return products.reshape(-1, *places, products.shape[-1]).astype(params["preferred_element_type"] or inputs.dtype)


twin_of(conv_general_dilated_p, _convolution, _is_covered)
