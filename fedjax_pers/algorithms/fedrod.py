"""Fed-RoD: a generic and a personal head on one representation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pers.aggregators import mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Array, Batch, Context, Leaves, Parts, Report, Task
from fedjax_pers.batches import sweep
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import OWN, Layout, LayoutMaker, Statistics, View, by_role
from fedjax_pers.local import ClientUpdate, for_epochs, train
from fedjax_pers.objectives import Objective, add, mean_of_examples, require_classes
from fedjax_pers.paths import SelectorLike, as_selector, flatten
from fedjax_pers.presets import head


@register(
    "fedrod",
    title="Fed-RoD",
    paper='Chen, Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022, '
    "arXiv:2107.00778",
    family="decoupling",
    personal="a second head that is added to the generic one",
    reduction="equal class counts: the generic model is FedAvg's",
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

    Differences from the paper: personal heads are linear and start at zero; the variant that generates them from the
    class counts is not offered. An unseen client trains a personal head (0 epochs: the generic model).
    """
    require_classes(task, "Fed-RoD, which combines outputs,")
    schedule = for_epochs(newcomer_epochs, local)
    return compose(
        task,
        layout=_two_heads(head, statistics),
        client=_with_counts(lambda counts: train(lr, objective=add(_generic(counts), _personal), **local), **local),
        aggregator=mean(weights=weights),
        newcomer=train(lr, objective=_personal, roles="personal", **schedule),
    )


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


def _generic(log_counts: Array) -> Objective:
    """Balanced softmax: the criterion on outputs shifted by the log of the client's class counts."""

    def objective(layout: Layout, parts: Parts, received: Parts, batch: Batch, key: Array) -> tuple[Array, Leaves]:
        view, task = layout.view("shared"), layout.task
        outputs, tracked = task.apply(view.read(parts), batch, key)
        return mean_of_examples(task.criterion(outputs + log_counts, batch), batch), view.tracked(parts, tracked)

    return objective


def _personal(layout: Layout, parts: Parts, received: Parts, batch: Batch, key: Array) -> tuple[Array, Leaves]:
    """The client's own loss of the summed heads; body and generic head are constants of it."""
    fixed = parts._replace(shared=jax.lax.stop_gradient(parts.shared))
    outputs, _ = layout.task.apply(layout.view("model").read(fixed), batch, key)
    return mean_of_examples(layout.task.criterion(outputs, batch), batch), {}


def _with_counts(make: Any, *, batch_size: int = 10, **_: Any) -> ClientUpdate:
    """A client update that first counts the client's own labels."""

    def update(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
        classes = layout.task.num_classes

        def add_batch(counts: Array, batch: Batch) -> Array:
            return counts + (jax.nn.one_hot(batch["y"], classes) * batch["weight"][:, None]).sum(0)

        counts = sweep(add_batch, jnp.zeros(classes), context, batch_size=batch_size)
        return make(jnp.log(counts))(layout, parts, context)

    return update
