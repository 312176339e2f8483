"""FedPer: personal top layers."""

from __future__ import annotations

from typing import Any

from fedjax_pers.aggregators import mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Task
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import Statistics, by_role
from fedjax_pers.local import for_epochs, train
from fedjax_pers.paths import SelectorLike
from fedjax_pers.presets import head


@register(
    "fedper",
    title="FedPer",
    paper='Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", 2019, '
    "arXiv:1912.00818",
    family="decoupling",
    personal="the top layers",
    reduction="nothing personal: FedAvg; everything personal: local training",
)
def fedper(
    task: Task,
    *,
    lr: float = 0.1,
    personal: SelectorLike = head(1),
    newcomer_epochs: int = 5,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """Top layers stay with the client; all leaves train jointly, the lower ones are averaged.

    Args:
      task: model and loss.
      lr: step size.
      personal: the leaves that stay.
      newcomer_epochs: passes over its data that an unseen client trains its personal leaves for before it predicts.
      weights: as in FedAvg.
      statistics: treatment of running statistics that ``personal`` does not name.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: all clients start from one common head; any number of clients may take part.
    """
    newcomer = train(lr, **for_epochs(newcomer_epochs, local), roles="personal")
    return compose(
        task,
        layout=by_role(personal=personal, statistics=statistics),
        client=train(lr, **local),
        aggregator=mean(weights=weights),
        newcomer=newcomer,
    )
