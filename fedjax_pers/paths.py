"""Leaves by path, and selectors: which leaves of a model are meant.

A path is ``keystr(..., simple=True, separator="/")`` of a leaf, read as segments between slashes, so a key that holds
slashes itself (Haiku's ``"mlp/~/linear_0"``) is several segments. Selectors are values: hashable, comparable,
printable, closed under ``|``, ``&`` and ``~``. Wherever one is expected, :func:`as_selector` also takes

* a glob, as in a ``.gitignore`` file: ``*``, ``?`` and ``[..]`` stay within one segment, ``**`` spans any number;
  without a slash it matches at any depth, with one it starts at the root; naming an inner node takes everything below
  it, and a slash at the end asks for an inner node; ``{query,value}`` stands for each of the names;
* a list or tuple, which is a union;
* ``re.compile(...)``, which must match the *whole* path.

Functions are taken through :func:`where` only. Presets (``head``, ``norm``, ...) are in :mod:`fedjax_pers.presets`, and
:func:`fedjax_pers.parsing.parse` reads the text that a selector prints as.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

_CHOICE = r'\{[^\s|&()"={}]*\}'
BARE = rf'(?:{_CHOICE}|[^\s|&()"=,~])(?:{_CHOICE}|[^\s|&()"=,])*'
"""What a glob looks like that needs no quotes in a selector's text; the commas in braces separate nothing else."""
_FLAGS = (("i", re.IGNORECASE), ("m", re.MULTILINE), ("s", re.DOTALL), ("x", re.VERBOSE), ("a", re.ASCII))


def flatten(tree: Any) -> dict[str, Any]:
    """Leaves of any pytree by path, in the order of ``jax.tree.leaves``.

    A tree that is one array has the path ``"value"``. Those of an ``nnx.State`` end in ``"/value"``, as JAX names them.

    Example:
      >>> list(flatten({"dense": {"bias": 0.0, "kernel": 1.0}, "layers": [2.0, 3.0]}))
      ['dense/bias', 'dense/kernel', 'layers/0', 'layers/1']

    Raises:
      ValueError: two leaves have one path, or a key is empty.
    """
    leaves: dict[str, Any] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        path = jax.tree_util.keystr(keys, simple=True, separator="/") if keys else "value"
        if "" in path.split("/"):
            raise ValueError(f"the leaf at {jax.tree_util.keystr(keys)} has an empty key; every key needs a name")
        if path in leaves:
            raise ValueError(f"two leaves have the path {path!r}; rename a key: {jax.tree_util.keystr(keys)}")
        leaves[path] = leaf
    return leaves


def unflattener(tree: Any) -> Callable[[Mapping[str, Any]], Any]:
    """The inverse of :func:`flatten` for trees of the structure of ``tree``; holds on to no array.

    Example:
      >>> rebuild = unflattener([1.0, {"a": 2.0}])
      >>> rebuild({"1/a": 20.0, "0": 10.0})
      [10.0, {'a': 20.0}]

    Returns:
      ``rebuild(leaves) -> tree``, which raises a ValueError that lists missing and unexpected paths.
    """
    structure = jax.tree.structure(tree)
    names = dict.fromkeys(flatten(tree))

    def rebuild(leaves: Mapping[str, Any]) -> Any:
        missing = [name for name in names if name not in leaves]
        unexpected = [name for name in leaves if name not in names]
        if missing or unexpected:
            raise ValueError(f"leaves do not fit the tree: missing {missing}, unexpected {unexpected}")
        return jax.tree.unflatten(structure, [leaves[name] for name in names])

    return rebuild


class Model(NamedTuple):
    """What presets know of a model beside the names of its leaves; made by :func:`fedjax_pers.presets.model_of`.

    Attributes:
      order: paths of the leaves by first use in the forward pass; ``None`` where it was not traced.
      kinds: ``(path of a layer, name of its type)`` pairs, as in ``Task.kinds``.
    """

    order: tuple[str, ...] | None = None
    kinds: tuple[tuple[str, str], ...] = ()


