"""JSON that any program reads: no NaN, sorted keys, numbers in their shortest exact form."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np


def plain(value: Any, where: str = "value") -> Any:
    """The same content in dicts, lists, text, numbers, booleans and ``None``.

    Numbers that are not finite become ``None``. A float of less than 64 bits becomes the shortest decimal that gives it
    back at its own precision (``float32(0.1)`` is 0.1, not 0.10000000149011612).

    Example:
      >>> plain({"loss": float("nan"), "sizes": np.array([1, 2]), "rate": np.float32(0.1)})
      {'loss': None, 'sizes': [1, 2], 'rate': 0.1}

    Args:
      value: numbers, text, arrays, named tuples, dataclasses, paths, and mappings and sequences of these.
      where: how messages name the value.

    Raises:
      ValueError: something has no such form (a function, a set), or a key is not text; names the field.
    """
    match value:
        case None | bool() | str():
            return value
        case int():
            return int(value)
        case float() if not isinstance(value, np.generic):
            return value if math.isfinite(value) else None
        case os.PathLike():
            return os.fspath(value)
        case Mapping():
            for key in value:
                if not isinstance(key, str):
                    raise ValueError(f"{where}: found the key {key!r}; keys must be text")
            return {key: plain(each, f"{where}.{key}") for key, each in value.items()}
        case tuple() if hasattr(value, "_asdict"):
            return plain(value._asdict(), where)
        case list() | tuple():
            return [plain(each, f"{where}[{index}]") for index, each in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name), f"{where}.{f.name}") for f in dataclasses.fields(value)}
    if hasattr(value, "__array__"):
        return _plain_array(np.asarray(value), where)
    raise ValueError(f"{where}: found {value!r} of type {type(value).__name__}; expected numbers, text, arrays")


def line(value: Any, where: str = "value") -> bytes:
    """One line of JSON, for files of one row a line."""
    return (json.dumps(plain(value, where), sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n").encode()


def document(value: Any, where: str = "value") -> bytes:
    """JSON for a file of its own, indented for reading."""
    text = json.dumps(plain(value, where), sort_keys=True, allow_nan=False, ensure_ascii=False, indent=2)
    return (text + "\n").encode()


def _plain_array(array: np.ndarray, where: str) -> Any:
    if array.dtype.kind in "biuSU" or array.dtype == np.float64:
        found = array.astype(str).tolist() if array.dtype.kind == "S" else array.tolist()
    elif np.issubdtype(array.dtype, np.floating) or (array.dtype.kind == "V" and not array.dtype.names):
        found = np.array([float(str(each)) for each in array.flat]).reshape(array.shape).tolist()
    else:
        raise ValueError(f"{where}: found an array of {array.dtype}; expected numbers or text")
    return plain(found, where) if array.dtype.kind not in "biu" else found
