"""Convolutions and max-pooling that are fast on the CPU wherever they stand: in loops, under ``vmap``, in groups.

XLA's CPU compiler brings a convolution into the layout of its fast kernel only in the entry computation. Inside a loop
the gradients, which come in other layouts, fall to a naive kernel. A convolution in groups does so everywhere, and
``vmap`` over kernels makes groups. The gradient of max-pooling, a select-and-scatter, visits one element at a time.

:func:`fast_convolutions` traces a function to a jaxpr and puts a twin in the place of each such operation: a primitive
of the same meaning, whose rules for ``vmap`` and for differentiation are those of the operation with twins put in, and
which differs in one thing, the program it becomes on a CPU. On other platforms it becomes the operation itself.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.core.primitives import (
    conv_general_dilated_p,
    reduce_window_max_p,
    select_and_gather_add_p,
    select_and_scatter_add_p,
)
from jax.interpreters import ad, batching, mlir

Array = jax.Array

# A convolution whose outputs are sums of at most so many products is written out as multiplications and additions. That
# is 3 to 10 times as fast up to 16 output channels, where XLA's kernel is slow, and as fast from 32 on.
MOST_PRODUCTS = 36

# Pooling windows of more elements would make long programs.
LARGEST_WINDOW = 64


def fast_convolutions(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, with convolutions and max-pooling in a form that is fast on the CPU in loops and under ``vmap``.

    Values and gradients are those of ``fn`` up to the order of additions; ties and NaN in max-pooling are resolved as
    XLA does. ``fn`` is traced at every call, as by ``jax.make_jaxpr``, so call the result under ``jax.jit``. ``fn`` may
    be a whole training step, with its gradient inside, and the result may be differentiated, in both modes and to any
    order. Both may contain, and stand in, ``jit``, ``vmap``, ``scan``, ``while_loop``, ``cond``, ``remat``,
    ``shard_map`` and functions with their own derivatives. Where there is nothing to replace, ``fn`` is evaluated as it
    was traced.

    Covered are convolutions of one or more spatial dimensions in every layout, with strides, padding, dilations and
    groups; and max-pooling, forward and backward, with strides equal to the window. Left as they are:

    - numbers that are complex, integer or of 8 bits, shapes that are symbolic, and explicitly sharded convolutions;
    - pooling with overlapping, dilated or large windows (over 64 elements), and pooling by minimum or mean;
    - the derivative rule of a ``custom_jvp`` or ``custom_vjp`` function, where the result of this transform is
      differentiated. Where the gradient is inside ``fn``, the rule is part of it and covered.

    Two things besides speed differ from ``fn``. Where the result is differentiated and ``fn`` contains a ``remat``
    whose policy saves convolutions (``dots_saveable``), they are recomputed: the policy does not know the twins. And an
    eager call is evaluated operation by operation without the checks of ``jax_debug_nans``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def loss(kernel, image):
      ...     return jnp.sum(jax.lax.conv(image, kernel, (1, 1), "SAME") ** 2)
      >>> step = jax.jit(fast_convolutions(lambda kernel, image: kernel - 0.1 * jax.grad(loss)(kernel, image)))
      >>> step(jnp.ones((1, 1, 3, 3)), jnp.ones((1, 1, 1, 1))).ravel().tolist()[3:6]
      [1.0, 0.800000011920929, 1.0]

    Args:
      fn: any function of pytrees. Arrays in its arguments (NumPy's, JAX's, random keys) are traced; all other leaves,
        Python numbers among them, reach ``fn`` as they are. The same holds for what it returns.

    Returns:
      A function with the signature of ``fn``.
    """

    @functools.wraps(fn)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        arrays, rebuild = _separate((args, kwargs))
        rebuild_result: Any = None

        def on_arrays(*arrays: Array) -> list[Array]:
            nonlocal rebuild_result
            args, kwargs = rebuild(arrays)
            results, rebuild_result = _separate(fn(*args, **kwargs))
            return results

        jaxpr = _replace(jax.make_jaxpr(on_arrays)(*arrays))
        return rebuild_result([jnp.asarray(result) for result in core.jaxpr_as_fun(jaxpr)(*arrays)])

    return replaced


