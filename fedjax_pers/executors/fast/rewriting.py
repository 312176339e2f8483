"""Operations that are fast on the CPU wherever they stand: in loops, under ``vmap``, in groups.

XLA's CPU compiler brings a convolution into the layout of its fast kernel only in the entry computation. Inside a loop
the gradients, which come in other layouts, fall to a naive kernel. A convolution in groups does so everywhere, and
``vmap`` over kernels makes groups. The gradient of max-pooling, a select-and-scatter, visits one element at a time. A
sum over examples, such as the gradient of a bias, draws everything that makes its summands into one slow loop.

:func:`fast_convolutions` traces a function to a jaxpr and puts a twin in the place of each such operation: a primitive
of the same meaning, whose rules for ``vmap`` and for differentiation are those of the operation with twins put in, and
which differs in one thing, the program it becomes on a CPU. On other platforms it becomes the operation itself.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import ad, batching, mlir

Array = jax.Array


def fast_convolutions(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, with convolutions, max-pooling and sums in a form that is fast on the CPU in loops and under ``vmap``.

    Values and gradients are those of ``fn`` up to the order of additions; ties and NaN in max-pooling are resolved as
    XLA does. ``fn`` is traced at every call, as by ``jax.make_jaxpr``, so call the result under ``jax.jit``. ``fn`` may
    be a whole training step, with its gradient inside, and the result may be differentiated, in both modes and to any
    order. Both may contain, and stand in, ``jit``, ``vmap``, ``scan``, ``while_loop``, ``cond``, ``remat``,
    ``shard_map`` and functions with their own derivatives. Where there is nothing to replace, ``fn`` is evaluated as it
    was traced.

    Covered are convolutions of one or more spatial dimensions in every layout, with strides, padding, dilations and
    groups; max-pooling, forward and backward, with strides equal to the window; and sums of large arrays that keep the
    last axis. Left as they are:

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
    twin = _twins.get(equation.primitive)
    if twin is not None and all(map(_is_ordinary, equation.invars)) and twin.covers(equation):
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
    covers: Callable[[Any], bool]


_twins: dict[core.Primitive, _Twin] = {}


def twin_of(plain: core.Primitive, on_cpu: Callable[..., Array], covers: Callable[[Any], bool]) -> None:
    """Puts a twin in the place of ``plain``: it means the same, has the same rules, and becomes ``on_cpu`` on a CPU.

    Args:
      plain: the operation.
      on_cpu: a function of the operation's operands and parameters.
      covers: whether an equation of a jaxpr is one to replace.
    """
    twin = core.Primitive(f"fast_{plain.name}")
    twin.def_impl(plain.bind)
    twin.def_abstract_eval(lambda *avals, **params: plain.abstract_eval(*avals, **params)[0])
    mlir.register_lowering(twin, mlir.lower_fun(plain.bind, multiple_results=False))
    mlir.register_lowering(twin, mlir.lower_fun(on_cpu, multiple_results=False), platform="cpu")

    def batch(args: Any, batched: Any, /, **params: Any) -> Any:
        return fast_convolutions(jax.vmap(functools.partial(plain.bind, **params), batched))(*args), 0

    def jvp(primals: Any, tangents: Any, /, **params: Any) -> Any:
        return fast_convolutions(functools.partial(ad.primitive_jvps[plain], **params))(primals, tangents)

    def transpose(cotangent: Any, *args: Any, **params: Any) -> Any:
        return fast_convolutions(functools.partial(ad.primitive_transposes[plain], **params))(cotangent, *args)

    batching.primitive_batchers[twin] = batch
    ad.primitive_jvps[twin] = jvp
    if plain in ad.primitive_transposes:
        ad.primitive_transposes[twin] = transpose
    _twins[plain] = _Twin(twin, covers)
