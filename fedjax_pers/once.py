"""Functions that are traced once, however often they are used.

Tracing a training step takes as long as compiling it, and every loop, ``vmap`` and shape inference around it would
trace it again: nested, these double each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
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
