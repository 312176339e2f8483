"""Where in a value the examples of a batch lie, followed through the operations of a jaxpr.

A rule answers for one operation: given the axis of the examples in its operands, which axis of the results holds the
examples so that each depends on the same example of the operands alone. Whatever has no rule mixes examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

INLINED = ("jit", "pjit", "closed_call", "core_call")
"""Calls that mean what is in them. (What has its own derivative, or is recomputed, must stay a call.)"""

CALLS = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "checkpoint", "remat2", "remat")


class Known(NamedTuple):
    """What is known of a value.

    Attributes:
      axis: of the examples; ``None`` where the value does not depend on them.
      equal: axes along which a value without examples is the same everywhere; ``None`` for all.
    """

    axis: int | None
    equal: frozenset[int] | None = None


def constant(rank: int) -> Known:
    """A value without examples and of any content; a single number is the same everywhere."""
    return Known(None, frozenset() if rank else None)


def follow(equation: Any, operands: Sequence[Known]) -> list[Known] | None:
    """What is known of an equation's results, or ``None`` where they mix examples."""
    name = equation.primitive.name
    if all(x.axis is None for x in operands):
        return [_without_examples(equation, operands, variable.aval.ndim) for variable in equation.outvars]
    if name in CALLS:
        return _follow_call(equation, operands)
    if name in _ELEMENTWISE:
        axis = _common_axis(equation, operands)
    elif name in _RULES:
        axis = _RULES[name](equation, operands)
    else:
        axis = None
    return None if axis is None else [Known(axis)] * len(equation.outvars)


def _without_examples(equation: Any, operands: Sequence[Known], rank: int) -> Known:
    name, params = equation.primitive.name, equation.params
    if name == "broadcast_in_dim":
        mapped = params["broadcast_dimensions"]
        [operand, *_], shape = operands, equation.invars[0].aval.shape
        old = {
            new for axis, new in enumerate(mapped) if operand.equal is None or axis in operand.equal or shape[axis] == 1
        }
        return Known(None, frozenset(old | (set(range(rank)) - set(mapped))))
    if name in _ELEMENTWISE:
        sets = [x.equal for x in operands if x.equal is not None]
        return Known(None, frozenset.intersection(*sets) if sets else None)
    return constant(rank)


def _common_axis(equation: Any, operands: Sequence[Known]) -> int | None:
    axes = {x.axis for x in operands if x.axis is not None}
    axis = axes.pop()

    def is_uniform(operand: Known, shape: tuple[int, ...]) -> bool:
        return operand.equal is None or axis in operand.equal or len(shape) <= axis or shape[axis] == 1

    shapes = [variable.aval.shape for variable in equation.invars]
    uniform = all(is_uniform(x, shape) for x, shape in zip(operands, shapes, strict=True) if x.axis is None)
    return axis if not axes and uniform else None


