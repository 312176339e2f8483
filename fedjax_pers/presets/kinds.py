"""Presets by what a layer is: its type, its name, or that of a module around it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedjax_pers.paths import Model, Selector
from fedjax_pers.presets.places import Place, collections_of, places, words_of

_NORM = frozenset("bn ln gn norm batchnorm layernorm groupnorm instancenorm rmsnorm normalization".split())
_REPARAMETRISATION = frozenset("spectral weight spectralnorm weightnorm".split())
_EMBEDDING = frozenset("embed embeds embedding embeddings embedder wte wpe".split())
_STATISTIC = re.compile(r"(running_|moving_|batch_)?(mean|var|variance)")
_BIAS = re.compile(r"(.+_)?bias(_n|_[ih]h(_l\d+)?)?|b_?\d*|beta|offset")
_LORA = re.compile(r"(?i)(?:.*/)?lora(?:_?(?:a|b|up|down|\d+))*(?:/(?:a|b|up|down))?(?:/[^/]+)?")
_MODULES = {
    "attention": frozenset({("attention",), ("attn",), ("mha",)}),
    "feed_forward": frozenset({("feed", "forward"), ("feedforward",), ("ffn",), ("ff",), ("mlp",), ("mlp", "block")}),
    "adapter": frozenset(
        {("adapter",), ("adapters",), ("bottleneck", "down"), ("bottleneck", "bias"), ("bottleneck", "up")}
    ),
}
"""Last words of the name or type of a module all of whose leaves belong."""


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
        types[below if top in collections else path] = words_of(kind)
    return {
        path: types.get(f"{place.layer}/{place.name}".lstrip("/")) or types.get(place.layer) or _name_words(place.layer)
        for path, place in found.items()
    }


def _name_words(layer: str) -> tuple[str, ...]:
    """Types end in what they are, names may begin with it: ``norm_hidden`` is the norm after ``hidden``."""
    words = words_of(layer.rpartition("/")[2])
    return words[:1] if words[0] in _NORM else words


def _is_norm(path: str, place: Place, words: tuple[str, ...]) -> bool:
    if place.collection == "batch_stats" and place.name in ("mean", "var"):
        return True
    return words[-1] in _NORM and _REPARAMETRISATION.isdisjoint(words)


def _is_norm_statistic(path: str, place: Place, words: tuple[str, ...]) -> bool:
    kept_apart = place.collection not in ("", "params") or "_ema/" in path
    return _is_norm(path, place, words) and bool(kept_apart or _STATISTIC.fullmatch(place.name))


def _is_embedding(path: str, place: Place, words: tuple[str, ...]) -> bool:
    return words[-1] in _EMBEDDING or words_of(place.name)[-1] in _EMBEDDING


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
        called = {path for path, kind in (model.kinds if model else ()) if _ends(words_of(kind), endings)}
        meant = {path.partition("/")[2] if path.partition("/")[0] in collections else path for path in called}

        def is_within(path: str) -> bool:
            layer = path.partition("/")[2] if path.partition("/")[0] in collections else path
            above = ["/".join(layer.split("/")[:end]) for end in range(1, layer.count("/") + 1)]
            return any(path in meant or _ends(_name_words(path), endings) for path in above)

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
