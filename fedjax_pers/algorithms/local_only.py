"""Local training alone: the baseline that every personalised method must beat."""

from __future__ import annotations

from typing import Any

from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Task
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import by_role
from fedjax_pers.local import for_epochs, train
from fedjax_pers.paths import everything


@register(
    "local_only",
    title="Local only",
    paper="baseline without communication",
    family="baseline",
    personal="the whole model",
    reduction="FedPer with every leaf personal",
)
def local_only(task: Task, *, lr: float = 0.1, newcomer_epochs: int = 5, **local: Any) -> Algorithm:
    """Every client trains a model of its own from a common start; nothing is sent.

    Args:
      task: model and loss.
      lr: step size.
      newcomer_epochs: passes that a client not seen in training makes over its data before it predicts.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: there is none; a client trains only in rounds for which it is sampled.
    """
    newcomer = train(lr, **for_epochs(newcomer_epochs, local))
    return compose(task, layout=by_role(personal=everything), client=train(lr, **local), newcomer=newcomer)
