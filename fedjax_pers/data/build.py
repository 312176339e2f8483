"""Builds a federation from the user's arrays. Everything that can be wrong with them is found here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pers.data.federation import SPLITS, Federation, Split
from fedjax_pers.data.identity import ClientId, canonical_ids, plain_id, tags_of
from fedjax_pers.data.messages import listed, unknown

Fields = dict[str, np.ndarray]

_RESERVED = "weight"


def from_clients(
    clients: Mapping[ClientId, Any] | Iterable[tuple[ClientId, Any]],
    *,
    name: str = "clients",
    num_classes: int | None = None,
    class_names: Iterable[str] = (),
    allow_missing: bool = False,
    description: str = "",
    licence: str = "",
) -> Federation:
    """A federation from one dict of arrays a client.

    Example:
      >>> import numpy as np
      >>> one = {"x": np.zeros((5, 3)), "y": [0, 1, 0, 1, 1]}
      >>> two = {"train": one, "test": {"x": np.ones((2, 3)), "y": [1, 1]}}
      >>> from_clients({"ann": one, "bob": two})
      Federation('clients', 2 clients, train 10, validation 0, test 2)

    Args:
      clients: by client id, either the fields of the training rows, ``{"x": [rows, ...], "y": [rows, ...]}``, or such a
        dict for each split, ``{"train": ..., "validation": ..., "test": ...}``, any of which may be left out. Further
        fields are allowed. Pairs ``(id, data)`` do as well. A client may have no rows at all.
      name: of the federation.
      num_classes: labels must be integers in ``0 .. num_classes - 1``. By default the number of ``class_names`` or, for
        one integer ``y`` a row, the largest label + 1; a ``y`` of another kind is not a class.
      class_names: one for each class.
      allow_missing: keep NaN in the features (an infinite value is refused all the same).
      description: one line for people.
      licence: of the data, with the credit that it asks for.

    Returns:
      The federation. 64-bit numbers become 32-bit ones unless JAX runs in 64-bit mode; class labels become int32.

    Raises:
      ValueError: names the client, the split and the field, what was found and what was expected.
    """
    pairs = list(clients.items() if isinstance(clients, Mapping) else clients)
    ids = canonical_ids(client_id for client_id, _ in pairs)
    given = {plain_id(client_id): _by_split(client_id, data) for client_id, data in pairs}
    tables = {
        _where(client_id, split): arrays_of(_where(client_id, split), given[client_id][split])
        for client_id in ids
        for split in given[client_id]
    }
    nothing = _agreed(tables)
    splits = {}
    for split in SPLITS:
        parts = [tables.get(_where(client_id, split), nothing) for client_id in ids]
        filled = [part for part in parts if _rows(part)] or [nothing]
        data = {key: np.concatenate([part[key] for part in filled]) for key in nothing}
        splits[split] = Split(data, _offsets([_rows(part) for part in parts]))
    return _federation(
        ids,
        splits,
        num_classes=num_classes,
        class_names=class_names,
        allow_missing=allow_missing,
        name=name,
        description=description,
        licence=licence,
    )


def from_rows(
    rows: Mapping[str, Mapping[str, Any]],
    owners: Mapping[str, Any],
    *,
    clients: Iterable[ClientId] | None = None,
    name: str = "rows",
    num_classes: int | None = None,
    class_names: Iterable[str] = (),
    allow_missing: bool = False,
    description: str = "",
    licence: str = "",
) -> Federation:
    """A federation from one table a split, with the client of each row beside it.

    Example:
      >>> table = {"x": [[0.0], [1.0], [2.0]], "y": [0, 1, 1]}
      >>> from_rows({"train": table}, {"train": ["bob", "ann", "bob"]}).train.data["x"].ravel().tolist()
      [1.0, 0.0, 2.0]

    Args:
      rows: by split, arrays ``[rows, ...]`` by field.
      owners: by split, the client id of each row, ``[rows]``.
      clients: all client ids, where some may have no row.
      name: of the federation.
      num_classes: this and the others as in :func:`from_clients`.
      class_names: one for each class.
      allow_missing: keep NaN in the features.
      description: one line for people.
      licence: of the data.
    """
    for split in rows:
        if split not in SPLITS:
            raise unknown("split", split, SPLITS)
    if set(rows) != set(owners):
        raise ValueError(f"owners: found the splits {listed(owners)}, expected {listed(rows)}")
    tables = {split: arrays_of(f"split {split!r}", fields) for split, fields in rows.items()}
    nothing = _agreed({f"split {split!r}": fields for split, fields in tables.items()})
    found = {split: _owners(split, owners[split], _rows(table)) for split, table in tables.items()}
    ids = canonical_ids({one for names, _ in found.values() for one in names} if clients is None else clients)
    place = {client_id: index for index, client_id in enumerate(ids)}
    splits = {}
    for split in SPLITS:
        table = tables[split] if split in tables and _rows(tables[split]) else nothing
        names, inverse = found.get(split, ([], np.zeros(0, np.int64)))
        for client_id in names:
            if client_id not in place:
                raise unknown(f"owners, split {split!r}", client_id, ids)
        index = np.asarray([place[client_id] for client_id in names], np.int64)[inverse]
        order = np.argsort(index, kind="stable")
        data = {key: values[order] for key, values in table.items()}
        splits[split] = Split(data, _offsets(np.bincount(index, minlength=len(ids))))
    return _federation(
        ids,
        splits,
        num_classes=num_classes,
        class_names=class_names,
        allow_missing=allow_missing,
        name=name,
        description=description,
        licence=licence,
    )


def arrays_of(where: str, fields: Any) -> Fields:
    """The fields of one table as arrays of numbers with equally many rows; ``where`` begins the message of an error."""
    if not isinstance(fields, Mapping):
        raise ValueError(f"{where}: found {type(fields).__name__}, expected a dict of arrays by field ('x', 'y')")
    for needed in ("x", "y"):
        if needed not in fields:
            raise ValueError(f"{where}: found the fields {listed(fields) or 'none'}, expected {needed!r} among them")
    if _RESERVED in fields:
        raise ValueError(f"{where}: found the field {_RESERVED!r}, which batches use to mark padding; rename it")
    arrays = {str(key): _array(f"{where}, field {key!r}", value) for key, value in fields.items()}
    for key, values in arrays.items():
        if len(values) != len(arrays["x"]):
            rows = f"{len(values)} rows, expected {len(arrays['x'])}"
            raise ValueError(f"{where}, field {key!r}: found {rows} as field 'x' has")
    return arrays


def _array(where: str, value: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{where}: found rows of different shapes, expected one array of numbers ({error})") from error
    real = jnp.issubdtype(array.dtype, np.integer) or jnp.issubdtype(array.dtype, np.floating) or array.dtype == bool
    if not real:
        raise ValueError(f"{where}: found dtype {array.dtype}, expected numbers (bool, integers or floats)")
    if array.ndim == 0:
        raise ValueError(f"{where}: found a single number, expected one row for each example")
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if dtype != array.dtype and array.size and jnp.issubdtype(dtype, np.integer):
        low, high = array.min(), array.max()
        if low < np.iinfo(dtype).min or high > np.iinfo(dtype).max:
            raise ValueError(f"{where}: found {low} .. {high}, expected integers that fit into {dtype}")
    with np.errstate(over="ignore"):
        return array.astype(dtype, copy=False)


def _by_split(client_id: ClientId, data: Any) -> Mapping[str, Any]:
    if not isinstance(data, Mapping) or not data:
        found = "an empty dict" if isinstance(data, Mapping) else type(data).__name__
        raise ValueError(
            f"client {client_id!r}: found {found}, expected the fields 'x' and 'y' or the splits {listed(SPLITS)}"
        )
    if not any(key in SPLITS or isinstance(value, Mapping) for key, value in data.items()):
        return {"train": data}
    for split in data:
        if split not in SPLITS:
            raise unknown(f"client {client_id!r}, split", split, SPLITS)
    return data


def _where(client_id: ClientId, split: str) -> str:
    return f"client {client_id!r}, split {split!r}"


def _rows(fields: Fields) -> int:
    return len(fields["x"])


def _offsets(sizes: Any) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _agreed(tables: Mapping[str, Fields]) -> Fields:
    """Every field without rows, in the shape and dtype that all tables share; the first table with rows sets them."""
    first, model = next((item for item in tables.items() if _rows(item[1])), next(iter(tables.items())))
    for where, fields in tables.items():
        for key in fields:
            if key not in model:
                raise unknown(f"{where}, field", key, model)
        for key, expected in model.items():
            if key not in fields:
                raise ValueError(f"{where}: found the fields {listed(fields)}, expected {key!r} too, as at {first}")
            values = fields[key]
            if values.shape == (0,):
                continue
            if values.shape[1:] != expected.shape[1:]:
                shapes = f"shape {values.shape[1:]} of one example, expected {expected.shape[1:]}"
                raise ValueError(f"{where}, field {key!r}: found {shapes} as at {first}")
            if len(values) and values.dtype != expected.dtype:
                dtypes = f"dtype {values.dtype}, expected {expected.dtype}"
                raise ValueError(f"{where}, field {key!r}: found {dtypes} as at {first}")
    return {key: values[:0] for key, values in model.items()}


def _owners(split: str, owners: Any, rows: int) -> tuple[list[ClientId], np.ndarray]:
    """The client ids that occur and, for each row, the place of its own among them."""
    if not isinstance(owners, np.ndarray) or owners.dtype.kind not in "iuU":
        owners = [plain_id(one.decode() if isinstance(one, bytes) else one) for one in np.asarray(owners, object)]
        canonical_ids(set(owners) or {0})
        owners = np.asarray(owners)
    if owners.shape != (rows,):
        raise ValueError(f"owners, split {split!r}: found shape {owners.shape}, expected ({rows},), one for each row")
    names, inverse = np.unique(owners, return_inverse=True)
    return [plain_id(one) for one in names], inverse


def _federation(
    ids: tuple[ClientId, ...],
    splits: dict[str, Split],
    *,
    num_classes: int | None,
    class_names: Iterable[str],
    allow_missing: bool,
    **about: str,
) -> Federation:
    for name, split in splits.items():
        _finite(ids, name, split, allow_missing)
    class_names = tuple(str(one) for one in class_names)
    num_classes = _number_of_classes(ids, splits, num_classes, class_names)
    if num_classes is not None:
        splits = {
            name: Split({**split.data, "y": split.data["y"].astype(np.int32)}, split.offsets)
            for name, split in splits.items()
        }
    tags, remarks = tags_of(ids)
    return Federation(
        client_ids=ids,
        tags=tags,
        **splits,
        class_names=class_names,
        num_classes=num_classes,
        remarks=remarks,
        **about,
    )


def _refuse(ids: tuple[ClientId, ...], name: str, split: Split, field: str, bad: np.ndarray, expected: str) -> None:
    """Raises if any entry of ``bad`` (``[rows, ...]``) is true, naming the client of the first one."""
    rows = np.asarray(bad.reshape(len(bad), -1).any(axis=1) if bad.size else np.zeros(0, bool))
    if not rows.any():
        return
    row = int(np.argmax(rows))
    owner = int(np.searchsorted(split.offsets, row, side="right")) - 1
    count = int(rows[split.offsets[owner] : split.offsets[owner + 1]].sum())
    value = split.data[field][row][bad[row]].flat[0] if bad.ndim > 1 else split.data[field][row]
    where = f"{_where(ids[owner], name)}, field {field!r}, row {row - split.offsets[owner]}"
    raise ValueError(f"{where}: found {value} ({count} such rows at this client), expected {expected}")


def _finite(ids: tuple[ClientId, ...], name: str, split: Split, allow_missing: bool) -> None:
    for field, values in split.data.items():
        if jnp.issubdtype(values.dtype, np.floating):
            if allow_missing and field != "y":
                _refuse(ids, name, split, field, np.isinf(values), "finite numbers or NaN")
            else:
                hint = "" if field == "y" else " (allow_missing=True keeps NaN)"
                _refuse(ids, name, split, field, ~np.isfinite(values), f"finite numbers{hint}")


def _number_of_classes(
    ids: tuple[ClientId, ...], splits: dict[str, Split], num_classes: int | None, class_names: tuple[str, ...]
) -> int | None:
    """The number of classes, given or read from the labels, all of which lie in its range; None for no classes."""
    labels = splits["train"].data["y"]
    whole = jnp.issubdtype(labels.dtype, np.integer) or labels.dtype == bool
    if num_classes is None and class_names:
        num_classes = len(class_names)
    if num_classes is None:
        if not whole or labels.ndim != 1:
            return None
        largest = max(int(split.data["y"].max(initial=0)) for split in splits.values())
        expected = "a label of 0 or more (a target that is not a class must be a float)"
        for name, split in splits.items():
            _refuse(ids, name, split, "y", split.data["y"] < 0, expected)
        return largest + 1
    if isinstance(num_classes, bool) or not isinstance(num_classes, int | np.integer) or num_classes < 1:
        raise ValueError(f"num_classes: found {num_classes!r}, expected an integer of 1 or more")
    if class_names and len(class_names) != num_classes:
        raise ValueError(f"class_names: found {len(class_names)} names, expected num_classes = {num_classes}")
    for name, split in splits.items():
        values = split.data["y"]
        bad = (values < 0) | (values >= num_classes) if whole else np.ones(values.shape, bool)
        expected = f"integers 0 .. {num_classes - 1}" + ("" if whole else f", not dtype {labels.dtype}")
        _refuse(ids, name, split, "y", bad, expected)
    return int(num_classes)
