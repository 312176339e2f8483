"""Sums over examples and places, such as gradients of biases and the moments of batch normalisation.

XLA's CPU compiler fuses such a sum with all that makes its summands, into a loop over results that runs through memory
in strides; where the summands have another reader they are made twice. A product with a vector of ones does neither.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax.extend.core.primitives import reduce_sum_p

from fedjax_pers.base import Array
from fedjax_pers.executors.fast.rewriting import twin_of

# Shorter and narrower sums are too little work to matter; those of dense layers' gradients stay as they are.
FEWEST_ELEMENTS = 4096
FEWEST_COLUMNS = 8


def _is_covered(equation: Any) -> bool:
    """Sums over neighbouring axes that are not the last."""
    shape, axes = equation.invars[0].aval.shape, sorted(equation.params["axes"])
    if not axes or axes != list(range(axes[0], axes[-1] + 1)):
        return False
    return math.prod(shape[axes[-1] + 1 :]) >= FEWEST_COLUMNS and math.prod(shape) >= FEWEST_ELEMENTS


def _sum(operand: Array, *, axes: tuple[int, ...], **_: Any) -> Array:
    before, after = operand.shape[: min(axes)], operand.shape[max(axes) + 1 :]
    rows = operand.reshape(*before, -1, math.prod(after))
    accurate = jnp.promote_types(operand.dtype, jnp.float32)
    ones = jnp.ones((*before, 1, rows.shape[-2]), operand.dtype)
    total = jnp.matmul(ones, rows, precision="highest", preferred_element_type=accurate)
    return total.reshape(before + after).astype(operand.dtype)


twin_of(reduce_sum_p, _sum, _is_covered)
