"""The part of a training loss that each example decides alone and that training does not change.

While only some leaves train, what the others make of an example is the same in every epoch: the features of a frozen
body. :func:`split` finds that part in the jaxpr of any loss, so that it can be computed once an example. What mixes
examples (batch normalisation), draws at random (dropout) or depends on a leaf that trains stays in the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from fedjax_pers.example_axis import INLINED, Known, constant, follow
from fedjax_pers.once import traced

HEAVY = ("dot_general", "conv_general_dilated")
"""Operations worth storing the results of."""


class Split(NamedTuple):
    """A function of ``(changing, batch, key)`` in two parts.

    Attributes:
      shapes: of the features of a batch, the axis of the examples first.
      features: ``features(batch) -> list of arrays``; each row depends on the same row of the batch alone.
      rest: ``rest(changing, batch, key, features)`` is what the function gives.
    """

    shapes: list[jax.ShapeDtypeStruct]
    features: Callable[[Any], list[jax.Array]]
    rest: Callable[..., Any]


class Step(NamedTuple):
    """An equation with its operands and results by number; a literal is an operand by value."""

    equation: Any
    operands: list[Any]
    results: list[int]


def split(function: Callable[..., Any], changing: Any, batch: Any, key: Any) -> Split | None:
    """The two parts of a function, or ``None`` where no heavy operation is decided by single examples.

    Example:
      >>> body, head, batch = jnp.ones((3, 4)), jnp.ones(4), {"x": jnp.ones((5, 3))}
      >>> parts = split(lambda head, batch, key: jnp.tanh(batch["x"] @ body) @ head, head, batch, None)
      >>> parts.shapes[0].shape
      (5, 4)

    Args:
      function: what it closes over does not change.
      changing: its first argument, what training changes.
      batch: arrays with the axis of the examples first, or their ``jax.ShapeDtypeStruct``.
      key: its last argument.
    """
    whole = opened(function, changing, batch, key)
    steps, inputs, consts, outputs, _ = whole
    first = len(jax.tree.leaves(changing))
    rows = inputs[first : first + len(jax.tree.leaves(batch))]

    known: dict[int, Known] = {number: Known(0) for number in rows} | {
        number: constant(jnp.ndim(value)) for number, value in consts.items()
    }
    heavy: set[int] = set()
    early = []
    for step in steps:
        operands = [known.get(x) if isinstance(x, int) else constant(0) for x in step.operands]
        found = follow(step.equation, operands) if all(x is not None for x in operands) else None
        if found is None:
            continue
        early.append(step)
        known.update(zip(step.results, found, strict=True))
        worth = _is_heavy(step.equation) or any(x in heavy for x in step.operands if isinstance(x, int))
        heavy.update(number for number in step.results if worth and known[number].axis is not None)
    late = [step for step in steps if not heavy.issuperset(step.results)]
    read = {x for step in late for x in step.operands if isinstance(x, int)} | {
        x for x in outputs if isinstance(x, int)
    }
    kept = sorted(read & heavy)
    if not kept:
        return None

    def features(batch: Any) -> list[jax.Array]:
        values = evaluated(early, consts | dict(zip(rows, jax.tree.leaves(batch), strict=True)))
        return [jnp.moveaxis(values[number], known[number].axis, 0) for number in kept]

    def rest(changing: Any, batch: Any, key: Any, features: Sequence[jax.Array]) -> Any:
        stored = {n: jnp.moveaxis(x, 0, known[n].axis) for n, x in zip(kept, features, strict=True)}
        values = evaluated(
            late, consts | stored | dict(zip(inputs, jax.tree.leaves((changing, batch, key)), strict=True))
        )
        return whole.result(values)

    once, shapes = traced(features, batch)
    return Split(shapes, once, rest)


class Opened(NamedTuple):
    """A function as the operations it consists of, with everything in it by number.

    Attributes:
      steps: in order.
      inputs: numbers of its arguments' arrays.
      consts: values by number.
      outputs: numbers of its results; a literal by value.
      structure: of its result.
    """

    steps: list[Step]
    inputs: list[int]
    consts: dict[int, Any]
    outputs: list[Any]
    structure: Any

    def result(self, values: dict[int, Any]) -> Any:
        """The function's result, once all steps are evaluated."""
        return jax.tree.unflatten(self.structure, [values[x] if isinstance(x, int) else x.val for x in self.outputs])


def opened(function: Callable[..., Any], *arguments: Any) -> Opened:
    """The function, traced with these arguments; functions compiled within it lie open too."""
    jaxpr, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
    numbers = itertools.count()
    inputs = [next(numbers) for _ in jaxpr.jaxpr.invars]
    consts: dict[int, Any] = {}
    steps, outputs = inlined(jaxpr, inputs, consts, numbers)
    return Opened(steps, inputs, consts, outputs, jax.tree.structure(shape))


def _is_heavy(equation: Any) -> bool:
    inside = (each for value in equation.params.values() for each in getattr(value, "eqns", ()))
    return equation.primitive.name in HEAVY or any(map(_is_heavy, inside))


def inlined(closed: Any, inputs: list[Any], consts: dict[int, Any], numbers: Any) -> tuple[list[Step], list[Any]]:
    """The equations of a jaxpr, those of the functions compiled within it in their places, and its outputs.

    Constants are numbered too, and go to ``consts``.
    """
    jaxpr, steps = closed.jaxpr, []
    number_of = dict(zip(jaxpr.invars, inputs, strict=True))
    for variable, value in zip(jaxpr.constvars, closed.consts, strict=True):
        number_of[variable] = next(numbers)
        consts[number_of[variable]] = value

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, core.Literal) else number_of[atom]

    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        if equation.primitive.name in INLINED:
            inside, results = inlined(equation.params["jaxpr"], operands, consts, numbers)
            steps += inside
        else:
            results = [next(numbers) for _ in equation.outvars]
            steps.append(Step(equation, operands, results))
        number_of.update(zip(equation.outvars, results, strict=True))
    return steps, [read(atom) for atom in jaxpr.outvars]


def evaluated(steps: list[Step], values: dict[int, Any]) -> dict[int, Any]:
    """Those values and the results of the steps, by number."""
    for equation, operands, results in steps:
        found = equation.primitive.get_bind_params(equation.params)
        functions, params = (
            found if isinstance(found, tuple) else ((), found)
        )  # since JAX 0.12 functions are among them
        read = [values[x] if isinstance(x, int) else x.val for x in operands]
        out = equation.primitive.bind(*functions, *read, **params)
        values |= dict(zip(results, out if equation.primitive.multiple_results else [out], strict=True))
    return values
