"""How good a model is on a client's rows: the mean of every metric, and means of examples that count."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pers.base import Array, Context, Parts, Task
from fedjax_pers.batches import batch_shapes, sweep
from fedjax_pers.checks import require

EVALUATION_BATCH = 64


def weighted_mean(values: Array, weight: Array) -> Array:
    """``sum(weight * values) / sum(weight)``, and 0 with a gradient of 0 where no weight is positive.

    Example:
      >>> weighted_mean(jnp.array([1.0, 2.0, 9.0]), jnp.array([1.0, 1.0, 0.0])).item()
      1.5
      >>> weighted_mean(jnp.array([jnp.nan]), jnp.array([0.0])).item()
      0.0

    Args:
      values: ``[batch]``; not looked at where the weight is 0.
      weight: ``[batch]``, not negative.
    """
    weight = weight.astype(values.dtype)
    total = weight.sum()
    counted = jnp.where(weight > 0, values, 0)
    return (weight * counted).sum() / jnp.where(total > 0, total, 1)


def mean_metrics(
    task: Task, variables: Any, data: dict[str, Array], start: Array, size: Array, *, batch_size: int = EVALUATION_BATCH
) -> dict[str, Array]:
    """Mean metrics of one model on the rows ``start .. start + size - 1`` of a pool; NaN over no rows."""
    zero = jnp.zeros((), jnp.int32)
    key = jax.random.key(0)  # the sweep is in order, nothing is drawn
    context = Context(data, start, size, key, key, zero, zero, Parts({}, {}, {}))
    return metrics_of_client(task, variables, context, batch_size=batch_size)


def metrics_of_client(
    task: Task, variables: Any, context: Context, *, batch_size: int = EVALUATION_BATCH
) -> dict[str, Array]:
    """Mean metrics of one model on a client's examples; NaN over none."""

    def add(sums: dict[str, Array], batch: dict[str, Array]) -> dict[str, Array]:
        # Select, then scale: the metrics of a padding row may be anything.
        used = batch["weight"] > 0
        found = task.metrics(variables, batch)
        return {name: sums[name] + jnp.where(used, found[name], 0).astype(jnp.float32).sum() for name in sums}

    names = jax.eval_shape(task.metrics, variables, batch_shapes(context, batch_size))
    for name, value in names.items():
        if value.shape != (batch_size,):
            raise ValueError(f"task.metrics[{name!r}]: found shape {value.shape}; expected [batch] = ({batch_size},)")
    sums = sweep(add, {name: jnp.zeros((), jnp.float32) for name in names}, context, batch_size=batch_size)
    size = context.size
    return {name: jnp.where(size > 0, total / jnp.maximum(size, 1), jnp.nan) for name, total in sums.items()}


def mean_loss(task: Task, variables: Any, context: Context) -> Array:
    """The mean loss of a model, in evaluation mode, over a client's examples; 0 for a client without any."""
    shapes = jax.eval_shape(task.metrics, variables, batch_shapes(context, 1))
    require("loss" in shapes, f"task.metrics: found {sorted(shapes)}; this method needs 'loss' among them")
    loss = metrics_of_client(task, variables, context)["loss"]
    return jnp.where(context.size > 0, loss, 0)
