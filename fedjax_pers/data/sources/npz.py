"""Arrays in npz files: one file for all clients, or a folder with one file a client as PFLlib writes it."""

from __future__ import annotations

import io
import pickle
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pers.data.build import from_clients, from_rows
from fedjax_pers.data.federation import Federation
from fedjax_pers.data.messages import listed

_UNREADABLE = (
    OSError,
    EOFError,
    AttributeError,
    KeyError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
    pickle.UnpicklingError,
)


def read_npz(path: str | Path) -> dict[str, np.ndarray]:
    """All arrays of an npz file, without pickles.

    Raises:
      FileNotFoundError: no such file.
      ValueError: names the file that is truncated, no npz file, or holds Python objects.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except _UNREADABLE as error:
        raise ValueError(f"{path}: found no readable npz file of plain arrays ({error})") from error


def npz(
    path: str | Path,
    *,
    fields: tuple[str, ...] = ("x", "y"),
    validation: float = 0.0,
    seed: int = 0,
    allow_missing: bool = False,
    channels_first: bool = True,
    **about: Any,
) -> Federation:
    """A federation from an npz file, or from a folder in PFLlib's form.

    A file holds the rows of all clients: ``x``, ``y``, ``client`` (index into ``client_ids``), ``client_ids``,
    ``split`` (0 train, 1 test; all train if absent) and, optionally, ``class_names``. A folder holds ``train/K.npz``
    and ``test/K.npz`` for each client ``K``, with ``x`` and ``y`` in a pickled dict called ``data``, of which only
    arrays are unpickled. Images stored as bytes become floats in 0 .. 1.

    Args:
      path: the file or the folder.
      fields: of the file, to keep; each has one entry for each row.
      validation: share of each client's training rows that becomes its validation split.
      seed: of the draw of the validation rows.
      allow_missing: keep NaN in the features.
      channels_first: images in a folder are ``[rows, channels, height, width]``, as PyTorch has them; the channels are
        moved to the end. False leaves them.
      **about: ``name``, ``num_classes``, ``class_names``, ``description``, ``licence``.
    """
    path = Path(path)
    about = {"name": path.stem, "allow_missing": allow_missing, **about}
    federation = _folder(path, channels_first, about) if path.is_dir() else _file(path, fields, about)
    return federation.with_validation(validation, seed) if validation else federation


def _file(path: Path, fields: tuple[str, ...], about: dict[str, Any]) -> Federation:
    content = read_npz(path)
    for needed in (*fields, "client", "client_ids"):
        if needed not in content:
            raise ValueError(f"{path}: found the arrays {listed(content)}, expected {needed!r} among them")
    client, names = content["client"], content["client_ids"]
    split = content.get("split", np.zeros(len(client), np.uint8))
    for key in (*fields, "split"):
        length = len(split if key == "split" else content[key])
        if length != len(client):
            raise ValueError(f"{path}, array {key!r}: found {length} rows, expected {len(client)} as in 'client'")
    if not np.issubdtype(client.dtype, np.integer) or client.min(initial=0) < 0 or client.max(initial=0) >= len(names):
        raise ValueError(
            f"{path}, array 'client': found {client.dtype} {client.min(initial=0)} .. {client.max(initial=0)}, "
            f"expected integers 0 .. {len(names) - 1}, indexes into 'client_ids'"
        )
    if not np.isin(split, (0, 1)).all():
        found = listed(np.unique(split).tolist())
        raise ValueError(f"{path}, array 'split': found {found}, expected 0 (train) and 1 (test)")
    if "class_names" in content:
        about = {"class_names": content["class_names"].tolist(), **about}
    chosen = {"train": split == 0, "test": split == 1}
    rows = {
        part: {key: unit_images(content[key][mask]) if key == "x" else content[key][mask] for key in fields}
        for part, mask in chosen.items()
    }
    owners = {part: names[client[mask]] for part, mask in chosen.items()}
    return from_rows(rows, owners, clients=names.tolist(), **about)


def unit_images(x: np.ndarray) -> np.ndarray:
    """Images stored as bytes (``uint8 [rows, height, width, ...]``) as floats in 0 .. 1; anything else as it is."""
    return x.astype(np.float32) / np.float32(255) if x.dtype == np.uint8 and x.ndim >= 3 else x


def _folder(path: Path, channels_first: bool, about: dict[str, Any]) -> Federation:
    clients: dict[int, dict[str, dict[str, np.ndarray]]] = {}
    for split in ("train", "test"):
        for file in sorted((path / split).glob("*.npz")):
            if not file.stem.isdecimal():
                raise ValueError(f"{file}: found the name {file.stem!r}, expected the number of a client")
            clients.setdefault(int(file.stem), {})[split] = _one_client(file, channels_first)
    if not clients:
        raise FileNotFoundError(f"{path}: found no train/K.npz or test/K.npz, one for each client K")
    return from_clients(clients, **about)


def _one_client(file: Path, channels_first: bool) -> dict[str, np.ndarray]:
    try:
        with zipfile.ZipFile(file) as archive:
            fields = _unpickled(archive.read("data.npy")).item()
        arrays = {"x": np.asarray(fields["x"]), "y": np.asarray(fields["y"])}
    except _UNREADABLE as error:
        raise ValueError(f"{file}: found no readable dict 'data' with 'x' and 'y' ({error})") from error
    if channels_first and arrays["x"].ndim == 4:
        arrays["x"] = np.moveaxis(arrays["x"], 1, -1)
    arrays["x"] = unit_images(arrays["x"])
    return arrays


def _unpickled(content: bytes) -> np.ndarray:
    """The object array of an npy file; nothing but arrays and plain containers is ever constructed."""
    stream = io.BytesIO(content)
    version = np.lib.format.read_magic(stream)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    read_header(stream)
    return _ArraysOnly(stream).load()


class _ArraysOnly(pickle.Unpickler):
    """Unpickles NumPy arrays and refuses every other class or function, so that a file cannot run code."""

    _allowed = {
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "scalar"),
        ("numpy._core.numeric", "_frombuffer"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("_codecs", "encode"),
    }

    def find_class(self, module: str, name: str) -> Any:
        home = module.replace("numpy.core", "numpy._core")
        if (home, name) not in self._allowed:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a file of arrays")
        return super().find_class(home, name)
