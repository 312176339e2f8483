"""APFL: an adaptive mixture of the parameters of a global and a local model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_pers.aggregators import mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Array, Batch, Context, Parts, Report, Task
from fedjax_pers.batches import loop, stream
from fedjax_pers.checks import number, positive_int
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import Layout, Statistics, interpolate, leaves_of, replace, trainable_leaves
from fedjax_pers.local import ClientUpdate, OptimizerOf, copy_shared, no_losses, one_step, phases, report_of, train
from fedjax_pers.objectives import task_loss


@register(
    "apfl",
    title="APFL",
    paper='Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", 2020, arXiv:2003.13461',
    family="regularised",
    personal="a second whole model and the mixing weight",
    reduction="the global model is FedAvg's for every alpha; alpha = 0: FedAvg; alpha = 1: local training",
)
def apfl(
    task: Task,
    *,
    lr: float = 0.1,
    alpha: float = 0.5,
    alpha_lr: float = 0.0,
    newcomer_epochs: int = 5,
    weights: str = "examples",
    statistics: Statistics = "average",
    batch_size: int = 10,
    epochs: int | None = None,
    steps: int | None = None,
    optimizer: OptimizerOf = optax.sgd,
    drop_last: bool = False,
) -> Algorithm:
    """Each client mixes parameters, ``alpha v + (1 - alpha) w``, and trains ``v`` through the mixture.

    In every local step ``w <- w - eta grad f(w)``, then ``v <- v - eta alpha grad f(alpha v + (1 - alpha) w)``.
    Once a round, before the first step, ``alpha <- clip(alpha - alpha_lr <v - w, grad f(mixture)>, 0, 1)``.

    Args:
      task: model and loss.
      lr: step size of both models.
      alpha: first mixing weight, in 0 .. 1; each client keeps its own.
      alpha_lr: step size of the mixing weight; 0 keeps it fixed.
      newcomer_epochs: passes by which an unseen client trains ``v``, from ``v = w``, before it predicts.
      weights: as in FedAvg.
      statistics: treatment of the global model's running statistics.
      batch_size: examples a step.
      epochs: passes over the client's examples (1 where neither is given), or
      steps: number of steps.
      optimizer: from a step size to an optax optimiser.
      drop_last: leave out short batches.

    Differences from the paper: ``v``'s gradient is taken at the mixture with the *new* ``w`` of the step (the paper's
    Algorithm 1 takes both gradients at the old ones); models start from one common initial model; alpha is adapted once
    a round on the round's first batch; it is a scalar for the whole model.
    """
    number("alpha", alpha, 0, 1)
    number("alpha_lr", alpha_lr, 0)
    number("lr", lr, 0)
    positive_int("batch_size", batch_size)
    epochs = 1 if epochs is None and steps is None else epochs
    schedule = {"batch_size": batch_size, "drop_last": drop_last}
    client = phases(
        _adapt_alpha(alpha_lr, **schedule), _mixture_steps(optimizer(lr), **schedule, epochs=epochs, steps=steps)
    )
    mixture = {"objective": task_loss("model"), "roles": "personal", "optimizer": optimizer}
    newcomer = phases(copy_shared, train(lr, **schedule, epochs=newcomer_epochs, **mixture))
    return compose(
        task,
        layout=interpolate(alpha, statistics=statistics),
        client=client,
        aggregator=mean(weights=weights),
        newcomer=newcomer,
    )


def _adapt_alpha(alpha_lr: Any, **schedule: Any) -> ClientUpdate:
    """One step on the mixing weight, on the first batch of the round."""

    def update(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
        batch = stream(context, "batches", **schedule).batch(jnp.int32(0))

        def loss(alpha: Array) -> Array:
            mixed = replace(parts, {"alpha": alpha})
            return layout.task.loss(layout.view("model").read(mixed), batch, context.key)[0]

        alpha = parts.personal["alpha"]
        moved = jnp.clip(alpha - alpha_lr * jax.grad(loss)(alpha), 0.0, 1.0)
        return replace(parts, {"alpha": moved}), report_of(no_losses(), jnp.int32(0), layout, parts)

    return update


def _mixture_steps(tx: optax.GradientTransformation, **schedule: Any) -> ClientUpdate:
    def update(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
        shared, own = trainable_leaves(layout, parts, "shared"), trainable_leaves(layout, parts, "personal")

        def step(carry: Any, batch: Batch, key: Array, number: Array) -> Any:
            moving, opt_shared, opt_own, losses = carry
            now, received = replace(parts, moving), context.received
            new, opt_shared, _ = one_step(
                layout, now, received, shared, tx, opt_shared, task_loss("shared"), batch, key
            )
            now = replace(now, new)
            new, opt_own, loss = one_step(layout, now, received, own, tx, opt_own, task_loss("model"), batch, key)
            now = replace(now, new)
            return leaves_of(now), opt_shared, opt_own, losses.plus(loss, batch)

        start = (leaves_of(parts), tx.init(shared), tx.init(own), no_losses())
        (moving, _, _, losses), steps = loop(step, start, context, **schedule)
        return replace(parts, moving), report_of(losses, steps, layout, parts)

    return update
