"""Tables with columns: Hugging Face datasets, data frames, dicts of lists."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pers.data.federation import Federation
from fedjax_pers.data.messages import unknown
from fedjax_pers.data.partitioners import Partitioner
from fedjax_pers.data.sources.npz import unit_images
from fedjax_pers.data.sources.tables import CLIENT, check_dealing, federate


def huggingface(
    source: Any,
    *,
    client_key: str | None = None,
    partitioner: Partitioner | str | None = None,
    num_clients: int | None = None,
    x: str = "image",
    y: str = "label",
    train: str = "train",
    test: str | None = "test",
    validation: float = 0.0,
    seed: int = 0,
    **about: Any,
) -> Federation:
    """A federation from a Hugging Face data set, or from anything else with columns.

    Example:
      >>> table = {"image": [[0.0], [1.0], [2.0]], "label": [0, 1, 1], "user": ["ann", "bob", "ann"]}
      >>> huggingface({"train": table}, client_key="user", test=None)
      Federation('huggingface', 2 clients, train 3, validation 0, test 0)

    Args:
      source: tables by split (a ``DatasetDict``, a dict), or a folder written by ``save_to_disk``. A table has
        ``table[column]``: a ``Dataset``, a data frame, a dict of lists.
      client_key: the column that names the client.
      partitioner: how to deal the rows where they name no client; ``num_clients`` belongs to it.
      num_clients: number of clients, with a partitioner.
      x: name of the features; images become arrays, with floats in 0 .. 1 where they are stored as bytes.
      y: name of the target.
      train: split to train on.
      test: split to test on; None for none.
      validation: share of each client's training rows that becomes its validation split.
      seed: of the deal and of the draw of the validation rows.
      **about: ``name``, ``num_classes``, ``class_names``, ``description``, ``licence``, ``allow_missing``.

    Raises:
      FileNotFoundError: no such folder.
      ValueError: an unknown split or column.
    """
    check_dealing("huggingface", client_key, partitioner)
    tables = _from_disk(Path(source)) if isinstance(source, str | Path) else source
    if not isinstance(tables, Mapping):
        found = type(source).__name__
        raise ValueError(f"source: found {found}, expected tables by split: {{'train': ..., 'test': ...}}")
    rows = {}
    for split in (train, test):
        if split is not None:
            if split not in tables:
                raise unknown("split", split, tables)
            rows[split] = _table(tables[split], split, x, y, client_key)
    names = getattr((getattr(tables[train], "features", None) or {}).get(y), "names", None)
    return federate(
        rows[train],
        rows.get(test),
        partitioner,
        num_clients=num_clients,
        validation=validation,
        seed=seed,
        **{"name": "huggingface", "class_names": names or (), **about},
    )


def _from_disk(path: Path) -> Mapping[str, Any]:
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such folder")
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"{path}: reading this folder needs the package datasets ({error})") from error
    loaded = datasets.load_from_disk(str(path))
    return loaded if isinstance(loaded, Mapping) else {"train": loaded}


def _table(table: Any, split: str, x: str, y: str, client_key: str | None) -> dict[str, Any]:
    columns = list(getattr(table, "column_names", table))
    wanted = {"x": x, "y": y} if client_key is None else {"x": x, "y": y, CLIENT: client_key}
    for column in wanted.values():
        if column not in columns:
            raise unknown(f"split {split!r}, column", column, columns)
    rows = {field: list(table[column]) for field, column in wanted.items()}
    return {**rows, "x": unit_images(np.asarray([np.asarray(one) for one in rows["x"]]))}
