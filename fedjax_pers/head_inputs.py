"""What enters the head of a model: the features of any model, read on the way through its loss or its metrics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from fedjax_pers.paths import flatten
from fedjax_pers.per_example import Step, evaluated, opened


def with_head_input(function: Callable[..., Any], head: Collection[str]) -> Callable[..., tuple[Any, jax.Array]]:
    """The same function, which also gives the features: what is multiplied with the head's weights.

    They are found in the function's jaxpr, where leaves of the head first meet the batch. Nothing is computed twice,
    and gradients pass through the features.

    Example:
      >>> import jax.numpy as jnp
      >>> variables, batch = {"body": jnp.full((1, 2), 3.0), "head": jnp.ones((2, 4))}, {"x": jnp.ones((5, 1))}
      >>> model = lambda variables, batch: batch["x"] @ variables["body"] @ variables["head"]
      >>> outputs, features = with_head_input(model, {"head"})(variables, batch)
      >>> outputs.shape, features.shape, features[0].tolist()
      ((5, 4), (5, 2), [3.0, 3.0])

    Args:
      function: ``function(variables, batch, *rest)``, for example ``task.loss`` or ``task.metrics``.
      head: paths of the head's leaves.

    Returns:
      ``observed(variables, batch, *rest) -> (result, features [batch, features])``; ValueError where the first
      operation on the head is no product of one such array with weights.
    """

    def observed(variables: Any, batch: Any, *rest: Any) -> tuple[Any, jax.Array]:
        arguments = (variables, batch, *rest)
        whole = opened(function, *arguments)
        steps, inputs = whole.steps, whole.inputs
        paths, examples = list(flatten(variables)), jax.tree.leaves(batch)
        of_head = {number for number, path in zip(inputs, paths, strict=False) if path in head}
        of_batch = set(inputs[len(paths) : len(paths) + len(examples)])
        place = _entering(steps, of_head, of_batch, examples[0].shape[0])
        values = evaluated(steps, whole.consts | dict(zip(inputs, jax.tree.leaves(arguments), strict=True)))
        return whole.result(values), values[place]

    return observed


def _entering(steps: Sequence[Step], of_head: set[int], of_batch: set[int], rows: int) -> int:
    """The number of the value that enters the head; both sets grow by what is made of their members."""
    for step in steps:
        read = {x for x in step.operands if isinstance(x, int)}
        if read & of_head and read & of_batch:
            return _checked(step, read & of_batch, rows)
        for made in (of_head, of_batch):
            if read & made:
                made.update(step.results)
    raise ValueError("head: its leaves never meet the examples; expected the last dense layer of the model")


def _checked(step: Step, entering: set[int], rows: int) -> int:
    shapes = [x.aval.shape for x, n in zip(step.equation.invars, step.operands, strict=True) if n in entering]
    name = step.equation.primitive.name
    if name != "dot_general" or len(shapes) != 1 or len(shapes[0]) != 2 or shapes[0][0] != rows:
        raise ValueError(
            f"head: its first operation is {name} on examples {shapes}; expected the product of one array "
            f"[batch, features] with weights, which a dense last layer is, so that features can be read"
        )
    return entering.pop()
