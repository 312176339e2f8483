"""Figures of who weighs how much, who belongs to whom, and who learns from whom."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedjax_pers.report.plots import COLOURS, LINES, save

MOST_NAMES = 40
"""Clients whose names fit beside an axis; with more, only their number is written."""


def who_learns_from_whom(
    weights: Any,
    path: str | os.PathLike[str],
    *,
    names: Sequence[Any] | None = None,
    title: str = "Who learns from whom",
) -> Path:
    """Draws a heat map of mixing weights: row i says how much of each client's model is in that of client i.

    Args:
      weights: ``[clients, clients]``, finite; a row of zeros is a client that has no mixture yet.
      path: the file; its ending (``.png``, ``.svg``, ``.pdf``) is the format.
      names: of the clients; their numbers by default.
      title: above the figure.

    Returns:
      The path.

    Raises:
      ValueError: the weights are not square or not finite, or there are not as many names.
    """
    weights = np.asarray(weights, float)
    if weights.ndim != 2 or weights.shape[0] != weights.shape[1] or not weights.size:
        raise ValueError(f"weights: found shape {weights.shape}; expected [clients, clients]")
    if not np.isfinite(weights).all():
        raise ValueError("weights: found numbers that are not finite")
    figure, axes = _figure(title, 6.6, 5.6)
    image = axes.imshow(weights, cmap="viridis", vmin=0, interpolation="nearest")
    figure.colorbar(image, ax=axes, label="share of the mixture", shrink=0.85)
    axes.set(xlabel="model of", ylabel="mixture for")
    for axis in (axes.xaxis, axes.yaxis):
        _name_clients(axis, _named(names, len(weights)))
    axes.tick_params(axis="x", labelrotation=90)
    return save(figure, path)


def members_over_rounds(
    members: Any,
    path: str | os.PathLike[str],
    *,
    names: Sequence[Any] | None = None,
    title: str = "Cluster of each client",
) -> Path:
    """Draws which cluster each client chose in each round; white where it was absent.

    Args:
      members: ``[rounds, clients]``, a cluster's number from 0 or -1 for an absent client.
      path: as in :func:`who_learns_from_whom`.
      names: of the clients.
      title: above the figure.

    Raises:
      ValueError: another shape, numbers that are not whole, or none of a cluster.
    """
    members = np.asarray(members)
    if members.ndim != 2 or not members.size or not np.issubdtype(members.dtype, np.integer):
        raise ValueError(f"members: found {members.dtype} {members.shape}; expected whole numbers [rounds, clients]")
    clusters = int(members.max()) + 1
    if clusters < 1:
        raise ValueError("members: found no cluster; everybody is absent in every round")
    colours = ["#FFFFFF", *(COLOURS[cluster % len(COLOURS)] for cluster in range(clusters))]
    figure, axes = _figure(title, 8, max(2.6, 1.4 + 0.18 * min(members.shape[1], MOST_NAMES)))
    bounds = np.arange(-1.5, clusters + 0.5)
    image = axes.imshow(
        members.T,
        cmap=ListedColormap(colours),
        norm=BoundaryNorm(bounds, len(colours)),
        aspect="auto",
        interpolation="nearest",
        extent=(0.5, len(members) + 0.5, members.shape[1] - 0.5, -0.5),
    )
    bar = figure.colorbar(image, ax=axes, ticks=range(-1, clusters))
    bar.ax.set_yticklabels(["absent", *(str(cluster) for cluster in range(clusters))])
    axes.set(xlabel="round", ylabel="client")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _name_clients(axes.yaxis, _named(names, members.shape[1]))
    return save(figure, path)


def weights_over_rounds(
    weights: Any,
    path: str | os.PathLike[str],
    *,
    names: Sequence[Any] | None = None,
    title: str = "Weight of each client",
) -> Path:
    """Draws how much each client or domain counts over rounds; the eight that end highest are named.

    Args:
      weights: ``[rounds, clients]``; NaN where a client was absent.
      path: as in :func:`who_learns_from_whom`.
      names: of the clients.
      title: above the figure.

    Raises:
      ValueError: another shape, or a client that has no weight in any round.
    """
    weights = np.asarray(weights, float)
    if weights.ndim != 2 or not weights.size or np.isinf(weights).any():
        raise ValueError(f"weights: found shape {weights.shape}; expected finite numbers [rounds, clients]")
    if np.isnan(weights).all(0).any():
        raise ValueError(f"weights: client {int(np.isnan(weights).all(0).argmax())} has none in any round")
    labels = _named(names, weights.shape[1])
    last = np.array([column[~np.isnan(column)][-1] for column in weights.T])
    highest = np.argsort(-last, kind="stable")[: len(COLOURS)]
    figure, axes = _figure(title, 8.4, 4.6)
    rounds = np.arange(1, len(weights) + 1)
    for client in range(weights.shape[1]):
        if client not in highest:
            axes.plot(rounds, weights[:, client], color="0.8", linewidth=0.8)
    for place, client in enumerate(highest):
        marker = "o" if len(rounds) == 1 else ""
        style = {"color": COLOURS[place], "linestyle": LINES[place % len(LINES)], "marker": marker}
        axes.plot(rounds, weights[:, client], linewidth=1.8, label=f"{labels[client]}  {last[client]:.3f}", **style)
    axes.set(xlabel="round", ylabel="share of the aggregate", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1), frameon=False, title="client, last weight")
    return save(figure, path)


def _figure(title: str, width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=12)
    return figure, figure.subplots()


def _named(names: Sequence[Any] | None, count: int) -> list[str]:
    found = list(range(count)) if names is None else list(names)
    if len(found) != count:
        raise ValueError(f"names: found {len(found)}; expected one for each of {count} clients")
    return [str(name) for name in found]


def _name_clients(axis: Any, names: list[str]) -> None:
    if len(names) <= MOST_NAMES:
        axis.set_ticks(range(len(names)), names, fontsize=7)
    else:
        axis.set_major_locator(MaxNLocator(integer=True))
