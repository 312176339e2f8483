"""In which order a function uses the leaves of its variables, read from its jaxpr; the function is never run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

from fedjax_pers.paths import flatten


class _Value(NamedTuple):
    """What an intermediate value was made from: the batch or not, and leaves that have not met the batch yet."""

    data: bool = False
    leaves: frozenset[int] = frozenset()


class _Uses(NamedTuple):
    """Position, in the walk, at which a leaf first meets the batch, and at which it first meets another leaf."""

    batch: dict[int, int]
    leaf: dict[int, int]
    clock: list[int]


def model_order(function: Callable[[Any, Any], Any], variables: Any, batch: Any) -> tuple[str, ...]:
    """Paths of the leaves of ``variables`` in the order in which the forward pass first uses them.

    A leaf is used where it, or something made from it alone, first meets something made from the batch. So casting or
    normalising all weights up front, or multiplying two low-rank factors, does not change the order. Leaves that meet
    the batch in one and the same operation are ordered by when they met another leaf, then as in the tree, ``params``
    first. Leaves that do not meet the batch but reach the result come last; leaves without influence are left out.

    Example:
      >>> import jax.numpy as jnp
      >>> variables = {"a_head": jnp.ones((3, 2)), "body": jnp.ones((4, 3)), "unused": jnp.ones(1)}
      >>> model_order(lambda v, x: x @ v["body"] @ v["a_head"], variables, jnp.ones((5, 4)))
      ('body', 'a_head')

    Args:
      function: ``function(variables, batch)``; traced, with loops, branches and calls of compiled functions inside.
      variables: pytree of arrays or of ``jax.ShapeDtypeStruct``.
      batch: likewise.
    """
    names = list(flatten(variables))
    jaxpr = jax.make_jaxpr(function)(variables, batch).jaxpr
    values = [_Value(leaves=frozenset([i])) if i < len(names) else _Value(data=True) for i in range(len(jaxpr.invars))]
    uses = _Uses({}, {}, [0])
    results = _joined(_walk(jaxpr, values, uses))
    reached = uses.batch.keys() | uses.leaf.keys() | results.leaves
    never = uses.clock[0] + 1

    def rank(i: int) -> tuple[int, int, bool, int]:
        # Statistics of a weight itself (spectral normalisation) are used together with it and follow it.
        return uses.batch.get(i, never), uses.leaf.get(i, never), not names[i].startswith("params/"), i

    return tuple(names[i] for i in sorted(reached, key=rank))


def _joined(values: Sequence[_Value]) -> _Value:
    return _Value(any(value.data for value in values), frozenset().union(*(value.leaves for value in values)))


def _each_joined(*columns: Sequence[_Value]) -> list[_Value]:
    return [_joined(values) for values in zip(*columns, strict=True)]


def _walk(jaxpr: Any, inputs: Sequence[_Value], uses: _Uses) -> list[_Value]:
    """Values of the outputs, given those of the inputs; notes uses on the way."""
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(variable: Any) -> _Value:
        return _Value() if isinstance(variable, Literal) else known.get(variable, _Value())

    for equation in jaxpr.eqns:
        outputs = _apply(equation, [read(variable) for variable in equation.invars], uses)
        known.update(zip(equation.outvars, outputs, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _apply(equation: Any, inputs: list[_Value], uses: _Uses) -> list[_Value]:
    rule = {"scan": _scan, "while": _while, "cond": _cond}.get(equation.primitive.name)
    if rule:
        return rule(equation, inputs, uses)
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = _open(equation.params.get(name))
        if inner and len(inner.invars) == len(inputs) and len(inner.outvars) == len(equation.outvars):
            return _walk(inner, inputs, uses)
    return [_operate(inputs, uses)] * len(equation.outvars)


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _operate(inputs: Sequence[_Value], uses: _Uses) -> _Value:
    uses.clock[0] += 1
    met = _joined(inputs)
    if len(met.leaves) > max((len(value.leaves) for value in inputs), default=0):
        for leaf in met.leaves:
            uses.leaf.setdefault(leaf, uses.clock[0])
    if not met.data:
        return met
    for leaf in met.leaves:
        uses.batch.setdefault(leaf, uses.clock[0])
    return _Value(data=True)


def _settled(step: Callable[[list[_Value], _Uses], list[_Value]], carry: list[_Value]) -> list[_Value]:
    """The carry of a loop after any number of turns: what it was made from can only grow, so this ends."""
    while True:
        grown = _each_joined(carry, step(carry, _Uses({}, {}, [0])))
        if grown == carry:
            return carry
        carry = grown


def _scan(equation: Any, inputs: list[_Value], uses: _Uses) -> list[_Value]:
    body = _open(equation.params["jaxpr"])
    # Only scanned inputs and stacked outputs have another rank outside; how JAX stores the counts differs by version.
    last = _same_rank(equation.invars, body.invars)
    carried = _same_rank(equation.outvars, body.outvars)
    first = last - carried

    def turn(carry: list[_Value], uses: _Uses) -> list[_Value]:
        return _walk(body, [*inputs[:first], *carry, *inputs[last:]], uses)

    return turn(_settled(lambda carry, uses: turn(carry, uses)[:carried], inputs[first:last]), uses)


def _same_rank(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    return sum(outer.aval.ndim == inner.aval.ndim for outer, inner in zip(outside, inside, strict=True))


def _while(equation: Any, inputs: list[_Value], uses: _Uses) -> list[_Value]:
    conditions, constants = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    test, body = _open(equation.params["cond_jaxpr"]), _open(equation.params["body_jaxpr"])
    for_test, for_body, start = inputs[:conditions], inputs[conditions:][:constants], inputs[conditions + constants :]

    def turn(carry: list[_Value], uses: _Uses) -> list[_Value]:
        decision = _walk(test, [*for_test, *carry], uses)
        return [_joined([value, *decision]) for value in _walk(body, [*for_body, *carry], uses)]

    return _each_joined(start, turn(_settled(turn, start), uses))


def _cond(equation: Any, inputs: list[_Value], uses: _Uses) -> list[_Value]:
    decision, *operands = inputs
    results = [_walk(_open(branch), operands, uses) for branch in equation.params["branches"]]
    return [_joined([decision, *values]) for values in zip(*results, strict=True)]
