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

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from fedjax_pers.base import Task
from fedjax_pers.paths import Model, Selector, flatten, nearest
from fedjax_pers.tracing import model_order

_NORM = frozenset("bn ln gn norm batchnorm layernorm groupnorm instancenorm rmsnorm normalization".split())
_REPARAMETRISATION = frozenset("spectral weight spectralnorm weightnorm".split())
_EMBEDDING = frozenset("embed embeds embedding embeddings embedder wte wpe".split())
_MODULES = {
    "attention": frozenset({("attention",), ("attn",), ("mha",)}),
    "feed_forward": frozenset({("feed", "forward"), ("feedforward",), ("ffn",), ("ff",), ("mlp",), ("mlp", "block")}),
    "adapter": frozenset(
        {("adapter",), ("adapters",), ("bottleneck", "down"), ("bottleneck", "bias"), ("bottleneck", "up")}
    ),
}
"""Last words of the name or type of a module all of whose leaves belong."""
_STATISTIC = re.compile(r"(running_|moving_|batch_)?(mean|var|variance)")
_BIAS = re.compile(r"(.+_)?bias(_n|_[ih]h(_l\d+)?)?|b_?\d*|beta|offset")
_LORA = re.compile(r"(?i)(?:.*/)?lora(?:_?(?:a|b|up|down|\d+))*(?:/(?:a|b|up|down))?(?:/[^/]+)?")
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


@dataclass(frozen=True, repr=False)
class _Preset(Selector):
    """A property of single leaves, without arguments; ``test(path, place, words)`` decides."""

    name: str

    def select(self, leaves: Mapping[str, Any], model: Model | None = None) -> frozenset[str]:
        found = places(leaves)
        words = _describing(leaves, found, model)
        return frozenset(path for path, place in found.items() if _TESTS[self.name](path, place, words[path]))

    def __str__(self) -> str:
        return f"{self.name}()"


def _describing(leaves: Iterable[str], found: Mapping[str, Place], model: Model | None) -> dict[str, tuple[str, ...]]:
    """What the layer of a leaf is called, in lower-case words: by its type where that is known, else by its name."""
    collections = collections_of(leaves)
    types: dict[str, tuple[str, ...]] = {}
    for path, kind in model.kinds if model else ():
        top, _, below = path.partition("/")
        types[below if top in collections else path] = _words(kind)
    return {
        path: types.get(f"{place.layer}/{place.name}".lstrip("/")) or types.get(place.layer) or _name_words(place.layer)
        for path, place in found.items()
    }


def _name_words(layer: str) -> tuple[str, ...]:
    """Types end in what they are, names may begin with it: ``norm_hidden`` is the norm after ``hidden``."""
    words = _words(layer.rpartition("/")[2])
    return words[:1] if words[0] in _NORM else words


