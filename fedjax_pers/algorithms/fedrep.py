"""FedRep: first the head, then the representation."""

from __future__ import annotations

from typing import Any

from fedjax_pers.aggregators import mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Task
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import Statistics, by_role
from fedjax_pers.local import phases, train
from fedjax_pers.paths import SelectorLike
from fedjax_pers.presets import head


@register(
    "fedrep",
    title="FedRep",
    paper='Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized Federated '
    'Learning", ICML 2021, arXiv:2102.07078',
    family="decoupling",
    personal="the head",
    reduction="nothing personal: FedAvg; head_epochs = 0: FedBABU's training",
)
def fedrep(
    task: Task,
    *,
    lr: float = 0.1,
    personal: SelectorLike = head(1),
    head_epochs: int = 5,
    newcomer_epochs: int = 5,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """The client trains its head with the body fixed, then the body with the new head fixed; the body is averaged.

    Args:
      task: model and loss.
      lr: step size of both phases.
      personal: the head.
      head_epochs: passes of the first phase; they are not taken from ``epochs``, those of the body.
      newcomer_epochs: passes over its data that an unseen client trains its head for before it predicts.
      weights: as in FedAvg.
      statistics: treatment of running statistics that ``personal`` does not name.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``; the optimiser starts
        afresh in each phase.

    Differences from the paper: the mean is weighted by examples by default (the paper's is uniform, its clients being
    of equal size); defaults are those of small data sets, the paper's are 10 head epochs, momentum 0.5, batch 10.
    """
    schedule = {**local, "steps": None}
    first = train(lr, **{**schedule, "epochs": head_epochs}, roles="personal", order="head")
    newcomer = train(lr, **{**schedule, "epochs": newcomer_epochs}, roles="personal")
    return compose(
        task,
        layout=by_role(personal=personal, statistics=statistics),
        client=phases(first, train(lr, **local, roles="shared")),
        aggregator=mean(weights=weights),
        newcomer=newcomer,
    )
