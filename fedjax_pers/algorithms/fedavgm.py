"""FedAvgM: momentum on the server."""

from __future__ import annotations

from typing import Any

import optax

from fedjax_pers.aggregators import mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Task
from fedjax_pers.checks import number
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import Statistics, by_role
from fedjax_pers.local import train


@register(
    "fedavgm",
    title="FedAvgM",
    paper='Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual '
    'Classification", 2019, arXiv:1909.06335',
    family="server optimiser",
    personal="nothing",
    reduction="beta = 0, server_lr = 1: FedAvg",
)
def fedavgm(
    task: Task,
    *,
    lr: float = 0.1,
    server_lr: float = 1.0,
    beta: float = 0.9,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """FedAvg with a heavy ball on the server: ``m <- beta m + delta``, ``w <- w + server_lr m``.

    Args:
      task: model and loss.
      lr: step size of the clients.
      server_lr: step size of the server.
      beta: momentum of the server.
      weights: as in FedAvg.
      statistics: running statistics never see the server's momentum.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: none.
    """
    number("server_lr", server_lr, low=0)
    number("beta", beta, 0, 1)
    server = mean(optax.sgd(server_lr, momentum=beta), weights=weights)
    return compose(task, layout=by_role(statistics=statistics), client=train(lr, **local), aggregator=server)
