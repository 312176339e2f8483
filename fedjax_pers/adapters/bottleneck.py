"""Bottleneck adapters: a narrow network behind a layer, added to what comes out of it."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pers.adapters.adapting import adapted, beside, weights_at
from fedjax_pers.adapters.products import Change, Product, products_of, with_changes
from fedjax_pers.base import Array, Leaves, Task
from fedjax_pers.checks import positive_int, require
from fedjax_pers.keys import fold_name
from fedjax_pers.paths import SelectorLike, flatten, unflattener
from fedjax_pers.per_example import Opened, opened

MARKERS = ("bottleneck_down", "bottleneck_bias", "bottleneck_up")


def bottleneck(task: Task, on: SelectorLike, *, size: int = 8) -> Task:
    """The task with a bottleneck behind chosen layers: ``h + relu(h D + c) U``, where ``h`` is the layer's product.

    ``D [features, size]`` starts normal with variance 1 / features, ``c [size]`` and ``U [size, features]`` at zero, so
    that the model starts as the backbone, to the bit. A layer is named by its weights: the last axis of their product
    with the inputs (the channels of a convolution) are the features. Beside ``params/block/up/kernel`` lie
    ``params/block/up/bottleneck_down/kernel``, ``.../bottleneck_bias/kernel`` and ``.../bottleneck_up/kernel``.

    Example:
      >>> import fedjax_pers as fp
      >>> task = fp.tasks.from_model(fp.data.load("vowel_speakers"), "mlp", hidden=(32,))
      >>> adapted = fp.adapters.bottleneck(task, on="**/hidden1/kernel", size=4)
      >>> {name: x.shape for name, x in adapted.init(jax.random.key(0)).items() if "bottleneck_up" in name}
      {'params/hidden1/bottleneck_up/kernel': (4, 32)}

    Args:
      task: model and loss.
      on: the weights of the layers.
      size: width of the bottleneck, at most the number of features.

    Raises:
      ValueError: nothing selected, weights that are not multiplied in the open (looked up, or inside a loop), a size
        that is too large, a task that is adapted already.

    Source: Houlsby et al., "Parameter-Efficient Transfer Learning for NLP", ICML 2019; one bottleneck behind a layer as
    in Pfeiffer et al., "AdapterFusion", EACL 2021.

    Differences from the papers: it stands before the layer's own bias is added, which ``c`` makes up for.
    """
    positive_int("size", size)
    weights = weights_at(task, on, "a bottleneck")
    features = _features(task, weights)
    for path, width in features.items():
        require(size <= width, f"size: found {size}; {path} has {width} features, so allowed are 1 .. {width}")

    def fresh(key: Array) -> Leaves:
        return {name: x for path in weights for name, x in one(path, fold_name(key, path)).items()}

    def one(path: str, key: Array) -> Leaves:
        width, dtype = features[path], weights[path].dtype
        down = jax.random.normal(key, (width, size), dtype) / math.sqrt(width)
        leaves = (down.astype(dtype), jnp.zeros(size, dtype), jnp.zeros((size, width), dtype))
        return dict(zip(_names(path), leaves, strict=True))

    def of_model(leaves: Leaves) -> Leaves:
        return {name: x for name, x in leaves.items() if name not in added}

    def around(function: Any) -> Any:
        def with_bottlenecks(leaves: Leaves, *rest: Any) -> Any:
            model = of_model(leaves)
            whole = opened(function, model, *rest)
            changes = [(p, _narrow(path, p)) for path, products in _products(whole, model, weights) for p in products]
            return with_changes(whole, (model, *rest), leaves, changes)

        return with_bottlenecks

    added = {name for path in weights for name in _names(path)}
    return adapted(task, fresh, _not_merged, around)


def _names(path: str) -> tuple[str, ...]:
    return tuple(beside(path, marker) for marker in MARKERS)


def _not_merged(leaves: Leaves) -> Leaves:
    raise ValueError("plain: a bottleneck does not fit into the model's own weights; keep the adapted variables")


def _products(whole: Opened, model: Leaves, weights: Leaves) -> list[tuple[str, list[Product]]]:
    number_of = dict(zip(flatten(model), whole.inputs, strict=False))
    found = []
    for path in weights:
        products = products_of(whole, number_of[path])
        require(bool(products), f"on: {path} is not multiplied with anything in the open, so no bottleneck fits there")
        found.append((path, products or []))
    return found


def _axis(product: Product) -> int:
    """The axis of the features in what comes out."""
    equation = product.step.equation
    if equation.primitive.name == "dot_general":
        _, (batched, _) = equation.params["dimension_numbers"]
        return equation.outvars[0].aval.ndim - 1 if product.weight == 1 else len(batched)
    return equation.params["dimension_numbers"].out_spec[1]


def _features(task: Task, weights: Leaves) -> dict[str, int]:
    """How many features come out of each layer."""
    require(task.example is not None, "task: a bottleneck needs to know an example; set Task.example")
    batch = {name: jnp.zeros((2, *shape), dtype) for name, shape, dtype in task.example or ()}
    model = jax.eval_shape(task.init, jax.random.key(0))
    leaves = flatten(model)
    rebuild = unflattener(model)
    whole = opened(lambda leaves, batch: task.metrics(rebuild(leaves), batch), leaves, batch)
    return {
        path: products[0].step.equation.outvars[0].aval.shape[_axis(products[0])]
        for path, products in _products(whole, leaves, weights)
    }


def _narrow(path: str, product: Product) -> Change:
    def change(leaves: Leaves, entering: Array, made: Array) -> Array:
        down, bias, up = (leaves[name].astype(made.dtype) for name in _names(path))
        h = jnp.moveaxis(made, _axis(product), -1)
        return jnp.moveaxis(h + jax.nn.relu(h @ down + bias) @ up, -1, _axis(product))

    return change
