"""Fed-RoD: a generic and a personal head on one representation, the latter trained or generated."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pers.adapters.adapting import adapted
from fedjax_pers.aggregators import mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Array, Batch, Context, Leaves, Parts, Report, Task
from fedjax_pers.batches import sweep
from fedjax_pers.checks import require
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.generators import CODE_LEAF, GENERATOR_LEAVES, generated, mlp
from fedjax_pers.layouts import OWN, Layout, LayoutMaker, Statistics, View, by_role, replace
from fedjax_pers.local import ClientUpdate, for_epochs, no_losses, report_of, train
from fedjax_pers.objectives import Objective, add, mean_of_examples, require_classes
from fedjax_pers.paths import SelectorLike, as_selector, flatten, select
from fedjax_pers.presets import head, model_of

PERSONAL, SHARES = "personal/", "code"
"""Leaves of the second head in a task that has two; the client's shares of the classes, of which it is generated."""

_ABOUT = {
    "paper": 'Chen, Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR '
    "2022, arXiv:2107.00778",
}


@register(
    "fedrod",
    title="Fed-RoD",
    family="decoupling",
    personal="a second head that is added to the generic one",
    reduction="equal class counts: the generic model is FedAvg's",
    **_ABOUT,
)
def fedrod(
    task: Task,
    *,
    lr: float = 0.1,
    head: SelectorLike = head(1),
    newcomer_epochs: int = 5,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """Body and generic head learn a balanced loss; a personal head learns what remains of the client's own loss.

    Generic: ``CE(g(z) + log n_i, y)`` on body and g, ``n_i`` being the client's class counts. Personal:
    ``CE(stop_gradient(g(z)) + p_i(stop_gradient(z)), y)`` on ``p_i`` alone. The generic model predicts by ``g(z)``, the
    personal one by ``g(z) + p_i(z)``. Counts come from the training split and never leave.

    Args:
      task: a classification task with ``apply``, ``criterion`` and ``num_classes``.
      lr: step size of both losses.
      head: the last, linear layer: the two heads are then added leaf by leaf.
      newcomer_epochs: passes over its data that an unseen client trains its personal head for before it predicts.
      weights: as in FedAvg.
      statistics: treatment of running statistics.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: personal heads are linear and start at zero (``fedrod_hyper`` generates them). An unseen
    client trains a personal head (0 epochs: the generic model).
    """
    require_classes(task, "Fed-RoD, which combines outputs,")
    schedule = for_epochs(newcomer_epochs, local)
    return compose(
        task,
        layout=_two_heads(head, statistics),
        client=_with_counts(lambda counts: _both_losses(lr, counts, local), **local),
        aggregator=mean(weights=weights),
        newcomer=train(lr, objective=_personal, roles="personal", **schedule),
    )


@register(
    "fedrod_hyper",
    title="Fed-RoD (hyper)",
    family="hypernetwork",
    personal="its shares of the classes, of which a shared network makes a second head",
    reduction="without its second head: the generic model of Fed-RoD",
    **_ABOUT,
)
def fedrod_hyper(
    task: Task,
    *,
    lr: float = 0.1,
    head: SelectorLike = head(1),
    hidden: tuple[int, ...] = (32,),
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """Fed-RoD whose personal heads are made by one network for all, of the client's class distribution: ``h(a_i)``.

    Generic: ``CE(g(z) + log n_i, y)`` on body and g. Personal, on h alone:
    ``CE(stop_gradient(g(z)) + h(a_i)(stop_gradient(z)), y)``, ``a_i = n_i / sum n_i`` being the shares of the classes
    among the client's training examples. Body, g and h are averaged; ``a_i`` never leaves. An unseen client counts its
    labels and is served at once, without a step.

    Args:
      task: a classification task with ``apply``, ``criterion`` and ``num_classes``.
      lr: step size of both losses.
      head: the last, linear layer: the two heads are added leaf by leaf.
      hidden: widths of h's hidden layers.
      weights: as in FedAvg.
      statistics: treatment of running statistics.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: generated heads start near zero. A client that has not taken part yet, and one without
    examples, predicts with the head of equal shares.
    """
    require_classes(task, "Fed-RoD, which combines outputs,")
    of_network = {**local, "roles": "shared"}  # shares are counted, not trained
    return compose(
        generated(_two_headed(task, head), f"{PERSONAL}**", generator=mlp(hidden), code=task.num_classes or 0),
        layout=_of_shares(statistics),
        client=_with_counts(lambda counts: _told(counts, _both_losses(lr, counts, of_network)), **local),
        aggregator=mean(weights=weights),
        newcomer=_with_counts(lambda counts: _told(counts, _at_rest), **local),
    )


def _two_headed(task: Task, head: SelectorLike) -> Task:
    """The task with a second head, ``personal/...``, at zero, that is added to the first."""
    leaves, model = flatten(jax.eval_shape(task.init, jax.random.key(0))), model_of(task)
    heads = sorted(select(head, leaves, model) - task.statistics.select(leaves, model))
    require(bool(heads), f"head: {as_selector(head)} selects no weights of this model, so there is no head to add to")

    def zeros(key: Array) -> Leaves:
        return {PERSONAL + path: jnp.zeros(leaves[path].shape, leaves[path].dtype) for path in heads}

    def summed(variables: Leaves) -> Leaves:
        both = {path: variables[path] + variables[PERSONAL + path] for path in heads}
        return {path: x for path, x in variables.items() if not path.startswith(PERSONAL)} | both

    return adapted(task, zeros, summed, lambda function: lambda variables, *rest: function(summed(variables), *rest))


def _of_shares(statistics: Statistics) -> LayoutMaker:
    """The network is shared, its input personal; the generic model is the one whose network makes zeros."""

    def bind(task: Task) -> Layout:
        base = by_role(personal=CODE_LEAF, statistics=statistics)(task)
        model = base.view("model")

        def init(variables: Any) -> Parts:
            parts = base.init(variables)
            shares = parts.personal[SHARES]
            return parts._replace(personal={**parts.personal, SHARES: jnp.full_like(shares, 1 / shares.size)})

        def generic(parts: Parts) -> Any:
            none = {name: jnp.zeros_like(parts.shared[name]) for name in GENERATOR_LEAVES.select(parts.shared)}
            return model.read(parts._replace(shared=parts.shared | none))

        alone = statistics != "local"
        views = {"model": model, "shared": View(generic, model.keys)}
        return base._replace(init=init, views=views, common="shared" if alone else None)

    return bind


def _told(counts: Array, training: ClientUpdate) -> ClientUpdate:
    """Training of a client whose shares of the classes are those of its counts; without examples they stay."""

    def update(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
        total, before = counts.sum(), parts.personal[SHARES]
        shares = jnp.where(total > 0, (counts / jnp.maximum(total, 1)).astype(before.dtype), before)
        return training(layout, replace(parts, {SHARES: shares}), context)

    return update


def _at_rest(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
    return parts, report_of(no_losses(), jnp.int32(0), layout, parts)


def _two_heads(head: SelectorLike, statistics: Statistics) -> LayoutMaker:
    """Everything shared, and a personal copy of the head, at zero, that is added to the generic one to predict."""

    def bind(task: Task) -> Layout:
        base = by_role(statistics=statistics)(task)
        leaves = flatten(jax.eval_shape(task.init, jax.random.key(0)))
        heads = as_selector(head).select(leaves, base.model)
        generic = base.view("model")

        def init(variables: Any) -> Parts:
            parts = base.init(variables)
            zeros = {OWN + path: jnp.zeros_like(parts.shared[path]) for path in sorted(heads)}
            return parts._replace(personal={**parts.personal, **zeros})

        def read(parts: Parts) -> Any:
            summed = {path: parts.shared[path] + parts.personal[OWN + path] for path in heads}
            return generic.read(parts._replace(shared={**parts.shared, **summed}))

        return base._replace(
            init=init,
            views={"shared": generic, "model": View(read, generic.keys)},
            trainable=base.trainable | {OWN + path for path in heads},
            common="shared" if base.common else None,
        )

    return bind


def _both_losses(lr: Any, counts: Array, phase: dict[str, Any]) -> ClientUpdate:
    return train(lr, objective=add(_generic(jnp.log(counts)), _personal), **phase)


def _generic(log_counts: Array) -> Objective:
    """Balanced softmax: the criterion on outputs shifted by the log of the client's class counts."""

    def objective(layout: Layout, parts: Parts, received: Parts, batch: Batch, key: Array) -> tuple[Array, Leaves]:
        view, task = layout.view("shared"), layout.task
        outputs, tracked = task.apply(view.read(parts), batch, key)
        return mean_of_examples(task.criterion(outputs + log_counts, batch), batch), view.tracked(parts, tracked)

    return objective


def _personal(layout: Layout, parts: Parts, received: Parts, batch: Batch, key: Array) -> tuple[Array, Leaves]:
    """The client's own loss of the summed heads; body and generic head are constants of it."""
    network = GENERATOR_LEAVES.select(parts.shared)
    fixed = {name: x if name in network else jax.lax.stop_gradient(x) for name, x in parts.shared.items()}
    outputs, _ = layout.task.apply(layout.view("model").read(parts._replace(shared=fixed)), batch, key)
    return mean_of_examples(layout.task.criterion(outputs, batch), batch), {}


def _with_counts(make: Any, *, batch_size: int = 10, **_: Any) -> ClientUpdate:
    """A client update that first counts the client's own labels."""

    def update(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
        classes = layout.task.num_classes

        def add_batch(counts: Array, batch: Batch) -> Array:
            return counts + (jax.nn.one_hot(batch["y"], classes) * batch["weight"][:, None]).sum(0)

        counts = sweep(add_batch, jnp.zeros(classes), context, batch_size=batch_size)
        return make(counts)(layout, parts, context)

    return update
