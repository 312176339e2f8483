"""FedLP: each client sends some of its layers, drawn at random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pers.aggregators.masked import masked_mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Context, Parts, Report, Task
from fedjax_pers.checks import number, positive
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.keys import fold_name
from fedjax_pers.layouts import Layout, Statistics
from fedjax_pers.local import ClientUpdate, train
from fedjax_pers.masks import layer_groups, left_out, masked, masks_of, sent, with_spared
from fedjax_pers.paths import SelectorLike
from fedjax_pers.trees import wire_bytes


@register(
    "fedlp",
    title="FedLP",
    paper='Zhu, Shi, Luo, Wang, Peng, Fan, Letaief, "FedLP: Layer-wise Pruning Mechanism for '
    'Communication-Computation Efficient Federated Learning", ICC 2023, arXiv:2303.06360',
    family="conditional",
    personal="nothing",
    reduction="preserve = 1: FedAvg",
    secure_aggregation=False,
)
def fedlp(
    task: Task,
    *,
    lr: float = 0.1,
    preserve: float = 0.5,
    groups: Sequence[SelectorLike] = (),
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """After training a client sends each layer with probability ``preserve``; the others do not cross.

    A layer is averaged over the clients that sent it; one that nobody sent keeps its value.

    Args:
      task: model and loss.
      lr: step size.
      preserve: the layer preserving rate, above 0 and at most 1.
      groups: selectors of the leaves that are sent together; the model's layers by default.
      weights: as in FedAvg, among the clients that sent a layer.
      statistics: treatment of running statistics; averaged ones go with the layer of their norm.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: the scheme for homogeneous models only, with one rate for all clients; clients count by
    their examples unless ``weights="uniform"``.
    """
    positive("preserve", preserve)
    number("preserve", preserve, 0, 1)
    layout = masked(statistics=statistics)
    return compose(
        task,
        layout=layout,
        client=_some_layers(train(lr, **local), preserve, layer_groups(layout(task), groups)),
        aggregator=masked_mean(weights=weights),
    )


def _some_layers(training: ClientUpdate, preserve: Any, groups: Mapping[str, frozenset[str]]) -> ClientUpdate:
    def update(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
        trained, report = training(layout, parts, context)
        drawn = jax.random.bernoulli(fold_name(context.key, "layers that are sent"), preserve, (len(groups),))
        sends = {path: jnp.array(True) for path in masks_of(parts.shared)}
        for place, members in enumerate(groups.values()):
            sends |= dict.fromkeys(sorted(members), drawn[place])
        report = with_spared(report, left_out(trained.shared, sends), wire_bytes(sends))
        return trained._replace(shared=sent(parts, trained, sends)), report

    return update