def _follow_call(equation: Any, operands: Sequence[Known]) -> list[Known] | None:
    params = equation.params
    inner = next(params[name] for name in ("call_jaxpr", "fun_jaxpr", "jaxpr") if name in params)
    jaxpr = getattr(inner, "jaxpr", inner)
    known = dict(zip(jaxpr.invars, operands, strict=True)) | {x: constant(x.aval.ndim) for x in jaxpr.constvars}

    def read(atom: Any) -> Known:
        return constant(0) if hasattr(atom, "val") else known[atom]

    for each in jaxpr.eqns:
        inside = [read(atom) for atom in each.invars]
        calls = each.primitive.name in INLINED
        found = _follow_call(each, inside) if calls else follow(each, inside)
        if found is None:
            return None
        known.update(zip(each.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _dot_general(equation: Any, operands: Sequence[Known]) -> int | None:
    (contracted, _), (batched, batched_right) = equation.params["dimension_numbers"]
    (left, right), rank = operands, equation.invars[0].aval.ndim
    if (left.axis, right.axis) in zip(batched, batched_right, strict=True):  # attention: an example with itself
        return tuple(batched).index(left.axis)
    if right.axis is not None:
        return _dot_from_the_right(equation, operands)
    if left.axis in contracted or left.axis in batched:
        return None
    free = [axis for axis in range(rank) if axis not in contracted and axis not in batched]
    return len(batched) + free.index(left.axis)


def _dot_from_the_right(equation: Any, operands: Sequence[Known]) -> int | None:
    (of_left, contracted), (_, batched) = equation.params["dimension_numbers"]
    left, right = operands
    if right.axis in contracted or right.axis in batched or left.axis is not None:
        return None
    free = [axis for axis in range(equation.invars[1].aval.ndim) if axis not in contracted and axis not in batched]
    return equation.invars[0].aval.ndim - len(of_left) + free.index(right.axis)


def _convolution(equation: Any, operands: Sequence[Known]) -> int | None:
    numbers, (left, right) = equation.params["dimension_numbers"], operands
    alone = right.axis is None and equation.params["batch_group_count"] == 1
    return numbers.out_spec[0] if alone and left.axis == numbers.lhs_spec[0] else None


def _reduction(equation: Any, operands: Sequence[Known]) -> int | None:
    axes, axis = equation.params["axes"], operands[0].axis
    return None if axis in axes else axis - sum(each < axis for each in axes)


def _along_an_axis(name: str) -> Callable[[Any, Sequence[Known]], int | None]:
    def rule(equation: Any, operands: Sequence[Known]) -> int | None:
        worked = equation.params[name]
        common = _common_axis(equation, operands)
        return None if common in (worked if isinstance(worked, tuple) else (worked,)) else common

    return rule


def _window(equation: Any, operands: Sequence[Known]) -> int | None:
    axis, params = operands[0].axis, equation.params
    ones = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    alone = all(params[name][axis] == 1 for name in ones) and tuple(params["padding"][axis]) == (0, 0)
    return axis if alone else None


def _broadcast(equation: Any, operands: Sequence[Known]) -> int | None:
    return equation.params["broadcast_dimensions"][operands[0].axis]


def _reshape(equation: Any, operands: Sequence[Known]) -> int | None:
    before, after, axis = equation.invars[0].aval.shape, equation.outvars[0].aval.shape, operands[0].axis
    if equation.params["dimensions"] is not None:
        return None
    for new, size in enumerate(after):
        if size == before[axis] and math.prod(after[:new]) == math.prod(before[:axis]):
            return new
    return None


def _transpose(equation: Any, operands: Sequence[Known]) -> int | None:
    return tuple(equation.params["permutation"]).index(operands[0].axis)


def _squeeze(equation: Any, operands: Sequence[Known]) -> int | None:
    axis, gone = operands[0].axis, equation.params["dimensions"]
    return None if axis in gone else axis - sum(each < axis for each in gone)


def _slice(equation: Any, operands: Sequence[Known]) -> int | None:
    axis, params, shape = operands[0].axis, equation.params, equation.invars[0].aval.shape
    whole = params["start_indices"][axis] == 0 and params["limit_indices"][axis] == shape[axis]
    return axis if whole and (params["strides"] is None or params["strides"][axis] == 1) else None


def _pad(equation: Any, operands: Sequence[Known]) -> int | None:
    operand, padding = operands
    unpadded = operand.axis is not None and tuple(equation.params["padding_config"][operand.axis]) == (0, 0, 0)
    return operand.axis if unpadded and padding.axis is None else None


def _gather(equation: Any, operands: Sequence[Known]) -> int | None:
    """Rows of a table, such as an embedding, at the places that examples name."""
    table, places = operands
    numbers = equation.params["dimension_numbers"]
    if table.axis is not None or numbers.operand_batching_dims or places.axis == equation.invars[1].aval.ndim - 1:
        return None
    batch = [axis for axis in range(equation.outvars[0].aval.ndim) if axis not in numbers.offset_dims]
    return batch[places.axis]


_RULES: dict[str, Callable[[Any, Sequence[Known]], int | None]] = {
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"),
        _reduction,
    ),
    **dict.fromkeys(("reduce_window_max", "reduce_window_min", "reduce_window_sum"), _window),
    **dict.fromkeys(("cumsum", "cumlogsumexp", "cummax", "cummin", "cumprod", "split"), _along_an_axis("axis")),
    **dict.fromkeys(("concatenate", "sort"), _along_an_axis("dimension")),
    "rev": _along_an_axis("dimensions"),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "slice": _slice,
    "pad": _pad,
    "gather": _gather,
}

_ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy copy_p cos cosh
    digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p logistic lt max
    min mul ne neg nextafter not optimization_barrier or pow reduce_precision rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor
    """.split()
)
