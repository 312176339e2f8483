"""How good a model is on a client's rows: the mean of every metric."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pers.base import Array, Context, Parts, Task
from fedjax_pers.batches import batch_shapes, sweep
from fedjax_pers.checks import require

EVALUATION_BATCH = 64


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
