"""LEAF's JSON: a folder with ``train/*.json`` and ``test/*.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pers.data.build import from_clients
from fedjax_pers.data.federation import Federation
from fedjax_pers.data.messages import listed


def leaf(
    path: str | Path,
    *,
    shape: tuple[int, ...] | None = None,
    validation: float = 0.0,
    seed: int = 0,
    **about: Any,
) -> Federation:
    """A federation from a folder in LEAF's form; the users of several files are put together.

    Text (an ``x`` of strings of equal length, as in Shakespeare) becomes ``int32 [rows, characters]``, places in the
    sorted alphabet of all characters in the folder, which are the ``class_names``; a ``y`` of one character likewise.

    Args:
      path: holds the folders ``train`` and ``test`` (or one of them) of ``*.json`` files, each of which has ``users``,
        ``num_samples`` and ``user_data: {user: {"x": [...], "y": [...]}}``.
      shape: of one example, where the file has it flat: ``(28, 28, 1)`` for FEMNIST.
      validation: share of each user's training rows that becomes the validation split.
      seed: of the draw of the validation rows.
      **about: ``name``, ``num_classes``, ``class_names``, ``description``, ``licence``, ``allow_missing``.

    Raises:
      FileNotFoundError: no such files.
      ValueError: names the file that cannot be read or contradicts itself, or the user and what is wrong there.

    Source: Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018.
    """
    path = Path(path)
    clients: dict[str, dict[str, dict[str, Any]]] = {}
    for split in ("train", "test"):
        for file in sorted((path / split).glob("*.json")):
            for user, data in _users(file):
                if split in clients.setdefault(user, {}):
                    raise ValueError(f"{file}: found user {user!r}, who is in another file of {split} too")
                clients[user][split] = data
    if not clients:
        raise FileNotFoundError(f"{path}: found no users in train/*.json or test/*.json")
    tables = [data for splits in clients.values() for data in splits.values()]
    if any(isinstance(one, str) for data in tables for one in data["x"]):
        alphabet = _alphabet(tables)
        about = {"class_names": alphabet, **about}
        for user, splits in clients.items():
            for data in splits.values():
                data.update(_encoded(user, data, alphabet))
    elif shape is not None:
        for user, splits in clients.items():
            for data in splits.values():
                data["x"] = _shaped(user, data["x"], shape)
    federation = from_clients(clients, **{"name": path.name, **about})
    return federation.with_validation(validation, seed) if validation else federation


def _users(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: found no readable JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: found {type(content).__name__}, expected a dict")
    for key in ("users", "num_samples", "user_data"):
        if key not in content:
            raise ValueError(f"{file}: found the keys {listed(content)}, expected {key!r} among them")
    users, counts = content["users"], content["num_samples"]
    if len(users) != len(counts):
        raise ValueError(f"{file}: found {len(users)} users and {len(counts)} numbers of samples")
    for user, count in zip(users, counts, strict=True):
        if user not in content["user_data"]:
            raise ValueError(f"{file}: found user {user!r} in 'users', but not in 'user_data'")
        data = content["user_data"][user]
        if not {"x", "y"} <= set(data):
            raise ValueError(f"{file}, user {user!r}: found the keys {listed(data)}, expected 'x' and 'y'")
        rows = len(data["y"])
        if rows != count:
            raise ValueError(f"{file}, user {user!r}: found {rows} rows, expected {count} as in 'num_samples'")
        yield str(user), {"x": data["x"], "y": data["y"]}


def _shaped(user: str, x: list[Any], shape: tuple[int, ...]) -> np.ndarray:
    values = np.asarray(x)
    if values.size != len(x) * int(np.prod(shape)):
        raise ValueError(f"client {user!r}, field 'x': found {values.shape}, expected examples that fill {shape}")
    return values.reshape(len(x), *shape)


def _alphabet(tables: list[dict[str, Any]]) -> list[str]:
    texts = [one for data in tables for field in ("x", "y") for one in data[field] if isinstance(one, str)]
    return sorted(set().union(*texts))


def _encoded(user: str, data: dict[str, Any], alphabet: list[str]) -> dict[str, np.ndarray]:
    place = {character: index for index, character in enumerate(alphabet)}
    lengths = {len(one) if isinstance(one, str) else type(one).__name__ for one in data["x"]}
    if len(lengths) > 1 or not all(isinstance(one, int) for one in lengths):
        raise ValueError(f"client {user!r}, field 'x': found texts of length {listed(lengths)}, expected one length")
    if not all(isinstance(one, str) and len(one) == 1 for one in data["y"]):
        raise ValueError(f"client {user!r}, field 'y': found {listed(data['y'])}, expected one character for each row")
    return {
        "x": np.asarray([[place[character] for character in one] for one in data["x"]], np.int32),
        "y": np.asarray([place[one] for one in data["y"]], np.int32),
    }
