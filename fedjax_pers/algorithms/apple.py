"""APPLE: every client learns how much of everybody's core model goes into its own."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax

from fedjax_pers.aggregators.peers import NUMBER, RELATIONS, ROUNDS, SIZE_SHARES, combined, core_models, stacked
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Array, Batch, Context, Leaves, Parts, Report, Task
from fedjax_pers.checks import number, positive_int
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import Layout, LayoutMaker, Statistics, by_role, shared_or_refused, trainable_leaves
from fedjax_pers.local import ClientUpdate, descend, train
from fedjax_pers.objectives import Objective
from fedjax_pers.paths import SelectorLike, nothing


@register(
    "apple",
    title="APPLE",
    paper='Luo, Wu, "Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning", IJCAI 2022, '
    "arXiv:2110.08394",
    family="similarity",
    personal="relations to all clients, and any chosen leaves; the server sends every core model to everybody",
    reduction="relations_lr = 0: everybody predicts with the mean of the core models, by examples",
    secure_aggregation=False,
)
def apple(
    task: Task,
    *,
    lr: float = 0.1,
    relations_lr: float = 0.01,
    mu: float = 0.1,
    fading: int = 20,
    personal: SelectorLike = nothing,
    newcomer_epochs: int = 5,
    statistics: Statistics = "average",
    batch_size: int = 10,
    epochs: int = 1,
) -> Algorithm:
    """The client's model is ``sum_j p_ij w_j``; it trains its own core model ``w_i`` and its relations ``p_i``.

    Steps go along the gradient g of ``f_i(sum_j p_ij w_j) + mu s_r / 2 |p_i - p_0|^2``, that is ``p_ii g`` for ``w_i``
    and ``<g, w_j>`` for ``p_ij``; ``p_0`` are the shares of all examples, at which ``p_i`` starts, and
    ``s_r = (1 + cos(pi r / fading)) / 2`` fades over rounds r, to 0 from ``fading`` on. All core models of others are
    shown to every client: meant for some tens of clients.

    Args:
      task: model and loss.
      lr: step size of core models (and of chosen personal leaves).
      relations_lr: step size of relations, at least 0.
      mu: strength of the tie to the shares, at least 0.
      fading: rounds over which it fades, at least 1.
      personal: leaves that stay; only the others are combined.
      newcomer_epochs: passes over its data of an unseen client, from the mean of core models, before it predicts.
      statistics: treatment of running statistics that ``personal`` does not name.
      batch_size: examples a step.
      epochs: passes over the client's examples.

    Differences from the paper: all core models are sent in every round, not some; in the first round, before the server
    knows their sizes, all clients have equal shares.
    """
    for name, value in (("relations_lr", relations_lr), ("mu", mu)):
        number(name, value, low=0)
    positive_int("fading", fading)
    return compose(
        task,
        layout=shared_or_refused(_with_relations(by_role(personal=personal, statistics=statistics)), task),
        client=_related(lr, relations_lr, mu, fading, batch_size, epochs),
        aggregator=core_models(),
        newcomer=train(lr, batch_size=batch_size, epochs=newcomer_epochs),
    )


def _with_relations(base: LayoutMaker) -> LayoutMaker:
    def bind(task: Task) -> Layout:
        layout = base(task)

        def grown(parts: Parts, num_clients: int) -> Parts:
            return parts._replace(personal={**parts.personal, RELATIONS: jnp.zeros(num_clients, jnp.float32)})

        return layout._replace(grown=grown, trainable=layout.trainable | {RELATIONS})

    return bind


def _related(lr: Any, relations_lr: Any, mu: Any, fading: int, batch_size: int, epochs: int) -> ClientUpdate:
    steps = {"model": optax.sgd(lr), "relations": optax.sgd(relations_lr)}

    def update(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
        training = trainable_leaves(layout, parts)
        tx = optax.partition(steps, {name: "relations" if name == RELATIONS else "model" for name in training})
        faded = jnp.minimum(context.download[ROUNDS] / fading, 1)  # a warm start does not count
        strength = mu * (1 + jnp.cos(jnp.pi * faded)) / 2
        objective = _combination(context.download, strength)
        return descend(layout, parts, context, training, tx, objective, batch_size=batch_size, epochs=epochs)

    return update


def _combination(download: Leaves, strength: Any) -> Objective:
    """The loss of the combined model, in which the client's own core model is the one that trains."""
    cores, own = stacked(download), download[NUMBER]

    def objective(layout: Layout, parts: Parts, received: Parts, batch: Batch, key: Array) -> tuple[Array, Leaves]:
        relations = parts.personal[RELATIONS]
        sent, share = combined(layout, download, relations), (download[SIZE_SHARES] + relations)[own]
        mixed = {
            name: sent[name] + share.astype(x.dtype) * (x - cores[name][own]) if name in layout.trainable else x
            for name, x in parts.shared.items()
        }
        model = layout.view("model")
        loss, tracked = layout.task.loss(model.read(parts._replace(shared=mixed)), batch, key)
        return loss + strength / 2 * jnp.sum(jnp.square(relations)), model.tracked(parts, tracked)

    return objective
