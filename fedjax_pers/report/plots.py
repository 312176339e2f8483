"""Figures of a comparison: curves over rounds, the spread over clients, accuracy against traffic.

Figures are objects of their own: nothing is changed for other users of matplotlib in the process. Colours are from the
Okabe-Ito set (wine in place of its yellow, which is too pale on white), at least 16 apart in CIELAB for readers with
any of the three kinds of colour blindness.
"""

from __future__ import annotations

import io
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter
from scipy.optimize import isotonic_regression

from fedjax_pers.report.files import write_atomic

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255")
LINES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
LABEL_GAP = 0.062
"""Least distance between two names beside the axes, as a share of their height, while there is room."""

Histories = Mapping[str, Sequence[Mapping[str, Sequence[float]]]]


class Style(NamedTuple):
    """How one method is drawn."""

    colour: str
    line: Any


class Curve(NamedTuple):
    """One method's runs: rounds ``[points]``, traffic and accuracy ``[seeds, points]``."""

    rounds: np.ndarray
    megabytes: np.ndarray
    accuracy: np.ndarray


def method_styles(methods: Iterable[str]) -> dict[str, Style]:
    """A colour and a line for each method, distinct within the set and the same whatever the order.

    A method has a preferred colour, taken from its name, and gets it unless another of the set has it; so figures of
    the same methods agree. For figures of different methods make the styles once, of all, and hand them to each figure.

    Example:
      >>> styles = method_styles(["fedavg", "ditto"])
      >>> styles == method_styles(["ditto", "fedavg"])
      True

    Args:
      methods: names, at most 32.

    Raises:
      ValueError: more methods than can be told apart.
    """
    names = sorted(set(methods))
    if len(names) > len(COLOURS) * len(LINES):
        raise ValueError(f"methods: found {len(names)}; at most {len(COLOURS) * len(LINES)} can be told apart")
    used: Counter[int] = Counter()
    styles = {}
    for name in names:
        preferred = zlib.crc32(name.encode()) % len(COLOURS)
        order = [(preferred + step) % len(COLOURS) for step in range(len(COLOURS))]
        colour = min(order, key=lambda index: used[index])
        styles[name] = Style(COLOURS[colour], LINES[used[colour]])
        used[colour] += 1
    return styles


def learning_curves(
    histories: Histories,
    path: str | os.PathLike[str],
    *,
    score: str = "accuracy",
    styles: Mapping[str, Style] | None = None,
) -> Path:
    """Draws a score over rounds: a line for the mean over seeds, a band from the lowest seed to the highest.

    The panel on the right enlarges the last third, where methods that end close together can be told apart.

    Args:
      histories: for each method one mapping a seed: ``"round"`` and ``"accuracy"``, each ``[points]``.
      path: the file; its ending (``.png``, ``.svg``, ``.pdf``) is the format.
      score: what the vertical axis shows, in words.
      styles: as :func:`method_styles` made them, where figures of different methods are to agree.

    Returns:
      The path.

    Raises:
      ValueError: seeds of one method have different rounds, lengths differ, or a number is not finite; names both.
    """
    curves = _curves(histories, needs_traffic=False)
    styles = styles or method_styles(curves)
    figure, panels = _figure(_title(f"{_capital(score)} over rounds", curves), 2, len(curves))
    for axes in panels:
        for method, curve in curves.items():
            _band(axes, styles[method], curve.rounds, curve.accuracy)
            _line(axes, styles[method], curve.rounds, curve.accuracy)
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.margins(x=0)
    whole, enlarged = panels
    first, last = min(c.rounds[0] for c in curves.values()), max(c.rounds[-1] for c in curves.values())
    start = last - (last - first) / 3
    late = [curve.accuracy.mean(0)[curve.rounds >= start] for curve in curves.values()]
    enlarged.set_ylim(_limits(np.concatenate(late)))
    if start < last:
        enlarged.set_xlim(start, last)
    enlarged.set_title("the last third, enlarged", fontsize=10)
    whole.set_ylabel(score)
    _label_at_right(enlarged, {method: _end(curve.rounds, curve.accuracy) for method, curve in curves.items()}, styles)
    return save(figure, path)


