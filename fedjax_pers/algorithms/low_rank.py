"""LoRA in federations: which factors train, and which stay."""

from __future__ import annotations

from typing import Any

from fedjax_pers.adapters import FACTOR_A, FACTOR_B, lora
from fedjax_pers.adapters.layouts import on_backbone
from fedjax_pers.aggregators import mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Task
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import Statistics, by_role
from fedjax_pers.local import for_epochs, phases, train
from fedjax_pers.paths import SelectorLike, as_selector, everything
from fedjax_pers.presets import head
from fedjax_pers.presets import lora as factors


def _adapted(task: Task, on: SelectorLike, also: SelectorLike, rank: int, alpha: float, scaling: str) -> Task:
    """Factors beside the chosen weights, those apart that train in full."""
    return lora(task, as_selector(on) & ~as_selector(also), rank=rank, alpha=alpha, scaling=scaling)


@register(
    "fedit",
    title="FedIT",
    paper='Zhang, Vahidian, Kuo, Li, Zhang, Yu, Wang, Chen, "Towards Building the Federated GPT: Federated Instruction '
    'Tuning", ICASSP 2024, arXiv:2305.05644',
    family="adapters",
    personal="nothing",
    reduction="factors A that agree: FFA-LoRA",
)
def fedit(
    task: Task,
    *,
    lr: float = 0.1,
    on: SelectorLike = everything,
    also: SelectorLike = head(1),
    rank: int = 4,
    alpha: float = 8.0,
    scaling: str = "standard",
    weights: str = "examples",
    backbone_statistics: Statistics = "ignore",
    **local: Any,
) -> Algorithm:
    """Low-rank factors beside frozen weights, ``W + s A B``, are trained and averaged one by one.

    ``A <- sum_i p_i A_i``, ``B <- sum_i p_i B_i``: the product of the averages is not the average of the products. Per
    adapted weight ``rank (inputs + outputs)`` numbers travel each way.

    Args:
      task: model and loss; its first variables are the backbone (``fedjax_pers.adapters.starting_from``).
      lr: step size.
      on: the weights that are adapted.
      also: leaves that train in full and are averaged: a new head.
      rank: of the factors.
      alpha: their strength, ``s = alpha / rank``.
      scaling: ``"standard"`` or ``"rank_stabilized"``.
      weights: as in FedAvg.
      backbone_statistics: running statistics are the backbone's (``"ignore"``), kept ``"local"``, or ``"average"``d.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: of any model and loss, not of instruction tuning alone; no dropout between the factors.
    """
    adapted = _adapted(task, on, also, rank, alpha, scaling)
    return compose(
        adapted,
        layout=on_backbone(statistics=backbone_statistics, also=also),
        client=train(lr, **local),
        aggregator=mean(weights=weights),
    )


@register(
    "ffa_lora",
    title="FFA-LoRA",
    paper='Sun, Li, Li, Ding, "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024, arXiv:2403.12313',
    family="adapters",
    personal="nothing",
    reduction="the mean of the products is the product of the means",
)
def ffa_lora(
    task: Task,
    *,
    lr: float = 0.1,
    on: SelectorLike = everything,
    also: SelectorLike = head(1),
    rank: int = 4,
    alpha: float = 8.0,
    scaling: str = "standard",
    weights: str = "examples",
    backbone_statistics: Statistics = "ignore",
    **local: Any,
) -> Algorithm:
    """The first factor is drawn once and frozen for all; only the second one is trained and averaged, which is exact.

    ``sum_i p_i A B_i = A (sum_i p_i B_i)``; half of the numbers travel.

    Args:
      task: as in FedIT.
      lr: step size.
      on: the weights that are adapted.
      also: leaves that train in full and are averaged.
      rank: of the factors.
      alpha: their strength.
      scaling: ``"standard"`` or ``"rank_stabilized"``.
      weights: as in FedAvg.
      backbone_statistics: running statistics are the backbone's (``"ignore"``), kept ``"local"``, or ``"average"``d.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: the head of a classifier trains with the factors, unless ``also`` says otherwise.
    """
    adapted = _adapted(task, on, also, rank, alpha, scaling)
    layout = on_backbone(statistics=backbone_statistics, also=also, frozen=FACTOR_A)
    return compose(adapted, layout=layout, client=train(lr, **local), aggregator=mean(weights=weights))


