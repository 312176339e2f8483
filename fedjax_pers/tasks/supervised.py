"""From a model and a criterion to a task, for every adapter alike: weighted mean, padding, running statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pers.base import Array, Batch, Example, Leaves, Task
from fedjax_pers.checks import require
from fedjax_pers.judging import weighted_mean
from fedjax_pers.paths import Selector, as_selector, flatten, nothing
from fedjax_pers.tasks.criteria import Criterion, as_criterion
from fedjax_pers.tasks.examples import ROWS, as_example, explained, shapes


def outside_params(variables: Mapping[str, Any]) -> Selector:
    """The leaves of every collection but ``params``: what adapters track.

    Example:
      >>> outside_params({"params": {"scale": 1.0}, "batch_stats": {"mean": 0.0}, "state": {}})
      Selector(batch_stats/**)
    """
    names = [name for name, leaves in variables.items() if name != "params" and flatten(leaves)]
    return as_selector([f"{name}/**" for name in names])


def supervised(
    init: Callable[[Array], Any],
    apply: Callable[[Any, Batch, Array | None], tuple[Any, Any]],
    criterion: str | Criterion = "cross_entropy",
    *,
    example: Any,
    statistics: Selector = nothing,
    kinds: tuple[tuple[str, str], ...] = (),
    num_classes: int | None = None,
) -> Task:
    """A task from a model given as two pure functions: what all adapters build on, and the way in for plain JAX.

    ``loss = sum_i weight_i criterion_i / sum_i weight_i``; a batch in which nothing has weight has loss 0, gradient 0,
    and leaves running statistics as they are. A batch without ``"weight"`` counts every row once.

    Example:
      >>> def init(key):
      ...     return {"w": jnp.zeros((3, 2))}
      >>> def apply(variables, batch, key):
      ...     return batch["x"] @ variables["w"], {}
      >>> task = supervised(init, apply, example=(("x", (3,), "float32"), ("y", (), "int32")))
      >>> loss, _ = task.loss(init(None), {"x": jnp.ones((4, 3)), "y": jnp.array([0, 1, 1, 0])}, jax.random.key(0))
      >>> round(loss.item(), 3), task.num_classes
      (0.693, 2)

    Args:
      init: ``init(key) -> variables``, any pytree of arrays.
      apply: ``apply(variables, batch, key) -> (outputs, tracked)``: in training mode where there is a key, else in
        evaluation mode. The batch has a weight. ``tracked`` is ``{}`` or the new value of leaves that change without a
        gradient, a dict of the same nesting as the variables, or flat by path.
      criterion: ``"cross_entropy"``, ``"squared_error"``, ``"binary_cross_entropy"``, or a :class:`Criterion`.
      example: field, shape and dtype of one example (``Federation.example``).
      statistics: exactly the leaves of ``tracked``.
      kinds: types of layers, see :class:`fedjax_pers.base.Task`.
      num_classes: labels lie below; by default the width of the outputs where the criterion has classes.

    Raises:
      ValueError: the model fails on such examples, its outputs do not suit the criterion or ``num_classes``, or what it
        tracks are not the leaves that ``statistics`` selects.
    """
    criterion, example = as_criterion(criterion), as_example(example)

    def start(key: Array) -> Any:
        return jax.tree.map(_strong, init(key))

    def forward(variables: Any, batch: Batch, key: Array | None = None) -> tuple[Any, Leaves]:
        batch = _weighted(batch)
        outputs, tracked = apply(variables, batch, key)
        return outputs, _kept_if_empty(variables, tracked, batch["weight"])

    def loss(variables: Any, batch: Batch, key: Array | None) -> tuple[Array, Leaves]:
        batch = _weighted(batch)
        outputs, tracked = forward(variables, batch, key)
        return weighted_mean(criterion.loss(outputs, batch), batch["weight"]), tracked

    def metrics(variables: Any, batch: Batch) -> dict[str, Array]:
        batch = _weighted(batch)
        outputs, _ = forward(variables, batch)
        return dict(criterion.metrics(outputs, batch))

    leaves, tracked, outputs = _traced(start, forward, criterion, example)
    _check_statistics(statistics, leaves, tracked)
    classes = _checked_classes(num_classes, criterion.classes(outputs), outputs)
    return Task(start, loss, metrics, forward, criterion.loss, statistics, example, kinds, classes)


def _strong(leaf: Any) -> Array:
    """An array whose dtype is its own: a weak one would change, and compile anew, at the first step."""
    leaf = jnp.asarray(leaf)
    return leaf.astype(leaf.dtype)


def _weighted(batch: Batch) -> Batch:
    batch = jax.tree.map(jnp.asarray, dict(batch))
    rows = len(next(iter(batch.values())))
    return {"weight": jnp.ones(rows, jnp.float32), **batch}


def _kept_if_empty(variables: Any, tracked: Any, weight: Array) -> Leaves:
    """The tracked leaves by path, in their own dtype; unchanged by a batch in which nothing has weight."""
    found = flatten(tracked)
    if not found:
        return {}
    before = flatten(variables)
    strangers = sorted(set(found) - set(before))
    require(not strangers, f"tracked: found {strangers}, which are no leaves of the variables")
    some = (weight > 0).any()
    return {path: jnp.where(some, jnp.asarray(x, before[path].dtype), before[path]) for path, x in found.items()}


def _traced(
    init: Callable[..., Any], apply: Callable[..., Any], criterion: Criterion, example: Example
) -> tuple[Leaves, Leaves, Any]:
    """Shapes of the leaves, of what training tracks and of the outputs; nothing is computed."""
    batch, key = shapes(example), jax.random.key(0)
    with explained("initialising the model", example):
        variables = jax.eval_shape(init, key)
    with explained("the model in training", example):
        _, tracked = jax.eval_shape(apply, variables, batch, key)
    with explained("the model in evaluation", example):
        outputs, _ = jax.eval_shape(apply, variables, batch)
    with explained("the criterion", example):
        losses = jax.eval_shape(criterion.loss, outputs, batch)
        scores = jax.eval_shape(criterion.metrics, outputs, batch)
    for name, score in {"the loss": losses, **scores}.items():
        require(score.shape == (ROWS,), f"criterion: found {name} of shape {score.shape}; expected [batch], ({ROWS},)")
    return flatten(variables), tracked, outputs


def _check_statistics(statistics: Selector, leaves: Leaves, tracked: Leaves) -> None:
    selected = statistics.select(leaves)
    if selected != set(tracked):
        raise ValueError(
            f"statistics: selects {sorted(selected)}, but training tracks {sorted(tracked)}; expected the same leaves"
        )
    for path, x in tracked.items():
        require(
            x.shape == leaves[path].shape,
            f"tracked: found {path} of shape {x.shape}; expected {leaves[path].shape} as in the variables",
        )


def _checked_classes(wanted: int | None, found: int | None, outputs: Any) -> int | None:
    if wanted is not None and found is None:
        raise ValueError(f"num_classes: found {wanted}, but for this criterion y is no class; leave it out")
    if wanted not in (None, found):
        raise ValueError(
            f"num_classes: found {wanted}, but the model tells {found} classes apart "
            f"(its outputs are {outputs.shape} for {ROWS} examples)"
        )
    return found
