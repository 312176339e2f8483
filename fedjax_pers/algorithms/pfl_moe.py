"""PFL-MoE: the global model and a fine-tuned copy of it, mixed by a gate that each client trains for itself."""

from __future__ import annotations

from typing import Any, Literal

from fedjax_pers.aggregators import mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Task
from fedjax_pers.checks import one_of
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import Layout, LayoutMaker, Statistics, by_role
from fedjax_pers.local import of_fine_tuning, phases, train
from fedjax_pers.mixtures import (
    GATE_LEAVES,
    Level,
    evaluated_loss,
    expert_loss,
    features_of,
    in_common,
    inputs_of,
    logistic_gate,
    mixture,
    path_of,
)
from fedjax_pers.paths import SelectorLike, everything
from fedjax_pers.presets import head as last_layers

GLOBAL, TUNED = 0, 1
Reads = Literal["inputs", "features"]


@register(
    "pfl_moe",
    title="PFL-MoE",
    paper='Guo, Mei, Xiao, Wu, Yin, Chang, "PFL-MoE: Personalized Federated Learning Based on Mixture of Experts", '
    "APWeb-WAIM 2021, arXiv:2012.15589",
    family="mixture",
    personal="nothing between rounds; before it predicts, a client has a fine-tuned copy and a gate",
    reduction="tune_epochs = 0: FedAvg",
)
def pfl_moe(
    task: Task,
    *,
    lr: float = 0.1,
    tune_lr: float = 0.1,
    gate_lr: float = 0.1,
    tune_epochs: int = 5,
    gate_epochs: int = 5,
    level: Level = "probability",
    gate_reads: Reads = "inputs",
    head: SelectorLike = last_layers(1),
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """FedAvg; each client then fine-tunes a copy of the global model, and trains a gate between the two.

    ``p(y | x) = g(x) p(y | x, w) + (1 - g(x)) p(y | x, v_i)`` with ``g = sigmoid(a_i x + c_i)``. The copy ``v_i`` is
    trained on its own loss, then the gate on that of the mixture, in which both models stay as they are.

    Args:
      task: classification by cross-entropy.
      lr: step size of the clients in training.
      tune_lr: step size of fine-tuning.
      gate_lr: step size of the gate.
      tune_epochs: passes of fine-tuning; 0 gives the global model.
      gate_epochs: passes of the gate, which starts at one half; 0 mixes both models alike.
      level: what is mixed, ``"probability"`` or ``"logit"``.
      gate_reads: ``"inputs"``, which must be floating numbers, or ``"features"``, what enters the head of the copy.
      head: the last, dense layer, for features.
      weights: as in FedAvg.
      statistics: as in FedAvg.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: the gate is one logistic unit. It is trained in evaluation mode, on the examples that
    the copy was trained on.
    """
    one_of("gate_reads", gate_reads, ("inputs", "features"))
    reading = inputs_of(task) if gate_reads == "inputs" else features_of(task, head, TUNED)
    schedule = of_fine_tuning(local)
    return compose(
        mixture(task, logistic_gate(reading), level=level),
        layout=_copied(task, statistics),
        client=train(lr, **local, objective=expert_loss(task, GLOBAL), roles="shared"),
        aggregator=mean(weights=weights),
        adapt=phases(
            train(
                tune_lr, **schedule, epochs=tune_epochs, leaves=path_of(TUNED, "**"), objective=expert_loss(task, TUNED)
            ),
            train(gate_lr, **schedule, epochs=gate_epochs, leaves=GATE_LEAVES, objective=evaluated_loss),
        ),
    )


def _copied(task: Task, statistics: Statistics) -> LayoutMaker:
    """The global model travels; the other expert is a copy of it."""
    make = in_common(by_role(personal=GATE_LEAVES, statistics=statistics), task, everything, 2)

    def bind(both: Task) -> Layout:
        return make(both)._replace(common=None if statistics == "local" else "model")

    return bind
