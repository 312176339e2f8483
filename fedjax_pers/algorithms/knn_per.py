"""kNN-Per: the global model, corrected by the client's own examples that lie nearest to its features."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from fedjax_pers.aggregators import mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Array, Batch, Context, Leaves, Parts, Report, Task
from fedjax_pers.batches import sweep
from fedjax_pers.checks import number, one_of, positive, positive_int, require
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.head_inputs import head_and_features, with_head_input
from fedjax_pers.judging import EVALUATION_BATCH
from fedjax_pers.layouts import Layout, LayoutMaker, Statistics, by_role, replace, without
from fedjax_pers.local import ClientUpdate, no_losses, report_of, train
from fedjax_pers.mixtures import class_scores, require_cross_entropy, statistics_below
from fedjax_pers.paths import SelectorLike, as_selector, flatten
from fedjax_pers.presets import head as last_layers

MODEL, STORE = "model", "store"
_NO_EXAMPLE = -1  # the label of a place of the store that is free

Distance = Literal["squared", "euclidean"]


@register(
    "knn_per",
    title="kNN-Per",
    paper='Marfoq, Neglia, Vidal, Kameni, "Personalized Federated Learning through Local Memorization", ICML 2022, '
    "arXiv:2111.09360",
    family="mixture",
    personal="nothing between rounds; before it predicts, a client stores features and labels of its examples",
    reduction="lam = 0: FedAvg",
)
def knn_per(
    task: Task,
    *,
    lr: float = 0.1,
    lam: float = 0.5,
    scale: float = 1.0,
    neighbours: int = 10,
    distance: Distance = "squared",
    standardise: bool = False,
    head: SelectorLike = last_layers(1),
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """FedAvg; a client then predicts ``lam p_near(y | x) + (1 - lam) p(y | x, w)``, ``p_near`` by its own examples.

    Of the client's training examples the ``neighbours`` with the nearest features vote for their labels with weights in
    proportion to ``exp(-d)``: ``d = |z - z_s|^2 / (scale * dim z)``, or ``|z - z_s| / scale``. Features z are those
    that enter the head of the global model, in evaluation mode. Nothing more travels than in FedAvg.

    Args:
      task: classification by cross-entropy, one label an example.
      lr: step size.
      lam: weight of the neighbours, in 0 .. 1. At 1 the loss of a label that no neighbour has is infinite.
      scale: above 0; the larger it is, the more alike neighbours count.
      neighbours: how many vote; a client with fewer examples has them all, one without any has the global model.
      distance: ``"squared"`` (as in the authors' code) or ``"euclidean"``.
      standardise: features are first divided by their standard deviations over the client's training examples.
      head: the last, dense layer.
      weights: as in FedAvg.
      statistics: as in FedAvg.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: ``lam`` is one setting for all clients, not chosen by each on its validation data.
    """
    number("lam", lam, 0, 1)
    positive("scale", scale)
    positive_int("neighbours", neighbours)
    one_of("distance", distance, ("squared", "euclidean"))
    require(isinstance(standardise, bool), f"standardise: found {standardise!r}; allowed are True and False")
    require_cross_entropy(task)
    names, features = head_and_features(task, head)

    def vote(store: Any, z: Array) -> Array:
        return _votes(store, z, neighbours, distance, scale, task.num_classes)

    return compose(
        _with_store(task, names, features, vote, lam),
        layout=_store_at_home(statistics),
        client=train(lr, **local),
        aggregator=mean(weights=weights),
        adapt=_memorise(task, names, standardise),
    )


def _with_store(task: Task, head: Collection[str], features: int, vote: Any, lam: Any) -> Task:
    """The task, whose predictions are mixed with the votes of a store of examples."""

    def init(key: Array) -> Any:
        return adopt(task.init(key), key)

    def adopt(variables: Any, key: Array) -> Any:
        known = isinstance(variables, Mapping) and set(variables) == {MODEL, STORE}
        return variables if known else {MODEL: variables, STORE: _empty_store(1, features)}

    def loss(variables: Any, batch: Batch, key: Array | None) -> tuple[Array, Leaves]:
        value, tracked = task.loss(variables[MODEL], batch, key)
        found = flatten(tracked) if jax.tree.leaves(tracked) else {}
        return value, {f"{MODEL}/{path}": x for path, x in found.items()}

    def metrics(variables: Any, batch: Batch) -> dict[str, Array]:
        (outputs, _), z = with_head_input(task.apply, head)(variables[MODEL], batch, None)
        votes, store = vote(variables[STORE], z), variables[STORE]
        share = jnp.where((store["labels"] != _NO_EXAMPLE).any(), lam, 0.0)
        alone = jax.nn.log_softmax(outputs.astype(jnp.promote_types(outputs.dtype, jnp.float32)))
        mixed = jnp.logaddexp(jnp.log(share) + jnp.log(votes), jnp.log1p(-share) + alone)
        return class_scores(task, mixed, batch)

    return Task(
        init,
        loss,
        metrics,
        statistics=statistics_below({MODEL: task}),
        example=task.example,
        kinds=tuple((f"{MODEL}/{path}".rstrip("/"), kind) for path, kind in task.kinds),
        num_classes=task.num_classes,
        private=as_selector(f"{STORE}/**"),
        adopt=adopt,
    )


def _empty_store(places: int, features: int) -> Any:
    return {
        "features": jnp.zeros((places, features)),
        "labels": jnp.full(places, _NO_EXAMPLE, jnp.int32),
        "deviations": jnp.ones(features),
    }


def _store_at_home(statistics: Statistics) -> LayoutMaker:
    """The model alone has owners; a store is empty until the client predicts."""

    def bind(task: Task) -> Layout:
        empty = jax.eval_shape(task.init, jax.random.key(0))[STORE]["features"].shape
        layout = by_role(personal=f"{STORE}/**", statistics=statistics)(task)
        layout = without(layout, lambda leaves: flatten({STORE: _empty_store(*empty)}))
        return layout._replace(common=None if statistics == "local" else "model")

    return bind


def _memorise(task: Task, head: Collection[str], standardise: bool) -> ClientUpdate:
    """Fills the store with features and labels of the client's examples."""

    def update(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
        room = context.room
        if room is None:
            raise ValueError(
                "cohort.room: found None; it must say how many examples a client has at most, to store them"
            )
        variables = layout.view("model").read(parts)
        places = -(-max(room.shape[0], 1) // EVALUATION_BATCH) * EVALUATION_BATCH

        def add(carry: tuple[Array, Array, Array], batch: Batch) -> tuple[Array, Array, Array]:
            place, features, labels = carry
            _, z = with_head_input(task.apply, head)(variables[MODEL], batch, None)
            there = batch["weight"] > 0
            z, y = jnp.where(there[:, None], z, 0), jnp.where(there, batch["y"], _NO_EXAMPLE)
            features = jax.lax.dynamic_update_slice_in_dim(features, z.astype(features.dtype), place, 0)
            labels = jax.lax.dynamic_update_slice_in_dim(labels, y.astype(labels.dtype), place, 0)
            return place + EVALUATION_BATCH, features, labels

        store = _empty_store(places, variables[STORE]["features"].shape[1])
        start = (jnp.int32(0), store["features"], store["labels"])
        _, features, labels = sweep(add, start, context, batch_size=EVALUATION_BATCH)
        deviations = _deviations(features, labels) if standardise else store["deviations"]
        filled = {STORE: {"features": features, "labels": labels, "deviations": deviations}}
        return replace(parts, flatten(filled)), report_of(no_losses(), jnp.int32(0), layout, parts)

    return update


def _deviations(features: Array, labels: Array) -> Array:
    """Standard deviations of stored features; 1 for one that does not vary."""
    there = (labels != _NO_EXAMPLE)[:, None]
    count = jnp.maximum(there.sum(), 1)
    centred = jnp.where(there, features - features.sum(0) / count, 0)
    variance = jnp.square(centred).sum(0) / count
    return jnp.where(variance > 0, jnp.sqrt(jnp.where(variance > 0, variance, 1)), 1)


def _votes(store: Any, z: Array, neighbours: int, distance: Distance, scale: Any, classes: Any) -> Array:
    """Probabilities of the labels of the nearest stored examples, ``[batch, classes]``; 0 where the store is empty."""

    def squared_to(one: Array) -> Array:  # one after another: all at once would be an array of batch x store x features
        return jnp.square((one - store["features"]) / store["deviations"]).sum(1)

    squared = jax.lax.map(squared_to, z)
    d = squared / (scale * z.shape[1]) if distance == "squared" else jnp.sqrt(squared) / scale
    d = jnp.where(store["labels"] == _NO_EXAMPLE, jnp.inf, d)
    closeness, places = jax.lax.top_k(-d, min(neighbours, d.shape[1]))
    closeness = jnp.where(jnp.isfinite(closeness[:, :1]), jax.nn.softmax(closeness, axis=1), 0)
    labels = jax.nn.one_hot(store["labels"][places], classes)
    return (closeness[:, :, None] * labels).sum(1)