def _separate(tree: Any) -> tuple[list[Array], Callable[[Any], Any]]:
    """The arrays of a pytree, and the function that puts others in their places."""
    leaves, structure = jax.tree.flatten(tree)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray | np.generic)]

    def rebuild(arrays: Any) -> Any:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        return jax.tree.unflatten(structure, filled)

    return [leaves[place] for place in places], rebuild


# Replacing primitives in jaxprs. Jaxprs with constants are a type of their own in some versions of JAX, not in all.

_JAXPRS = (core.Jaxpr, core.ClosedJaxpr)
_replaced: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _replace(jaxpr: Any) -> Any:
    """The jaxpr with twins; itself where nothing changes, and the same result every time, so that JAX's caches hold."""
    if jaxpr not in _replaced:
        equations = [_replace_equation(equation) for equation in jaxpr.eqns]
        if all(new is old for new, old in zip(equations, jaxpr.eqns, strict=True)):
            _replaced[jaxpr] = None
        elif isinstance(jaxpr, core.Jaxpr):
            _replaced[jaxpr] = jaxpr.replace(eqns=equations)
        else:
            _replaced[jaxpr] = jaxpr.replace(jaxpr=jaxpr.jaxpr.replace(eqns=equations))
    result = _replaced[jaxpr]
    return jaxpr if result is None else result


def _replace_equation(equation: Any) -> Any:
    twin = _TWINS.get(equation.primitive)
    if twin is not None and twin.covers(**equation.params) and all(map(_is_ordinary, equation.invars)):
        return equation.replace(primitive=twin.primitive)
    params = {name: _replace_in(value) for name, value in equation.params.items()}
    if all(params[name] is value for name, value in equation.params.items()):
        return equation
    return equation.replace(params=params)


def _is_ordinary(variable: Any) -> bool:
    """Real numbers of at least 16 bits, in an array of known shape that is not empty."""
    shape, dtype = variable.aval.shape, variable.aval.dtype
    known = all(isinstance(size, int) and size > 0 for size in shape)
    return known and jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 16


def _replace_in(value: Any) -> Any:
    """A parameter of an equation: a jaxpr, a tuple of them (the branches of ``cond``), or anything else."""
    if not isinstance(value, (*_JAXPRS, tuple, list)):
        return value
    leaves, structure = jax.tree.flatten(value)
    new = [_replace(leaf) if isinstance(leaf, _JAXPRS) else leaf for leaf in leaves]
    return value if all(a is b for a, b in zip(new, leaves, strict=True)) else jax.tree.unflatten(structure, new)


# Twins.


class _Twin(NamedTuple):
    primitive: core.Primitive
    covers: Callable[..., bool]


def _twin(plain: core.Primitive, on_cpu: Callable[..., Array], covers: Callable[..., bool]) -> _Twin:
    """A primitive that means ``plain``, becomes ``on_cpu`` on a CPU, and has the rules of ``plain``, with twins."""
    twin = core.Primitive(f"fast_{plain.name}")
    twin.def_impl(plain.bind)
    twin.def_abstract_eval(lambda *avals, **params: plain.abstract_eval(*avals, **params)[0])
    mlir.register_lowering(twin, mlir.lower_fun(plain.bind, multiple_results=False))
    mlir.register_lowering(twin, mlir.lower_fun(on_cpu, multiple_results=False), platform="cpu")

    def batch(args: Any, axes: Any, **params: Any) -> Any:
        return fast_convolutions(jax.vmap(functools.partial(plain.bind, **params), axes))(*args), 0

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        return fast_convolutions(functools.partial(ad.primitive_jvps[plain], **params))(primals, tangents)

    def transpose(cotangent: Any, *args: Any, **params: Any) -> Any:
        return fast_convolutions(functools.partial(ad.primitive_transposes[plain], **params))(cotangent, *args)

    batching.primitive_batchers[twin] = batch
    ad.primitive_jvps[twin] = jvp
    if plain in ad.primitive_transposes:
        ad.primitive_transposes[twin] = transpose
    return _Twin(twin, covers)


# Convolutions.


