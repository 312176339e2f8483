"""Ditto: a personal model tied to the global one."""

from __future__ import annotations

from typing import Any

from fedjax_pers.aggregators import mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Task
from fedjax_pers.checks import number
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import Statistics, twin
from fedjax_pers.local import copy_shared, for_epochs, phases, train
from fedjax_pers.objectives import add, pull_to_shared, task_loss


@register(
    "ditto",
    title="Ditto",
    paper='Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, '
    "arXiv:2012.04221",
    family="regularised",
    personal="a second whole model",
    reduction="the global model is FedAvg's for every lam; lam = 0: the personal model is local training",
)
def ditto(
    task: Task,
    *,
    lr: float = 0.1,
    personal_lr: float = 0.1,
    lam: float = 1.0,
    personal_epochs: int | None = None,
    newcomer_epochs: int = 5,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """FedAvg, and beside it a model of each client's own: ``v <- v - eta (grad f_i(v) + lam (v - w))``.

    ``w`` is the global model as received this round, never the locally updated one.

    Args:
      task: model and loss.
      lr: step size of the global model.
      personal_lr: step size of the personal model; ``personal_lr * (lam + curvature) < 2`` or it diverges.
      lam: strength of the tie, at least 0.
      personal_epochs: passes of the personal model; as many as the global one's where ``None``.
      newcomer_epochs: passes of an unseen client, from the global model, before it predicts.
      weights: as in FedAvg.
      statistics: treatment of the global model's running statistics.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: ``lam`` is one value for all clients (the paper also chooses it per client on validation
    data); personal models start from the common initial model.
    """
    number("lam", lam, low=0)
    own = {"objective": add(task_loss("own"), pull_to_shared(lam)), "roles": "personal"}
    schedule = local if personal_epochs is None else {**local, "epochs": personal_epochs, "steps": None}
    return compose(
        task,
        layout=twin(statistics=statistics),
        client=phases(
            train(lr, **local, objective=task_loss("shared"), roles="shared"),
            train(personal_lr, **schedule, **own),
        ),
        aggregator=mean(weights=weights),
        newcomer=phases(
            copy_shared,
            train(personal_lr, **for_epochs(newcomer_epochs, local), **own),
        ),
    )
