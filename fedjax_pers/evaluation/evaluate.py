"""Per-client evaluation of the models that a method personalises."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pers.base import Array, Cohort, Context, Parts, Task
from fedjax_pers.batches import batch_shapes, sweep

EVALUATION_BATCH = 64


def evaluate(task: Task, personalised: Any, cohort: Cohort, *, batch_size: int = EVALUATION_BATCH) -> dict[str, Array]:
    """The mean of every metric over each client's examples, ``{name: [clients]}``, and ``"examples"``.

    A client without examples has NaN there: it has no accuracy, not an accuracy of 0.

    Args:
      task: whose ``metrics`` are used.
      personalised: variables ``[clients, ...]``, as ``algorithm.personalize`` returns them.
      cohort: the same clients, with the examples to judge on (for instance the test split).
    """

    def one(variables: Any, start: Array, size: Array) -> dict[str, Array]:
        return evaluate_one(task, variables, cohort.data, start, size, batch_size=batch_size)

    size = jnp.where(cohort.valid, cohort.size, 0)
    table = jax.vmap(one)(personalised, cohort.start, size)
    return {**table, "examples": size}


def evaluate_one(
    task: Task, variables: Any, data: dict[str, Array], start: Array, size: Array, *, batch_size: int = EVALUATION_BATCH
) -> dict[str, Array]:
    """Mean metrics of one model on the rows ``start .. start + size - 1`` of a pool."""
    zero = jnp.zeros((), jnp.int32)
    key = jax.random.key(0)  # the sweep is in order, nothing is drawn
    context = Context(data, start, size, key, key, zero, zero, Parts({}, {}, {}))

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
    return {name: jnp.where(size > 0, total / jnp.maximum(size, 1), jnp.nan) for name, total in sums.items()}