class Selector:
    """A set of leaves, named by a rule. Combine with ``|``, ``&`` and ``~``; ``parse`` reads what ``str`` gives."""

    def select(self, leaves: Mapping[str, Any], model: Model | None = None) -> frozenset[str]:
        """Paths of the leaves that are meant; use the function :func:`select`, which checks what it is given."""
        raise NotImplementedError

    def __or__(self, other: Any) -> Selector:
        return _joined(_Union, (self, as_selector(other)))

    def __ror__(self, other: Any) -> Selector:
        return _joined(_Union, (as_selector(other), self))

    def __and__(self, other: Any) -> Selector:
        return _joined(_Intersection, (self, as_selector(other)))

    def __rand__(self, other: Any) -> Selector:
        return _joined(_Intersection, (as_selector(other), self))

    def __invert__(self) -> Selector:
        return _Complement(self)

    def __repr__(self) -> str:
        return f"Selector({self})"


@dataclass(frozen=True, repr=False)
class _Union(Selector):
    parts: tuple[Selector, ...]

    def select(self, leaves: Mapping[str, Any], model: Model | None = None) -> frozenset[str]:
        return frozenset().union(*(part.select(leaves, model) for part in self.parts))

    def __str__(self) -> str:
        return " | ".join(map(_within, self.parts)) or "nothing"


@dataclass(frozen=True, repr=False)
class _Intersection(Selector):
    parts: tuple[Selector, ...]

    def select(self, leaves: Mapping[str, Any], model: Model | None = None) -> frozenset[str]:
        return frozenset(leaves).intersection(*(part.select(leaves, model) for part in self.parts))

    def __str__(self) -> str:
        return " & ".join(map(_within, self.parts)) or "everything"


@dataclass(frozen=True, repr=False)
class _Complement(Selector):
    part: Selector

    def select(self, leaves: Mapping[str, Any], model: Model | None = None) -> frozenset[str]:
        return frozenset(leaves) - self.part.select(leaves, model)

    def __invert__(self) -> Selector:
        return self.part

    def __str__(self) -> str:
        return f"~{_within(self.part)}"


def _joined(kind: type[_Union] | type[_Intersection], parts: Iterable[Selector]) -> Selector:
    """One flat union or intersection, so that equal text means equal selectors."""
    flat = tuple(inner for part in parts for inner in (part.parts if isinstance(part, kind) else (part,)))
    return flat[0] if len(flat) == 1 else kind(flat)


def _within(part: Selector) -> str:
    compound = isinstance(part, (_Union, _Intersection)) and part.parts
    return f"({part})" if compound else str(part)


nothing: Selector = _Union(())
"""No leaf."""
everything: Selector = _Intersection(())
"""Every leaf."""
SelectorLike = Selector | str | list | tuple | re.Pattern
"""What :func:`as_selector` takes."""


@dataclass(frozen=True, repr=False)
class _Glob(Selector):
    pattern: str

    def __post_init__(self) -> None:
        if not all(self.pattern.removeprefix("/").removesuffix("/").split("/")):
            raise ValueError(f"pattern {self.pattern!r}: found an empty segment; expected names between single slashes")
        if self.pattern.startswith("!"):
            raise ValueError(f"pattern {self.pattern!r}: '!' does not negate here; use ~, as in ~as_selector(...)")

    def select(self, leaves: Mapping[str, Any], model: Model | None = None) -> frozenset[str]:
        alternatives = _alternatives(self.pattern)
        if len(alternatives) > 1:
            return frozenset().union(*(_Glob(each).select(leaves, model) for each in alternatives))
        segments = self.pattern.strip("/").split("/")
        if "/" not in self.pattern.removesuffix("/"):
            segments = ["**", *segments]
        if segments[-1] == "**":  # everything inside: any node below
            segments = [*segments, "*"]
        if self.pattern.endswith("/"):  # an inner node: there is something below
            segments = [*segments, "*"]
        return _some(self, (path for path in leaves if _fits(segments, path.split("/"))), leaves)

    def __str__(self) -> str:
        bare = re.fullmatch(BARE, self.pattern) and self.pattern not in ("nothing", "everything")
        return self.pattern if bare else json.dumps(self.pattern, ensure_ascii=False)


