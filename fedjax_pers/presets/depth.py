"""Presets by order of use: the first and the last layers of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedjax_pers.paths import Model, Selector
from fedjax_pers.presets.kinds import norm
from fedjax_pers.presets.places import Place, places


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
