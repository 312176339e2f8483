"""FedALA: each client decides, number by number, how much of the received head it takes over."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_pers.aggregators import mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Context, Leaves, Parts, Report, Task
from fedjax_pers.batches import steps_per_epoch
from fedjax_pers.checks import number, positive_int
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import OWN, Layout, LayoutMaker, Statistics, View, by_role, replace
from fedjax_pers.local import ClientUpdate, descend, train
from fedjax_pers.objectives import task_loss
from fedjax_pers.paths import SelectorLike, as_selector, flatten
from fedjax_pers.presets import head as last_layers

_TAKEN, _BEFORE = "taken/", "taken_part"


@register(
    "fedala",
    title="FedALA",
    paper='Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedALA: Adaptive Local Aggregation for Personalized Federated '
    'Learning", AAAI 2023, arXiv:2212.01197',
    family="similarity",
    personal="the head of the last round, and how much of the received head is taken over",
    reduction="ala_lr = 0: FedAvg",
)
def fedala(
    task: Task,
    *,
    lr: float = 0.1,
    ala_lr: float = 1.0,
    ala_share: float = 0.8,
    first_passes: int = 5,
    head: SelectorLike = last_layers(1),
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """The client's model begins as ``t + (w - t) A`` in its head: its own of last time ``t``, the received ``w``.

    ``A`` starts at 1 and takes steps ``A <- clip(A - ala_lr * g (w - t), 0, 1)`` along the gradient g of the loss on
    some of the client's examples. Below the head the received leaves are taken as they are. Then all leaves are trained
    and sent; what predicts is the model as it begins, before training.

    Args:
      task: model and loss.
      lr: step size of training.
      ala_lr: step size of ``A``, at least 0.
      ala_share: share of the batches of an epoch that ``A`` sees, in 0 .. 1.
      first_passes: such parts of an epoch when a client takes part for the first time; later it is one.
      head: the leaves that are mixed.
      weights: as in FedAvg.
      statistics: treatment of running statistics.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: ``A`` is first trained for ``first_passes`` passes, not until ten losses in a row differ
    by less than 0.1; it is not trained once more before a client predicts.
    """
    number("ala_lr", ala_lr, low=0)
    number("ala_share", ala_share, 0, 1)
    positive_int("first_passes", first_passes)
    training = train(lr, **local, objective=task_loss("shared"), roles="shared")
    return compose(
        task,
        layout=_mixed_head(head, statistics),
        client=_merged_first(training, ala_lr, ala_share, first_passes, local.get("batch_size", 10)),
        aggregator=mean(weights=weights),
    )


def _mixed_head(head: SelectorLike, statistics: Statistics) -> LayoutMaker:
    """Everything shared; of the head a personal copy of last time, and the shares that are taken over."""

    def bind(task: Task) -> Layout:
        base = by_role(statistics=statistics)(task)
        leaves = flatten(jax.eval_shape(task.init, jax.random.key(0)))
        heads = sorted(as_selector(head).select(leaves, base.model) & base.trainable)
        whole = base.view("model")

        def init(variables: Any) -> Parts:
            parts = base.init(variables)
            last = {OWN + path: parts.shared[path] for path in heads}
            taken = {_TAKEN + path: jnp.ones_like(parts.shared[path]) for path in heads}
            return parts._replace(personal={**parts.personal, **last, **taken, _BEFORE: jnp.int32(0)})

        def read(parts: Parts) -> Any:
            return whole.read(parts._replace(shared=parts.shared | _merged(parts)))

        return base._replace(
            init=init,
            views={"shared": whole, "model": View(read, whole.keys)},
            trainable=base.trainable | {_TAKEN + path for path in heads},
            common="shared" if base.common else None,
        )

    return bind


def _merged(parts: Parts) -> Leaves:
    """The head with which the client begins."""
    paths = [name.removeprefix(_TAKEN) for name in parts.personal if name.startswith(_TAKEN)]
    own, taken = ({path: parts.personal[prefix + path] for path in paths} for prefix in (OWN, _TAKEN))
    return {path: own[path] + (parts.shared[path] - own[path]) * taken[path] for path in paths}


def _in_bounds(update: Any, value: Any) -> Any:
    return jnp.clip(value + update, 0, 1) - value


def _merged_first(
    training: ClientUpdate, ala_lr: Any, ala_share: Any, first_passes: int, batch_size: int
) -> ClientUpdate:
    tx = optax.chain(optax.sgd(ala_lr), optax.stateless_with_tree_map(_in_bounds))

    def update(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
        taken = {name: x for name, x in parts.personal.items() if name.startswith(_TAKEN)}
        batches = jnp.ceil(ala_share * steps_per_epoch(context.size, batch_size, False)).astype(jnp.int32)
        steps = batches * jnp.where(parts.personal[_BEFORE] == 0, first_passes, 1)
        schedule = {"batch_size": batch_size, "steps": steps, "order": "local aggregation"}
        adapted, _ = descend(layout, parts, context, taken, tx, task_loss("model"), **schedule)
        begun = replace(adapted, _merged(adapted))
        after, report = training(layout, begun, context)
        last = {name: after.shared[name.removeprefix(OWN)] for name in parts.personal if name.startswith(OWN)}
        return replace(after, {**last, _BEFORE: parts.personal[_BEFORE] + 1}), report

    return update
