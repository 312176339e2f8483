"""What is in a federation: a table for the terminal and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedjax_pers.checks import positive_int
from fedjax_pers.data.federation import SPLITS, Federation

_NAMED_CLASSES = 3
_NAMED_CLIENTS = 40
"""Up to so many clients have their names under the bars; beyond that they would overlap."""
_SPACED_CLIENTS = 200
"""Up to so many clients have a gap between their bars; beyond that it would be smaller than a dot."""


def label_counts(federation: Federation, split: str = "train") -> np.ndarray:
    """Rows of each class at each client, ``int64 [clients, classes]``.

    Example:
      >>> from fedjax_pers.data import load
      >>> label_counts(load("vowel_speakers"), "test")[0].tolist()
      [2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]

    Raises:
      ValueError: the target is not one class for each row.
    """
    if not has_labels(federation):
        raise ValueError(f"{federation.name!r}: the target is not one class for each row")
    rows = federation.split(split)
    flat = rows.owners * federation.num_classes + rows.data["y"]
    counts = np.bincount(flat, minlength=federation.num_clients * federation.num_classes)
    return counts.reshape(federation.num_clients, federation.num_classes)


def has_labels(federation: Federation) -> bool:
    """Whether each row has one class (text has one at every position, a regression has none)."""
    return federation.num_classes is not None and federation.train.data["y"].ndim == 1


def describe(federation: Federation, max_clients: int = 20) -> RenderableType:
    """Sizes, label mix, notes and licence, to be printed with ``rich.print``.

    Example:
      >>> import rich
      >>> from fedjax_pers.data import load
      >>> rich.print(describe(load("vowel_speakers")))  # doctest: +ELLIPSIS
      vowel_speakers: vowels by speaker...

    Args:
      federation: what to describe.
      max_clients: how many clients to list.
    """
    positive_int("max_clients", max_clients)
    title = f"{federation.name}: {federation.description}" if federation.description else federation.name
    fields = ", ".join(f"{name} {dtype}{list(shape)}" for name, shape, dtype in federation.example)
    parts: list[RenderableType] = [Text(title, style="bold"), Text(f"one example: {fields}"), _sizes(federation)]
    parts.append(_clients(federation, max_clients))
    parts += [Text(f"note: {note}", style="yellow") for note in federation.notes]
    if federation.licence:
        parts.append(Text(f"licence: {federation.licence}", style="dim"))
    return Group(*parts)


def _sizes(federation: Federation) -> Table:
    table = Table(title="rows of a client", title_justify="left", box=SIMPLE)
    for heading in ("clients", "split"):
        table.add_column(heading, no_wrap=True)
    for heading in ("rows", "min", "median", "max", "clients without"):
        table.add_column(heading, justify="right")
    parts = [(f"{federation.num_clients} in training", federation)]
    if federation.unseen is not None:
        parts.append((f"{federation.unseen.num_clients} unseen", federation.unseen))
    for name, part in parts:
        for split in SPLITS:
            sizes = part.sizes(split)
            numbers = (sizes.sum(), sizes.min(), f"{np.median(sizes):g}", sizes.max(), (sizes == 0).sum())
            table.add_row(name, split, *(str(number) for number in numbers))
            name = ""
    return table


def _clients(federation: Federation, max_clients: int) -> Table:
    labelled = has_labels(federation)
    title = "rows of each client" + (", and its commonest classes in train" if labelled else "")
    table = Table(title=title, title_justify="left", box=SIMPLE)
    table.add_column("client", no_wrap=True)
    for heading in SPLITS:
        table.add_column(heading, justify="right", no_wrap=True)
    mixes = [""] * federation.num_clients
    if labelled:
        table.add_column("commonest classes")
        mixes = [_commonest(federation, counts) for counts in label_counts(federation)]
    sizes = np.stack([federation.sizes(split) for split in SPLITS], axis=1)
    for client_id, rows, mix in list(zip(federation.client_ids, sizes, mixes, strict=True))[:max_clients]:
        table.add_row(str(client_id), *(str(row) for row in rows), *([mix] if labelled else []))
    if federation.num_clients > max_clients:
        table.add_row(f"and {federation.num_clients - max_clients} more")
    return table


def _commonest(federation: Federation, counts: np.ndarray) -> str:
    """The classes with most rows at a client, in per cent, and how many more it has."""
    names = federation.class_names or range(federation.num_classes or 0)
    present = int((counts > 0).sum())
    order = np.argsort(-counts, kind="stable")[: min(present, _NAMED_CLASSES)]
    named = ", ".join(f"{names[label]} {100 * counts[label] / counts.sum():.0f}%" for label in order)
    return f"{named}, {present - _NAMED_CLASSES} more" if present > _NAMED_CLASSES else named


def picture(federation: Federation, path: str | Path) -> None:
    """Writes a PNG: the label mix of each client in train and test, and the rows of each client by split.

    Where the target is not one class for each row, the sizes only.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    mixes = ("train", "test") if has_labels(federation) else ()
    width = float(np.clip(4 + 0.22 * federation.num_clients, 8, 18))
    height = 2.2 * (len(mixes) + 1) + 0.8 + (0.09 * _longest(federation) if _upright(federation) else 0)
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(mixes) + 1, 1, sharex=True, squeeze=False)[:, 0]
    figure.suptitle(f"{federation.name}: {federation.num_clients} clients", x=0.01, ha="left")
    for panel, split in zip(panels, mixes, strict=False):
        _draw_mix(panel, federation, split)
    if mixes:
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], title="class", loc="outside right upper", frameon=False)
    _draw_sizes(panels[-1], federation)
    figure.savefig(path, dpi=120)


