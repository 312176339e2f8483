"""FedBN: normalisation layers stay at home."""

from __future__ import annotations

from typing import Any

from fedjax_pers.aggregators import mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Task
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import by_role
from fedjax_pers.local import reestimate, train
from fedjax_pers.paths import SelectorLike
from fedjax_pers.presets import norm


@register(
    "fedbn",
    title="FedBN",
    paper='Li, Jiang, Zhang, Kamp, Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", '
    "ICLR 2021, arXiv:2102.07623",
    family="decoupling",
    personal="scale, bias and running statistics of normalisation layers",
    reduction="a model without normalisation layers (personal = nothing): FedAvg",
)
def fedbn(
    task: Task,
    *,
    lr: float = 0.1,
    personal: SelectorLike = norm(),
    newcomer_passes: int = 20,
    weights: str = "examples",
    **local: Any,
) -> Algorithm:
    """FedAvg on everything but the normalisation layers, which each client keeps whole.

    Args:
      task: model and loss. A model without normalisation layers is an error: FedBN would silently be FedAvg, which
        ``personal=nothing`` asks for in so many words.
      lr: step size.
      personal: the normalisation layers, by type as well as by name.
      newcomer_passes: forward passes by which an unseen client estimates its running statistics.
      weights: ``"examples"``, or ``"uniform"`` as in the paper.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: weights by examples by default; an unseen client starts from the initial scale and bias
    (the paper does not say).
    """
    return compose(
        task,
        layout=by_role(personal=personal),
        client=train(lr, **local),
        aggregator=mean(weights=weights),
        newcomer=reestimate(passes=newcomer_passes, batch_size=local.get("batch_size", 32)),
    )
