"""FedBABU: the head rests until the end."""

from __future__ import annotations

from typing import Any

from fedjax_pers.aggregators import mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Task
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import Statistics, by_role
from fedjax_pers.local import of_fine_tuning, train
from fedjax_pers.paths import SelectorLike, everything
from fedjax_pers.presets import head


@register(
    "fedbabu",
    title="FedBABU",
    paper='Oh, Kim, Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022, '
    "arXiv:2106.06042",
    family="decoupling",
    personal="nothing between rounds; every client fine-tunes a copy before it predicts",
    reduction="nothing frozen, tune_epochs = 0: FedAvg",
)
def fedbabu(
    task: Task,
    *,
    lr: float = 0.1,
    frozen: SelectorLike = head(1),
    tune_lr: float = 0.1,
    tune_epochs: int = 5,
    tune: SelectorLike = everything,
    weights: str = "uniform",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """The head keeps its common random start while the body is trained and averaged; then each client fine-tunes.

    Args:
      task: model and loss.
      lr: step size of the body.
      frozen: the head, never trained nor sent in federated training.
      tune_lr: step size of fine-tuning.
      tune_epochs: passes of fine-tuning before a client predicts; 0 gives the common model.
      tune: the leaves that are fine-tuned; the head too by default.
      weights: ``"uniform"`` as in the paper, or ``"examples"``.
      statistics: treatment of running statistics that ``frozen`` does not name.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: running statistics are averaged (the paper's models normalise without them); no schedule
    of step sizes; defaults are those of small data sets.
    """
    schedule = of_fine_tuning(local)
    return compose(
        task,
        layout=by_role(frozen=frozen, statistics=statistics),
        client=train(lr, **local),
        aggregator=mean(weights=weights),
        adapt=train(tune_lr, epochs=tune_epochs, leaves=tune, **schedule),
    )
