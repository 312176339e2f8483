"""pFedMe: personalisation by Moreau envelopes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_pers.aggregators import mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Array, Batch, Context, Parts, Report, Task
from fedjax_pers.batches import loop
from fedjax_pers.checks import number, positive_int
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import OWN, Layout, Statistics, leaves_of, replace, trainable_leaves, twin
from fedjax_pers.local import ClientUpdate, OptimizerOf, copy_shared, no_losses, one_step, phases, report_of, train
from fedjax_pers.objectives import Objective, add, pull_to_shared, task_loss


@register(
    "pfedme",
    title="pFedMe",
    paper='Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, arXiv:2006.08848',
    family="regularised",
    personal="a second whole model, the envelope's minimiser",
    reduction="one local round, lr * lam = 1, exact inner solves: FedProx with mu = lam and exact solves",
)
def pfedme(
    task: Task,
    *,
    lr: float = 0.005,
    inner_lr: float = 0.05,
    lam: float = 15.0,
    inner_steps: int = 5,
    beta: float = 1.0,
    newcomer_epochs: int = 5,
    weights: str = "examples",
    statistics: Statistics = "average",
    batch_size: int = 10,
    epochs: int | None = None,
    steps: int | None = None,
    optimizer: OptimizerOf = optax.sgd,
    drop_last: bool = False,
) -> Algorithm:
    """Minimises the mean of ``F_i(w) = min_theta f_i(theta) + lam / 2 |theta - w|^2``; the client predicts with theta.

    In every local round: draw a batch, take ``inner_steps`` on theta starting from the client's ``w_i``, then
    ``w_i <- w_i - lr lam (w_i - theta)``. Server: ``w <- (1 - beta) w + beta sum_i p_i w_i``.

    Args:
      task: model and loss.
      lr: step size of ``w_i`` (eta).
      inner_lr: step size of theta; ``inner_lr * (lam + curvature) < 2`` or it diverges.
      lam: strength of the envelope's tie, at least 0.
      inner_steps: steps on theta for every batch (K).
      beta: step of the server.
      newcomer_epochs: passes of an unseen client's inner problem, from ``w``, before it predicts.
      weights: as in FedAvg.
      statistics: treatment of running statistics.
      batch_size: examples a local round.
      epochs: passes over the client's examples (1 where neither is given), or
      steps: number of local rounds (R).
      optimizer: of the inner problem, from a step size to an optax optimiser; fresh for every batch.
      drop_last: leave out short batches.

    Differences from the paper: only clients of the cohort train (in the paper's pseudo-code all do and a sample is
    aggregated); theta starts from ``w_i`` in every local round; an unseen client solves its inner problem from ``w``;
    clients are weighted by examples by default (the paper's mean is uniform).
    """
    for name, value in (("lr", lr), ("inner_lr", inner_lr), ("lam", lam), ("beta", beta)):
        number(name, value, low=0)
    for name, value in (("inner_steps", inner_steps), ("batch_size", batch_size)):
        positive_int(name, value)
    epochs = 1 if epochs is None and steps is None else epochs
    objective = add(task_loss("own"), pull_to_shared(lam))
    envelope = _envelope(lr, lam, optimizer(inner_lr), objective, inner_steps)
    inner = train(
        inner_lr,
        batch_size=batch_size,
        epochs=newcomer_epochs,
        optimizer=optimizer,
        objective=objective,
        roles="personal",
    )
    return compose(
        task,
        layout=twin(statistics=statistics),
        client=_local_rounds(envelope, batch_size=batch_size, epochs=epochs, steps=steps, drop_last=drop_last),
        aggregator=mean(optax.sgd(beta), weights=weights),
        newcomer=phases(copy_shared, inner),
    )


def _envelope(lr: Any, lam: Any, tx: optax.GradientTransformation, objective: Objective, inner_steps: int) -> Any:
    def local_round(layout: Layout, parts: Parts, batch: Batch, key: Array) -> tuple[Parts, Array]:
        """theta by inner steps from w_i, then a step of w_i towards theta; the loss at the last inner step."""
        near = replace(parts, {OWN + n: x for n, x in parts.shared.items() if OWN + n in layout.trainable})
        own = trainable_leaves(layout, near, "personal")

        def inner(_: Array, carry: Any) -> Any:
            moving, opt, _ = carry
            now = replace(near, moving)
            new, opt, loss = one_step(layout, now, parts, own, tx, opt, objective, batch, key)
            return {**moving, **new}, opt, loss.astype(jnp.float32)

        start = (dict(near.personal), tx.init(own), jnp.zeros((), jnp.float32))
        theta, _, loss = jax.lax.fori_loop(0, inner_steps, inner, start)

        def towards(name: str, w: Array) -> Array:
            if OWN + name not in theta:
                return w
            if name not in layout.trainable:  # running statistics: those of the model that was trained
                return theta[OWN + name]
            return w - lr * lam * (w - theta[OWN + name])

        return Parts({n: towards(n, w) for n, w in parts.shared.items()}, theta, parts.frozen), loss

    return local_round


def _local_rounds(envelope: Any, **schedule: Any) -> ClientUpdate:
    def update(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
        def step(carry: Any, batch: Batch, key: Array, number: Array) -> Any:
            moving, losses = carry
            new, loss = envelope(layout, replace(parts, moving), batch, key)
            return leaves_of(new), losses.plus(loss, batch)

        (moving, losses), steps = loop(step, (leaves_of(parts), no_losses()), context, **schedule)
        return replace(parts, moving), report_of(losses, steps, layout, parts)

    return update
