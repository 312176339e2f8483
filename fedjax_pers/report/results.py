r"""The folder of a run: what was asked, what came out, in files that any program reads.

=====================  ==============================================================================================
``config.json``        the settings; together with the package's version they repeat the run
``metrics.jsonl``      one row a round
``clients.csv``        the raw numbers of every client, with its number of test examples
``summary.json``       the statistics over them
``timings.jsonl``      seconds: the only file besides ``environment.json`` that differs when a run is repeated
``environment.json``   versions, devices and platform
=====================  ==============================================================================================

Keys are sorted, floats are in their shortest exact form, numbers that are not finite are ``null`` (an empty cell in the
table of clients). Whole files are replaced at once; rows are added whole or not at all.
"""

from __future__ import annotations

import collections
import csv
import errno
import importlib.metadata
import io
import json
import math
import os
import platform
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_pers.report import files
from fedjax_pers.report.strict_json import document, line, plain

CONFIG, METRICS, TIMINGS = "config.json", "metrics.jsonl", "timings.jsonl"
CLIENTS, SUMMARY, ENVIRONMENT = "clients.csv", "summary.json", "environment.json"
PROBE_BYTES = 1 << 20
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


def prepare(folder: str | os.PathLike[str], config: Any) -> Path:
    """A folder that this run can write to, holding its ``config.json``. Call it before any work.

    A folder that already holds the same settings is taken as it is, so that a run can be resumed.

    Example:
      >>> import tempfile
      >>> folder = prepare(Path(tempfile.mkdtemp()) / "run", {"method": "fedavg", "seed": 0})
      >>> read_config(folder)
      {'method': 'fedavg', 'seed': 0}

    Args:
      folder: made where it does not exist, parents included.
      config: the settings, a mapping or a dataclass of plain values.

    Returns:
      The folder as an absolute path.

    Raises:
      OSError: the folder is a file, cannot be made or written to, or its disk has no space left.
      ValueError: it holds the results of other settings (the message names the first field that differs), or results
        without settings.
    """
    wanted = plain(config, "config")
    folder = Path(folder).absolute()
    try:
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "a file lies there")
        folder.mkdir(parents=True, exist_ok=True)
        present = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise OSError(error.errno, f"the run folder cannot be used: {error.strerror}", str(folder)) from error
    if CONFIG in present:
        _refuse_another_run(folder, _read_document(folder / CONFIG), wanted)
    elif leftovers := sorted(present & {METRICS, TIMINGS, CLIENTS, SUMMARY, ENVIRONMENT}):
        raise ValueError(f"{folder}: holds {', '.join(leftovers)} but no {CONFIG}; choose another folder")
    files.probe(folder, PROBE_BYTES)
    if CONFIG not in present:
        files.write_atomic(folder / CONFIG, document(wanted))
    return folder


def read_config(folder: str | os.PathLike[str]) -> Any:
    """The settings of a run."""
    return _read_document(Path(folder) / CONFIG)


def append_rows(folder: str | os.PathLike[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Adds rows to ``metrics.jsonl``, one a round, all of them or none. Timings go to :func:`append_timings`.

    Args:
      folder: as :func:`prepare` returned it.
      rows: mappings with the whole number ``round``, ascending, and whatever is to be kept of it.

    Raises:
      ValueError: ``round`` is missing or does not ascend.
      OSError: the disk is full; the file holds what it held before.
    """
    rows = [dict(row) for row in rows]
    _check_rounds([row.get("round") for row in rows], "rows")
    files.append(Path(folder) / METRICS, b"".join(line(row, f"row of round {row['round']}") for row in rows))


def append_timings(folder: str | os.PathLike[str], row: Mapping[str, Any]) -> None:
    """Adds one row to ``timings.jsonl``: seconds and whatever else differs when a run is repeated."""
    files.append(Path(folder) / TIMINGS, line(row, "timings"))


def sync(folder: str | os.PathLike[str]) -> None:
    """Returns when all rows have reached the disk. Call it before a checkpoint of the same round is saved."""
    path = Path(folder) / METRICS
    if path.exists():
        files.sync(path)


def truncate_after(folder: str | os.PathLike[str], round: int) -> None:
    """Drops the rows after ``round``, and incomplete last lines, so that a run resumed there writes each round once.

    Args:
      folder: as :func:`prepare` returned it.
      round: rounds that the checkpoint holds; 0 starts the file again (a row of round 0 is kept).

    Raises:
      ValueError: the file does not reach the round, a round is missing in order, or a line is not a row.
    """
    path = Path(folder) / METRICS
    ends, rounds, end = [], [], 0
    for row, size in _rows_with_sizes(path):
        end += size
        ends.append(end)
        rounds.append(row["round"])
    kept = sum(each <= round for each in rounds)
    reached = rounds[kept - 1] if kept else 0
    if reached != round:
        raise ValueError(f"{path}: asked for round {round}, the last row up to there is of round {reached}")
    if path.exists():
        files.truncate(path, ends[kept - 1] if kept else 0)
    timings = Path(folder) / TIMINGS
    if timings.exists():
        files.truncate(timings, timings.read_bytes().rfind(b"\n") + 1)


def read_rows(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of ``metrics.jsonl`` in order. An incomplete last line, the mark of a kill, is not a row.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a line is not a row, or rounds do not ascend.
    """
    path = Path(folder) / METRICS
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, "no metrics there", str(path))
    return [row for row, _ in _rows_with_sizes(path)]


def write_clients(folder: str | os.PathLike[str], columns: Mapping[str, Sequence[Any]]) -> None:
    """Writes ``clients.csv``: one line a client, one column a number.

    Args:
      folder: as :func:`prepare` returned it.
      columns: ``client`` (names, unique), ``test_examples``, and any others, each ``[clients]``.

    Raises:
      ValueError: a needed column is missing, lengths differ, or two clients have one name.
    """
    for needed in ("client", "test_examples"):
        if needed not in columns:
            raise ValueError(f"columns: {needed!r} is missing; found {', '.join(columns) or 'none'}")
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns: found lengths {lengths}; one value for each client is needed")
    names = [str(name) for name in columns["client"]]
    if repeated := [name for name, times in collections.Counter(names).items() if times > 1]:
        raise ValueError(f"columns['client']: found {repeated[0]!r} more than once; names must be unique")
    table = {name: [_cell(each) for each in plain(list(values), name)] for name, values in columns.items()}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table)
    writer.writerows(zip(*({**table, "client": names}).values(), strict=True))
    files.write_atomic(Path(folder) / CLIENTS, text.getvalue().encode())


