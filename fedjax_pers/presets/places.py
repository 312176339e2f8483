"""Where leaves live: collection, layer and name, and the words that a name consists of."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_PARTS_OF_LAYERS = frozenset(
    {"~", "mean_ema", "var_ema", "lora", "lora_a", "lora_b", "base_module"}
    | {"bottleneck_down", "bottleneck_bias", "bottleneck_up"}
)
"""Segments between a layer and its leaf that are no layer of their own (Haiku's averages, NNX's low-rank factors)."""


class Place(NamedTuple):
    """Where a leaf lives: ``params/block/dense/kernel`` is ``("params", "block/dense", "kernel")``."""

    collection: str
    layer: str
    name: str


def collections_of(paths: Iterable[str]) -> frozenset[str]:
    """Top-level keys, if they are collections (``params``, ``batch_stats``, ...) and not layers; else the empty set."""
    tops = frozenset(path.partition("/")[0] for path in paths if "/" in path)
    return tops if tops & {"params", "batch_stats"} else frozenset()


def places(paths: Iterable[str]) -> dict[str, Place]:
    """The place of every leaf.

    Example:
      >>> places(["params/bn/scale", "batch_stats/bn/mean"])["batch_stats/bn/mean"]
      Place(collection='batch_stats', layer='bn', name='mean')
    """
    paths = list(paths)
    collections = collections_of(paths)
    in_variables = all(path.endswith("/value") for path in paths)  # a raw nnx.State: the last segment names no leaf
    found = {}
    for path in paths:
        *layer, name = path.removesuffix("/value").split("/") if in_variables else path.split("/")
        collection = layer.pop(0) if layer and layer[0] in collections else ""
        while layer and layer[-1] in _PARTS_OF_LAYERS:
            layer.pop()
        found[path] = Place(collection, "/".join(layer), name)
    return found


def words_of(name: str) -> tuple[str, ...]:
    """``"FrozenBatchNorm_3"`` is ``("frozen", "batch", "norm")``: no counters, no single letters at the end."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    words = [re.sub(r"\d+[a-z]?$", "", word) for word in snake.split("_")]
    while len(words) > 1 and len(words[-1]) < 2:
        words.pop()
    return tuple(words)
