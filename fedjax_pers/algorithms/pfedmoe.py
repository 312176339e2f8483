"""pFedMoE: a common small extractor beside the client's own, whose features a private gate mixes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pers.aggregators import mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Array, Batch, Leaves, Task
from fedjax_pers.checks import require
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.head_inputs import from_head_input, head_and_features, with_head_input
from fedjax_pers.layouts import Layout, LayoutMaker, Statistics, by_role, without
from fedjax_pers.local import for_epochs, train
from fedjax_pers.mixtures import (
    GATE_LEAVES,
    Answer,
    class_scores,
    inputs_of,
    linear_gate,
    path_of,
    require_cross_entropy,
    task_of,
    tracked_of,
)
from fedjax_pers.paths import SelectorLike, flatten
from fedjax_pers.presets import head as last_layers

COMMON, OWN = 0, 1


@register(
    "pfedmoe",
    title="pFedMoE",
    paper='Yi, Yu, Ren, Zhang, Wang, Liu, Li, "pFedMoE: Data-Level Personalization with Mixture of Experts for '
    'Model-Heterogeneous Personalized Federated Learning", 2024, arXiv:2402.01350',
    family="mixture",
    personal="a whole model and the gate",
    reduction="a gate that always trusts the common extractor: FedPer",
)
def pfedmoe(
    task: Task,
    *,
    lr: float = 0.1,
    own_lr: float = 0.1,
    head: SelectorLike = last_layers(1),
    extractor: Task | None = None,
    newcomer_epochs: int = 5,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """A client's head reads ``g_0(x) z_0 + g_1(x) z_1``: features of a common extractor and of its own.

    ``g = softmax(A_i x + c_i)``. Common extractor, own model and gate are trained together on the loss of the head's
    outputs; the common extractor alone is sent.

    Args:
      task: classification by cross-entropy, with inputs ``x`` of floating numbers: the client's own model.
      lr: step size of the common extractor.
      own_lr: step size of the own model and the gate.
      head: the last, dense layer.
      extractor: a task of the same examples, whose model below its head is the common extractor; as many features must
        enter that head. By default the model of ``task``.
      newcomer_epochs: passes over its data in which an unseen client trains its own model and its gate.
      weights: of the extractor's mean, as in FedAvg.
      statistics: treatment of the common extractor's running statistics.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: the gate is linear in the inputs, without normalisation; own models are of one form.
    """
    require_cross_entropy(task)
    extractor = task if extractor is None else extractor
    require(isinstance(extractor, Task), f"extractor: found {extractor!r}; allowed are None and a fedjax_pers.Task")
    heads, widths = zip(*(head_and_features(each, head) for each in (extractor, task)), strict=True)
    require(
        widths[COMMON] == widths[OWN],
        f"extractor: found {widths[COMMON]} features for the {widths[OWN]} that enter the head; they must be as many",
    )
    require(extractor.apply is not None, "extractor: found a task without apply, which features are read from")
    gate, answer = linear_gate(inputs_of(task), 2), _mixed_features(extractor, task, *heads)
    mixed = task_of([extractor, task], gate, answer, given=OWN)
    return compose(
        mixed,
        layout=_without_the_common_head(heads[COMMON], statistics),
        client=train({"shared": lr, "personal": own_lr}, **local),
        aggregator=mean(weights=weights),
        newcomer=train(own_lr, **for_epochs(newcomer_epochs, local), roles="personal"),
    )


def _mixed_features(extractor: Task, task: Task, common_head: Collection[str], own_head: Collection[str]) -> Answer:
    def answer(experts: list[Any], log_weights: Array, batch: Batch, key: Array | None) -> Any:
        (_, tracked), features = with_head_input(extractor.apply, common_head)(experts[COMMON], batch, key)
        (_, own_tracked), own_features = with_head_input(task.apply, own_head)(experts[OWN], batch, key)
        weights = jnp.exp(log_weights).astype(own_features.dtype)
        both = weights[:, :1] * features + weights[:, 1:] * own_features
        outputs, _ = from_head_input(task.apply, own_head)(experts[OWN], batch, both, key)
        return class_scores(task, outputs, batch), tracked_of(COMMON, tracked) | tracked_of(OWN, own_tracked)

    return answer


def _without_the_common_head(head: Collection[str], statistics: Statistics) -> LayoutMaker:
    """The common model's head is read by nobody: it is 0, neither sent nor kept."""

    def bind(task: Task) -> Layout:
        leaves = flatten(jax.eval_shape(task.init, jax.random.key(0)))
        unread = {path_of(COMMON, path): leaves[path_of(COMMON, path)] for path in head}

        def zeros(others: Leaves) -> Leaves:
            return {path: jnp.zeros(x.shape, x.dtype) for path, x in unread.items()}

        return without(by_role(personal=[GATE_LEAVES, path_of(OWN, "**")], statistics=statistics)(task), zeros)

    return bind
