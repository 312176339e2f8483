"""How a client trains: phases of optimiser steps, each with its own objective, trainable leaves and fresh optimiser.

A client update is ``update(layout, parts, context) -> (parts, Report)``. What comes back in ``parts.shared`` is
uploaded, what comes back in ``parts.personal`` becomes the client's row: a client update cannot send anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_pers.base import Array, Batch, Context, Leaves, Parts, Report
from fedjax_pers.batches import loop, sweep
from fedjax_pers.checks import number, positive_int, require
from fedjax_pers.features import remembered
from fedjax_pers.layouts import OWN, Layout, leaves_of, replace, trainable_leaves
from fedjax_pers.objectives import Objective, task_loss
from fedjax_pers.paths import Selector, SelectorLike, as_selector, everything, nothing

ClientUpdate = Callable[[Layout, Parts, Context], tuple[Parts, Report]]
OptimizerOf = Callable[[Any], optax.GradientTransformation]
"""From a learning rate to an optimiser, for example ``optax.sgd`` or ``partial(optax.sgd, momentum=0.5)``."""


class Losses(NamedTuple):
    """A running mean of losses over examples."""

    total: Array
    weight: Array

    def plus(self, loss: Array, batch: Batch) -> Losses:
        """Adds a batch's mean loss, counted by its examples."""
        weight = batch["weight"].sum()
        return Losses(self.total + loss.astype(jnp.float32) * weight, self.weight + weight)

    def mean(self) -> Array:
        """The mean so far; NaN before the first batch."""
        return jnp.where(self.weight > 0, self.total / jnp.maximum(self.weight, 1), jnp.nan)


def no_losses() -> Losses:
    """The start of a running mean."""
    return Losses(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))


def report_of(losses: Losses, steps: Array, layout: Layout, parts: Parts) -> Report:
    """The report of a client that communicates if and only if it has shared leaves."""
    return Report(losses.mean(), jnp.asarray(steps, jnp.int32), jnp.array(bool(parts.shared)))


