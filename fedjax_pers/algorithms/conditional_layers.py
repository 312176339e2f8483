"""Layers that become personal while a run goes on: one choice for all clients, or each client's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import optax

from fedjax_pers.aggregators.choice import SCORES, layer_choice
from fedjax_pers.aggregators.masked import masked_mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Array, Context, Parts, Task
from fedjax_pers.checks import one_of, require, whole_number
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import Layout, LayoutMaker, Statistics, shared_shapes
from fedjax_pers.local import ClientUpdate, for_epochs, train
from fedjax_pers.masks import (
    ALL_SENT,
    Choice,
    Masks,
    chosen_by_client,
    chosen_by_server,
    layer_groups,
    masked_copies,
    masks_of,
    newly_chosen,
    only,
)
from fedjax_pers.objectives import task_loss
from fedjax_pers.paths import SelectorLike


@register(
    "conditional_layers",
    title="Conditional layers",
    paper='none; personal layers as in FedPer, divergence after Zhao et al., "Federated Learning with Non-IID Data", '
    "2018, arXiv:1806.00582, cosines of updates after Sattler et al., IEEE TNNLS 2021, arXiv:1910.01991",
    family="conditional",
    personal="the layers that differ most between clients, which is found out in the first rounds",
    reduction="layers = 0: FedAvg",
    secure_aggregation=False,  # with score="agreement" it can be had
)
def conditional_layers(
    task: Task,
    *,
    lr: float = 0.1,
    layers: int = 1,
    score: str = "divergence",
    warm_up: int = 5,
    reselect_every: int = 0,
    hysteresis: float = 0.0,
    groups: Sequence[SelectorLike] = (),
    newcomer_epochs: int = 5,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """FedAvg for some rounds; then the layers on which clients differ most stay with them, the others are averaged.

    ``"divergence"``: largest ``d_l = sum_i p_i |w_il - w_l| / |w_l|``, ``w_l`` the mean of the ``w_il``.
    ``"agreement"``: smallest mean cosine of the clients' updates of a layer,
    ``s_l = (|sum_i u_il|^2 - m) / (m (m - 1))``, which needs sums of unit vectors only. A personal layer begins at the
    server's value. Clients are compared, so a round has places for two at least.

    Args:
      task: model and loss.
      lr: step size.
      layers: how many are personal; at least one layer stays shared.
      score: ``"divergence"`` or ``"agreement"``.
      warm_up: rounds in which everything is shared and sent, at least 1; the last is measured.
      reselect_every: rounds to the next choice; in the last of them everything is sent, also what is personal, to
        measure it. 0: the first choice is held, and nothing personal is ever sent.
      hysteresis: by how much a layer's score must be beyond a personal one's to take its place, at least 0.
      groups: selectors of the leaves that are chosen together; the model's layers by default.
      newcomer_epochs: passes over its data that an unseen client trains its personal layers for before it predicts.
      weights: as in FedAvg.
      statistics: treatment of running statistics; averaged ones go with the layer of their norm.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.
    """
    one_of("score", score, SCORES)
    layout = masked_copies(statistics=statistics)
    bound = layout(task)
    grouped = layer_groups(bound, groups)
    always = set(masks_of(shared_shapes(bound))).difference(*grouped.values())
    require(
        layers < len(grouped) + bool(always),
        f"layers: found {layers} of {len(grouped)} ({', '.join(grouped)}); at least one must stay shared",
    )
    return compose(
        task,
        layout=_asking(layout),
        client=chosen_by_server(train(lr, objective=task_loss("shared"), **local)),
        aggregator=layer_choice(
            grouped,
            SCORES[score](),
            scored=bound.trainable,
            count=layers,
            warm_up=warm_up,
            reselect_every=reselect_every,
            hysteresis=hysteresis,
            weights=weights,
        ),
        newcomer=newly_chosen(_as_asked, _training_of(lr, newcomer_epochs, local)),
        at_least=2,
    )


@register(
    "layers_by_client",
    title="Layers by client",
    paper="none; after Arivazhagan et al., FedPer, 2019, whose number of personal layers is one for all clients",
    family="conditional",
    personal="the last layers: as many as the client has data for",
    reduction="examples below no client's number: FedAvg",
    secure_aggregation=False,
)
def layers_by_client(
    task: Task,
    *,
    lr: float = 0.1,
    examples: tuple[int, ...] = (100,),
    groups: Sequence[SelectorLike] = (),
    newcomer_epochs: int = 5,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """A client with much data keeps many layers to itself, one with little shares all: depth by its own number.

    The last layer is personal for clients with at least ``examples[0]`` training examples, the last two for those with
    at least ``examples[1]``, and so on. Each leaf is averaged over the clients that share it.

    Args:
      task: model and loss.
      lr: step size.
      examples: numbers of training examples, in ascending order; fewer than there are layers.
      groups: selectors of the leaves that go together, the first the nearest to the input; the model's layers by
        default.
      newcomer_epochs: passes over its data that an unseen client trains its personal layers for before it predicts.
      weights: as in FedAvg, among the clients that share a layer.
      statistics: treatment of running statistics; averaged ones go with the layer of their norm.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.
    """
    layout = masked_copies(statistics=statistics)
    grouped = layer_groups(layout(task), groups)
    require(isinstance(examples, Sequence), f"examples: found {examples!r}; expected numbers, such as (100, 500)")
    for number in examples:
        whole_number("examples", number)
    require(list(examples) == sorted(examples), f"examples: found {examples}; expected an ascending order")
    require(
        0 < len(examples) < len(grouped),
        f"examples: found {len(examples)} numbers; allowed are 1 .. {len(grouped) - 1}, so that one of the "
        f"{len(grouped)} layers ({', '.join(grouped)}) stays shared",
    )
    choice = by_examples(grouped, examples)
    return compose(
        task,
        layout=layout,
        client=chosen_by_client(train(lr, objective=task_loss("shared"), **local), choice),
        aggregator=masked_mean(weights=weights),
        newcomer=newly_chosen(choice, _training_of(lr, newcomer_epochs, local)),
    )


def by_examples(groups: Mapping[str, frozenset[str]], examples: Sequence[int]) -> Choice:
    """The last layer is personal where a client has at least ``examples[0]`` examples, the last two from the next on.

    Args:
      groups: leaves by layer, the last layer last.
      examples: for the last layer, the one before it, ...
    """
    least: dict[str, int] = dict(zip(reversed(groups), examples, strict=False))

    def choice(layout: Layout, before: Parts, after: Parts, context: Context) -> Masks:
        personal = {path: jnp.array(False) for path in masks_of(before.shared)}
        for layer, number in least.items():
            personal |= dict.fromkeys(sorted(groups[layer]), context.size >= number)
        return personal

    return choice


def _asking(base: LayoutMaker) -> LayoutMaker:
    """With one more shared leaf, by which the server asks for everything."""

    def bind(task: Task) -> Layout:
        layout = base(task)

        def init(variables: Any) -> Parts:
            parts = layout.init(variables)
            return parts._replace(shared=parts.shared | {ALL_SENT: jnp.array(False)})

        return layout._replace(init=init)

    return bind


def _as_asked(layout: Layout, before: Parts, after: Parts, context: Context) -> Masks:
    return {path: ~mask for path, mask in masks_of(before.shared).items()}


def _training_of(lr: Any, epochs: int, local: Mapping[str, Any]) -> Any:
    optimizer = local.get("optimizer", optax.sgd)

    def training_of(personal: Masks) -> ClientUpdate:
        def masked(rate: Array) -> optax.GradientTransformation:
            return only(personal, optimizer(rate))

        return train(lr, objective=task_loss("shared"), **{**for_epochs(epochs, local), "optimizer": masked})

    return training_of
