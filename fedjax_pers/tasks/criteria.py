"""What an output is worth: a loss and a few scores, one number per example.

A criterion never averages over a batch: who counts how much is the business of the task (``batch["weight"]``), and
methods that mix outputs or weigh examples need the numbers one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from fedjax_pers.base import Array, Batch
from fedjax_pers.checks import one_of


class Criterion(NamedTuple):
    """How outputs are judged, example by example.

    Example:
      >>> batch = {"y": jnp.array([1.0, 2.0])}
      >>> squared_error.loss(jnp.array([[0.0], [2.0]]), batch).tolist()
      [1.0, 0.0]

    Attributes:
      loss: ``loss(outputs, batch) -> [batch]``, differentiable.
      metrics: ``metrics(outputs, batch) -> {name: [batch]}``; contains ``"loss"``.
      classes: ``classes(outputs)``, the number of classes that outputs of this shape tell apart; ``None`` where ``y``
        is not a class.
    """

    loss: Callable[[Any, Batch], Array]
    metrics: Callable[[Any, Batch], Mapping[str, Array]]
    classes: Callable[[Any], int | None]


def _at_least_float32(outputs: Any) -> Array:
    outputs = jnp.asarray(outputs)
    return outputs.astype(jnp.promote_types(outputs.dtype, jnp.float32))


def _per_example(values: Array) -> Array:
    """The mean over every axis but the first: positions of a sequence, targets of an example."""
    return values.mean(axis=tuple(range(1, values.ndim)))


def _logits(outputs: Any, labels: Array) -> Array:
    logits = _at_least_float32(outputs)
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"cross_entropy: found outputs {logits.shape} for labels y {labels.shape}; "
            "expected the shape of y and one more axis, of the classes"
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"cross_entropy: found labels y of dtype {labels.dtype}; expected whole numbers (int32)")
    return logits


def _cross_entropy(outputs: Any, batch: Batch) -> Array:
    labels = jnp.asarray(batch["y"])
    return _per_example(optax.softmax_cross_entropy_with_integer_labels(_logits(outputs, labels), labels))


def _class_metrics(outputs: Any, batch: Batch) -> dict[str, Array]:
    labels = jnp.asarray(batch["y"])
    logits = _logits(outputs, labels)
    right = (logits.argmax(-1) == labels).astype(logits.dtype)
    return {"loss": _cross_entropy(outputs, batch), "accuracy": _per_example(right)}


def _like_targets(name: str, outputs: Any, targets: Array) -> Array:
    """Outputs in the shape of the targets; ``[batch, 1]`` against ``[batch]`` would broadcast to ``[batch, batch]``."""
    outputs = _at_least_float32(outputs)
    if outputs.shape == (*targets.shape, 1):
        return outputs[..., 0]
    if outputs.shape != targets.shape:
        raise ValueError(f"{name}: found outputs {outputs.shape} for targets y {targets.shape}; expected equal shapes")
    return outputs


def _squared_error(outputs: Any, batch: Batch) -> Array:
    targets = jnp.asarray(batch["y"])
    return _per_example(jnp.square(_like_targets("squared_error", outputs, targets) - targets))


def _error_metrics(outputs: Any, batch: Batch) -> dict[str, Array]:
    error = _squared_error(outputs, batch)
    return {"loss": error, "squared_error": error}


def _binary_cross_entropy(outputs: Any, batch: Batch) -> Array:
    targets = jnp.asarray(batch["y"])
    logits = _like_targets("binary_cross_entropy", outputs, targets)
    return _per_example(optax.sigmoid_binary_cross_entropy(logits, targets.astype(logits.dtype)))


def _binary_metrics(outputs: Any, batch: Batch) -> dict[str, Array]:
    targets = jnp.asarray(batch["y"])
    logits = _like_targets("binary_cross_entropy", outputs, targets)
    right = ((logits > 0) == (targets > 0.5)).astype(logits.dtype)
    return {"loss": _binary_cross_entropy(outputs, batch), "accuracy": _per_example(right)}


cross_entropy = Criterion(_cross_entropy, _class_metrics, classes=lambda outputs: outputs.shape[-1])
"""``-log softmax(outputs)[y]`` for whole-number labels ``y [batch, ...]`` and outputs ``[batch, ..., classes]``; for a
sequence the mean over its positions. Scores ``loss`` and ``accuracy``."""

squared_error = Criterion(_squared_error, _error_metrics, classes=lambda outputs: None)
"""``(outputs - y)^2``, the mean over the targets of an example. Scores ``loss`` and ``squared_error``, which agree."""

binary_cross_entropy = Criterion(_binary_cross_entropy, _binary_metrics, classes=lambda outputs: 2)
"""``-log sigmoid((2 y - 1) outputs)`` for ``y`` 0 or 1 and one output a label. Scores ``loss`` and ``accuracy``."""

_BY_NAME = {
    "cross_entropy": cross_entropy,
    "squared_error": squared_error,
    "binary_cross_entropy": binary_cross_entropy,
}


def as_criterion(criterion: str | Criterion) -> Criterion:
    """The criterion of that name, or the one given.

    Example:
      >>> as_criterion("cross_entropy") is cross_entropy
      True

    Raises:
      ValueError: a name that does not exist.
    """
    if isinstance(criterion, Criterion):
        return criterion
    one_of("criterion", criterion, _BY_NAME)
    return _BY_NAME[criterion]
