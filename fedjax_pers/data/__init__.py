"""Federations: the clients and their data, from bundled sets, the user's arrays and the formats people bring.

``load("vowel_speakers")`` is a natural federation in one line; :func:`from_clients` takes a dict of arrays;
:func:`partition` deals a table to clients.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fedjax_pers.data.build import from_clients, from_rows
from fedjax_pers.data.describe import describe, picture
from fedjax_pers.data.federation import SPLITS, Federation, Split
from fedjax_pers.data.identity import ClientId
from fedjax_pers.data.messages import unknown
from fedjax_pers.data.partitioners import (
    Partitioner,
    dirichlet,
    iid,
    lognormal,
    natural,
    partition,
    quantity,
    shards,
    sized,
)
from fedjax_pers.data.sources.bundled import digits, digits_domains, shakespeare_roles, vowel_speakers
from fedjax_pers.data.sources.huggingface import huggingface
from fedjax_pers.data.sources.leaf import leaf
from fedjax_pers.data.sources.local import digits_4domains, heart_hospitals, shapes_drawers, spoken_digits_speakers
from fedjax_pers.data.sources.npz import npz
from fedjax_pers.data.sources.sqlite import sqlite, write_sqlite
from fedjax_pers.data.sources.tfds import tfds
from fedjax_pers.data.transforms import impute, noise, rotate, standardise

_BUNDLED: dict[str, Callable[..., Federation]] = {
    "digits": digits,
    "digits_domains": digits_domains,
    "shakespeare_roles": shakespeare_roles,
    "vowel_speakers": vowel_speakers,
}
_LOCAL: dict[str, Callable[..., Federation]] = {
    "digits_4domains": digits_4domains,
    "heart_hospitals": heart_hospitals,
    "shapes_drawers": shapes_drawers,
    "spoken_digits_speakers": spoken_digits_speakers,
}


def names() -> tuple[str, ...]:
    """The sets that :func:`load` has on every machine.

    Example:
      >>> names()
      ('digits', 'digits_domains', 'shakespeare_roles', 'vowel_speakers')
    """
    return tuple(_BUNDLED)


def local_names() -> tuple[str, ...]:
    """The sets that :func:`load` knows the form of, and that come in a folder of their own (FEDJAX_PERS_DATA)."""
    return tuple(_LOCAL)


def load(
    name: str | Path, /, *, unseen: float | Iterable[ClientId] | None = None, unseen_seed: int = 0, **options: Any
) -> Federation:
    """A federation by name.

    Example:
      >>> load("digits", partitioner="dirichlet(0.5)", num_clients=5)
      Federation('digits', 5 clients, train 1078, validation 269, test 450)

    Args:
      name: one of :func:`names`; a local set (``shapes_drawers``, ``heart_hospitals``, ``spoken_digits_speakers``,
        ``digits_4domains``, found by ``directory=`` or FEDJAX_PERS_DATA); ``"tfds:NAME"``; or a path: an ``.npz`` or
        ``.sqlite`` file, a folder of LEAF's JSON, of PFLlib's npz, or of a Hugging Face data set.
      unseen: clients that do not take part in training, as for :meth:`Federation.with_unseen`.
      unseen_seed: of their draw.
      **options: of the loader; each set's function lists them. Most have ``validation`` and ``seed``.

    Raises:
      ValueError: an unknown name or option, with the nearest one.
      FileNotFoundError: no such file.
    """
    loader, source = _loader(str(name))
    allowed = _options(loader)
    for option in options:
        if option not in allowed:
            raise unknown(f"load({str(name)!r}), option", option, [*allowed, "unseen", "unseen_seed"])
    federation = loader(*source, **options)
    return federation if unseen is None else federation.with_unseen(unseen, unseen_seed)


def _loader(name: str) -> tuple[Callable[..., Federation], tuple[Any, ...]]:
    """The function that reads this name, and its positional arguments."""
    sets = {**_BUNDLED, **_LOCAL}
    if name in sets:
        return sets[name], ()
    if name.startswith("tfds:"):
        return tfds, (name.removeprefix("tfds:"),)
    path = Path(name)
    if path.suffix == ".npz":
        return npz, (path,)
    if path.suffix in (".sqlite", ".sqlite3", ".db"):
        return sqlite, (path,)
    if path.is_dir():
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            return huggingface, (path,)
        for pattern, loader in (("t*/*.json", leaf), ("t*/*.npz", npz)):
            if any(path.glob(pattern)):
                return loader, (path,)
        raise ValueError(
            f"{path}: found a folder of no known form, expected train/*.json (LEAF), train/K.npz (PFLlib) or "
            "dataset_dict.json (Hugging Face)"
        )
    if path.parent != Path():
        raise FileNotFoundError(f"{path}: no such folder, and no .npz or .sqlite file")
    raise unknown("data set", name, [*sets, "tfds:NAME", "PATH.npz", "PATH.sqlite", "a folder"])


def _options(loader: Callable[..., Federation]) -> list[str]:
    """The options of a loader; those that it passes on describe the federation."""
    parameters = inspect.signature(loader).parameters.values()
    own = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY or one.default is not one.empty]
    passed_on = ["name", "num_classes", "class_names", "allow_missing", "description", "licence"]
    return own + [name for name in passed_on if name not in own and any(p.kind is p.VAR_KEYWORD for p in parameters)]


__all__ = [
    "SPLITS",
    "ClientId",
    "Federation",
    "Partitioner",
    "Split",
    "describe",
    "digits",
    "digits_4domains",
    "digits_domains",
    "dirichlet",
    "from_clients",
    "from_rows",
    "heart_hospitals",
    "huggingface",
    "iid",
    "impute",
    "leaf",
    "load",
    "local_names",
    "lognormal",
    "names",
    "natural",
    "noise",
    "npz",
    "partition",
    "picture",
    "quantity",
    "rotate",
    "shakespeare_roles",
    "shapes_drawers",
    "shards",
    "sized",
    "spoken_digits_speakers",
    "sqlite",
    "standardise",
    "tfds",
    "vowel_speakers",
    "write_sqlite",
]
