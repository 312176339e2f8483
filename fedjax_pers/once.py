"""Functions that are traced once, however often they are used, and values that are computed once.

Tracing a training step takes as long as compiling it, and every loop, ``vmap`` and shape inference around it would
trace it again: nested, these double each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core


def traced(function: Callable[..., Any], *examples: Any) -> tuple[Callable[..., Any], Any]:
    """``function`` as it was traced with these examples, and the shapes of its result.

    Example:
      >>> import jax.numpy as jnp
      >>> double, shape = traced(lambda x: {"twice": 2 * x}, jax.ShapeDtypeStruct((3,), jnp.float32))
      >>> shape["twice"].shape, double(jnp.ones(3))["twice"].tolist()
      ((3,), [2.0, 2.0, 2.0])

    Args:
      function: of pytrees of arrays; what it closes over may be traced.
      examples: arguments, or their ``jax.ShapeDtypeStruct``.
    """
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*examples)
    structure, evaluate = jax.tree.structure(shapes), core.jaxpr_as_fun(jaxpr)

    def again(*args: Any) -> Any:
        return jax.tree.unflatten(structure, evaluate(*jax.tree.leaves(args)))

    return again, shapes


def unfused(function: Callable[..., jax.Array], *operands: jax.Array) -> jax.Array:
    """``function(*operands)``, on a CPU computed once, where XLA would write cheap operations out for every reader.

    It is the only turn of a loop: nothing is fused across a loop's border. The compiler is kept from seeing that there
    is one turn, and that it could be moved out.

    Example:
      >>> import jax.numpy as jnp
      >>> unfused(lambda a, b: a * b + 1, jnp.arange(3), 2).tolist()
      [1, 3, 5]
    """

    def in_a_loop(*operands: jax.Array) -> jax.Array:
        def turn(index: jax.Array, _: jax.Array) -> jax.Array:
            _, here = lax.optimization_barrier((index, operands))
            return function(*here)

        shape = jax.eval_shape(function, *operands)
        # Zeros that vary over the devices of a mesh as the operands do.
        start = sum(lax.full_like(x, 0, shape.dtype, shape.shape) for x in operands)
        one = lax.optimization_barrier(jnp.int32(1))
        return lax.fori_loop(0, one, turn, start)

    return lax.platform_dependent(*operands, cpu=in_a_loop, default=function)
