"""Other parameter-efficient fine-tuning in federations: bottleneck adapters, and biases alone."""

from __future__ import annotations

from typing import Any

from fedjax_pers.adapters import bottleneck
from fedjax_pers.adapters.layouts import on_backbone
from fedjax_pers.aggregators import mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Task
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import Statistics
from fedjax_pers.local import for_epochs, train
from fedjax_pers.paths import SelectorLike, as_selector, everything, nothing
from fedjax_pers.presets import bias, head

_PAPER = (
    'Zhang, Yang, Dai, Wang, Yu, Qu, Xu, "FedPETuning: When Federated Learning Meets the Parameter-Efficient Tuning '
    'Methods of Pre-trained Language Models", Findings of ACL 2023'
)


@register(
    "fed_adapter",
    title="FedAdapter",
    paper=_PAPER + "; Houlsby et al., ICML 2019, arXiv:1902.00751",
    family="adapters",
    personal="what you choose: by default nothing",
    reduction="a shared bottleneck that stays at its start: FedAvg of the head",
)
def fed_adapter(
    task: Task,
    *,
    lr: float = 0.1,
    on: SelectorLike = everything,
    also: SelectorLike = head(1),
    personal: SelectorLike = nothing,
    size: int = 4,
    newcomer_epochs: int = 5,
    weights: str = "examples",
    backbone_statistics: Statistics = "ignore",
    **local: Any,
) -> Algorithm:
    """Narrow networks behind the layers of a frozen backbone, ``h + relu(h D + c) U``, are trained and averaged.

    Args:
      task: model and loss; its first variables are the backbone (``fedjax_pers.adapters.starting_from``).
      lr: step size.
      on: the weights of the layers that get a bottleneck.
      also: leaves that train in full: a new head.
      personal: which of all these stay with the client.
      size: width of the bottleneck.
      newcomer_epochs: passes over its data that an unseen client trains its personal leaves for before it predicts.
      weights: as in FedAvg.
      backbone_statistics: running statistics are the backbone's (``"ignore"``), kept ``"local"``, or ``"average"``d.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: of any model; a bottleneck stands before its layer's bias is added.
    """
    adapted = bottleneck(task, as_selector(on) & ~as_selector(also), size=size)
    return compose(
        adapted,
        layout=on_backbone(statistics=backbone_statistics, also=also, personal=personal),
        client=train(lr, **local),
        aggregator=mean(weights=weights),
        newcomer=train(lr, roles="personal", **for_epochs(newcomer_epochs, local)),
    )


@register(
    "bitfit",
    title="BitFit",
    paper=_PAPER + "; Ben Zaken, Ravfogel, Goldberg, ACL 2022, arXiv:2106.10199",
    family="adapters",
    personal="what you choose: by default nothing",
    reduction="also = everything: FedAvg",
)
def bitfit(
    task: Task,
    *,
    lr: float = 0.1,
    also: SelectorLike = head(1),
    personal: SelectorLike = nothing,
    newcomer_epochs: int = 5,
    weights: str = "examples",
    backbone_statistics: Statistics = "ignore",
    **local: Any,
) -> Algorithm:
    """Only biases (and a head) train and travel; the backbone's weights are frozen.

    Args:
      task: model and loss; its first variables are the backbone (``fedjax_pers.adapters.starting_from``).
      lr: step size.
      also: leaves that train in full beside the biases: a new head.
      personal: which of all these stay with the client.
      newcomer_epochs: passes over its data that an unseen client trains its personal leaves for before it predicts.
      weights: as in FedAvg.
      backbone_statistics: running statistics are the backbone's (``"ignore"``), kept ``"local"``, or ``"average"``d.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: of any model.
    """
    return compose(
        task,
        layout=on_backbone(statistics=backbone_statistics, also=bias() | as_selector(also), personal=personal),
        client=train(lr, **local),
        aggregator=mean(weights=weights),
        newcomer=train(lr, roles="personal", **for_epochs(newcomer_epochs, local)),
    )