def accuracy_against_traffic(
    histories: Histories,
    path: str | os.PathLike[str],
    *,
    score: str = "accuracy",
    styles: Mapping[str, Style] | None = None,
) -> Path:
    """Draws a score over the megabytes that a client has sent and received so far, on a logarithmic axis.

    A method that sends nothing (local training) is a horizontal line at its last score.

    Args:
      histories: for each method one mapping a seed: ``"round"``, ``"accuracy"`` and ``"megabytes"`` (10^6 bytes up and
        down of one client since the start), each ``[points]``.
      path: the file; its ending (``.png``, ``.svg``, ``.pdf``) is the format.
      score: what the vertical axis shows, in words.
      styles: as :func:`method_styles` made them, where figures of different methods are to agree.

    Returns:
      The path.

    Raises:
      ValueError: as for :func:`learning_curves`, or the traffic of a method shrinks.
    """
    curves = _curves(histories, needs_traffic=True)
    styles = styles or method_styles(curves)
    figure, panels = _figure(_title(f"{_capital(score)} against traffic", curves), 2, len(curves))
    whole, enlarged = panels
    silent = {method for method, curve in curves.items() if not curve.megabytes.any()}
    scale = "linear" if silent == set(curves) else "log"
    for axes in panels:
        for method, curve in curves.items():
            traffic = curve.megabytes.mean(0)
            sent = traffic > 0
            _line(axes, styles[method], traffic[sent], curve.accuracy[:, sent])
            if axes is whole:
                _band(axes, styles[method], traffic[sent], curve.accuracy[:, sent])
        axes.set(xscale=scale, xlabel="MB up and down of one client")
        first, last = axes.get_xlim()
        if scale == "log":
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if last < 100 * first else (1,)))
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
        for method, curve in curves.items():  # what a method has reached, it keeps without further traffic
            end, level = _end(curve.megabytes, curve.accuracy)
            axes.plot([end or first, last], [level, level], color=styles[method].colour, linewidth=1.1, dashes=(1, 2))
            if end:
                axes.plot(end, level, marker="o", markersize=5, color=styles[method].colour)
        axes.set_xlim(first, last)
    enlarged.set_ylim(_limits(np.concatenate([curve.accuracy[:, -1] for curve in curves.values()])))
    enlarged.set_title("the last scores, enlarged", fontsize=10)
    whole.set_ylabel(score)
    ends = {method: (last, _end(curve.megabytes, curve.accuracy)[1]) for method, curve in curves.items()}
    _label_at_right(enlarged, ends, styles, notes=dict.fromkeys(silent, " (sends nothing)"))
    return save(figure, path)


def accuracy_ecdf(
    per_client: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    score: str = "accuracy",
    styles: Mapping[str, Style] | None = None,
) -> Path:
    """Draws the share of clients at or below each score: one step curve a method, the further right the better.

    Args:
      per_client: for each method the scores ``[seeds, clients]``; NaN for a client without test examples, which is left
        out and counted below the figure. Seeds are pooled.
      path: the file; its ending (``.png``, ``.svg``, ``.pdf``) is the format.
      score: what the horizontal axis shows, in words.
      styles: as :func:`method_styles` made them, where figures of different methods are to agree.

    Returns:
      The path.

    Raises:
      ValueError: a method's scores are not ``[seeds, clients]``, are infinite, or all NaN; names the method.
    """
    if not per_client:
        raise ValueError("per_client: found no methods; nothing to draw")
    scores, left_out = {}, {}
    for method, values in per_client.items():
        values = np.asarray(values, float)
        if values.ndim != 2 or np.isinf(values).any() or np.isnan(values).all():
            raise ValueError(f"{method}: found shape {values.shape}; expected finite scores [seeds, clients]")
        scores[method] = values[~np.isnan(values)]
        left_out[method] = int(np.isnan(values).sum())
    styles = styles or method_styles(scores)
    figure, (axes,) = _figure(f"Spread of {score} over clients ({_counted(per_client)})", 1, len(scores))
    for method in sorted(scores, key=lambda method: (scores[method].mean(), method)):
        values, (colour, line) = scores[method], styles[method]
        missing = f", {left_out[method]} without test examples" if left_out[method] else ""
        label = f"{method}  {values.min():.3f}, {values.mean():.3f}{missing}"
        axes.ecdf(values, color=colour, linestyle=line, linewidth=1.8, label=label)
    axes.set(xlabel=f"{score} of one client", ylabel="share of clients at or below", ylim=(0, 1.005))
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.02, 1), frameon=False, title="method, worst client, mean", alignment="left"
    )
    return save(figure, path)


def _curves(histories: Histories, *, needs_traffic: bool) -> dict[str, Curve]:
    if not histories:
        raise ValueError("histories: found no methods; nothing to draw")
    return {method: _curve(method, runs, needs_traffic=needs_traffic) for method, runs in histories.items()}


