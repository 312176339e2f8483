"""TensorFlow Datasets, read without TensorFlow from a directory prepared as array_record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pers.data.federation import Federation
from fedjax_pers.data.messages import unknown
from fedjax_pers.data.partitioners import Partitioner
from fedjax_pers.data.sources.npz import unit_images
from fedjax_pers.data.sources.tables import CLIENT, check_dealing, federate

Example = Mapping[str, Any]

_CHUNK = 1024


def tfds(
    dataset: str,
    *,
    client_key: str | Callable[[Example], Any] | None = None,
    partitioner: Partitioner | str | None = None,
    num_clients: int | None = None,
    directory: str | Path | None = None,
    x: str = "image",
    y: str = "label",
    train: str = "train",
    test: str | None = "test",
    preprocess: Callable[[Example], Example] | None = None,
    validation: float = 0.0,
    seed: int = 0,
    **about: Any,
) -> Federation:
    """A federation from a data set of TensorFlow Datasets.

    The data set must lie prepared in the directory; nothing is downloaded. Images stored as bytes become floats in
    0 .. 1.

    Args:
      dataset: ``"emnist/byclass"``, with a configuration where there are several.
      client_key: the feature that names the client (``"speaker_id"``), or a function of the example.
      partitioner: how to deal the examples where they name no client; ``num_clients`` belongs to it.
      num_clients: number of clients, with a partitioner.
      directory: where data sets lie; by default that of TensorFlow Datasets (``~/tensorflow_datasets``).
      x: name of the features.
      y: name of the target.
      train: split to train on; slices such as ``"train[:10%]"`` are allowed.
      test: split to test on; None for none.
      preprocess: turns an example into another one, which has the features ``x`` and ``y``.
      validation: share of each client's training rows that becomes its validation split.
      seed: of the deal and of the draw of the validation rows.
      **about: ``name``, ``num_classes``, ``class_names``, ``description``, ``licence``, ``allow_missing``.

    Raises:
      ValueError: an unknown name, split or feature; a directory in another format than array_record.
      FileNotFoundError: the data set is not prepared there.
    """
    check_dealing(f"tfds:{dataset}", client_key, partitioner)
    builder = _builder(dataset, directory)
    features = builder.info.features
    label_names = getattr(features[y], "names", None) if y in features else None
    key = _named_by(features, client_key)
    tables = {split: _table(builder, split, x, y, key, preprocess) for split in (train, test) if split is not None}
    about = {"name": dataset, "class_names": label_names or (), "description": _first_line(builder), **about}
    return federate(
        tables[train],
        tables.get(test),
        partitioner,
        num_clients=num_clients,
        validation=validation,
        seed=seed,
        **about,
    )


def _builder(name: str, directory: str | Path | None) -> Any:
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise ImportError(
            f"tfds:{name} needs the packages tensorflow-datasets, importlib_resources and pillow ({error})"
        ) from error
    try:
        builder = tensorflow_datasets.builder(name, data_dir=directory)
    except tensorflow_datasets.core.registered.DatasetNotFoundError as error:
        raise unknown("tfds: data set", name, _known(directory)) from error
    fix = f"tensorflow_datasets.builder({name!r}, data_dir=...).download_and_prepare(file_format='array_record')"
    if not builder.is_prepared():
        raise FileNotFoundError(f"tfds:{name}: found nothing prepared at {builder.data_path}; prepare it with {fix}")
    found = builder.info.file_format.value
    if found != "array_record":
        raise ValueError(
            f"tfds:{name}: found {builder.data_path} in the format {found}, expected array_record, the one that can be "
            f"read example by example without TensorFlow; prepare it in an empty directory with {fix}"
        )
    return builder


def _known(directory: str | Path | None) -> list[str]:
    """Data sets that the library knows by name, and those that lie in the directory."""
    from tensorflow_datasets.core.registered import list_imported_builders

    there = [] if directory is None or not Path(directory).is_dir() else [one.name for one in Path(directory).iterdir()]
    return sorted({*list_imported_builders(), *there})


def _first_line(builder: Any) -> str:
    return (builder.info.description or "").strip().partition("\n")[0]


def _named_by(features: Mapping[str, Any], client_key: Any) -> Callable[[Example], Any] | None:
    """The function of an example that gives its client id: text for text and for names of classes."""
    if client_key is None or callable(client_key):
        return client_key
    if client_key not in features:
        raise unknown("client_key", client_key, features)
    names = getattr(features[client_key], "names", None)

    def key(example: Example) -> Any:
        value = example[client_key]
        return names[int(value)] if names else value

    return key


def _table(
    builder: Any,
    split: str,
    x: str,
    y: str,
    key: Callable[[Example], Any] | None,
    preprocess: Callable[[Example], Example] | None,
) -> dict[str, Any]:
    if split.partition("[")[0] not in builder.info.splits:
        raise unknown(f"tfds:{builder.info.name}, split", split, builder.info.splits)
    source = builder.as_data_source(split)
    columns: dict[str, list[Any]] = {"x": [], "y": [], CLIENT: []}
    for start in range(0, len(source), _CHUNK):
        for raw in source.__getitems__(range(start, min(start + _CHUNK, len(source)))):
            example = preprocess(raw) if preprocess else raw
            for field, feature in (("x", x), ("y", y)):
                if feature not in example:
                    raise unknown(f"tfds:{builder.info.name}, feature", feature, example)
                columns[field].append(example[feature])
            if key is not None:
                client = key(raw)
                columns[CLIENT].append(client.decode() if isinstance(client, bytes) else client)
    table = {"x": _stacked(columns["x"]), "y": _stacked(columns["y"])}
    return table if key is None else {**table, CLIENT: columns[CLIENT]}


def _stacked(values: list[Any]) -> np.ndarray:
    return unit_images(np.asarray(values))
