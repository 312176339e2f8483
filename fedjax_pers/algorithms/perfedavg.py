"""Per-FedAvg: a common start from which one local step does well (MAML)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

from fedjax_pers.aggregators import mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Array, Batch, Context, Leaves, Parts, Report, Task
from fedjax_pers.batches import loop, stream
from fedjax_pers.checks import number, positive_int
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import Layout, Statistics, by_role, leaves_of, replace, trainable_leaves
from fedjax_pers.local import ClientUpdate, OptimizerOf, moving_leaves, no_losses, report_of, train

_ABOUT = {
    "paper": 'Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A '
    'Model-Agnostic Meta-Learning Approach", NeurIPS 2020, arXiv:2002.07948',
    "family": "meta",
    "personal": "nothing between rounds; every client takes a few steps before it predicts",
}
Gradient = Callable[[Leaves, Batch], Leaves]
MetaGradient = Callable[[Gradient, Leaves, Leaves, Batch, Any], Leaves]
"""``(gradient, w, g, batch, alpha) -> (I - alpha Hessian(w; batch)) g``, exactly or nearly."""


def _first_order(gradient: Gradient, w: Leaves, g: Leaves, batch: Batch, alpha: Any) -> Leaves:
    return g


def _exact(gradient: Gradient, w: Leaves, g: Leaves, batch: Batch, alpha: Any) -> Leaves:
    _, product = jax.jvp(lambda w: gradient(w, batch), (w,), (g,))
    return jax.tree.map(lambda g, h: g - alpha * h, g, product)


def _hessian_free(delta: Any) -> MetaGradient:
    def product(gradient: Gradient, w: Leaves, g: Leaves, batch: Batch, alpha: Any) -> Leaves:
        ahead = gradient(jax.tree.map(lambda w, g: w + delta * g, w, g), batch)
        behind = gradient(jax.tree.map(lambda w, g: w - delta * g, w, g), batch)
        return jax.tree.map(lambda g, a, b: g - alpha * (a - b) / (2 * delta), g, ahead, behind)

    return product


@register("perfedavg", title="Per-FedAvg", reduction="alpha = 0: FedAvg", **_ABOUT)
def perfedavg(
    task: Task,
    *,
    lr: float = 0.1,
    alpha: float = 0.05,
    adapt_steps: int = 1,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """Minimises ``f_i(w - alpha grad f_i(w))`` with the exact Hessian-vector product.

    ``w <- w - lr (I - alpha H(w; D'')) grad f(w - alpha grad f(w; D); D')`` with three independent batches; the product
    is one ``jvp`` of the gradient.

    Args:
      task: model and loss.
      lr: step size of the meta step (beta).
      alpha: step size of adaptation.
      adapt_steps: adaptation steps on training batches before a client predicts.
      weights: as in FedAvg.
      statistics: as in FedAvg.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: none in the update; clients are weighted by examples by default (the paper's mean is
    uniform).
    """
    return _per_fedavg(task, _exact, lr, alpha, adapt_steps, weights, statistics, **local)


@register("perfedavg_fo", title="Per-FedAvg (FO)", reduction="alpha = 0: FedAvg", **_ABOUT)
def perfedavg_fo(
    task: Task,
    *,
    lr: float = 0.1,
    alpha: float = 0.05,
    adapt_steps: int = 1,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """Per-FedAvg without the Hessian: ``w <- w - lr grad f(w - alpha grad f(w; D); D')``. It is not MAML.

    Args:
      task: model and loss.
      lr: step size of the meta step (beta).
      alpha: step size of adaptation.
      adapt_steps: adaptation steps on training batches before a client predicts.
      weights: as in FedAvg.
      statistics: as in FedAvg.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: none in the update; clients are weighted by examples by default (the paper's mean is
    uniform).
    """
    return _per_fedavg(task, _first_order, lr, alpha, adapt_steps, weights, statistics, **local)


@register("perfedavg_hf", title="Per-FedAvg (HF)", reduction="alpha = 0: FedAvg; exact on quadratics", **_ABOUT)
def perfedavg_hf(
    task: Task,
    *,
    lr: float = 0.1,
    alpha: float = 0.05,
    delta: float = 1e-3,
    adapt_steps: int = 1,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """Per-FedAvg with the Hessian-vector product by a central difference of gradients.

    ``H u ~ (grad f(w + delta u) - grad f(w - delta u)) / (2 delta)``.

    Args:
      task: model and loss.
      lr: step size of the meta step (beta).
      alpha: step size of adaptation.
      delta: half width of the difference; in float32 below 1e-4 rounding dominates.
      adapt_steps: adaptation steps on training batches before a client predicts.
      weights: as in FedAvg.
      statistics: as in FedAvg.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: none in the update; clients are weighted by examples by default (the paper's mean is
    uniform).
    """
    number("delta", delta, low=1e-8)
    return _per_fedavg(task, _hessian_free(delta), lr, alpha, adapt_steps, weights, statistics, **local)


def _per_fedavg(
    task: Task,
    meta: MetaGradient,
    lr: Any,
    alpha: Any,
    adapt_steps: int,
    weights: str,
    statistics: Statistics,
    *,
    batch_size: int = 10,
    epochs: int | None = None,
    steps: int | None = None,
    optimizer: OptimizerOf = optax.sgd,
    drop_last: bool = False,
) -> Algorithm:
    number("alpha", alpha, low=0)
    number("lr", lr, low=0)
    positive_int("batch_size", batch_size)
    epochs = 1 if epochs is None and steps is None else epochs
    client = _meta_steps(
        meta, optimizer(lr), alpha, batch_size=batch_size, epochs=epochs, steps=steps, drop_last=drop_last
    )
    return compose(
        task,
        layout=by_role(statistics=statistics),
        client=client,
        aggregator=mean(weights=weights),
        adapt=train(alpha, steps=adapt_steps, batch_size=batch_size),
    )


def _meta_steps(meta: MetaGradient, tx: optax.GradientTransformation, alpha: Any, **schedule: Any) -> ClientUpdate:
    batches = {"batch_size": schedule["batch_size"], "drop_last": schedule["drop_last"]}

    def update(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
        view, training = layout.view("model"), trainable_leaves(layout, parts)
        others = [stream(context, name, **batches) for name in ("inner", "hessian")]

        def loss_at(now: Parts, w: Leaves, batch: Batch, key: Array) -> tuple[Array, Leaves]:
            loss, tracked = layout.task.loss(view.read(replace(now, w)), batch, key)
            return loss, view.tracked(now, tracked)

        def meta_step(now: Parts, opt: Any, outer: Batch, key: Array, number: Array) -> tuple[Leaves, Any, Array]:
            w = {name: leaves_of(now)[name] for name in training}
            inner, hessian = (each.batch(number) for each in others)

            def gradient(w: Leaves, batch: Batch) -> Leaves:
                return jax.grad(lambda w: loss_at(now, w, batch, key)[0])(w)

            adapted = jax.tree.map(lambda w, g: w - alpha * g, w, gradient(w, inner))
            (loss, tracked), g = jax.value_and_grad(lambda w: loss_at(now, w, outer, key), has_aux=True)(adapted)
            updates, opt = tx.update(meta(gradient, w, g, hessian, alpha), opt, w)
            like = {name: x.astype(leaves_of(now)[name].dtype) for name, x in tracked.items()}
            return {**like, **optax.apply_updates(w, updates)}, opt, loss

        def step(carry: Any, outer: Batch, key: Array, number: Array) -> Any:
            moving, opt, losses = carry
            new, opt, loss = meta_step(replace(parts, moving), opt, outer, key, number)
            return moving | new, opt, losses.plus(loss, outer)

        start = (moving_leaves(layout, parts, training), tx.init(training), no_losses())
        (moving, _, losses), steps = loop(step, start, context, **schedule)
        return replace(parts, moving), report_of(losses, steps, layout, parts)

    return update
