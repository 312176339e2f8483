"""SQLite files: FedJAX's (read and write) and TensorFlow Federated's (read)."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pers.data.build import from_clients
from fedjax_pers.data.federation import Federation
from fedjax_pers.data.messages import listed, unknown

Features = dict[str, np.ndarray]

_NDARRAY, _BYTES_ARRAY = 1, 4
"""MessagePack extension types: an array of numbers, an array of byte strings."""

_CREATE = (
    "CREATE TABLE federated_data "
    "(client_id BLOB NOT NULL PRIMARY KEY, data BLOB NOT NULL, num_examples INTEGER NOT NULL)"
)


def sqlite(
    path: str | Path,
    test: str | Path | None = None,
    *,
    x: str = "x",
    y: str = "y",
    shape: tuple[int, ...] | None = None,
    preprocess: Callable[[Features], Features] | None = None,
    validation: float = 0.0,
    seed: int = 0,
    **about: Any,
) -> Federation:
    """A federation from FedJAX's SQLite files (one a split) or from one of TensorFlow Federated (all splits in one).

    Args:
      path: the training split in FedJAX's form, or a file in TensorFlow Federated's, whose splits ``train`` and
        ``test`` are read.
      test: the test split in FedJAX's form.
      x: name of the features in the file (``"pixels"`` in EMNIST).
      y: name of the target (``"label"``).
      shape: of one example of ``x``, where the file has it flat.
      preprocess: turns a client's features ``[rows, ...]`` into others, among them ``x`` and ``y`` (text comes as
        arrays of bytes).
      validation: share of each client's training rows that becomes the validation split.
      seed: of the draw of the validation rows.
      **about: ``name``, ``num_classes``, ``class_names``, ``description``, ``licence``, ``allow_missing``.

    Raises:
      FileNotFoundError: no such file.
      ValueError: names the file (and the client) that cannot be read, or the feature that is not there.
    """
    files = {"train": Path(path)} if test is None else {"train": Path(path), "test": Path(test)}
    clients: dict[str, dict[str, Features]] = {}
    for split, file in files.items():
        for client_id, part, features in _clients(file, split):
            where = f"{file}, client {client_id!r}"
            features = preprocess(features) if preprocess else features
            clients.setdefault(client_id, {})[part] = _chosen(where, features, x, y, shape)
    federation = from_clients(clients, **{"name": Path(path).stem, **about})
    return federation.with_validation(validation, seed) if validation else federation


def write_sqlite(federation: Federation, path: str | Path, split: str = "train") -> None:
    """Writes one split in FedJAX's form. Client ids become text, as the format has no other.

    Raises:
      FileExistsError: the file is there; nothing is written over.
    """
    import msgpack

    rows = federation.split(split)
    path = Path(path)
    if path.exists():
        raise FileExistsError(f"{path}: found a file, expected none; nothing is written over")

    def encoded(array: np.ndarray) -> Any:
        content = msgpack.packb((array.shape, array.dtype.name, array.tobytes("C")), use_bin_type=True)
        return msgpack.ExtType(_NDARRAY, content)

    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(_CREATE)
        for index, client_id in enumerate(federation.client_ids):
            data = zlib.compress(msgpack.packb(rows.client(index), default=encoded, use_bin_type=True))
            values = (str(client_id).encode(), data, int(rows.sizes[index]))
            connection.execute("INSERT INTO federated_data VALUES (?, ?, ?)", values)


def _clients(file: Path, split: str) -> Iterator[tuple[str, str, Features]]:
    """Client id, split and features of every client in a file of either form."""
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file")
    try:
        with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if "federated_data" in tables:
                for client_id, features in _from_fedjax(file, connection):
                    yield client_id, split, features
            elif {"examples", "client_metadata"} <= tables:
                yield from _from_tff(file, connection)
            else:
                raise ValueError(
                    f"{file}: found the tables {listed(sorted(tables)) or 'none'}, expected 'federated_data' (FedJAX) "
                    "or 'examples' and 'client_metadata' (TensorFlow Federated)"
                )
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{file}: found no readable SQLite file ({error})") from error


def _from_fedjax(file: Path, connection: sqlite3.Connection) -> Iterator[tuple[str, Features]]:
    import msgpack

    def decoded(code: int, content: bytes) -> Any:
        if code == _NDARRAY:
            shape, dtype, buffer = msgpack.unpackb(content, raw=True)
            return np.frombuffer(buffer, dtype.decode()).reshape(shape)
        if code == _BYTES_ARRAY:
            shape, strings = msgpack.unpackb(content, raw=True)
            return np.asarray(strings, object).reshape(shape)
        raise ValueError(f"unknown extension type {code}")

    query = "SELECT client_id, data, num_examples FROM federated_data ORDER BY rowid"
    for client_id, data, count in connection.execute(query):
        name = client_id.decode() if isinstance(client_id, bytes) else str(client_id)
        try:
            features = msgpack.unpackb(zlib.decompress(data), ext_hook=decoded, raw=False)
            rows = {key: len(values) for key, values in features.items()}
        except (zlib.error, ValueError, TypeError, AttributeError, msgpack.UnpackException) as error:
            raise ValueError(f"{file}, client {name!r}: found no readable arrays ({error})") from error
        if set(rows.values()) != {count}:
            raise ValueError(f"{file}, client {name!r}: found {rows} rows, expected num_examples = {count}")
        yield name, features


def _from_tff(file: Path, connection: sqlite3.Connection) -> Iterator[tuple[str, str, Features]]:
    from tensorflow_datasets.proto import tf_example_pb2

    pairs = connection.execute(
        "SELECT DISTINCT client_id, split_name FROM client_metadata WHERE split_name IN ('train', 'test')"
    ).fetchall()
    query = "SELECT serialized_example_proto FROM examples WHERE client_id = ? AND split_name = ? ORDER BY rowid"
    for client_id, split in pairs:
        contents = connection.execute(query, (client_id, split))
        rows = [tf_example_pb2.Example.FromString(content).features.feature for (content,) in contents]
        if not rows:
            raise ValueError(f"{file}, client {client_id!r}: found no examples in {split}, expected some")
        yield client_id, split, {name: np.asarray([_value(row[name]) for row in rows]) for name in sorted(rows[0])}


def _value(feature: Any) -> Any:
    """The content of a feature of an Example; a list of one is a scalar, since the file does not keep shapes."""
    values = list(getattr(feature, feature.WhichOneof("kind")).value)
    return values[0] if len(values) == 1 else values


def _chosen(where: str, features: Features, x: str, y: str, shape: tuple[int, ...] | None) -> Features:
    for name in (x, y):
        if name not in features:
            raise unknown(f"{where}, feature", name, features)
    images = np.asarray(features[x])
    if shape is not None:
        if images.size != len(images) * int(np.prod(shape)):
            raise ValueError(f"{where}, feature {x!r}: found {images.shape}, expected examples that fill {shape}")
        images = images.reshape(len(images), *shape)
    return {"x": images, "y": np.asarray(features[y])}
