"""How experts and gates are trained: responsibilities, losses, and leaves that experts have in common."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pers.base import Array, Batch, Context, Leaves, Parts, Task
from fedjax_pers.batches import sweep
from fedjax_pers.judging import EVALUATION_BATCH, weighted_mean
from fedjax_pers.layouts import Layout, LayoutMaker, without
from fedjax_pers.mixtures.gates import EXPERTS, Gate
from fedjax_pers.mixtures.mixture import losses_of, path_of, tracked_of
from fedjax_pers.objectives import Objective
from fedjax_pers.paths import SelectorLike, as_selector, flatten
from fedjax_pers.presets import model_of


def responsibilities(task: Task, gate: Gate, variables: Any, batch: Batch) -> Array:
    """The E-step, ``q_k`` in proportion to ``g_k(x) exp(-loss_k)`` for each example, ``[batch, experts]``."""
    return jax.nn.softmax(gate.log_weights(variables, batch) - losses_of(task, variables[EXPERTS], batch), axis=1)


def mean_responsibilities(task: Task, gate: Gate, variables: Any, context: Context) -> Array:
    """Their mean over a client's examples, ``[experts]``; 0 for a client without any."""

    def add(total: Array, batch: Batch) -> Array:
        found = responsibilities(task, gate, variables, batch)
        return total + jnp.where(batch["weight"][:, None] > 0, found, 0).sum(0)

    start = jnp.zeros(len(variables[EXPERTS]))
    return sweep(add, start, context, batch_size=EVALUATION_BATCH) / jnp.maximum(context.size, 1)


def expert_loss(task: Task, number: int) -> Objective:
    """The task's own loss of one expert, whatever the gate says."""

    def objective(layout: Layout, parts: Parts, received: Parts, batch: Batch, key: Array) -> tuple[Array, Leaves]:
        view = layout.view("model")
        loss, tracked = task.loss(view.read(parts)[EXPERTS][number], batch, key)
        return loss, view.tracked(parts, tracked_of(number, tracked))

    return objective


def evaluated_loss(layout: Layout, parts: Parts, received: Parts, batch: Batch, key: Array) -> tuple[Array, Leaves]:
    """The loss of the mixture in evaluation mode: for a gate that is trained while the experts stay as they are."""
    losses = layout.task.metrics(layout.view("model").read(parts), batch)["loss"]
    return weighted_mean(losses, batch["weight"]), {}


def balance_of(gate: Gate, strength: Any) -> Objective:
    """``strength (K sum_k mean(g_k)^2 - 1)``, the mean being over the batch: 0 where all K experts are used alike.

    The squared coefficient of variation of what the experts are used for.

    Source: Shazeer et al., "Outrageously Large Neural Networks", ICLR 2017, arXiv:1701.06538.
    """

    def objective(layout: Layout, parts: Parts, received: Parts, batch: Batch, key: Array) -> tuple[Array, Leaves]:
        weights = jnp.exp(gate.log_weights(layout.view("model").read(parts), batch))
        usage = jax.vmap(weighted_mean, (1, None))(weights, batch["weight"])
        some = (batch["weight"] > 0).any()
        return jnp.where(some, strength * (usage.shape[0] * jnp.square(usage).sum() - 1), 0), {}

    return objective


def paths_in_common(task: Task, chosen: SelectorLike, experts: int) -> dict[str, str]:
    """Where the other experts' leaves at the chosen paths of the model are read: those of the first."""
    variables = jax.eval_shape(task.init, jax.random.key(0))
    paths = as_selector(chosen).select(flatten(variables), model_of(task, variables))
    return {path_of(number, path): path_of(0, path) for path in sorted(paths) for number in range(1, experts)}


def in_common(make: LayoutMaker, task: Task, chosen: SelectorLike, experts: int) -> LayoutMaker:
    """A layout of a mixture in which all experts have some leaves in common, such as the body below their heads.

    Example:
      >>> import fedjax_pers as fp
      >>> from fedjax_pers.mixtures import in_common, inputs_of, linear_gate, mixture
      >>> task = fp.tasks.from_model(fp.data.load("vowel_speakers"), "mlp")
      >>> heads = in_common(fp.by_role(personal="gate/**"), task, ~fp.head(1), experts=2)
      >>> both = mixture(task, linear_gate(inputs_of(task), 2))
      >>> fp.describe(heads(both)).shared, fp.describe(fp.by_role()(task)).shared
      (8536, 5676)

    Args:
      make: of the mixture.
      task: of which the mixture is made.
      chosen: paths of its model.
      experts: how many there are.
    """
    common = paths_in_common(task, chosen, experts)

    def bind(both: Task) -> Layout:
        return without(make(both), lambda leaves: {path: leaves[first] for path, first in common.items()})

    return bind