def _curve(method: str, runs: Sequence[Mapping[str, Sequence[float]]], *, needs_traffic: bool) -> Curve:
    if not runs:
        raise ValueError(f"{method}: found no runs; expected one mapping for each seed")
    columns = {}
    for name in ("round", "accuracy", "megabytes") if needs_traffic else ("round", "accuracy"):
        if missing := [seed for seed, run in enumerate(runs) if name not in run]:
            raise ValueError(f"{method}, seed {missing[0]}: {name!r} is missing; found {', '.join(runs[missing[0]])}")
        values = [np.asarray(run[name], float) for run in runs]
        for seed, each in enumerate(values):
            if each.ndim != 1 or each.shape != np.shape(runs[0]["round"]) or not len(each):
                raise ValueError(f"{method}, seed {seed}: {name!r} has shape {each.shape}; expected [points]")
            if not np.isfinite(each).all():
                raise ValueError(f"{method}, seed {seed}: {name!r} is {each[~np.isfinite(each)][0]} at some point")
        columns[name] = np.stack(values)
    if (columns["round"] != columns["round"][0]).any():
        raise ValueError(f"{method}: the seeds have different rounds; a mean over seeds needs the same")
    megabytes = columns.get("megabytes", np.zeros_like(columns["accuracy"]))
    if (megabytes < 0).any() or (np.diff(megabytes, axis=1) < 0).any():
        raise ValueError(f"{method}: 'megabytes' shrinks or is negative; expected the total since the start")
    return Curve(columns["round"][0], megabytes, columns["accuracy"])


def _figure(title: str, panels: int, names: int) -> tuple[Figure, Sequence[Axes]]:
    """Panels side by side, high enough for that many names beside them."""
    figure = Figure(figsize=(7 + 2 * panels, max(4.8, 1 + 0.27 * names)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=12)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(axis="both", color="0.9", linewidth=0.7)
        each.set_axisbelow(True)
    return figure, axes


def _band(axes: Axes, style: Style, x: np.ndarray, accuracy: np.ndarray) -> None:
    axes.fill_between(x, accuracy.min(0), accuracy.max(0), color=style.colour, alpha=0.13, linewidth=0)


def _line(axes: Axes, style: Style, x: np.ndarray, accuracy: np.ndarray) -> None:
    marker = "o" if len(x) == 1 else ""  # a line of one point is not seen
    axes.plot(x, accuracy.mean(0), color=style.colour, linewidth=1.8, linestyle=style.line, marker=marker)


def _limits(scores: np.ndarray) -> tuple[float, float]:
    """The range of the scores with a margin, and some width where they are all one number."""
    low, high = float(scores.min()), float(scores.max())
    margin = 0.06 * (high - low) or 0.01
    return low - margin, high + margin


def _end(x: np.ndarray, accuracy: np.ndarray) -> tuple[float, float]:
    """Where the mean over seeds ends; ``x`` is ``[points]`` or ``[seeds, points]``."""
    return float(np.mean(x[..., -1])), float(accuracy[:, -1].mean())


def _label_at_right(
    axes: Axes,
    ends: Mapping[str, tuple[float, float]],
    styles: Mapping[str, Style],
    notes: Mapping[str, str] | None = None,
) -> None:
    """Names every line beside the axes, as near to its end as the other names allow."""
    to_axes: Callable[..., Any] = (axes.transData + axes.transAxes.inverted()).transform
    methods = sorted(ends, key=lambda method: ends[method][1])
    wanted = np.array([to_axes(ends[method])[1] for method in methods])
    # Least squares with a least distance between neighbours is isotonic regression once the distances are taken off.
    taken = min(LABEL_GAP, 1 / len(methods)) * np.arange(len(methods))
    heights = np.clip(isotonic_regression(wanted - taken).x, 0, 1 - taken[-1]) + taken
    for method, height in zip(methods, heights, strict=True):
        axes.annotate(
            f"{method}  {ends[method][1]:.3f}{(notes or {}).get(method, '')}",
            xy=ends[method],
            xytext=(1.07, height),
            textcoords="axes fraction",
            verticalalignment="center",
            color=styles[method].colour,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": styles[method].colour,
                "linewidth": 0.8,
                "relpos": (0, 0.5),
                "shrinkA": 2,
                "shrinkB": 1,
            },
        )


def _title(title: str, curves: Mapping[str, Curve]) -> str:
    seeds = {len(curve.accuracy) for curve in curves.values()}
    if seeds <= {1}:
        return f"{title} (one seed)"
    count = f"{seeds.pop()}" if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)}"
    return f"{title} (line: mean over {count} seeds, band: lowest to highest)"


def _counted(per_client: Mapping[str, Any]) -> str:
    shapes = {np.shape(values) for values in per_client.values()}
    if len(shapes) > 1:
        return "seeds pooled"
    seeds, clients = shapes.pop()
    return f"{clients} clients, {seeds} seeds pooled" if seeds > 1 else f"{clients} clients, one seed"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Writes the figure at once, the same bytes for the same data."""
    path = Path(path)
    content = io.BytesIO()
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix)
    with rc_context({"svg.hashsalt": "fedjax_pers"}):
        figure.savefig(content, format=path.suffix.removeprefix(".") or None, metadata=metadata)
    write_atomic(path, content.getvalue())
    return path
