"""Domain experts: a common and a private model on every client, and a private gate between them."""

from __future__ import annotations

from typing import Any

from fedjax_pers.aggregators import mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Task
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import Statistics, by_role
from fedjax_pers.local import for_epochs, train
from fedjax_pers.mixtures import GATE_LEAVES, Level, inputs_of, logistic_gate, mixture, path_of


@register(
    "domain_experts",
    title="Domain experts",
    paper='Peterson, Kanani, Marathe, "Private Federated Learning with Domain Adaptation", 2019, arXiv:1912.06733',
    family="mixture",
    personal="a second whole model and the gate",
    reduction="a gate that always trusts the common model: FedAvg",
)
def domain_experts(
    task: Task,
    *,
    lr: float = 0.1,
    private_lr: float = 0.1,
    level: Level = "probability",
    newcomer_epochs: int = 5,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """Clients mix a common and a private model by a private gate, and train all three on the loss of the mixture.

    ``p(y | x) = g_i(x) p(y | x, w) + (1 - g_i(x)) p(y | x, v_i)`` with ``g_i = sigmoid(a_i x + c_i)``. Each example
    moves a model as far as it is responsible for it. Only ``w`` is sent.

    Args:
      task: classification by cross-entropy, with inputs ``x`` of floating numbers.
      lr: step size of the common model.
      private_lr: step size of the private model and the gate.
      level: what is mixed, ``"probability"`` or ``"logit"``.
      newcomer_epochs: passes over its data in which an unseen client trains its private model and its gate.
      weights: of the common model's mean, as in FedAvg.
      statistics: treatment of the common model's running statistics.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: the noise with which it trains the common model is not part of this method; compose it
    with :func:`fedjax_pers.privacy.private`. Private models have the common one's form and start from one random
    initialisation.
    """
    return compose(
        mixture(task, logistic_gate(inputs_of(task)), level=level),
        layout=by_role(personal=[GATE_LEAVES, path_of(1, "**")], statistics=statistics),
        client=train({"shared": lr, "personal": private_lr}, **local),
        aggregator=mean(weights=weights),
        newcomer=train(private_lr, **for_epochs(newcomer_epochs, local), roles="personal"),
    )