def _alternatives(pattern: str) -> list[str]:
    """``"block/{query,value}"`` is ``["block/query", "block/value"]``, each of which has to match something."""
    first = re.search(r"\{([^{},]+(?:,[^{},]+)+)\}", pattern)
    if first is None:
        return [pattern]
    return [each for name in first[1].split(",") for each in _alternatives(pattern.replace(first[0], name, 1))]


def _fits(pattern: list[str], path: list[str]) -> bool:
    """True if the pattern names the path or a node above it."""
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_fits(pattern[1:], path[start:]) for start in range(len(path)))
    return bool(path) and fnmatch.fnmatchcase(path[0], pattern[0]) and _fits(pattern[1:], path[1:])


@dataclass(frozen=True, repr=False)
class _Regex(Selector):
    pattern: str

    def select(self, leaves: Mapping[str, Any], model: Model | None = None) -> frozenset[str]:
        matches = re.compile(self.pattern).fullmatch
        return _some(self, (path for path in leaves if matches(path)), leaves)

    def __str__(self) -> str:
        return f"regex({json.dumps(self.pattern, ensure_ascii=False)})"


def _regex(compiled: re.Pattern[Any]) -> _Regex:
    """Flags given beside the pattern move into it, so that the pattern alone says everything."""
    if not isinstance(compiled.pattern, str):
        raise ValueError(f"regular expression {compiled.pattern!r}: found bytes; paths are text")
    added = compiled.flags & ~re.compile(compiled.pattern).flags
    letters = "".join(letter for letter, flag in _FLAGS if added & flag)
    return _Regex(f"(?{letters})" * bool(letters) + compiled.pattern)


@dataclass(frozen=True, repr=False)
class _Where(Selector):
    function: Callable[[str, Any], bool]

    def select(self, leaves: Mapping[str, Any], model: Model | None = None) -> frozenset[str]:
        answers = {path: self.function(path, leaf) for path, leaf in leaves.items()}
        for path, answer in answers.items():
            if not isinstance(answer, (bool, np.bool_)):
                raise ValueError(f"{self}: found {answer!r} for the leaf {path!r}; expected True or False")
        return frozenset(path for path, answer in answers.items() if answer)

    def __str__(self) -> str:
        return f"where({getattr(self.function, '__qualname__', repr(self.function))})"


def where(function: Callable[[str, Any], bool]) -> Selector:
    """Leaves for which ``function(path, leaf)`` is true. Has no text form that can be read back; may select nothing.

    Example:
      >>> leaves = flatten({"bias": np.zeros(3), "kernel": np.zeros((2, 3))})
      >>> sorted(select(where(lambda path, leaf: leaf.ndim == 2), leaves))
      ['kernel']
    """
    if not callable(function):
        raise ValueError(f"where: found {function!r}; expected a function (path, leaf) -> bool")
    return _Where(function)


def as_selector(value: SelectorLike) -> Selector:
    """A selector from a glob, a list or tuple (union), a compiled regular expression or a selector.

    Example:
      >>> as_selector(["head", "body/**/bias"]) & ~as_selector("scale")
      Selector((head | body/**/bias) & ~scale)

    Raises:
      ValueError: ``value`` is something else; a function needs :func:`where`.
    """
    if isinstance(value, Selector):
        return value
    if isinstance(value, str):
        return _Glob(value)
    if isinstance(value, (list, tuple)):
        return _joined(_Union, map(as_selector, value))
    if isinstance(value, re.Pattern):
        return _regex(value)
    if callable(value):
        raise ValueError(f"selector: found the function {value!r}; wrap it, where({getattr(value, '__name__', '...')})")
    raise ValueError(
        f"selector: found {value!r}; expected a glob, a list or tuple, re.compile(...), where(...) or a Selector"
    )


