"""FedSelect: each client's personal parameters, one by one, grow by those that change most."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax

from fedjax_pers.aggregators.masked import masked_mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Array, Context, Parts, Report, Task
from fedjax_pers.checks import number, whole_number
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import Layout, Statistics
from fedjax_pers.local import ClientUpdate, for_epochs, phases, train
from fedjax_pers.masks import (
    Masks,
    begun,
    in_use,
    inverse,
    largest,
    left_out,
    masked_copies,
    only,
    remembered,
    with_spared,
)
from fedjax_pers.objectives import task_loss
from fedjax_pers.trees import wire_bytes


@register(
    "fedselect",
    title="FedSelect",
    paper='Tamirisa, Xie, Bao, Zhou, Arel, Shamsian, "FedSelect: Personalized Federated Learning with Customized '
    'Selection of Parameters for Fine-Tuning", CVPR 2024, arXiv:2404.02478',
    family="conditional",
    personal="single parameters, other ones at each client, more of them in every round up to a bound",
    reduction="growth = 0 or bound = 0: FedAvg",
    secure_aggregation=False,
)
def fedselect(
    task: Task,
    *,
    lr: float = 0.1,
    growth: float = 0.05,
    bound: float = 0.5,
    personal_epochs: int = 1,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """A client trains its personal parameters, then its shared ones, and makes those personal that moved most.

    Of the shared parameters of each leaf the share ``growth`` with the largest ``|Delta theta|`` over the round become
    personal, until ``bound`` of the leaf are; they stay so. The server averages each parameter over the clients that
    share it; one that nobody shares keeps its value.

    Args:
      task: model and loss.
      lr: step size of both passes.
      growth: share of a leaf's shared parameters that become personal in a round, rounded to whole ones, in 0 .. 1.
      bound: largest share of a leaf that is personal, rounded to whole ones, in 0 .. 1.
      personal_epochs: passes over the data for the personal parameters; those for the shared ones are ``epochs``.
      weights: as in FedAvg, among the clients that share a parameter.
      statistics: treatment of running statistics, which are never personal one by one.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: one personal and one shared pass a round, of any number of epochs; a parameter that has
    just become personal is sent once more, with the mask under which it was trained. A client never seen predicts with
    the shared model.
    """
    number("growth", growth, 0, 1)
    number("bound", bound, 0, 1)
    whole_number("personal_epochs", personal_epochs)
    optimizer = local.get("optimizer", optax.sgd)

    def passes(personal: Masks) -> ClientUpdate:
        def under(masks: Masks, **schedule: Any) -> ClientUpdate:
            masked = {**schedule, "optimizer": lambda rate: only(masks, optimizer(rate))}
            return train(lr, objective=task_loss("shared"), **masked)

        return phases(under(personal, **for_epochs(personal_epochs, local)), under(inverse(personal), **local))

    def update(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
        personal, before = in_use(parts), begun(parts)
        trained, report = passes(personal)(layout, before, context)
        report = with_spared(
            report,
            left_out(trained.shared, inverse(personal)),
            left_out(parts.shared, inverse(personal)) + wire_bytes(personal),
        )
        grown = personal | {
            name: grown_by_change(personal[name], trained.shared[name] - before.shared[name], growth, bound)
            for name in sorted(layout.trainable)
        }
        return remembered(parts, trained, grown, inverse(personal)), report

    return compose(
        task,
        layout=masked_copies(elementwise=True, statistics=statistics),
        client=update,
        aggregator=masked_mean(weights=weights),
    )


def grown_by_change(personal: Array, change: Array, growth: Any, bound: Any) -> Array:
    """The mask of personal elements, with the share ``growth`` of the others that changed most, up to ``bound``.

    Example:
      >>> before, change = jnp.array([True, False, False, False, False]), jnp.array([9.0, 0.1, -0.4, 0.3, 0.2])
      >>> grown_by_change(before, change, 0.5, 1.0).tolist(), grown_by_change(before, change, 0.5, 0.4).tolist()
      ([True, False, True, True, False], [True, False, True, False, False])
    """
    shared = (~personal).sum()
    room = jnp.maximum(jnp.round(bound * personal.size) - personal.sum(), 0)
    count = jnp.minimum(jnp.round(growth * shared), room)
    return personal | largest(jnp.where(personal, -jnp.inf, jnp.abs(change)), count)
