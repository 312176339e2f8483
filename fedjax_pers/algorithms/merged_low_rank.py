"""LoRA whose server works with products of factors: exact averages, and clients of different ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedjax_pers.adapters import Slot, lora, scale_of, slots
from fedjax_pers.adapters.layouts import on_backbone, with_weights_on_server
from fedjax_pers.aggregators import Aggregator, of_ranks, residual, sparsity_weighted, stacking
from fedjax_pers.aggregators.factors import checked_ranks, padding_spared
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Task
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import Statistics
from fedjax_pers.local import ClientUpdate, train
from fedjax_pers.paths import SelectorLike, as_selector, everything
from fedjax_pers.presets import head


def _on_server(
    task: Task,
    on: SelectorLike,
    also: SelectorLike,
    backbone_statistics: Statistics,
    rank: int,
    alpha: float,
    client: Callable[[tuple[Slot, ...]], ClientUpdate],
    aggregator: Callable[[tuple[Slot, ...], float], Aggregator],
) -> Algorithm:
    """Factors on weights that the server changes."""
    chosen = as_selector(on) & ~as_selector(also)
    places = slots(task, chosen, rank)
    return compose(
        lora(task, chosen, rank=rank, alpha=alpha),
        layout=with_weights_on_server(places, also=also, statistics=backbone_statistics),
        client=client(places),
        aggregator=aggregator(places, scale_of(rank, alpha)),
    )


@register(
    "fedex_lora",
    title="FedEx-LoRA",
    paper='Singhal, Ponkshe, Vepakomma, "FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of '
    'Foundation Models", arXiv:2410.09432, 2024',
    family="adapters",
    personal="nothing",
    reduction="factors A that agree: FedIT",
    secure_aggregation=False,
)
def fedex_lora(
    task: Task,
    *,
    lr: float = 0.1,
    on: SelectorLike = everything,
    also: SelectorLike = head(1),
    rank: int = 4,
    alpha: float = 8.0,
    weights: str = "examples",
    backbone_statistics: Statistics = "ignore",
    **local: Any,
) -> Algorithm:
    """FedIT, whose server puts what the product of the averages lacks into the weights: the mean of models is exact.

    ``W <- W + s (sum_i p_i A_i B_i - A B)``. The server must see each client's factors. ``rank (inputs + outputs)``
    numbers of an adapted weight go up; down go these and the weight itself.

    Args:
      task: as in FedIT.
      lr: step size.
      on: the weights that are adapted.
      also: leaves that train in full and are averaged: a new head.
      rank: of the factors.
      alpha: their strength.
      weights: as in FedAvg.
      backbone_statistics: running statistics are the backbone's (``"ignore"``), kept ``"local"``, or ``"average"``d.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: the residual is sent as part of the changed weight, not as factors of rank ``m rank``.
    """

    def aggregator(places: tuple[Slot, ...], scale: float) -> Aggregator:
        return residual(places, scale, weights=weights)

    def client(places: tuple[Slot, ...]) -> ClientUpdate:
        return train(lr, **local)

    return _on_server(task, on, also, backbone_statistics, rank, alpha, client, aggregator)


@register(
    "flora",
    title="FLoRA",
    paper='Wang, Shen, He, Sun, Liu, Fan, "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous '
    'Low-Rank Adaptations", NeurIPS 2024, arXiv:2409.05976',
    family="adapters",
    personal="nothing",
    reduction="one round: the mean of models, as in FedEx-LoRA",
    secure_aggregation=False,
)
def flora(
    task: Task,
    *,
    lr: float = 0.1,
    on: SelectorLike = everything,
    also: SelectorLike = head(1),
    ranks: tuple[int, ...] = (2, 4),
    alpha: float = 8.0,
    weights: str = "examples",
    backbone_statistics: Statistics = "ignore",
    **local: Any,
) -> Algorithm:
    """Factors of any ranks are stacked, so that their product is the mean of products, and merged into the weights.

    ``W <- W + s [A_1 .. A_m] [p_1 B_1; ..; p_m B_m]``, after which factors start anew. ``s = alpha / max(ranks)`` is
    one for all. The server must see each client's factors.

    Args:
      task: as in FedIT.
      lr: step size.
      on: the weights that are adapted.
      also: leaves that train in full and are averaged: a new head.
      ranks: client i has factors of rank ``ranks[i % len(ranks)]``.
      alpha: their strength.
      weights: as in FedAvg.
      backbone_statistics: running statistics are the backbone's (``"ignore"``), kept ``"local"``, or ``"average"``d.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: the merged weight is sent, not the stacked factors (fewer numbers as soon as the ranks
    of a round add up to more than ``inputs outputs / (inputs + outputs)``); new first factors are drawn by the server,
    the same for all.
    """
    rank = checked_ranks(ranks)

    def aggregator(places: tuple[Slot, ...], scale: float) -> Aggregator:
        return of_ranks(stacking(places, scale, rank, weights=weights), places, ranks)

    def client(places: tuple[Slot, ...]) -> ClientUpdate:
        return padding_spared(train(lr, **local), places, rank)

    return _on_server(task, on, also, backbone_statistics, rank, alpha, client, aggregator)


@register(
    "hetlora",
    title="HetLoRA",
    paper='Cho, Liu, Xu, Fahrezi, Joshi, "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models"'
    ", EMNLP 2024, arXiv:2401.06432",
    family="adapters",
    personal="nothing",
    reduction="equal ranks and products of one size: FedIT",
)
def hetlora(
    task: Task,
    *,
    lr: float = 0.1,
    on: SelectorLike = everything,
    also: SelectorLike = head(1),
    ranks: tuple[int, ...] = (2, 4),
    alpha: float = 8.0,
    weights: str = "examples",
    backbone_statistics: Statistics = "ignore",
    **local: Any,
) -> Algorithm:
    """Clients of different ranks: factors are cut to a client's rank, padded with zeros, and averaged by their size.

    Client i counts by ``|A_i B_i|_F``. ``s = alpha / max(ranks)`` is one for all.

    Args:
      task: as in FedIT.
      lr: step size.
      on: the weights that are adapted.
      also: leaves that train in full and are averaged by ``weights``: a new head.
      ranks: client i has factors of rank ``ranks[i % len(ranks)]``.
      alpha: their strength.
      weights: of the leaves in ``also``.
      backbone_statistics: running statistics are the backbone's (``"ignore"``), kept ``"local"``, or ``"average"``d.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: clients do not prune their own rank.
    """
    chosen, rank = as_selector(on) & ~as_selector(also), checked_ranks(ranks)
    places = slots(task, chosen, rank)
    return compose(
        lora(task, chosen, rank=rank, alpha=alpha),
        layout=on_backbone(statistics=backbone_statistics, also=also),
        client=padding_spared(train(lr, **local), places, rank),
        aggregator=of_ranks(sparsity_weighted(places, weights=weights), places, ranks),
    )