def select(selector: SelectorLike, leaves: Mapping[str, Any], model: Model | None = None) -> frozenset[str]:
    """Paths of the leaves that a selector means.

    Example:
      >>> leaves = flatten({"body": {"bias": 0.0, "kernel": 0.0}, "head": {"bias": 0.0}})
      >>> sorted(select("bias", leaves)), sorted(select(["head", "body/k*"], leaves))
      (['body/bias', 'head/bias'], ['body/kernel', 'head/bias'])

    Args:
      selector: anything :func:`as_selector` takes.
      leaves: leaves by path, from :func:`flatten`.
      model: order of use and types of layers, for presets that need them.

    Raises:
      ValueError: a glob or regular expression matches no leaf, wherever in the selector it stands; the message lists
        the nearest paths.
    """
    nested = [path for path, leaf in leaves.items() if not isinstance(path, str) or isinstance(leaf, Mapping)]
    if nested:
        raise ValueError(f"leaves: {nested[0]!r} is not the path of a leaf; pass flatten(tree)")
    return as_selector(selector).select(leaves, model)


def assign(
    roles: Mapping[str, SelectorLike | frozenset[str]],
    leaves: Mapping[str, Any],
    default: str | None = None,
    model: Model | None = None,
) -> dict[str, str]:
    """The role of every leaf, in the order of the leaves.

    Example:
      >>> leaves = flatten({"body": {"bias": 0.0, "kernel": 0.0}, "head": {"bias": 0.0}})
      >>> assign({"personal": "head"}, leaves, default="shared")
      {'body/bias': 'shared', 'body/kernel': 'shared', 'head/bias': 'personal'}

    Args:
      roles: selector by role, or a frozenset of paths, as :func:`select` returns it.
      leaves: leaves by path.
      default: role of the leaves that no selector takes; ``None`` makes such a leaf an error.
      model: as in :func:`select`.

    Raises:
      ValueError: a leaf is taken by two roles, or by none while ``default`` is ``None``.
    """
    taken: dict[str, frozenset[str]] = {}
    for role, chosen in roles.items():
        taken[role] = chosen if isinstance(chosen, frozenset) else select(chosen, leaves, model)
        for path in sorted(taken[role].difference(leaves)):
            raise ValueError(f"role {role!r} claims {path!r}, which is no leaf; nearest: {nearest(path, leaves)}")
    assigned: dict[str, str] = {}
    for path in leaves:
        claims = [role for role, paths in taken.items() if path in paths]
        if len(claims) > 1:
            raise ValueError(f"leaf {path!r} is claimed by {' and '.join(map(repr, claims))}; make these disjoint")
        owner = claims[0] if claims else default
        if owner is None:
            raise ValueError(f"leaf {path!r} is claimed by no role; roles are {', '.join(map(repr, roles)) or 'none'}")
        assigned[path] = owner
    return assigned


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The names most like ``name``, best first, for error messages.

    Example:
      >>> nearest("haed", ["body", "head", "norm"])
      ['head']
    """
    by_lower = {candidate.lower(): candidate for candidate in known}
    return [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, count, cutoff=0.5)]


def _some(selector: _Glob | _Regex, matches: Iterable[str], leaves: Mapping[str, Any]) -> frozenset[str]:
    found = frozenset(matches)
    if not found:
        close = _nodes_like(selector.pattern, leaves) or list(leaves)[:5]
        around = f"nearest: {', '.join(close)}" if close else "there are no leaves"
        hint = "; operators within a string are read by parse(...)" if re.search(r"[|&()]|^~", selector.pattern) else ""
        raise ValueError(f"the pattern {selector} matches no leaf; {around}{hint}")
    return found


def _nodes_like(pattern: str, leaves: Iterable[str]) -> list[str]:
    """Leaves and inner nodes like the pattern; without a slash it is compared with names: "haed" with "body/head"."""
    nodes: dict[str, str] = {}
    for path in leaves:
        segments = path.split("/")
        for end in range(1, len(segments) + 1):
            node = "/".join(segments[:end])
            nodes.setdefault(node if "/" in pattern else segments[end - 1], node)
    return [nodes[key] for key in nearest(pattern.strip("/"), nodes)]
