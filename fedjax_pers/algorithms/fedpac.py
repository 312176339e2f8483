"""FedPAC: features drawn to common centroids, and a head mixed for every client out of those of its like."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pers.aggregators.collaboration import CENTROIDS, COUNTS, MEAN, VARIANCE, collaborating_heads
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Array, Batch, Context, Leaves, Parts, Report, Task
from fedjax_pers.batches import sweep
from fedjax_pers.checks import number
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.head_inputs import head_and_features, with_head_input
from fedjax_pers.judging import EVALUATION_BATCH
from fedjax_pers.layouts import Layout, LayoutMaker, Statistics, by_role, replace
from fedjax_pers.local import ClientUpdate, for_epochs, phases, train
from fedjax_pers.objectives import Objective
from fedjax_pers.paths import SelectorLike, as_selector
from fedjax_pers.presets import head as last_layers


@register(
    "fedpac",
    title="FedPAC",
    paper='Xu, Tong, Huang, "Personalized Federated Learning with Feature Alignment and Classifier Collaboration", '
    "ICLR 2023, arXiv:2306.11867",
    family="similarity",
    personal="nothing; the server keeps a head for each client",
    reduction="lam = 0: FedRep with one client; lam = 0, head_epochs = 0: FedBABU's training",
    secure_aggregation=False,
)
def fedpac(
    task: Task,
    *,
    lr: float = 0.1,
    head_lr: float = 0.1,
    lam: float = 1.0,
    head: SelectorLike = last_layers(1),
    head_epochs: int = 1,
    newcomer_epochs: int = 5,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """One body whose features are drawn to the classes' centroids; heads mixed so that bias and variance are least.

    A client first trains its head, then the body by ``f_i + lam mean |z - c_y|^2 / dim z``, ``c`` being the classes'
    mean features over all clients of the last round. Bodies are averaged. The next head is ``sum_j a_ij head_j``,
    ``a_i = argmin_{a on the simplex} sum_j V_j a_j^2 + |h_i - sum_j a_j h_j|^2``: ``h_j`` is the mean of
    ``onehot(y) x z`` over the examples of client j under the received body, ``V_j = (E|z|^2 - |h_j|^2) / n_j`` the
    variance of that mean. An absent client keeps its last mixture.

    Features z are what is multiplied with the head's weights, in any model whose head is a dense layer.

    Args:
      task: a classification task, one label an example.
      lr: step size of the body.
      head_lr: step size of the head.
      lam: how strongly features are drawn to centroids, at least 0.
      head: the last, dense layer.
      head_epochs: passes of the first phase; they are not taken from ``epochs``, those of the body.
      newcomer_epochs: passes over its data that an unseen client trains the mean head for before it predicts.
      weights: of the body's mean, as in FedAvg.
      statistics: treatment of running statistics.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``; the optimiser starts
        afresh in each phase.

    Differences from the paper: clients predict with the mean body and their mixed head, before they train them (the
    authors' code reports both, before and after); features of a class without a centroid are drawn nowhere (there, to
    the client's own); a class that nobody in a round has keeps its centroid; weights below 0.001 are not cut to 0.
    Defaults are those of small data sets: the paper's are 5 epochs, batch 50, lr 0.01, momentum 0.5, decay 5e-4.
    """
    number("lam", lam, low=0)
    names, features = head_and_features(task, head)
    first = train(head_lr, **for_epochs(head_epochs, local), leaves=head, order="head")
    second = train(lr, **local, leaves=~as_selector(head), objective=_drawn_to_centroids(names, lam))
    return compose(
        task,
        layout=_with_centroids(by_role(statistics=statistics), task.num_classes, features),
        client=_sending_centroids(phases(first, second), names),
        aggregator=collaborating_heads(names, _mean_and_variance(names), weights=weights),
        newcomer=train(head_lr, **for_epochs(newcomer_epochs, local), leaves=head),
    )


def _with_centroids(base: LayoutMaker, classes: int | None, features: int) -> LayoutMaker:
    """Beside the model, centroids that travel and how many examples each is of."""

    def bind(task: Task) -> Layout:
        layout = base(task)

        def init(variables: Any) -> Parts:
            parts = layout.init(variables)
            nothing = {CENTROIDS: jnp.zeros((classes, features)), COUNTS: jnp.zeros(classes)}
            return parts._replace(shared={**parts.shared, **nothing})

        return layout._replace(init=init)

    return bind


def _drawn_to_centroids(head: frozenset[str], lam: Any) -> Objective:
    """The task's loss and ``lam`` times the mean squared distance of features from the centroids, a feature."""

    def objective(layout: Layout, parts: Parts, received: Parts, batch: Batch, key: Array) -> tuple[Array, Leaves]:
        view = layout.view("model")
        (loss, tracked), features = with_head_input(layout.task.loss, head)(view.read(parts), batch, key)
        known = received.shared[COUNTS][batch["y"]] > 0
        distance = jnp.square(features - received.shared[CENTROIDS][batch["y"]]).mean(1)
        counted = jnp.where(known & (batch["weight"] > 0), distance * batch["weight"], 0)
        return loss + lam * counted.sum() / jnp.maximum(batch["weight"].sum(), 1), view.tracked(parts, tracked)

    return objective


def _class_sums(head: frozenset[str], layout: Layout, parts: Parts, context: Context) -> tuple[Array, Array, Array]:
    """Of a client's features in evaluation mode: examples by class, sums by class, and the sum of all squares."""
    view, observed = layout.view("model").read(parts), with_head_input(layout.task.metrics, head)

    def add(sums: tuple[Array, Array, Array], batch: Batch) -> tuple[Array, Array, Array]:
        _, features = observed(view, batch)
        features = jnp.where(batch["weight"][:, None] > 0, features, 0).astype(jnp.float32)
        labels = jax.nn.one_hot(batch["y"], layout.task.num_classes) * batch["weight"][:, None]
        counts, by_class, squares = sums
        summed = jnp.matmul(labels.T, features, precision="highest")
        return counts + labels.sum(0), by_class + summed, squares + jnp.square(features).sum()

    shape = parts.shared[CENTROIDS].shape
    return sweep(add, (jnp.zeros(shape[0]), jnp.zeros(shape), jnp.zeros(())), context, batch_size=EVALUATION_BATCH)


def _mean_and_variance(head: frozenset[str]) -> Any:
    """``ask``: the mean of ``onehot(y) x z`` over a client's examples, and the variance of that mean."""

    def ask(layout: Layout, parts: Parts, context: Context) -> dict[str, Array]:
        _, by_class, squares = _class_sums(head, layout, parts, context)
        examples = jnp.maximum(context.size, 1)
        mean = by_class / examples
        variance = jnp.maximum(squares / examples - jnp.square(mean).sum(), 0) / examples
        return {MEAN: mean, VARIANCE: variance}

    return ask


def _sending_centroids(training: ClientUpdate, head: frozenset[str]) -> ClientUpdate:
    """Training, and afterwards the mean features of each class, 0 where the client has none of it."""

    def update(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
        after, report = training(layout, parts, context)
        counts, by_class, _ = _class_sums(head, layout, after, context)
        return replace(after, {CENTROIDS: by_class / jnp.maximum(counts, 1)[:, None], COUNTS: counts}), report

    return update
