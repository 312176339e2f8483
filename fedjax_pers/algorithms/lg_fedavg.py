"""LG-FedAvg: personal lower layers."""

from __future__ import annotations

from typing import Any

from fedjax_pers.aggregators import mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Task
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import by_role
from fedjax_pers.local import for_epochs, train
from fedjax_pers.paths import SelectorLike, as_selector
from fedjax_pers.presets import head


@register(
    "lg_fedavg",
    title="LG-FedAvg",
    paper='Liang, Liu, Ziyin, Salakhutdinov, Morency, "Think Locally, Act Globally: Federated Learning with Local and '
    'Global Representations", NeurIPS 2019 workshop, arXiv:2001.01523',
    family="decoupling",
    personal="the lower layers",
    reduction="FedPer with the complementary mask",
)
def lg_fedavg(
    task: Task,
    *,
    lr: float = 0.1,
    shared: SelectorLike = head(1),
    newcomer_epochs: int = 5,
    weights: str = "examples",
    **local: Any,
) -> Algorithm:
    """The lower layers stay with the client as its own representation; the layers above are averaged.

    Args:
      task: model and loss.
      lr: step size.
      shared: the upper layers, which are averaged. Everything else stays, running statistics included.
      newcomer_epochs: passes over its data that an unseen client trains its representation for before it predicts.
      weights: as in FedAvg.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: the paper starts from a FedAvg checkpoint, and a cold start is much worse. Run it with
    ``warm_start`` rounds of FedAvg (they are charged to its traffic); a cold start is what you get without.
    """
    newcomer = train(lr, **for_epochs(newcomer_epochs, local), roles="personal")
    return compose(
        task,
        layout=by_role(personal=~as_selector(shared)),
        client=train(lr, **local),
        aggregator=mean(weights=weights),
        newcomer=newcomer,
    )
