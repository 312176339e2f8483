"""Per-client evaluation of the models that a method personalises."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pers.base import Array, Cohort, Task
from fedjax_pers.judging import EVALUATION_BATCH, mean_metrics


def evaluate(task: Task, personalised: Any, cohort: Cohort, *, batch_size: int = EVALUATION_BATCH) -> dict[str, Array]:
    """The mean of every metric over each client's examples, ``{name: [clients]}``, and ``"examples"``.

    A client without examples has NaN there: it has no accuracy, not an accuracy of 0.

    Args:
      task: whose ``metrics`` are used.
      personalised: variables ``[clients, ...]``, as ``algorithm.personalize`` returns them.
      cohort: the same clients, with the examples to judge on (for instance the test split).
    """

    def one(variables: Any, start: Array, size: Array) -> dict[str, Array]:
        return mean_metrics(task, variables, cohort.data, start, size, batch_size=batch_size)

    size = jnp.where(cohort.valid, cohort.size, 0)
    table = jax.vmap(one)(personalised, cohort.start, size)
    return {**table, "examples": size}
