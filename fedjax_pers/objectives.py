"""What a client minimises: the task's loss on a view of its leaves, and penalties that add to it.

An objective is ``objective(layout, parts, received, batch, key) -> (loss, tracked)``: ``parts`` are the client's leaves
now, ``received`` those at the start of the round (the anchor: never an alias of what is trained), and ``tracked`` the
new running statistics by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_pers.base import Array, Batch, Leaves, Parts, Task
from fedjax_pers.checks import number, positive, require
from fedjax_pers.judging import weighted_mean
from fedjax_pers.layouts import OWN, Layout, leaves_of, trainable_leaves
from fedjax_pers.paths import SelectorLike, as_selector, nothing

Objective = Callable[[Layout, Parts, Parts, Batch, Array], tuple[Array, Leaves]]


def task_loss(view: str = "model") -> Objective:
    """The task's own loss of one of the layout's views (``"model"``, ``"shared"``, ``"own"``)."""

    def objective(layout: Layout, parts: Parts, received: Parts, batch: Batch, key: Array) -> tuple[Array, Leaves]:
        chosen = layout.view(view)
        loss, tracked = layout.task.loss(chosen.read(parts), batch, key)
        return loss, chosen.tracked(parts, tracked)

    return objective


def squared_distance(a: Leaves, b: Leaves) -> Array:
    """``sum (a - b)^2`` over all leaves: never the square of a norm, whose gradient at zero is NaN."""
    return sum((jnp.sum(jnp.square(a[name] - b[name])) for name in sorted(a)), start=jnp.zeros(()))


def proximal(strength: Any, role: str = "shared") -> Objective:
    """``strength / 2 * sum (x - x_received)^2`` over the trainable leaves of a role (FedProx's term).

    Source: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.
    """

    def objective(layout: Layout, parts: Parts, received: Parts, batch: Batch, key: Array) -> tuple[Array, Leaves]:
        now, then = (trainable_leaves(layout, each, role) for each in (parts, received))
        return 0.5 * strength * squared_distance(now, then), {}

    return objective


def pull_to_shared(strength: Any) -> Objective:
    """``strength / 2 * sum (v - w)^2``: a client's own model tied to the shared one *as received* (Ditto)."""

    def objective(layout: Layout, parts: Parts, received: Parts, batch: Batch, key: Array) -> tuple[Array, Leaves]:
        own, shared = layout.view("own").keys, layout.view("shared").keys
        pairs = {own[path]: shared[path] for path in own if own[path] in layout.trainable}
        now = {name: parts.personal[name] for name in pairs}
        anchor = {name: received.shared[twin] for name, twin in pairs.items()}
        return 0.5 * strength * squared_distance(now, anchor), {}

    return objective


def l2(strength: Any, role: str = "all") -> Objective:
    """``strength / 2 * sum x^2`` over the trainable leaves of a role."""

    def objective(layout: Layout, parts: Parts, received: Parts, batch: Batch, key: Array) -> tuple[Array, Leaves]:
        now = trainable_leaves(layout, parts, role)
        return 0.5 * strength * sum((jnp.sum(jnp.square(x)) for x in now.values()), start=jnp.zeros(())), {}

    return objective


def l2_sp(strength: Any, new_strength: Any = 0.0, *, new: SelectorLike = nothing) -> Objective:
    """``strength / 2 |x_S - x_S^0|^2 + new_strength / 2 |x_new|^2``: near the model that fine-tuning starts from.

    ``S`` are the trainable leaves but the new ones, such as a fresh head, which have no start worth staying near.

    Example:
      >>> from fedjax_pers import fine_tune, head
      >>> tuned = fine_tune(0.1, objective=add(task_loss(), l2_sp(0.1, 0.01, new=head(1))))

    Args:
      strength: of the pull to the start, at least 0.
      new_strength: of the pull of new leaves to 0, at least 0.
      new: the leaves of the model that are new; none by default, and ``strength`` holds all.

    Source: Li, Grandvalet, Davoine, "Explicit Inductive Bias for Transfer Learning with Convolutional Networks", ICML
    2018, arXiv:1802.01483.
    """
    number("strength", strength, low=0)
    number("new_strength", new_strength, low=0)
    chosen = as_selector(new)
    unused = chosen == nothing and not isinstance(new_strength, jax.core.Tracer) and new_strength > 0
    require(not unused, f"new_strength: found {new_strength}, but new selects nothing; name the new leaves")

    def objective(layout: Layout, parts: Parts, received: Parts, batch: Batch, key: Array) -> tuple[Array, Leaves]:
        now, then = (trainable_leaves(layout, each) for each in (parts, received))
        # Selectors speak of the model's paths; a client's own copy of a leaf answers to the same path.
        paths = chosen.select({name.removeprefix(OWN): x for name, x in now.items()}, layout.model)
        fresh = {name: x for name, x in now.items() if name.removeprefix(OWN) in paths}
        require(bool(fresh) or chosen == nothing, f"new: {chosen} selects none of {sorted(now)}")
        old = {name: x for name, x in now.items() if name not in fresh}
        zeros = jax.tree.map(jnp.zeros_like, fresh)
        return 0.5 * strength * squared_distance(old, then) + 0.5 * new_strength * squared_distance(fresh, zeros), {}

    return objective


def ewc(strength: Any, fisher: Leaves) -> Objective:
    """``strength / 2 sum_j F_j (x_j - x_j^0)^2``: what the start's predictions depend on moves least (EWC).

    Args:
      strength: at least 0.
      fisher: ``F`` by name of the leaves, from :func:`fedjax_pers.fisher.fisher_information`; other leaves are free.

    Source: Kirkpatrick et al., "Overcoming Catastrophic Forgetting in Neural Networks", PNAS 2017, arXiv:1612.00796.
    """
    number("strength", strength, low=0)

    def objective(layout: Layout, parts: Parts, received: Parts, batch: Batch, key: Array) -> tuple[Array, Leaves]:
        now, then = leaves_of(parts), leaves_of(received)
        pulls = (jnp.sum(fisher[name] * jnp.square(now[name] - then[name])) for name in sorted(fisher))
        return 0.5 * strength * sum(pulls, start=jnp.zeros(())), {}

    return objective


def distillation(strength: Any, temperature: Any = 1.0, view: str = "model") -> Objective:
    """``strength T^2 KL(softmax(z^0 / T) || softmax(z / T))``: the outputs stay near those of the start.

    ``z^0`` are the outputs of the same view of the leaves at the start, in evaluation mode. The factor ``T^2`` keeps
    gradients of one size for all temperatures. The mean is over examples, and over the positions of a sequence.

    Args:
      strength: at least 0.
      temperature: above 0.
      view: of the layout.

    Raises:
      ValueError: when it is traced, where the task has no ``apply``, or outputs that are not scores of its classes.

    Source: Hinton, Vinyals, Dean, "Distilling the Knowledge in a Neural Network", 2015, arXiv:1503.02531; against
    forgetting: Li, Hoiem, "Learning without Forgetting", ECCV 2016, arXiv:1606.09282.
    """
    number("strength", strength, low=0)
    positive("temperature", temperature)

    def objective(layout: Layout, parts: Parts, received: Parts, batch: Batch, key: Array) -> tuple[Array, Leaves]:
        read, task = layout.view(view).read, layout.task
        require_classes(task, "distillation")
        outputs, start = (task.apply(read(each), batch, k)[0] for each, k in ((parts, key), (received, None)))
        found = jnp.shape(outputs)
        require(
            found == (*batch["y"].shape, task.num_classes),
            f"task: found outputs {found}; distillation needs a score for each of {task.num_classes} classes",
        )
        student, teacher = (jax.nn.log_softmax(z / temperature) for z in (outputs, start))
        apart = optax.losses.kl_divergence_with_log_targets(student, jax.lax.stop_gradient(teacher))
        return strength * temperature**2 * mean_of_examples(apart, batch), {}

    return objective


def require_classes(task: Task, what: str) -> None:
    """ValueError unless the outputs of a task can be read and judged by class."""
    lacking = [name for name in ("apply", "criterion", "num_classes") if getattr(task, name) is None]
    require(not lacking, f"task: {what} needs apply, criterion and num_classes; found none for {', '.join(lacking)}")


def mean_of_examples(values: Array, batch: Batch) -> Array:
    """The mean over the examples that count of ``[batch, ...]``, first over each one's positions; 0 over none."""
    return weighted_mean(values.mean(axis=tuple(range(1, values.ndim))), batch["weight"])


def add(*objectives: Objective) -> Objective:
    """The sum of objectives; their tracked leaves are merged."""

    def objective(layout: Layout, parts: Parts, received: Parts, batch: Batch, key: Array) -> tuple[Array, Leaves]:
        total = jnp.zeros(())
        tracked: Leaves = {}
        for each in objectives:
            loss, names = each(layout, parts, received, batch, key)
            total, tracked = total + loss, {**tracked, **names}
        return total, tracked

    return objective