def _words(name: str) -> tuple[str, ...]:
    """``"FrozenBatchNorm_3"`` is ``("frozen", "batch", "norm")``: no counters, no single letters at the end."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    words = [re.sub(r"\d+[a-z]?$", "", word) for word in snake.split("_")]
    while len(words) > 1 and len(words[-1]) < 2:
        words.pop()
    return tuple(words)


def _is_norm(path: str, place: Place, words: tuple[str, ...]) -> bool:
    if place.collection == "batch_stats" and place.name in ("mean", "var"):
        return True
    return words[-1] in _NORM and _REPARAMETRISATION.isdisjoint(words)


def _is_norm_statistic(path: str, place: Place, words: tuple[str, ...]) -> bool:
    kept_apart = place.collection not in ("", "params") or "_ema/" in path
    return _is_norm(path, place, words) and bool(kept_apart or _STATISTIC.fullmatch(place.name))


def _is_embedding(path: str, place: Place, words: tuple[str, ...]) -> bool:
    return words[-1] in _EMBEDDING or _words(place.name)[-1] in _EMBEDDING


def _is_lora(path: str, place: Place, words: tuple[str, ...]) -> bool:
    return bool(_LORA.fullmatch(path.removesuffix("/value")))


def _is_bias(path: str, place: Place, words: tuple[str, ...]) -> bool:
    return bool(_BIAS.fullmatch(place.name)) and not _is_lora(path, place, words)


_TESTS: dict[str, Callable[[str, Place, tuple[str, ...]], bool]] = {
    "norm": _is_norm,
    "norm_statistics": _is_norm_statistic,
    "embedding": _is_embedding,
    "bias": _is_bias,
    "lora": _is_lora,
}


def norm() -> Selector:
    """All leaves of normalisation layers: scale, shift and running statistics.

    By the type of the layer where ``Task.kinds`` tells it, else by its name (``bn1``, ``final_norm``, ``LayerNorm_0``);
    ``mean`` and ``var`` in a collection ``batch_stats`` always belong. Spectral and weight normalisation do not: they
    reparametrise weights.

    Example:
      >>> from fedjax_pers.paths import select
      >>> leaves = {"params/odd/scale": 0, "params/normal_dense/kernel": 0, "batch_stats/odd/mean": 0}
      >>> sorted(select(norm(), leaves, Model(kinds=(("params/odd", "BatchNorm"),))))
      ['batch_stats/odd/mean', 'params/odd/scale']
    """
    return _Preset("norm")


def norm_statistics() -> Selector:
    """The running statistics among :func:`norm`: what changes without a gradient.

    Example:
      >>> from fedjax_pers.paths import select
      >>> sorted(select(norm_statistics(), {"bn/scale": 0, "bn/mean": 0, "bn/var": 0}))
      ['bn/mean', 'bn/var']
    """
    return _Preset("norm_statistics")


def embedding() -> Selector:
    """Leaves of embedding layers, by type where it is known, else by name; and leaves named so (``pos_embedding``)."""
    return _Preset("embedding")


def bias() -> Selector:
    """Leaves, of norms too, named ``bias``, ``b``, ``b1``, ``in_bias``, ``bias_hh``, ``beta`` or ``offset``."""
    return _Preset("bias")


def lora() -> Selector:
    """Low-rank factors by name: ``lora_a``, ``lora_B``, ``lora/down/kernel``, ``LoRA_0/a``; not what they adapt."""
    return _Preset("lora")


@dataclass(frozen=True, repr=False)
class _Within(Selector):
    """All leaves below a module that is called so, or is of a type that is called so."""

    name: str

    def select(self, leaves: Mapping[str, Any], model: Model | None = None) -> frozenset[str]:
        endings, collections = _MODULES[self.name], collections_of(leaves)
        called = {path for path, kind in (model.kinds if model else ()) if _ends(_words(kind), endings)}
        meant = {path.partition("/")[2] if path.partition("/")[0] in collections else path for path in called}

        def is_within(path: str) -> bool:
            layer = path.partition("/")[2] if path.partition("/")[0] in collections else path
            above = ["/".join(layer.split("/")[:end]) for end in range(1, layer.count("/") + 1)]
            return any(path in meant or _ends(_words(path.rpartition("/")[2]), endings) for path in above)

        return frozenset(path for path in leaves if is_within(path))

    def __str__(self) -> str:
        return f"{self.name}()"


def _ends(words: tuple[str, ...], endings: frozenset[tuple[str, ...]]) -> bool:
    return any(words[-len(ending) :] == ending for ending in endings)


def attention() -> Selector:
    """All leaves of attention layers: modules named, or of a type named, ``attention``, ``attn`` or ``mha``.

    Queries and values alone, as in many papers on adapting transformers, are ``"**/attention/{query,value}"``.

    Example:
      >>> from fedjax_pers.paths import select
      >>> sorted(select(attention(), {"block1/attention/query/kernel": 0, "block1/norm1/scale": 0, "self_attn/w": 0}))
      ['block1/attention/query/kernel', 'self_attn/w']
    """
    return _Within("attention")


def feed_forward() -> Selector:
    """All leaves of feed-forward layers: modules named, or of a type named, ``feed_forward``, ``ffn``, ``ff``, ``mlp``.

    Example:
      >>> from fedjax_pers.paths import select
      >>> leaves = {"block1/feed_forward/up/kernel": 0, "MlpBlock_0/Dense_1/kernel": 0, "head/kernel": 0}
      >>> sorted(select(feed_forward(), leaves))
      ['MlpBlock_0/Dense_1/kernel', 'block1/feed_forward/up/kernel']
    """
    return _Within("feed_forward")


def adapter() -> Selector:
    """What is small beside a large model: low-rank factors (:func:`lora`), bottlenecks, and modules named ``adapter``.

    Example:
      >>> from fedjax_pers.paths import select
      >>> sorted(select(adapter(), {"block1/adapter/down/kernel": 0, "dense/lora_a": 0, "dense/kernel": 0}))
      ['block1/adapter/down/kernel', 'dense/lora_a']
    """
    return _Within("adapter") | lora()


@dataclass(frozen=True, repr=False)
class _AtEnd(Selector):
    """The first (``depth``) or last (``head``) layers in order of use."""

    name: str
    count: int
    by: str

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise ValueError(f"{self.name}: found n={self.count!r}; expected a whole number of layers, at least 1")
        if self.by not in ("layer", "block"):
            raise ValueError(f"{self.name}: found by={self.by!r}; allowed are 'layer' and 'block'")

    def select(self, leaves: Mapping[str, Any], model: Model | None = None) -> frozenset[str]:
        if model is None or model.order is None:
            raise ValueError(
                f"{self} needs the order in which layers are used: pass model_of(task), with Task.example set"
            )
        layers = _layers(leaves, model, self.by)
        if self.count > len(layers):
            raise ValueError(
                f"{self}: found {len(layers)} {self.by}s with weights, so n can be 1 .. {len(layers)}; "
                f"in order of use they are {', '.join(name or '(the model itself)' for name in layers)}"
            )
        members = list(layers.values())
        chosen = members[-self.count :] if self.name == "head" else members[: self.count]
        return frozenset().union(*chosen)

    def __str__(self) -> str:
        return f"{self.name}({self.count})" if self.by == "layer" else f"{self.name}({self.count}, by={self.by})"


def _layers(leaves: Mapping[str, Any], model: Model, by: str) -> dict[str, set[str]]:
    """Leaves of the layers (or blocks) that hold weights, in order of use; norms go to the layer that they follow.

    Layers are counted over the whole model that was traced, also where only some of its leaves are to choose from.
    """
    order = model.order or ()
    if leaves and set(order).isdisjoint(leaves):
        raise ValueError(f"leaves: {next(iter(leaves))!r} and all others are unknown to the model, which uses {order}")
    paths = dict.fromkeys([*order, *leaves])
    found = places(paths)
    group = {path: _group(place, by) for path, place in found.items()}
    weights = {path for path, place in found.items() if place.collection in ("", "params")}
    bearing = {group[path] for path in weights - norm().select(paths, model)} or set(group.values())

    layers: dict[str, set[str]] = {}
    waiting: list[str] = []  # norms before the first layer with weights go to that layer
    for name in dict.fromkeys(group[path] for path in order):
        if name in bearing:
            layers[name] = set()
        waiting.append(name)
        if layers:
            layers[next(reversed(layers))].update(path for path in leaves if group[path] in waiting)
            waiting.clear()
    return layers


def _group(place: Place, by: str) -> str:
    if by == "block":
        return f"{place.layer}/{place.name}".lstrip("/").partition("/")[0]
    # Statistics at the top of their collection (an Equinox state) are no part of the layer of root-level parameters.
    return place.layer or ("" if place.collection in ("", "params") else place.name)


def head(n: int = 1, *, by: str = "layer") -> Selector:
    """The last ``n`` layers with weights, in order of first use in the forward pass, with the norms that follow them.

    Example:
      >>> from fedjax_pers.paths import select
      >>> leaves = {"a_last/kernel": 0, "first/kernel": 0, "bn/scale": 0}
      >>> order = ("first/kernel", "bn/scale", "a_last/kernel")
      >>> sorted(select(head(1), leaves, Model(order))), sorted(select(~head(1), leaves, Model(order)))
      (['a_last/kernel'], ['bn/scale', 'first/kernel'])

    Args:
      n: number of layers, ``1 .. number of layers``.
      by: ``"layer"``, the module that owns a leaf, or ``"block"``, the first segment below the collection.

    Raises:
      ValueError: ``n`` or ``by`` is not allowed; when selecting, ``n`` is more than there are layers, or the order of
        use is not known because ``Task.example`` is ``None``.
    """
    return _AtEnd("head", n, by)


def depth(n: int = 1, *, by: str = "layer") -> Selector:
    """The first ``n`` layers with weights, in order of first use, with the norms that follow them (and any before).

    Example:
      >>> from fedjax_pers.paths import select
      >>> sorted(select(depth(1), {"a": 0, "z/w": 0, "z/b": 0}, Model(("z/w", "z/b", "a"))))
      ['z/b', 'z/w']

    Args:
      n: number of layers.
      by: as in :func:`head`.

    Raises:
      ValueError: as in :func:`head`.
    """
    return _AtEnd("depth", n, by)


def shallow() -> Selector:
    """Shallow personalisation: the last layer, ``head(1)``.

    Example:
      >>> shallow()
      Selector(head(1))
    """
    return head(1)


def deep() -> Selector:
    """Deep personalisation: all but the first block, ``~depth(1, by=block)``.

    The norm right behind the first block is of that block. A model of one block, such as ``linear``, has nothing deep.

    Example:
      >>> deep()
      Selector(~depth(1, by=block))
    """
    return ~depth(1, by="block")


def model_of(task: Task, variables: Any = None) -> Model:
    """Order of use and types of layers of a task's model, from an abstract trace of ``task.metrics``.

    Where ``task.example`` is ``None`` the order is unknown, and ``head`` and ``depth`` raise when they are asked.

    Args:
      task: the task.
      variables: its variables or their shapes; by default those of ``task.init``.

    Raises:
      ValueError: ``task.kinds`` names a layer that has no leaves.
    """
    if variables is None:
        variables = jax.eval_shape(task.init, jax.random.key(0))
    paths = list(flatten(variables))
    for path, kind in task.kinds:
        if path and not any(f"{leaf}/".startswith(f"{path}/") for leaf in paths):
            nodes = {leaf.rpartition("/")[0] for leaf in paths}
            raise ValueError(f"Task.kinds: {path!r} ({kind}) has no leaves; nearest: {', '.join(nearest(path, nodes))}")
    if task.example is None:
        return Model(None, task.kinds)
    batch = {name: jax.ShapeDtypeStruct((2, *shape), dtype) for name, shape, dtype in task.example}
    batch["weight"] = jax.ShapeDtypeStruct((2,), "float32")
    return Model(model_order(task.metrics, variables, batch), task.kinds)


def layers(leaves: Mapping[str, Any], model: Model | None = None) -> dict[str, frozenset[str]]:
    """Leaves by the layer that they belong to, kernel and bias together, in order of use where that is known.

    Norms go to the layer that they follow, as in :func:`head`; where the order of use is unknown they are layers.

    Example:
      >>> found = layers({"z/w": 0, "z/b": 0, "bn/scale": 0, "a/w": 0}, Model(("z/w", "z/b", "bn/scale", "a/w")))
      >>> {name: sorted(members) for name, members in found.items()}
      {'z': ['bn/scale', 'z/b', 'z/w'], 'a': ['a/w']}
    """
    found: dict[str, set[str]] = {}
    if model is not None and model.order is not None:
        found = _layers(leaves, model, "layer")
    else:
        for path, place in places(leaves).items():
            found.setdefault(_group(place, "layer"), set()).add(path)
    return {name or "model": frozenset(members) for name, members in found.items() if members}