def _draw_mix(panel: Any, federation: Federation, split: str) -> None:
    counts = label_counts(federation, split)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    names = federation.class_names or range(federation.num_classes or 0)
    tops = np.cumsum(shares, axis=1)
    for name, share, top, colour in zip(names, shares.T, tops.T, _colours(federation.num_classes or 0), strict=True):
        _draw_bars(panel, top - share, top, colour, str(name))
    panel.set(ylabel=f"{split}\nshare of classes", ylim=(0, 1))
    _plain(panel)


def _draw_sizes(panel: Any, federation: Federation) -> None:
    bottom = np.zeros(federation.num_clients)
    for split, grey in zip(SPLITS, ("0.25", "0.55", "0.8"), strict=True):
        top = bottom + federation.sizes(split)
        if (top > bottom).any():
            _draw_bars(panel, bottom, top, grey, split)
        bottom = top
    panel.set(ylabel="rows", xlim=(-0.7, federation.num_clients - 0.3), ylim=(0, 1.05 * max(bottom.max(), 1)))
    panel.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(SPLITS), frameon=False, borderpad=0)
    if federation.num_clients <= _NAMED_CLIENTS:
        names = [str(client_id) for client_id in federation.client_ids]
        panel.set_xticks(np.arange(len(names)), names, rotation=90 if _upright(federation) else 0)
    else:
        panel.set_xlabel("client, by place in the canonical order")
    _plain(panel)


def _draw_bars(panel: Any, bottom: np.ndarray, top: np.ndarray, colour: Any, label: str) -> None:
    """One bar a client, all of them as a single artist: thousands of clients are drawn at once."""
    from matplotlib.collections import PolyCollection

    half = 0.45 if len(top) <= _SPACED_CLIENTS else 0.5
    left, right = np.arange(len(top)) - half, np.arange(len(top)) + half
    corners = np.stack([left, bottom, left, top, right, top, right, bottom], axis=1).reshape(-1, 4, 2)
    panel.add_collection(PolyCollection(corners, facecolor=colour, linewidth=0, label=label), autolim=False)


def _longest(federation: Federation) -> int:
    return max(len(str(client_id)) for client_id in federation.client_ids)


def _upright(federation: Federation) -> bool:
    """Whether the names of the clients are turned, as they would overlap side by side."""
    return federation.num_clients <= _NAMED_CLIENTS and _longest(federation) * federation.num_clients > 90


def _colours(count: int) -> list:
    from matplotlib import colormaps

    if count <= 20:
        return list(colormaps["tab10" if count <= 10 else "tab20"](np.arange(count)))
    return list(colormaps["turbo"](np.linspace(0, 1, count)))


def _plain(panel: Any) -> None:
    panel.spines[["top", "right"]].set_visible(False)
