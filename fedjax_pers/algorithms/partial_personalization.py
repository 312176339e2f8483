"""FedSim and FedAlt: partial personalisation, simultaneous and alternating."""

from __future__ import annotations

from typing import Any

from fedjax_pers.aggregators import mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Task
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import Statistics, by_role
from fedjax_pers.local import for_epochs, phases, train
from fedjax_pers.paths import SelectorLike
from fedjax_pers.presets import head

_ABOUT = {
    "paper": "Pillutla, Malik, Mohamed, Rabbat, Sanjabi, Xiao, "
    '"Federated Learning with Partial Model Personalization", ICML 2022, arXiv:2204.03809',
    "family": "decoupling",
    "personal": "any chosen leaves",
}


@register("fedsim", title="FedSim", reduction="equal step sizes: FedPer; nothing personal: FedAvg", **_ABOUT)
def fedsim(
    task: Task,
    *,
    lr: float = 0.1,
    personal_lr: float = 0.1,
    personal: SelectorLike = head(1),
    newcomer_epochs: int = 5,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """Shared and personal leaves take their steps simultaneously, each with a step size of its own.

    Args:
      task: model and loss.
      lr: step size of the shared leaves.
      personal_lr: step size of the personal leaves.
      personal: the leaves that stay.
      newcomer_epochs: passes over its data that an unseen client trains its personal leaves for before it predicts.
      weights: as in FedAvg.
      statistics: treatment of running statistics that ``personal`` does not name.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: no server optimiser and no FedAvg pre-training by default (see ``warm_start``); personal
    leaves are kept between rounds (the paper's stateless mode is not offered).
    """
    rates = {"shared": lr, "personal": personal_lr}
    newcomer = train(personal_lr, **for_epochs(newcomer_epochs, local), roles="personal")
    return compose(
        task,
        layout=by_role(personal=personal, statistics=statistics),
        client=train(rates, **local),
        aggregator=mean(weights=weights),
        newcomer=newcomer,
    )


@register("fedalt", title="FedAlt", reduction="the same schedule: FedRep; nothing personal: FedAvg", **_ABOUT)
def fedalt(
    task: Task,
    *,
    lr: float = 0.1,
    personal_lr: float = 0.1,
    personal: SelectorLike = head(1),
    personal_epochs: int = 1,
    newcomer_epochs: int = 5,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """Personal leaves train first, on the shared ones as received; then the shared leaves, on the new personal ones.

    Args:
      task: model and loss.
      lr: step size of the shared leaves.
      personal_lr: step size of the personal leaves.
      personal: the leaves that stay.
      personal_epochs: passes of the first phase; ``epochs`` are those of the second.
      newcomer_epochs: passes over its data that an unseen client trains its personal leaves for before it predicts.
      weights: as in FedAvg.
      statistics: treatment of running statistics that ``personal`` does not name.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: no server optimiser and no FedAvg pre-training by default (see ``warm_start``); personal
    leaves are kept between rounds (the paper's stateless mode is not offered).
    """
    schedule = {**local, "steps": None}
    first = train(personal_lr, **{**schedule, "epochs": personal_epochs}, roles="personal", order="head")
    newcomer = train(personal_lr, **{**schedule, "epochs": newcomer_epochs}, roles="personal")
    return compose(
        task,
        layout=by_role(personal=personal, statistics=statistics),
        client=phases(first, train(lr, **local, roles="shared")),
        aggregator=mean(weights=weights),
        newcomer=newcomer,
    )
