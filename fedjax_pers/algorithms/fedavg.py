"""FedAvg and FedAvg followed by fine-tuning."""

from __future__ import annotations

from typing import Any

from fedjax_pers.aggregators import mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Task
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import Statistics, by_role
from fedjax_pers.local import train
from fedjax_pers.paths import SelectorLike, everything

_PAPER = (
    'McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from '
    'Decentralized Data", AISTATS 2017, arXiv:1602.05629'
)


@register(
    "fedavg",
    title="FedAvg",
    paper=_PAPER,
    family="baseline",
    personal="nothing",
    reduction="one client: sequential local training",
)
def fedavg(
    task: Task, *, lr: float = 0.1, weights: str = "examples", statistics: Statistics = "average", **local: Any
) -> Algorithm:
    """One global model: local SGD, then the mean of the clients' differences weighted by examples.

    ``w <- w + sum_i p_i (w_i - w)``, ``p_i = n_i / sum_j n_j`` over the round's clients.

    Args:
      task: model and loss.
      lr: step size of the clients.
      weights: ``"examples"`` or ``"uniform"``.
      statistics: running statistics are ``"average"``d, kept ``"local"``, or ``"ignore"``d.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last`` of :func:`fedjax_pers.train`.

    Differences from the paper: none in the update; written as base plus mean difference, which differs from the mean of
    models by rounding.
    """
    return compose(
        task, layout=by_role(statistics=statistics), client=train(lr, **local), aggregator=mean(weights=weights)
    )


@register(
    "fedavg_ft",
    title="FedAvg + fine-tuning",
    paper=_PAPER + "; fine-tuning as in Yu, Bagdasaryan, Shmatikov, arXiv:2002.04758, 2020",
    family="baseline",
    personal="nothing between rounds; every client fine-tunes a copy before it predicts",
    reduction="tune_epochs = 0: FedAvg",
)
def fedavg_ft(
    task: Task,
    *,
    lr: float = 0.1,
    tune_lr: float = 0.1,
    tune_epochs: int = 5,
    tune: SelectorLike = everything,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """FedAvg; each client then trains a copy of the global model on its own training data before it predicts.

    Args:
      task: model and loss.
      lr: step size of the clients in training.
      tune_lr: step size of fine-tuning.
      tune_epochs: passes of fine-tuning; 0 gives the global model.
      tune: the leaves that are fine-tuned, for instance ``head(1)``.
      weights: as in FedAvg.
      statistics: as in FedAvg.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: the number of epochs is one setting for all clients, chosen on validation data.
    """
    schedule = {name: local[name] for name in ("batch_size", "optimizer") if name in local}
    return compose(
        task,
        layout=by_role(statistics=statistics),
        client=train(lr, **local),
        aggregator=mean(weights=weights),
        adapt=train(tune_lr, epochs=tune_epochs, leaves=tune, **schedule),
    )