def _is_covered_convolution(*, dimension_numbers: Any, out_sharding: Any, **_: Any) -> bool:
    unsharded = out_sharding is None or all(axis is None for axis in out_sharding.spec)
    return unsharded and len(dimension_numbers.lhs_spec) > 2


def _convolution(lhs: Array, rhs: Array, **params: Any) -> Array:
    (batch, features, *space), (out_features, in_features, *kernel), out = params["dimension_numbers"]
    groups = max(params["feature_group_count"], params["batch_group_count"])
    few = rhs.size // rhs.shape[out_features] <= MOST_PRODUCTS and params["batch_group_count"] == 1
    if groups > 1 and not few:
        axis = features if params["batch_group_count"] == 1 else batch
        alone = functools.partial(_convolution, **params | {"feature_group_count": 1, "batch_group_count": 1})
        pairs = _split(lhs, axis, groups), _split(rhs, out_features, groups)
        return _merge(lax.map(lambda pair: alone(*pair), pairs), out[1])
    inputs = lhs.transpose(batch, *space, features)
    weights = rhs.transpose(*kernel, in_features, out_features)
    outputs = _written_out(inputs, weights, **params) if few else _in_fast_layout(inputs, weights, **params)
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


def _written_out(
    inputs: Array,
    weights: Array,
    *,
    window_strides: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
    lhs_dilation: tuple[int, ...],
    rhs_dilation: tuple[int, ...],
    feature_group_count: int,
    preferred_element_type: Any,
    **_: Any,
) -> Array:
    """The sum over the kernel and a group's input features, product by product: XLA makes one loop of it."""
    dtype = jnp.promote_types(inputs.dtype, jnp.float32)
    result_dtype = preferred_element_type or inputs.dtype
    inputs, weights = inputs.astype(dtype), weights.astype(dtype)
    inside = [(low, high, dilation - 1) for (low, high), dilation in zip(padding, lhs_dilation, strict=True)]
    inputs = lax.pad(inputs, jnp.zeros((), dtype), [(0, 0, 0), *inside, (0, 0, 0)])
    reach = [(size - 1) * dilation + 1 for size, dilation in zip(weights.shape, rhs_dilation, strict=False)]
    inputs = inputs.reshape(*inputs.shape[:-1], feature_group_count, -1)
    weights = weights.reshape(*weights.shape[:-1], feature_group_count, -1)
    total: Any = 0
    for tap in np.ndindex(weights.shape[:-3]):
        starts = [index * dilation for index, dilation in zip(tap, rhs_dilation, strict=True)]
        ends = [start + size - length + 1 for start, size, length in zip(starts, inputs.shape[1:], reach, strict=False)]
        window = inputs[:, *map(slice, starts, ends, window_strides)]
        for feature in range(weights.shape[-3]):
            total += window[..., feature, None] * weights[*tap, feature]
    return total.reshape(*total.shape[:-2], -1).astype(result_dtype)


# Max-pooling: the element of each window that XLA selects, as a mask.


def _is_covered_pooling(
    *,
    window_dimensions: tuple[int, ...],
    window_strides: tuple[int, ...],
    base_dilation: tuple[int, ...] = (),
    window_dilation: tuple[int, ...] = (),
    select_prim: core.Primitive = lax.ge_p,
    **_: Any,
) -> bool:
    apart = tuple(window_dimensions) == tuple(window_strides) and set(base_dilation) | set(window_dilation) <= {1}
    return apart and math.prod(window_dimensions) <= LARGEST_WINDOW and select_prim is lax.ge_p


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
    return [tiled[tuple(map(slice, corner, tiled.shape, window))] for corner in np.ndindex(*window)]


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


_TWINS = {
    conv_general_dilated_p: _twin(conv_general_dilated_p, _convolution, _is_covered_convolution),
    reduce_window_max_p: _twin(reduce_window_max_p, _max_pooling, _is_covered_pooling),
    select_and_gather_add_p: _twin(select_and_gather_add_p, _select_and_gather, _is_covered_pooling),
    select_and_scatter_add_p: _twin(select_and_scatter_add_p, _select_and_scatter, _is_covered_pooling),
}
