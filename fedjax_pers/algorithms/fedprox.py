"""FedProx."""

from __future__ import annotations

from typing import Any

from fedjax_pers.aggregators import mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Task
from fedjax_pers.checks import number
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import Statistics, by_role
from fedjax_pers.local import train
from fedjax_pers.objectives import add, proximal, task_loss


@register(
    "fedprox",
    title="FedProx",
    paper='Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", '
    "MLSys 2020, arXiv:1812.06127",
    family="regularised",
    personal="nothing",
    reduction="mu = 0: FedAvg",
)
def fedprox(
    task: Task,
    *,
    lr: float = 0.1,
    mu: float = 0.1,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """FedAvg whose clients minimise ``f_i(y) + mu / 2 * |y - w|^2``, ``w`` being the model received this round.

    Args:
      task: model and loss.
      lr: step size.
      mu: strength of the proximal term, at least 0.
      weights: as in FedAvg.
      statistics: as in FedAvg.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: clients are sampled uniformly and weighted by examples (the paper samples in proportion
    to examples and averages uniformly); every client does the same number of epochs.
    """
    number("mu", mu, low=0)
    client = train(lr, objective=add(task_loss(), proximal(mu)), **local)
    return compose(task, layout=by_role(statistics=statistics), client=client, aggregator=mean(weights=weights))
