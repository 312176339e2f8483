"""Figures of who weighs how much, who belongs to whom, and who learns from whom."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.cluster import hierarchy

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


def dendrogram(
    tree: Any,
    path: str | os.PathLike[str],
    *,
    leaves: Any = None,
    cut: float | None = None,
    names: Sequence[Any] | None = None,
    title: str = "Clients merged by distance",
) -> Path:
    """Draws which clients, and then which groups of them, were merged at which distance; FL+HC's tree for example.

    What hangs together below the cut has one colour, that of the cluster's number in the other figures.

    Args:
      tree: ``[mergers, 4]`` as SciPy's ``linkage`` writes it, ``state.aux["tree"]`` of FL+HC; rows of zeros at its end
        are left out.
      path: as in :func:`who_learns_from_whom`.
      leaves: the client of each leaf, ``state.aux["leaves"]``; -1 at its end is left out. ``0, 1, ...`` by default.
      cut: the distance at which the tree was cut.
      names: of all clients.
      title: above the figure.

    Raises:
      ValueError: no such tree, or not as many leaves or names.
    """
    tree = np.asarray(tree, float)
    tree = tree[tree[:, 3] > 0] if tree.ndim == 2 and tree.shape[1] == 4 else tree
    if not hierarchy.is_valid_linkage(tree):
        raise ValueError(f"tree: found shape {tree.shape}; expected [mergers, 4], as SciPy's linkage writes mergers")
    leaves = np.arange(len(tree) + 1) if leaves is None else np.asarray(leaves)
    labels, clients = _named(names, len(leaves)), leaves[leaves >= 0]
    if len(clients) != len(tree) + 1:
        raise ValueError(f"leaves: found {len(clients)}; expected {len(tree) + 1}, one more than mergers")
    colours = _colours_below(tree, cut)
    drawn = hierarchy.dendrogram(tree, no_plot=True, link_color_func=lambda node: colours[node])
    figure, axes = _figure(title, 8, max(2.6, 1.4 + 0.18 * min(len(clients), MOST_NAMES)))
    for places, distances, colour in zip(drawn["icoord"], drawn["dcoord"], drawn["color_list"]):
        axes.plot(distances, np.array(places) / 10 - 0.5, color=colour, linewidth=1.4)
    if cut is not None:
        axes.axvline(cut, color="0.3", linestyle=LINES[1], linewidth=1)
        axes.annotate(f" cut at {cut:g}", (cut, 1), xycoords=("data", "axes fraction"), va="bottom", fontsize=8)
    axes.set(xlabel="distance at which they are merged", xlim=(0, None), ylim=(len(clients) - 0.5, -0.5), yticks=[])
    axes.set_ylabel("client" if len(clients) <= MOST_NAMES else f"{len(clients)} clients")
    axes.spines[["top", "right"]].set_visible(False)
    if len(clients) <= MOST_NAMES:
        _name_clients(axes.yaxis, [labels[client] for client in clients[drawn["leaves"]]])
        for leaf, text in zip(drawn["leaves"], axes.get_yticklabels()):
            text.set_color(colours[leaf])
    return save(figure, path)


def splits_over_rounds(
    aux: Mapping[str, Any], path: str | os.PathLike[str], *, title: str = "Clusters over rounds"
) -> Path:
    """Draws when each cluster was made and which one it was cut from, with its members at the end.

    Args:
      aux: ``state.aux`` of CFL, FL+HC or FedGroup: ``made``, ``parent``, ``members`` and ``rounds``.
      path: as in :func:`who_learns_from_whom`.
      title: above the figure.

    Raises:
      ValueError: something of it is missing, or no cluster has been made.
    """
    missing = sorted({"made", "parent", "members", "rounds"} - set(aux))
    if missing:
        raise ValueError(f"aux: {missing} are missing; found {sorted(aux)}")
    made, parent, members = (np.asarray(aux[name]) for name in ("made", "parent", "members"))
    lanes: list[int] = []
    for cluster in map(int, np.flatnonzero(made >= 0)):
        # Below the one it was cut from, above those that were cut from it earlier: no line is crossed.
        lanes.insert(lanes.index(parent[cluster]) + 1 if parent[cluster] >= 0 else len(lanes), cluster)
    if not lanes:
        raise ValueError("aux: found no cluster; none was made yet")
    figure, axes = _figure(title, 8, 1.4 + 0.3 * max(4, len(lanes)))
    end = max(1, int(made.max()), int(aux["rounds"]))
    for lane, cluster in enumerate(lanes):
        colour, begin = COLOURS[cluster % len(COLOURS)], int(made[cluster])
        axes.plot([begin, end], [lane, lane], color=colour, linewidth=3, solid_capstyle="butt")
        if parent[cluster] >= 0:
            axes.plot([begin, begin], [lanes.index(parent[cluster]), lane], color=colour, linewidth=1.4)
            axes.annotate(f"{begin} ", (begin, lane), ha="right", va="center", fontsize=7, color=colour)
        count = int((members == cluster).sum())
        said = f"  {cluster}: {count} client{'' if count == 1 else 's'}"
        axes.annotate(said, (end, lane), va="center", fontsize=8, annotation_clip=False)
    axes.set(xlabel="round", xlim=(0, end), ylim=(len(lanes) - 0.5, -0.5), yticks=[])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right", "left"]].set_visible(False)
    return save(figure, path)


def _colours_below(tree: np.ndarray, cut: float | None) -> dict[int, str]:
    """The colour of each leaf and merger by its node: that of its cluster, and grey above the cut."""
    clusters = hierarchy.fcluster(tree, np.inf if cut is None else cut, "distance")
    numbers = {cluster: number for number, cluster in enumerate(dict.fromkeys(clusters))}
    colours = {leaf: COLOURS[numbers[cluster] % len(COLOURS)] for leaf, cluster in enumerate(clusters)}
    for node, (first, _, distance, _) in enumerate(tree, start=len(clusters)):
        colours[node] = colours[int(first)] if cut is None or distance <= cut else "0.6"
    return colours


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
