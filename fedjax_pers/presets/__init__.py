"""Selectors for what models have in common: heads, norms, biases, embeddings, attention, low-rank factors.

Presets tell layers apart by three things: the names of the leaves, ``Task.kinds`` (types of layers, where the adapter
knows them), and the order of first use in a traced forward pass. :func:`model_of` collects the last two from a task::

    leaves = flatten(task.init(key))
    select(head(1) | norm(), leaves, model_of(task))

A *layer* is the module that owns a leaf: the path without collection and without the leaf's own name, so that
``params/bn/scale`` and ``batch_stats/bn/mean`` are both of the layer ``bn``. Top-level keys are collections if
``params`` or ``batch_stats`` is among them. Unlike a pattern, a preset may select nothing: a model without norm layers
is a fact about the model, not a misspelling.
"""

from fedjax_pers.paths import Model
from fedjax_pers.presets.depth import deep, depth, head, layers, shallow
from fedjax_pers.presets.kinds import (
    adapter,
    attention,
    bias,
    embedding,
    feed_forward,
    lora,
    norm,
    norm_statistics,
)
from fedjax_pers.presets.models import model_of
from fedjax_pers.presets.places import Place, collections_of, places

__all__ = [
    "Model",
    "Place",
    "adapter",
    "attention",
    "bias",
    "collections_of",
    "deep",
    "depth",
    "embedding",
    "feed_forward",
    "head",
    "layers",
    "lora",
    "model_of",
    "norm",
    "norm_statistics",
    "places",
    "shallow",
]
