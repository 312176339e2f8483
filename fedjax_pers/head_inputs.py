"""What enters the head of a model: the features of any model, read on the way through its loss or its metrics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax

from fedjax_pers.base import Batch, Task
from fedjax_pers.checks import require
from fedjax_pers.paths import SelectorLike, as_selector, flatten
from fedjax_pers.per_example import Opened, Step, evaluated, opened
from fedjax_pers.presets import model_of


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
        met = _met(function, head, variables, batch, rest)
        values = evaluated(met.whole.steps, met.given)
        return met.whole.result(values), values[met.place]

    return observed


def from_head_input(function: Callable[..., Any], head: Collection[str]) -> Callable[..., Any]:
    """The same function with other features in the place of those that enter the head.

    Example:
      >>> import jax.numpy as jnp
      >>> variables, batch = {"body": jnp.full((1, 2), 3.0), "head": jnp.ones((2, 4))}, {"x": jnp.ones((5, 1))}
      >>> model = lambda variables, batch: batch["x"] @ variables["body"] @ variables["head"]
      >>> from_head_input(model, {"head"})(variables, batch, jnp.zeros((5, 2))).tolist()[0]
      [0.0, 0.0, 0.0, 0.0]

    Args:
      function: as of :func:`with_head_input`.
      head: paths of the head's leaves.

    Returns:
      ``changed(variables, batch, features, *rest) -> result``.
    """

    def changed(variables: Any, batch: Any, features: jax.Array, *rest: Any) -> Any:
        met = _met(function, head, variables, batch, rest)
        before, after = met.whole.steps[: met.meets], met.whole.steps[met.meets :]
        values = evaluated(before, met.given) | {met.place: features}
        return met.whole.result(evaluated(after, values))

    return changed


def head_and_features(task: Task, head: SelectorLike) -> tuple[frozenset[str], int]:
    """Paths of a classifier's head, and how many features enter it; ValueError where that cannot be told."""
    labels = {name: shape for name, shape, _ in task.example or ()}.get("y")
    require(
        task.num_classes is not None and labels == (),
        f"task: found num_classes {task.num_classes}, labels y of shape {labels}; features of classes need classes, "
        "and labels of shape (), one an example",
    )
    variables, key = jax.eval_shape(task.init, jax.random.key(0)), jax.random.key(0)
    leaves = flatten(variables)
    names = as_selector(head).select(leaves, model_of(task, variables))
    require(names < set(leaves), f"head: found all leaves {sorted(leaves)}; a body below the head is needed")
    rows = 2
    batch: Batch = {name: jax.ShapeDtypeStruct((rows, *shape), dtype) for name, shape, dtype in task.example or ()}
    batch["weight"] = jax.ShapeDtypeStruct((rows,), "float32")
    jax.eval_shape(with_head_input(task.loss, names), variables, batch, key)
    _, features = jax.eval_shape(with_head_input(task.metrics, names), variables, batch)
    return names, features.shape[1]


class _Met(NamedTuple):
    """An opened function and its values, the value that enters the head, and the step at which it does."""

    whole: Opened
    given: dict[int, Any]
    place: int
    meets: int


def _met(
    function: Callable[..., Any], head: Collection[str], variables: Any, batch: Any, rest: tuple[Any, ...]
) -> _Met:
    arguments = (variables, batch, *rest)
    whole = opened(function, *arguments)
    paths, examples = list(flatten(variables)), jax.tree.leaves(batch)
    of_head = {number for number, path in zip(whole.inputs, paths, strict=False) if path in head}
    of_batch = set(whole.inputs[len(paths) : len(paths) + len(examples)])
    place, meets = _entering(whole.steps, of_head, of_batch, examples[0].shape[0])
    given = whole.consts | dict(zip(whole.inputs, jax.tree.leaves(arguments), strict=True))
    return _Met(whole, given, place, meets)


def _entering(steps: Sequence[Step], of_head: set[int], of_batch: set[int], rows: int) -> tuple[int, int]:
    """The value that enters the head, and at which step, by number; both sets grow by what is made of their members."""
    for number, step in enumerate(steps):
        read = {x for x in step.operands if isinstance(x, int)}
        if read & of_head and read & of_batch:
            return _checked(step, read & of_batch, rows), number
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
