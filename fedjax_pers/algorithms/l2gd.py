"""L2GD: a random mixture of local steps and averaging steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_pers.aggregators import mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Array, Context, Leaves, Parts, Report, Task
from fedjax_pers.checks import number
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import Layout, replace, twin
from fedjax_pers.local import copy_shared, phases, train
from fedjax_pers.objectives import task_loss


@register(
    "l2gd",
    title="L2GD",
    paper='Hanzely, Richtárik, "Federated Learning of a Mixture of Global and Local Models", 2020, arXiv:2002.05516',
    family="regularised",
    personal="a whole model; the server holds only their mean",
    reduction="lam = 0: local training; lr * lam = p: averaging steps set every model to the mean",
)
def l2gd(
    task: Task,
    *,
    lr: float = 0.1,
    lam: float = 1.0,
    p: float = 0.3,
    batch_size: int = 10,
    newcomer_epochs: int = 5,
) -> Algorithm:
    """Minimises ``mean_i f_i(x_i) + lam / 2 mean_i |x_i - x_mean|^2``; one round is one iteration.

    All clients toss one common coin. With probability ``1 - p`` everyone takes a gradient step
    ``x_i <- x_i - lr / (1 - p) grad f_i(x_i)``; otherwise ``x_i <- x_i - (lr lam / p)(x_i - x_mean)``. Nothing is sent
    but when an averaging step follows a local one: ``p (1 - p)`` of the rounds.

    Args:
      task: model and loss.
      lr: ``alpha / N`` of the paper, so that it does not depend on the number of clients; ``lr * lam <= p`` is needed.
      lam: strength of the tie to the mean, at least 0.
      p: probability of an averaging step, in 0 .. 1 exclusive.
      batch_size: examples of a local step (L2SGD); at least the largest client for full gradients.
      newcomer_epochs: passes of an unseen client, from the mean, before it predicts.

    Differences from the paper: step sizes are given per client (``lr = alpha / N``); the mean is over all clients, so
    every round needs everyone.
    """
    number("p", p, 1e-6, 1 - 1e-6)
    number("lam", lam, low=0)
    number("lr * lam / p", lr * lam / p, 0, 1 + 1e-6)
    step = train(lr / (1 - p), batch_size=batch_size, steps=1, objective=task_loss("own"), roles="personal")
    newcomer = train(lr, batch_size=batch_size, epochs=newcomer_epochs, objective=task_loss("own"), roles="personal")

    def averaging(context: Context, round: Array) -> Array:
        return jax.random.bernoulli(jax.random.fold_in(context.common, round), p)

    def update(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
        averages = averaging(context, context.round)
        after_local = (context.round > 0) & ~averaging(context, context.round - 1)
        # The step that the coin did not choose runs on no examples, so it costs nothing.
        local, report = step(layout, parts, context._replace(size=jnp.where(averages, 0, context.size)))
        chosen = {
            name: jnp.where(averages, x, local.personal[name])
            for name, x in _towards(layout, parts, lr * lam / p).items()
        }
        new = replace(parts, chosen)
        sent = {shared: new.personal[own] for own, shared in _pairs(layout, parts)}
        steps = jnp.where(averages, (context.size > 0).astype(jnp.int32), report.steps)
        return replace(new, sent), report._replace(steps=steps, transmitted=averages & after_local)

    return compose(
        task,
        layout=twin(),
        client=update,
        aggregator=mean(optax.sgd(1.0), weights="uniform"),
        newcomer=phases(copy_shared, newcomer),
        participation="everyone",
    )


def _pairs(layout: Layout, parts: Parts) -> list[tuple[str, str]]:
    own, shared = layout.view("own").keys, layout.view("shared").keys
    return [(own[path], shared[path]) for path in own if own[path] in parts.personal]


def _towards(layout: Layout, parts: Parts, fraction: Any) -> Leaves:
    """The client's own leaves after a step towards the mean that the server holds."""
    return {
        own: parts.personal[own] - fraction * (parts.personal[own] - parts.shared[shared])
        if own in layout.trainable
        else parts.personal[own]
        for own, shared in _pairs(layout, parts)
    }
