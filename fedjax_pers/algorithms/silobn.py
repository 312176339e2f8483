"""SiloBN: only the running statistics stay at home."""

from __future__ import annotations

from typing import Any

from fedjax_pers.aggregators import mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Task
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import by_role
from fedjax_pers.local import reestimate, train


@register(
    "silobn",
    title="SiloBN",
    paper='Andreux, du Terrail, Beguier, Tramel, "Siloed Federated Learning for Multi-Centric Histopathology '
    'Datasets", DART@MICCAI 2020, arXiv:2008.07424',
    family="decoupling",
    personal="running statistics of batch normalisation",
    reduction="a model without running statistics: FedAvg",
)
def silobn(
    task: Task, *, lr: float = 0.1, newcomer_passes: int = 20, weights: str = "examples", **local: Any
) -> Algorithm:
    """FedAvg in which scale and bias of batch normalisation are shared and mean and variance stay with the client.

    Args:
      task: model and loss.
      lr: step size.
      newcomer_passes: forward passes by which an unseen client estimates its running statistics.
      weights: ``"examples"`` or ``"uniform"``.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: none.
    """
    return compose(
        task,
        layout=by_role(statistics="local"),
        client=train(lr, **local),
        aggregator=mean(weights=weights),
        newcomer=reestimate(passes=newcomer_passes, batch_size=local.get("batch_size", 32)),
    )