def read_clients(folder: str | os.PathLike[str]) -> dict[str, list[Any]]:
    """The columns of ``clients.csv``: ``client`` as text, others as whole numbers, floats (NaN where empty) or text."""
    path = Path(folder) / CLIENTS
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    if not rows or any(len(row) != len(rows[0]) for row in rows):
        raise ValueError(f"{path}: not a table; every line needs the same number of cells")
    columns = {name: [row[index] for row in rows[1:]] for index, name in enumerate(rows[0])}
    return {name: cells if name == "client" else _numbers(cells) for name, cells in columns.items()}


def write_summary(folder: str | os.PathLike[str], summary: Mapping[str, Any]) -> None:
    """Writes ``summary.json``."""
    files.write_atomic(Path(folder) / SUMMARY, document(summary, "summary"))


def read_summary(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What :func:`write_summary` wrote; numbers that were not finite are ``None``."""
    return _read_document(Path(folder) / SUMMARY)


def write_environment(folder: str | os.PathLike[str]) -> None:
    """Writes ``environment.json``; warns where a resumed run goes on with other versions or devices."""
    path = Path(folder) / ENVIRONMENT
    now = environment()
    if path.exists() and (field := _first_difference(before := _read_document(path), now)):
        warnings.warn(
            f"{path}: this run began with {field} {_at(before, field)} and goes on with {_at(now, field)}", stacklevel=2
        )
    files.write_atomic(path, document(now))


def environment() -> dict[str, Any]:
    """Versions, devices and platform of this process."""
    return {
        "fedjax_pers": _version("fedjax-pers"),
        "packages": {name: _version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "byteorder": sys.byteorder,
        "cpus": os.cpu_count(),
        "devices": [f"{device.platform}: {device.device_kind}" for device in jax.devices()],
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _refuse_another_run(folder: Path, found: Any, wanted: Any) -> None:
    if field := _first_difference(found, wanted):
        raise ValueError(
            f"{folder}: holds another run: {field} is {_at(found, field)} there and {_at(wanted, field)} here; "
            "choose another folder, or remove that one"
        )


def _first_difference(found: Any, wanted: Any) -> str | None:
    ours, theirs = _flat(wanted), _flat(found)
    return next((name for name in sorted(ours | theirs) if ours.get(name) != theirs.get(name)), None)


def _at(value: Any, field: str) -> str:
    return _flat(value).get(field, "absent")


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    """The leaves by dotted name, as JSON text (in which ``1`` and ``True`` are not the same)."""
    if isinstance(value, dict) and (value or not prefix):
        flat: dict[str, str] = {}
        for name, each in value.items():
            flat |= _flat(each, f"{prefix}.{name}" if prefix else name)
        return flat
    return {prefix: json.dumps(value, sort_keys=True)}


def _read_document(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None


def _rows_with_sizes(path: Path) -> list[tuple[dict[str, Any], int]]:
    content = path.read_bytes() if path.exists() else b""
    rows = []
    for number, text in enumerate(content.splitlines(keepends=True), 1):
        if not text.endswith(b"\n"):
            break
        try:
            row = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: found {text[:40]!r}; expected a row with its round")
        rows.append((row, len(text)))
    _check_rounds([row.get("round") for row, _ in rows], str(path))
    return rows


def _check_rounds(rounds: list[Any], where: str) -> None:
    for index, found in enumerate(rounds):
        if not isinstance(found, int | np.integer) or isinstance(found, bool) or found < 0:
            raise ValueError(f"{where}: row {index + 1} has round {found!r}; expected a whole number from 0")
        if index and found <= rounds[index - 1]:
            raise ValueError(f"{where}: round {found} follows round {rounds[index - 1]}; one row a round, ascending")


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return "" if value is None else repr(value) if isinstance(value, float) else str(value)


def _numbers(cells: list[str]) -> list[Any]:
    try:
        found = [json.loads(cell) if cell else math.nan for cell in cells]
    except ValueError:
        return cells
    return found if all(type(each) in (int, float) for each in found) else cells
