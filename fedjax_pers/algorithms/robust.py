"""FedAvg with an aggregator that a minority of bad uploads cannot move far; any leaves may stay personal."""

from __future__ import annotations

from typing import Any

from fedjax_pers.aggregators import Aggregator, geometric_median, krum, median, norm_clipping, trimmed_mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Task
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import Statistics, by_role
from fedjax_pers.local import for_epochs, train
from fedjax_pers.paths import SelectorLike, nothing

_FAMILY = {"family": "robust", "personal": "nothing, or any chosen leaves"}
_YIN = (
    'Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", '
    "ICML 2018, arXiv:1803.01498"
)


def _fedavg_with(
    aggregator: Aggregator,
    task: Task,
    lr: Any,
    personal: SelectorLike,
    newcomer_epochs: int,
    statistics: Statistics,
    local: dict[str, Any],
) -> Algorithm:
    return compose(
        task,
        layout=by_role(personal=personal, statistics=statistics),
        client=train(lr, **local),
        aggregator=aggregator,
        newcomer=train(lr, **for_epochs(newcomer_epochs, local), roles="personal"),
    )


@register(
    "fedmedian",
    title="Coordinate-wise median",
    paper=_YIN,
    reduction="equal uploads: FedAvg",
    secure_aggregation=False,
    **_FAMILY,
)
def fedmedian(
    task: Task,
    *,
    lr: float = 0.1,
    personal: SelectorLike = nothing,
    newcomer_epochs: int = 5,
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """The server moves by the median of each coordinate of the clients' differences.

    Args:
      task: model and loss.
      lr: step size of the clients.
      personal: leaves that stay.
      newcomer_epochs: passes over its data that an unseen client trains its personal leaves for before it predicts.
      statistics: treatment of running statistics that ``personal`` does not name.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: local training in place of one gradient.
    """
    return _fedavg_with(median(), task, lr, personal, newcomer_epochs, statistics, local)


@register(
    "trimmed_mean",
    title="Coordinate-wise trimmed mean",
    paper=_YIN,
    reduction="trim = 0: FedAvg with uniform weights",
    secure_aggregation=False,
    **_FAMILY,
)
def trimmed(
    task: Task,
    *,
    lr: float = 0.1,
    trim: float = 0.25,
    personal: SelectorLike = nothing,
    newcomer_epochs: int = 5,
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """The server moves by the mean of each coordinate without its ``floor(trim * m)`` smallest and largest values.

    Args:
      task: model and loss.
      lr: step size of the clients.
      trim: share that is cut at each end, at least 0 and below 1/2.
      personal: leaves that stay.
      newcomer_epochs: passes over its data that an unseen client trains its personal leaves for before it predicts.
      statistics: treatment of running statistics that ``personal`` does not name.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: local training in place of one gradient.
    """
    return _fedavg_with(trimmed_mean(trim), task, lr, personal, newcomer_epochs, statistics, local)


@register(
    "krum",
    title="Krum and Multi-Krum",
    paper='Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries: Byzantine Tolerant Gradient '
    'Descent", NeurIPS 2017, arXiv:1703.02757',
    reduction="all of a round chosen: FedAvg with uniform weights",
    secure_aggregation=False,
    **_FAMILY,
)
def krum_(
    task: Task,
    *,
    lr: float = 0.1,
    byzantine: int = 1,
    chosen: int = 1,
    personal: SelectorLike = nothing,
    newcomer_epochs: int = 5,
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """The server moves by the mean of the ``chosen`` differences that lie nearest to ``m - byzantine - 2`` others.

    Args:
      task: model and loss.
      lr: step size of the clients.
      byzantine: bad uploads that are expected in a round.
      chosen: 1 is Krum, more is Multi-Krum.
      personal: leaves that stay.
      newcomer_epochs: passes over its data that an unseen client trains its personal leaves for before it predicts.
      statistics: treatment of running statistics that ``personal`` does not name.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: local training in place of one gradient.
    """
    return _fedavg_with(krum(byzantine, chosen), task, lr, personal, newcomer_epochs, statistics, local)


@register(
    "rfa",
    title="RFA (geometric median)",
    paper='Pillutla, Kakade, Harchaoui, "Robust Aggregation for Federated Learning", IEEE Transactions on Signal '
    "Processing 70, 2022, arXiv:1912.13445",
    reduction="equal uploads: FedAvg",
    secure_aggregation=False,
    **_FAMILY,
)
def rfa(
    task: Task,
    *,
    lr: float = 0.1,
    median_steps: int = 8,
    smoothing: float = 1e-6,
    personal: SelectorLike = nothing,
    newcomer_epochs: int = 5,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """The server moves by the geometric median of the clients' differences, by smoothed Weiszfeld steps.

    Args:
      task: model and loss.
      lr: step size of the clients.
      median_steps: of Weiszfeld's iteration.
      smoothing: least distance that counts, above 0.
      personal: leaves that stay.
      newcomer_epochs: passes over its data that an unseen client trains its personal leaves for before it predicts.
      weights: as in FedAvg.
      statistics: treatment of running statistics that ``personal`` does not name.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: the server sees the uploads (the paper computes each step by secure aggregation).
    """
    aggregator = geometric_median(median_steps, smoothing, weights=weights)
    return _fedavg_with(aggregator, task, lr, personal, newcomer_epochs, statistics, local)


@register(
    "norm_clipping",
    title="Norm clipping",
    paper='Sun, Kairouz, Suresh, McMahan, "Can You Really Backdoor Federated Learning?", 2019, arXiv:1911.07963',
    reduction="a bound above all norms: FedAvg",
    **_FAMILY,
)
def clipping(
    task: Task,
    *,
    lr: float = 0.1,
    bound: float = 1.0,
    personal: SelectorLike = nothing,
    newcomer_epochs: int = 5,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """FedAvg whose differences are cut to the L2 norm ``bound`` before they are averaged.

    Args:
      task: model and loss.
      lr: step size of the clients.
      bound: largest norm over all shared leaves, above 0.
      personal: leaves that stay.
      newcomer_epochs: passes over its data that an unseen client trains its personal leaves for before it predicts.
      weights: as in FedAvg.
      statistics: treatment of running statistics that ``personal`` does not name.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: no noise is added (weak differential privacy).
    """
    return _fedavg_with(norm_clipping(bound, weights=weights), task, lr, personal, newcomer_epochs, statistics, local)
