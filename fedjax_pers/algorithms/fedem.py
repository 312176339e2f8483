"""FedEM: every client's data are a mixture of common distributions, in proportions of its own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pers.aggregators import mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Array, Batch, Context, Leaves, Parts, Report, Task
from fedjax_pers.checks import positive_int, whole_number
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import Layout, Statistics, by_role, replace
from fedjax_pers.local import ClientUpdate, no_losses, phases, report_of, train
from fedjax_pers.mixtures import (
    EXPERTS,
    GATE,
    Gate,
    constant_gate,
    mean_responsibilities,
    mixture,
    responsibilities,
    tracked_of,
)
from fedjax_pers.objectives import Objective

PROPORTIONS = f"{GATE}/weights"
_SMALLEST = jnp.finfo(jnp.float32).tiny


@register(
    "fedem",
    title="FedEM",
    paper='Marfoq, Neglia, Bellet, Kameni, Vidal, "Federated Multi-Task Learning under a Mixture of Distributions", '
    "NeurIPS 2021, arXiv:2108.10252",
    family="mixture",
    personal="in which proportions it mixes the common models",
    reduction="components = 1: FedAvg",
)
def fedem(
    task: Task,
    *,
    lr: float = 0.1,
    components: int = 3,
    newcomer_epochs: int = 5,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """Several common models; each client mixes their probabilities in proportions ``pi_i`` that it never sends.

    E-step, for every example s of a client: ``q_s(m)`` in proportion to ``pi_im exp(-loss(w_m; s))`` of the models as
    received; then ``pi_im <- mean_s q_s(m)``. M-step: local SGD on ``1/n sum_s sum_m q_s(m) loss(w_m; s)``, all models
    in each step. The server averages each model. A client predicts with ``sum_m pi_im p(y | x, w_m)``.

    Args:
      task: classification by cross-entropy, or a task without ``apply`` whose loss is a negative log-likelihood.
      lr: step size.
      components: number of models, which start from as many random initialisations; all of them travel.
      newcomer_epochs: E-steps by which an unseen client finds its proportions before it predicts; they start uniform.
      weights: of every model's mean, as in FedAvg.
      statistics: treatment of running statistics, of which each model has its own; E-steps are in evaluation mode.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: clients that are absent from a round are not averaged in with their last models.
    """
    positive_int("components", components)
    whole_number("newcomer_epochs", newcomer_epochs)
    gate = constant_gate(components)
    expectation = _e_step(task, gate)
    maximisation = train(lr, **local, roles="shared", objective=_m_step(task, gate))
    return compose(
        mixture(task, gate),
        layout=by_role(personal=PROPORTIONS, statistics=statistics),
        client=phases(expectation, maximisation),
        aggregator=mean(weights=weights),
        newcomer=_repeated(expectation, newcomer_epochs),
    )


def _e_step(task: Task, gate: Gate) -> ClientUpdate:
    """The proportions become the mean responsibilities; a client without examples keeps its own."""

    def update(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
        found = mean_responsibilities(task, gate, layout.view("model").read(parts), context)
        now = jnp.where(context.size > 0, found, parts.personal[PROPORTIONS])
        return replace(parts, {PROPORTIONS: now}), report_of(no_losses(), jnp.int32(0), layout, parts)

    return update


def _m_step(task: Task, gate: Gate) -> Objective:
    """``sum_s weight_s sum_m q_s(m) loss(w_m; s) / sum_s weight_s``, the responsibilities being those on receipt."""

    def objective(layout: Layout, parts: Parts, received: Parts, batch: Batch, key: Array) -> tuple[Array, Leaves]:
        view, counted = layout.view("model"), batch["weight"]
        shares = responsibilities(task, gate, view.read(received), batch)
        total = jnp.zeros(())
        tracked: Leaves = {}
        for number, model in enumerate(view.read(parts)[EXPERTS]):
            # Above 0, so that an example without responsibility is still one of the batch for its normalisation.
            weight = counted * jnp.maximum(shares[:, number], _SMALLEST)
            loss, moved = task.loss(model, {**batch, "weight": weight}, key)
            total = total + loss * (weight.sum() / jnp.maximum(counted.sum(), 1))
            tracked |= view.tracked(parts, tracked_of(number, moved))
        return total, tracked

    return objective


def _repeated(update: ClientUpdate, times: int) -> ClientUpdate:
    def several(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
        nothing_done = report_of(no_losses(), jnp.int32(0), layout, parts)
        return jax.lax.fori_loop(0, times, lambda _, now: update(layout, now, context)[0], parts), nothing_done

    return several
