"""Fine-tuning that knows when to stop: a client judges each epoch on examples that it does not train on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_pers.base import Array, Context, Leaves, Parts, Report
from fedjax_pers.batches import loop, split_off
from fedjax_pers.checks import number, positive_int, whole_number
from fedjax_pers.features import remembered
from fedjax_pers.judging import mean_loss
from fedjax_pers.layouts import Layout, replace
from fedjax_pers.local import ClientUpdate, OptimizerOf, chosen_leaves, descent, moving_leaves, no_losses, report_of
from fedjax_pers.objectives import Objective, task_loss
from fedjax_pers.paths import SelectorLike, as_selector, everything
from fedjax_pers.trees import where


def fine_tune(
    lr: Any = 0.1,
    *,
    epochs: int | Array = 5,
    holdout: Any = 0.2,
    batch_size: int = 10,
    optimizer: OptimizerOf = optax.sgd,
    objective: Objective | None = None,
    leaves: SelectorLike = everything,
) -> ClientUpdate:
    r"""Training that keeps the best of its epochs, 0 among them, by the loss on examples that the client holds back.

    .. math:: e_i = \arg\min_{0 \le e \le E} L_i^{\text{held back}}(\theta_i^{(e)})

    of equal ones the first. With ``e_i = 0`` it is the model as it was. The examples held back are the client's own, of
    its training split, and the same in every round: test data are not looked at, and the validation split remains for
    choosing settings. A client with fewer than two examples has none to judge on, and its model stays as it is.
    :func:`~fedjax_pers.train` is the same without stopping, on all examples.

    Example:
      >>> import fedjax_pers as fp
      >>> federation = fp.data.load("vowel_speakers")
      >>> task = fp.tasks.from_model(federation, "linear")
      >>> algorithm = fp.compose(task, layout=fp.by_role(personal="bias"), adapt=fine_tune(0.3, epochs=3))
      >>> state, _ = fp.run(algorithm, None, federation, 1)

    Args:
      lr: step size.
      epochs: passes over the examples that are not held back, at most; 0 keeps the model.
      holdout: share of its examples that a client holds back, in 0 .. 1; at least one where it has two.
      batch_size: examples a step.
      optimizer: from a step size to an optax optimiser; its state goes on from epoch to epoch.
      objective: what is minimised; the task's loss by default. What is judged is always the task's loss.
      leaves: the leaves that train, by paths of the model.

    Raises:
      ValueError: names the setting, what was found and what is allowed.

    Source: Prechelt, "Early Stopping, But When?", in: Neural Networks: Tricks of the Trade, Springer 1998.
    """
    number("lr", lr, low=0)
    whole_number("epochs", epochs)
    number("holdout", holdout, 0, 1)
    positive_int("batch_size", batch_size)
    objective, chosen = objective or task_loss(), as_selector(leaves)

    def update(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
        training = chosen_leaves(layout, parts, "all", chosen)
        if not training:
            return parts, report_of(no_losses(), jnp.int32(0), layout, parts)
        rest, held_back = split_off(context, holdout)
        moving = moving_leaves(layout, parts, training)
        rest, loss = remembered(layout, parts, rest, moving, objective, batch_size)
        step, start = descent(layout, parts, context.received, training, optimizer(lr), loss)

        def judged(moving: Leaves) -> Array:
            return mean_loss(layout.task, layout.view("model").read(replace(parts, moving)), held_back)

        def one_epoch(epoch: Array, carry: Any) -> Any:
            trained, steps, best, least = carry
            trained, taken = loop(step, trained, rest, batch_size=batch_size, epochs=1, done=epoch)
            found = judged(trained[0])
            better = found < least
            return trained, steps + taken, where(better, trained[0], best), jnp.where(better, found, least)

        first = start, jnp.int32(0), start[0], judged(start[0])
        (_, _, losses), steps, best, _ = jax.lax.fori_loop(0, epochs, one_epoch, first)
        return replace(parts, best), report_of(losses, steps, layout, parts)

    return update
