"""PFL-MoE: the global model and a fine-tuned copy of it, mixed by a gate that each client trains for itself."""

from __future__ import annotations

from typing import Any

from fedjax_pers.aggregators import mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Leaves, Task
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import Layout, LayoutMaker, Statistics, by_role, without
from fedjax_pers.local import phases, train
from fedjax_pers.mixtures import (
    GATE_LEAVES,
    Level,
    evaluated_loss,
    expert_loss,
    logistic_gate,
    mixture,
    path_of,
)

GLOBAL, TUNED = 0, 1


@register(
    "pfl_moe",
    title="PFL-MoE",
    paper='Guo, Mei, Xiang, Lü, Jiang, "PFL-MoE: Personalized Federated Learning Based on Mixture of Experts", '
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
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """FedAvg; each client then fine-tunes a copy of the global model, and trains a gate between the two.

    ``p(y | x) = g(x) p(y | x, w) + (1 - g(x)) p(y | x, v_i)`` with ``g = sigmoid(a_i x + c_i)``. The copy ``v_i`` is
    trained on its own loss, then the gate on that of the mixture, in which both models stay as they are.

    Args:
      task: classification by cross-entropy, with inputs ``x`` of floating numbers.
      lr: step size of the clients in training.
      tune_lr: step size of fine-tuning.
      gate_lr: step size of the gate.
      tune_epochs: passes of fine-tuning; 0 gives the global model.
      gate_epochs: passes of the gate, which starts at one half; 0 mixes both models alike.
      level: what is mixed, ``"probability"`` or ``"logit"``.
      weights: as in FedAvg.
      statistics: as in FedAvg.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: the gate is linear in the inputs; the variant that reads features of the copy is not
    offered. The gate is trained in evaluation mode, on the examples that the copy was trained on.
    """
    schedule = {name: local[name] for name in ("batch_size", "optimizer") if name in local}
    return compose(
        mixture(task, logistic_gate(task), level=level),
        layout=_copied(statistics),
        client=train(lr, **local, objective=expert_loss(task, GLOBAL), roles="shared"),
        aggregator=mean(weights=weights),
        adapt=phases(
            train(
                tune_lr, **schedule, epochs=tune_epochs, leaves=path_of(TUNED, "**"), objective=expert_loss(task, TUNED)
            ),
            train(gate_lr, **schedule, epochs=gate_epochs, leaves=GATE_LEAVES, objective=evaluated_loss),
        ),
    )


def _copied(statistics: Statistics) -> LayoutMaker:
    """The global model travels; the other expert is a copy of it."""

    def bind(task: Task) -> Layout:
        layout = without(by_role(personal=GATE_LEAVES, statistics=statistics)(task), _second_from_first)
        return layout._replace(common=None if statistics == "local" else "model")

    return bind


def _second_from_first(leaves: Leaves) -> Leaves:
    first = path_of(GLOBAL, "")
    return {path_of(TUNED, name[len(first) + 1 :]): x for name, x in leaves.items() if name.startswith(f"{first}/")}
