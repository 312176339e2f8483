"""FedMix: common experts, and on every client a gate that says which of them answers."""

from __future__ import annotations

from typing import Any

from fedjax_pers.aggregators import mean
from fedjax_pers.aggregators.experts import expert_means
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Array, Context, Parts, Task
from fedjax_pers.checks import number, one_of
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import Layout, Statistics, by_role
from fedjax_pers.local import for_epochs, train
from fedjax_pers.mixtures import (
    GATE_LEAVES,
    balance_of,
    in_common,
    inputs_of,
    linear_gate,
    mean_responsibilities,
    mixture,
    paths_in_common,
)
from fedjax_pers.objectives import add, task_loss
from fedjax_pers.paths import SelectorLike, nothing


@register(
    "fedmix",
    title="FedMix",
    paper='Reisser, Louizos, Gavves, Welling, "Federated Mixture of Experts", 2021, arXiv:2107.06724',
    family="mixture",
    personal="the gate",
    reduction="experts = 1: FedAvg",
)
def fedmix(
    task: Task,
    *,
    lr: float = 0.1,
    gate_lr: float = 0.1,
    experts: int = 2,
    balance: float = 0.0,
    body: SelectorLike = nothing,
    newcomer_epochs: int = 5,
    weights: str = "usage",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """All experts are common and a gate on the inputs is the client's own: ``p(y | x) = sum_k g_ik(x) p(y | x, w_k)``.

    Clients minimise ``-log p(y | x)``. Its gradient is, for expert k, that of the expert's own loss times the
    responsibility ``r_k`` in proportion to ``g_ik(x) p(y | x, w_k)``, and for the gate's scores ``g - r``. Expert k of
    the server is the mean of the clients' with weights ``rho_ik = sum_x r_k(x)``, under the received experts; one that
    nobody uses stays.

    Args:
      task: classification by cross-entropy, with inputs ``x`` of floating numbers.
      lr: step size of the experts.
      gate_lr: step size of the gate.
      experts: how many, from as many random initialisations; all of them travel.
      balance: weight of the local penalty ``experts * sum_k mean(g_k)^2 - 1`` against a gate that collapses.
      body: leaves of which there is one for all experts (``~head(1)``: experts are heads); means of it are by examples.
      newcomer_epochs: passes over its data in which an unseen client trains its gate, uniform at first.
      weights: of an expert's mean: ``"usage"`` (rho, which the client tells the server), ``"examples"`` or
        ``"uniform"``, as in FedAvg, which tell nothing.
      statistics: treatment of running statistics, of which each expert has its own.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: the gate is linear in the inputs; one step moves experts and gate together.
    """
    number("balance", balance, low=0)
    one_of("weights", weights, ("usage", "examples", "uniform"))
    gate = linear_gate(inputs_of(task), experts)
    common = set(paths_in_common(task, body, experts).values())

    def usage(layout: Layout, parts: Parts, context: Context) -> Array:
        return mean_responsibilities(task, gate, layout.view("model").read(parts), context)

    return compose(
        mixture(task, gate),
        layout=in_common(by_role(personal=GATE_LEAVES, statistics=statistics), task, body, experts),
        client=train(
            {"shared": lr, "personal": gate_lr}, **local, objective=add(task_loss(), balance_of(gate, balance))
        ),
        aggregator=expert_means(usage, common) if weights == "usage" else mean(weights=weights),
        newcomer=train(gate_lr, **for_epochs(newcomer_epochs, local), roles="personal"),
    )
