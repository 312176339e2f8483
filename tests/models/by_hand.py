"""Small models of every kind with random leaves, and their operations in numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pers.paths import flatten
from fedjax_pers.tasks import from_model

IMAGE = (("x", (8, 8, 1), "float32"), ("y", (), "int32"))
FLAT = (("x", (6,), "float32"), ("y", (), "int32"))
TEXT = (("x", (5,), "int32"), ("y", (5,), "int32"))
SENTENCE = (("x", (5,), "int32"), ("y", (), "int32"))
SERIES = (("x", (9, 2), "float32"), ("y", (), "int32"))
SMALL = {
    "linear": (FLAT, {}),
    "mlp": (FLAT, {"hidden": (7,)}),
    "mlp_norm": (FLAT, {"hidden": (8, 4)}),
    "cnn": (IMAGE, {"channels": (2, 3), "hidden": 4}),
    "cnn_norm": (IMAGE, {"channels": (2, 3), "hidden": 4}),
    "resnet8": (IMAGE, {"channels": (2, 3, 4)}),
    "resnet20": (IMAGE, {"channels": (2, 3, 4)}),
    "mobilenet": (IMAGE, {"channels": (2, 3, 3, 4)}),
    "cnn1d": (SERIES, {"channels": (4, 3), "window": 3}),
    "char_lstm": (TEXT, {"embedding": 3, "hidden": 4}),
    "char_transformer": (TEXT, {"width": 4, "heads": 2, "hidden": 6}),
    "fasttext": (SENTENCE, {"vocabulary": 9, "embedding": 3}),
    "text_cnn": (SENTENCE, {"vocabulary": 9, "embedding": 3, "windows": (2, 3), "channels": 4}),
}


def task_of(name, **settings):
    example, small = SMALL[name]
    return from_model(example, name, num_classes=9, **{**small, **settings})


def leaves_of(task):
    """Float64 leaves by path: no bias 0, no scale 1, variances positive."""
    draw = np.random.default_rng(0)
    shapes = flatten(jax.eval_shape(task.init, jax.random.key(0)))
    return {
        path: draw.uniform(0.5, 1.5, leaf.shape)
        if path.endswith(("scale", "var"))
        else 0.5 * draw.normal(size=leaf.shape)
        for path, leaf in shapes.items()
    }


def nested(leaves):
    tree = {}
    for path, leaf in leaves.items():
        *above, name = path.split("/")
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        node[name] = jnp.asarray(leaf)
    return tree


def sizes(name, example, num_classes, **settings):
    task = from_model(example, name, num_classes=num_classes, **settings)
    leaves = flatten(jax.eval_shape(task.init, jax.random.key(0)))
    return sum(leaf.size for path, leaf in leaves.items() if path.startswith("params/"))


def relu(x):
    return np.maximum(x, 0)


def convolved(x, kernel, stride=1):
    """Cross-correlation with zero padding that keeps the size (before the stride), by shifting, in numpy."""
    height, width = kernel.shape[:2]
    out = [-(-side // stride) for side in x.shape[1:3]]
    pads = [max((o - 1) * stride + k - s, 0) for o, k, s in zip(out, (height, width), x.shape[1:3], strict=True)]
    x = np.pad(x, [(0, 0), *((p // 2, p - p // 2) for p in pads), (0, 0)])
    total = 0
    for i in range(height):
        for j in range(width):
            total = total + x[:, i : i + out[0] * stride : stride, j : j + out[1] * stride : stride][
                :, : out[0], : out[1]
            ] @ kernel[i, j]  # fmt: skip
    return total


def pooled(x):
    rows, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2]
    return x.reshape(rows, height // 2, 2, width // 2, 2, channels).max((2, 4))


def normalise(x, p, layer, kind, rows=None):
    """Training-mode normalisation in numpy; ``rows`` are those that count for the batch's statistics."""
    shift, scale = p.get(f"{layer}/bias"), p.get(f"{layer}/scale")
    if kind == "batch":
        counted = x if rows is None else x[rows]
        over = tuple(range(x.ndim - 1))
        mean, var, epsilon = counted.mean(over), counted.var(over), 1e-5
    elif kind == "layer":
        over = tuple(range(1, x.ndim))
        mean, var, epsilon = x.mean(over, keepdims=True), x.var(over, keepdims=True), 1e-6
    else:
        groups, epsilon = np.gcd(8, x.shape[-1]), 1e-6
        split = x.reshape(len(x), -1, groups, x.shape[-1] // groups)
        mean, var = (np.zeros_like(split) + of(split, axis=(1, 3), keepdims=True) for of in (np.mean, np.var))
        mean, var = mean.reshape(x.shape), var.reshape(x.shape)
    return (x - mean) / np.sqrt(var + epsilon) * scale + shift