def train(
    lr: Any = 0.1,
    *,
    batch_size: int = 10,
    epochs: int | Array | None = None,
    steps: int | Array | None = None,
    optimizer: OptimizerOf | Mapping[str, OptimizerOf] = optax.sgd,
    objective: Objective | None = None,
    roles: str = "all",
    leaves: SelectorLike = everything,
    order: str = "batches",
    drop_last: bool = False,
) -> ClientUpdate:
    """A phase of local training: by default one epoch of SGD on the task's loss over all shared and personal leaves.

    The mask is applied *before* the gradient: leaves that do not train are constants of the step, they have neither a
    gradient nor optimiser state, so momentum and weight decay cannot move them.

    Example:
      >>> import optax
      >>> head_then_body = phases(train(0.1, epochs=5, roles="personal"), train(0.1, epochs=1, roles="shared"))

    Args:
      lr: step size; a float or a traced scalar. A mapping by role gives each role its own.
      batch_size: examples a step. The last batch of an epoch may be shorter.
      epochs: passes over the client's examples (1 where neither is given), or
      steps: number of steps, whatever the client's size.
      optimizer: from a step size to an optax optimiser; its state is fresh in every phase.
      objective: what is minimised; :func:`~fedjax_pers.objectives.task_loss` by default.
      roles: ``"shared"``, ``"personal"`` or ``"all"``.
      leaves: only those at these paths of the model.
      order: name of the stream that orders the examples; phases of equal order see equal batches.
      drop_last: leave out short batches; a client smaller than a batch is then skipped.
    """
    positive_int("batch_size", batch_size)
    for rate in lr.values() if isinstance(lr, Mapping) else (lr,):
        number("lr", rate, low=0)
    require(epochs is None or steps is None, "epochs, steps: both were given; a phase has one or the other")
    epochs = 1 if epochs is None and steps is None else epochs
    objective, chosen = objective or task_loss(), as_selector(leaves)
    optimizers = dict(optimizer) if isinstance(optimizer, Mapping) else optimizer

    def update(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
        training = chosen_leaves(layout, parts, roles, chosen)
        if not training:
            return parts, report_of(no_losses(), jnp.int32(0), layout, parts)
        rates = lr if isinstance(lr, Mapping) else {"shared": lr, "personal": lr}
        if isinstance(optimizers, dict) or isinstance(lr, Mapping):
            of_role = optimizers if isinstance(optimizers, dict) else dict.fromkeys(rates, optimizers)
            labels = {name: "shared" if name in parts.shared else "personal" for name in training}
            tx = optax.partition({role: of_role[role](rates[role]) for role in rates}, labels)
        else:
            tx = optimizers(lr)
        return descend(
            layout, parts, context, training, tx, objective,
            batch_size=batch_size, epochs=epochs, steps=steps, order=order, drop_last=drop_last,
        )  # fmt: skip

    return update


def for_epochs(epochs: int, local: Mapping[str, Any]) -> dict[str, Any]:
    """A method's settings of local training with another length, such as that of a newcomer's.

    Example:
      >>> for_epochs(5, {"steps": 3, "batch_size": 4})
      {'steps': None, 'batch_size': 4, 'epochs': 5}
    """
    return {**local, "epochs": epochs, "steps": None}


def of_fine_tuning(local: Mapping[str, Any]) -> dict[str, Any]:
    """What fine-tuning has in common with a method's local training: its length is another, its steps are alike.

    Example:
      >>> of_fine_tuning({"steps": 3, "batch_size": 4})
      {'batch_size': 4}
    """
    return {name: local[name] for name in ("batch_size", "optimizer") if name in local}


def chosen_leaves(layout: Layout, parts: Parts, roles: str, chosen: Selector) -> Leaves:
    """The leaves of some roles that may train and that a selector names; ValueError where there are none of these."""
    candidates = trainable_leaves(layout, parts, roles)
    if chosen == everything or not candidates:
        return candidates
    # Selectors speak of the model's paths; a client's own copy of a leaf answers to the same path.
    paths = chosen.select({name.removeprefix(OWN): x for name, x in candidates.items()}, layout.model)
    named = {name: x for name, x in candidates.items() if name.removeprefix(OWN) in paths}
    require(bool(named), f"leaves: {chosen} selects none of the leaves that may train here: {sorted(candidates)}")
    return named


def one_step(
    layout: Layout,
    parts: Parts,
    received: Parts,
    names: Iterable[str],
    tx: optax.GradientTransformation,
    opt: Any,
    objective: Objective,
    batch: Batch,
    key: Array,
) -> tuple[Leaves, Any, Array]:
    """One optimiser step on the named leaves: their new values and those of tracked leaves, the state, and the loss."""
    training = {name: leaves_of(parts)[name] for name in names}

    def loss_of(training: Leaves) -> tuple[Array, Leaves]:
        return objective(layout, replace(parts, training), received, batch, key)

    (loss, tracked), grads = jax.value_and_grad(loss_of, has_aux=True)(training)
    updates, opt = tx.update(grads, opt, training)
    now = leaves_of(parts)
    both = sorted(layout.trainable & set(tracked))
    require(not both, f"tracked: the loss returns new values of {both}, which optimisers change; name them statistics")
    tracked = {name: jnp.asarray(x).astype(now[name].dtype) for name, x in tracked.items()}
    return {**tracked, **optax.apply_updates(training, updates)}, opt, loss


def descend(
    layout: Layout,
    parts: Parts,
    context: Context,
    training: Leaves,
    tx: optax.GradientTransformation,
    objective: Objective,
    **schedule: Any,
) -> tuple[Parts, Report]:
    """Optimiser steps on the leaves in ``training``; ``schedule`` goes to :func:`fedjax_pers.batches.loop`.

    Over several epochs, what the leaves that stay make of an example is computed once.
    """
    epochs = schedule.get("epochs")
    if epochs is not None and (isinstance(epochs, jax.core.Tracer) or epochs > 1):
        moving = moving_leaves(layout, parts, training)
        context, objective = remembered(layout, parts, context, moving, objective, schedule["batch_size"])
    step, start = descent(layout, parts, context.received, training, tx, objective)
    (moving, _, losses), steps = loop(step, start, context, **schedule)
    return replace(parts, moving), report_of(losses, steps, layout, parts)


def descent(
    layout: Layout,
    parts: Parts,
    received: Parts,
    training: Leaves,
    tx: optax.GradientTransformation,
    objective: Objective,
) -> tuple[Callable[[Any, Batch, Array, Array], Any], tuple[Leaves, Any, Losses]]:
    """The body of a loop of optimiser steps, and its first carry: leaves that move, the optimiser's state, losses."""

    def step(carry: Any, batch: Batch, key: Array, number: Array) -> Any:
        moving, opt, losses = carry
        now = replace(parts, moving)
        new, opt, loss = one_step(layout, now, received, training, tx, opt, objective, batch, key)
        return moving | new, opt, losses.plus(loss, batch)

    return step, (moving_leaves(layout, parts, training), tx.init(training), no_losses())


def full_gradient(
    layout: Layout, parts: Parts, context: Context, training: Leaves, objective: Objective, *, batch_size: int
) -> tuple[Leaves, Leaves, Array]:
    """The gradient of the mean loss over all of a client's examples, by batches.

    Returns:
      It, with the names of ``training``; the tracked leaves (running statistics) after the pass; the mean loss.
    """
    still = {name: x for name, x in leaves_of(parts).items() if name not in layout.trainable}

    def add_batch(carry: Any, batch: Batch) -> Any:
        total, still, losses = carry

        def loss_of(training: Leaves) -> tuple[Array, Leaves]:
            return objective(layout, replace(parts, still | training), context.received, batch, context.key)

        (loss, tracked), grads = jax.value_and_grad(loss_of, has_aux=True)(training)
        weight = batch["weight"].sum()
        total = jax.tree.map(lambda t, g: t + weight * g, total, grads)
        return (
            total,
            still | {name: tracked[name].astype(still[name].dtype) for name in tracked},
            losses.plus(loss, batch),
        )

    start = jax.tree.map(jnp.zeros_like, training), still, no_losses()
    total, still, losses = sweep(add_batch, start, context, batch_size=batch_size)
    return jax.tree.map(lambda t: t / jnp.maximum(context.size, 1), total), still, losses.mean()


def full_step(
    lr: Any = 0.1, *, batch_size: int = 32, objective: Objective | None = None, roles: str = "all"
) -> ClientUpdate:
    """One step along the gradient of the mean loss over all of the client's examples: ``w <- w - lr grad f_i(w)``.

    Args:
      lr: step size.
      batch_size: examples at once; it changes the memory that is needed, not the result.
      objective: what is minimised; the task's loss by default.
      roles: as in :func:`train`.
    """
    positive_int("batch_size", batch_size)
    number("lr", lr, low=0)
    objective = objective or task_loss()

    def update(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
        training = trainable_leaves(layout, parts, roles)
        gradient, still, loss = full_gradient(layout, parts, context, training, objective, batch_size=batch_size)
        moved = jax.tree.map(lambda x, g: (x - lr * g).astype(x.dtype), training, gradient)
        steps = (context.size > 0).astype(jnp.int32)
        return replace(parts, still | moved), Report(loss, steps, jnp.array(bool(parts.shared)))

    return update


def moving_leaves(layout: Layout, parts: Parts, training: Leaves) -> Leaves:
    """What steps on ``training`` can change: those leaves, and the ones that a loss tracks (running statistics).

    Only these are carried through a loop: constants of the phase stay out of it (and unbatched under ``vmap``).
    """
    return training | {name: x for name, x in leaves_of(parts).items() if name not in layout.trainable}


def phases(*updates: ClientUpdate) -> ClientUpdate:
    """One phase after another; steps add up, the loss is that of the phases that took steps, weighted by steps.

    What phases say did not cross adds up too.
    """

    def update(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
        reports = []
        for each in updates:
            parts, report = each(layout, parts, context)
            reports.append(report)
        steps = sum(r.steps for r in reports)
        total = sum(jnp.where(r.steps > 0, r.loss, 0) * r.steps for r in reports)
        loss = jnp.where(steps > 0, total / jnp.maximum(steps, 1), jnp.nan)
        spared = (sum(r.spared_up for r in reports), sum(r.spared_down for r in reports))
        return parts, Report(loss, steps, reports[-1].transmitted, *spared)

    require(len(updates) > 0, "phases: none were given; a client update needs at least one")
    return update


def copy_shared(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
    """The client's own model starts as a copy of the shared one (what an unseen client does in two-model methods)."""
    own, shared = layout.view("own").keys, layout.view("shared").keys
    copies = {
        own[path]: parts.shared[shared[path]]
        for path in own
        if own[path] in parts.personal and shared[path] in parts.shared
    }
    return replace(parts, copies), report_of(no_losses(), jnp.int32(0), layout, parts)


def reestimate(*, batch_size: int = 32, passes: int = 10) -> ClientUpdate:
    """Recomputes running statistics by forward passes in training mode; no leaf is trained.

    What a client without statistics of its own does in FedBN and SiloBN. The passes update the model's own moving
    averages, so ``passes`` must outlast their momentum.
    """
    positive_int("batch_size", batch_size)

    def update(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
        if layout.task.statistics == nothing:
            return parts, report_of(no_losses(), jnp.int32(0), layout, parts)
        return descend(layout, parts, context, {}, optax.identity(), task_loss(), batch_size=batch_size, epochs=passes)

    return update
