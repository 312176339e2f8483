"""Figures of what was personal where that was decided in the run: layer by layer, over rounds and over clients."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedjax_pers.report.plots import save

MOST_TICKS = 12


def personal_over_rounds(
    rows: Iterable[Mapping[str, Any]],
    path: str | os.PathLike[str],
    *,
    layers: Sequence[str] | None = None,
    title: str = "What is personal, over rounds",
) -> Path:
    """Draws how much of each layer is personal, on average over clients, at each evaluation of a run.

    Args:
      rows: of a run's record (``metrics.jsonl``); those with ``"personal_share"`` are drawn.
      path: the file; its ending (``.png``, ``.svg``, ``.pdf``) is the format.
      layers: which, from top to bottom; all by default.
      title: above the figure.

    Returns:
      The path.

    Raises:
      ValueError: no row says what is personal, or a layer is unknown.
    """
    judged = [row for row in rows if row.get("personal_share")]
    if not judged:
        raise ValueError("rows: none has 'personal_share', which methods that decide in the run have at evaluations")
    layers = _known(layers, judged[0]["personal_share"])
    shares = np.array([[row["personal_share"][layer] for row in judged] for layer in layers], float)
    return _drawn(shares, layers, "round", [str(row["round"]) for row in judged], "share that is personal", title, path)


def personal_by_client(
    shares: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    layers: Sequence[str] | None = None,
    names: Sequence[Any] | None = None,
    title: str = "What each client keeps to itself",
) -> Path:
    """Draws how much of each layer each client keeps to itself.

    Args:
      shares: by layer ``[clients]``, in 0 .. 1: :func:`fedjax_pers.masks.personal_shares` of a state.
      path: as in :func:`personal_over_rounds`.
      layers: which, from top to bottom; all by default.
      names: of the clients; their numbers by default.
      title: above the figure.

    Raises:
      ValueError: shares are not of as many clients each, or outside 0 .. 1; a layer is unknown; not as many names.
    """
    layers = _known(layers, shares)
    counts = {np.shape(shares[layer]) for layer in layers}
    if len(counts) != 1 or len(next(iter(counts))) != 1:
        raise ValueError(f"shares: found shapes {sorted(counts)}; expected [clients] for every layer")
    found = np.array([shares[layer] for layer in layers], float)
    names = [str(name) for name in (range(found.shape[1]) if names is None else names)]
    if len(names) != found.shape[1]:
        raise ValueError(f"names: found {len(names)}; expected one for each of {found.shape[1]} clients")
    return _drawn(found, layers, "client", names, "share that the client keeps", title, path)


def _known(layers: Sequence[str] | None, shares: Mapping[str, Any]) -> list[str]:
    chosen = list(shares if layers is None else layers)
    unknown = [layer for layer in chosen if layer not in shares]
    if unknown or not chosen:
        raise ValueError(f"layers: found {unknown or chosen}; allowed are {list(shares)}")
    return chosen


def _drawn(
    shares: np.ndarray,
    layers: list[str],
    across: str,
    columns: list[str],
    label: str,
    title: str,
    path: str | os.PathLike[str],
) -> Path:
    if not ((shares >= 0) & (shares <= 1)).all():
        raise ValueError(f"shares: found {shares.min():g} .. {shares.max():g}; allowed is 0 .. 1")
    figure = Figure(figsize=(7, max(2.6, 1.6 + 0.3 * len(layers))), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=12)
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="viridis", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    figure.colorbar(image, ax=axes, label=label)
    axes.set_yticks(range(len(layers)), layers, fontsize=8)
    places = range(0, len(columns), -(-len(columns) // MOST_TICKS))
    axes.set_xticks(places, [columns[place] for place in places], fontsize=8)
    axes.set(xlabel=across)
    return save(figure, path)
