"""FedAvg: one model for everyone."""

from __future__ import annotations

from typing import Any

from fedjax_pers.aggregators import mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Task
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import Statistics, by_role
from fedjax_pers.local import train


@register(
    "fedavg",
    title="FedAvg",
    paper='McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from '
    'Decentralized Data", AISTATS 2017, arXiv:1602.05629',
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
