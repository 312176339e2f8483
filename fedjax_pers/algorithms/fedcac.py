"""FedCAC: parameters that are critical to a client are shared with clients that are like it, for a while."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from fedjax_pers.aggregators.critical import critical_collaboration
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Context, Parts, Report, Task
from fedjax_pers.checks import number
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import Layout, Statistics
from fedjax_pers.local import ClientUpdate, train
from fedjax_pers.masks import MASK, largest, masked, masks_of, with_spared
from fedjax_pers.trees import wire_bytes


@register(
    "fedcac",
    title="FedCAC",
    paper='Wu, Liu, Niu, Zhu, Tang, "Bold but Cautious: Unlocking the Potential of Personalized Federated Learning '
    'through Cautiously Aggressive Collaboration", ICCV 2023, arXiv:2309.11103',
    family="conditional",
    personal="which parameters are critical, and their values; the server keeps both",
    reduction="tau = 0: FedAvg",
    secure_aggregation=False,
)
def fedcac(
    task: Task,
    *,
    lr: float = 0.1,
    tau: float = 0.5,
    beta: int = 100,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """The ``tau`` most sensitive parameters of each leaf, by ``|Delta theta * theta|`` after training, are critical.

    A client begins with the mean over everybody of what is not critical to it, and of what is, with the mean over those
    clients whose critical parameters lie where its own do. Their circle becomes smaller with every round, and after
    ``beta`` rounds it is the client alone (:func:`~fedjax_pers.aggregators.critical.critical_collaboration`).

    Args:
      task: model and loss.
      lr: step size.
      tau: share of critical parameters of a leaf, rounded to whole ones, in 0 .. 1.
      beta: rounds in which critical parameters are averaged among like clients, at least 1.
      weights: of the mean over everybody, as in FedAvg.
      statistics: treatment of running statistics, which are never critical.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: with partial participation clients are compared with those of the same round, and keep
    what they got until they come again. A client never seen predicts with the mean over everybody.
    """
    number("tau", tau, 0, 1)
    return compose(
        task,
        layout=masked(elementwise=True, statistics=statistics),
        client=_with_critical(train(lr, **local), tau),
        aggregator=critical_collaboration(beta, weights=weights),
    )


def _with_critical(training: ClientUpdate, tau: Any) -> ClientUpdate:
    def update(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
        trained, report = training(layout, parts, context)
        told = {MASK + name: jnp.ones_like(mask) for name, mask in masks_of(parts.shared).items()}
        for name in sorted(layout.trainable):
            now = trained.shared[name]
            sensitivity = jnp.abs((now - parts.shared[name]) * now)
            told[MASK + name] = ~largest(sensitivity, jnp.round(tau * now.size))
        # The server has the masks: none of them comes down.
        report = with_spared(report, 0, wire_bytes(masks_of(parts.shared)))
        return trained._replace(shared=trained.shared | told), report

    return update