@register(
    "fedsa_lora",
    title="FedSA-LoRA",
    paper='Guo, Zeng, Wang, Xu, Wang, Tian, Liang, Zhao, Yan, Zhou, "Selective Aggregation for Low-Rank Adaptation in '
    'Federated Learning", ICLR 2025, arXiv:2410.01463',
    family="adapters",
    personal="the second factors and the head",
    reduction="with everything personal but nothing shared: local_lora",
)
def fedsa_lora(
    task: Task,
    *,
    lr: float = 0.1,
    on: SelectorLike = everything,
    also: SelectorLike = head(1),
    personal: SelectorLike | None = None,
    rank: int = 4,
    alpha: float = 8.0,
    scaling: str = "standard",
    newcomer_epochs: int = 5,
    weights: str = "examples",
    backbone_statistics: Statistics = "ignore",
    **local: Any,
) -> Algorithm:
    """Both factors train; the first ones, on the side of the inputs, are averaged, the second ones stay.

    Args:
      task: as in FedIT.
      lr: step size.
      on: the weights that are adapted.
      also: leaves that train in full.
      personal: what stays; by default the second factors, and what trains in full.
      rank: of the factors.
      alpha: their strength.
      scaling: ``"standard"`` or ``"rank_stabilized"``.
      newcomer_epochs: passes over its data that an unseen client trains its personal leaves for before it predicts.
      weights: as in FedAvg.
      backbone_statistics: running statistics are the backbone's (``"ignore"``), kept ``"local"``, or ``"average"``d.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: none in the update. That first factors look alike over clients is partly their common
    start.
    """
    adapted = _adapted(task, on, also, rank, alpha, scaling)
    return compose(
        adapted,
        layout=on_backbone(
            statistics=backbone_statistics,
            also=also,
            personal=FACTOR_B | as_selector(also) if personal is None else personal,
        ),
        client=train(lr, **local),
        aggregator=mean(weights=weights),
        newcomer=train(lr, roles="personal", **for_epochs(newcomer_epochs, local)),
    )


@register(
    "local_lora",
    title="Local LoRA",
    paper='Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022, arXiv:2106.09685; by each '
    "client alone",
    family="adapters",
    personal="all factors and the head",
    reduction="every client for itself: nothing is sent",
)
def local_lora(
    task: Task,
    *,
    lr: float = 0.1,
    on: SelectorLike = everything,
    also: SelectorLike = head(1),
    rank: int = 4,
    alpha: float = 8.0,
    scaling: str = "standard",
    newcomer_epochs: int = 5,
    backbone_statistics: Statistics = "ignore",
    **local: Any,
) -> Algorithm:
    """Every client has factors and a head of its own on one frozen backbone; nothing is sent.

    Args:
      task: as in FedIT.
      lr: step size.
      on: the weights that are adapted.
      also: leaves that train in full.
      rank: of the factors.
      alpha: their strength.
      scaling: ``"standard"`` or ``"rank_stabilized"``.
      newcomer_epochs: passes over its data that an unseen client trains for before it predicts.
      backbone_statistics: running statistics are the backbone's (``"ignore"``), kept ``"local"``, or ``"average"``d.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: none; the baseline to which federated factors are compared.
    """
    adapted = _adapted(task, on, also, rank, alpha, scaling)
    return compose(
        adapted,
        layout=on_backbone(statistics=backbone_statistics, also=also, personal=factors() | as_selector(also)),
        client=train(lr, **local),
        newcomer=train(lr, **for_epochs(newcomer_epochs, local)),
    )


@register(
    "pfedlora",
    title="pFedLoRA",
    paper='Yi, Yu, Wang, Liu, Li, "pFedLoRA: Model-Heterogeneous Personalized Federated Learning with LoRA Tuning", '
    "arXiv:2310.13283, 2023",
    family="adapters",
    personal="the whole model; its adapters are shared",
    reduction="model_epochs = 0: FedIT without a head, on models that stay at their start",
)
def pfedlora(
    task: Task,
    *,
    lr: float = 0.1,
    on: SelectorLike = everything,
    rank: int = 4,
    alpha: float = 8.0,
    scaling: str = "standard",
    model_epochs: int = 1,
    newcomer_epochs: int = 5,
    weights: str = "examples",
    **local: Any,
) -> Algorithm:
    """Clients keep their models and share small adapters: the model learns with the adapter fixed, then the reverse.

    Args:
      task: model and loss.
      lr: step size of both phases.
      on: the weights that are adapted.
      rank: of the factors.
      alpha: their strength.
      scaling: ``"standard"`` or ``"rank_stabilized"``.
      model_epochs: passes in which the client's model learns.
      newcomer_epochs: passes over its data that an unseen client trains its model for before it predicts.
      weights: as in FedAvg.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``, of the adapters' phase.

    Differences from the paper: models of one architecture, which one program can hold; adapters lie beside the weights
    that ``on`` names, where the paper adds one small network to each model.
    """
    adapted = lora(task, on, rank=rank, alpha=alpha, scaling=scaling)
    own = train(lr, roles="personal", order="model", **for_epochs(model_epochs, local))
    return compose(
        adapted,
        layout=by_role(personal=~factors()),
        client=phases(own, train(lr, roles="shared", **local)),
        aggregator=mean(weights=weights),
        newcomer=train(lr, roles="personal", **for_epochs(newcomer_epochs, local)),
    )
