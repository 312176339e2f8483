"""What :mod:`benchmarks.growth` found, as a picture and as a section of ``docs/benchmarks.md``.

    python -m benchmarks.growth_report

draws the picture again and prints the section.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from fedjax_pers.report.plots import COLOURS

RESULTS = Path(__file__).parent / "results" / "growth.json"
PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "growth.png"

AXES = {
    "clients a round": "clients a round",
    "clients in all": "clients in all (100 a round)",
    "parameters": "parameters of the model",
    "local steps": "local steps of a client",
    "devices": "devices (CPU cores)",
}
LARGEST = "10^6 clients x 1,000 personal parameters"
LARGEST_ON_ONE = f"{LARGEST}, one device"
"""Points of their own, the first drawn with the clients in all."""
NOT_DRAWN = "clients in all, without drawing them"
BATCHES = "batch at 3 x 10^6 parameters"
"""Controls: what is told of a bend is the difference that they make."""

Found = list[dict[str, Any]]


class Cost(NamedTuple):
    """A fixed cost and one by unit, in seconds, and the largest share by which a measured point differs from them."""

    fixed: float
    each: float
    off: float


def column(points: Found, field: str) -> np.ndarray:
    """One number of every point."""
    return np.array([point[field] for point in points], float)


def sizes(curve: str, points: Found) -> np.ndarray:
    """Where the points lie; models have not exactly the number of parameters that was asked for."""
    return column(points, "parameters" if curve == "parameters" else "size")


def exponent(x: np.ndarray, y: np.ndarray, *, upper: bool) -> float:
    """The slope of the line of least squares through the logarithms, of all points or of the upper half."""
    kept = x >= np.sqrt(x.min() * x.max()) if upper else np.full(x.shape, True)
    if kept.sum() < 2:
        kept[-2:] = True
    return float(np.polyfit(np.log(x[kept]), np.log(y[kept]), 1)[0])


def cost(x: np.ndarray, y: np.ndarray) -> Cost:
    """The line through the points with the least sum of squared relative errors."""
    columns = np.stack([np.ones(x.shape), x], axis=1) / y[:, None]
    fixed, each = np.linalg.lstsq(columns, np.ones(x.shape), rcond=None)[0]
    return Cost(float(fixed), float(each), float(np.abs((fixed + each * x) / y - 1).max()))


def memory(points: Found) -> np.ndarray:
    """Peak of resident memory while rounds run, above that of the process before there was a federation."""
    return column(points, "rounds_peak_megabytes") - column(points, "baseline_megabytes")


def explanation(curve: str, curves: dict[str, Found]) -> str:
    """Why a curve bends, as far as the measurements say."""
    x, y = sizes(curve, curves[curve]), column(curves[curve], "seconds")
    if curve == "devices":
        return f"{x[-1]:.0f} devices: {y[0] / y[-1]:.2f} times as fast as one"
    if curve == "clients in all":
        few, many = column(curves[NOT_DRAWN], "seconds") * 1e3
        return (
            f"{y[-1] / y[0]:.1f} times; with clients at equal distances, not drawn, a round takes {few:.1f} ms with "
            f"{x[0]:,.0f} clients and {many:.1f} ms with {x[-1]:,.0f}"
        )
    line = cost(x, y)
    text = f"{line.fixed * 1e3:.2f} ms + {quantity(line.each)} each is within {line.off:.0%} of every point"
    if curve == "parameters":
        # Forward, and backward by weights and by inputs: 6 operations a weight and example; 20 examples, 10 clients.
        rates, batches = 6 * x * 20 * 10 / y / 1e9, column(curves[BATCHES], "seconds")
        text += (
            f"; {rates[0]:.1f} GFLOP/s at first, {rates.max():.0f} at most, {rates[-1]:.0f} at last; at 3 x 10^6, "
            f"batches of 40 in place of 10 take {batches[-1] / batches[0]:.2f} times as long (operations: 4)"
        )
    return text


def quantity(seconds: float) -> str:
    """A time in its unit."""
    unit, name = next((unit for unit in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")) if seconds >= unit[0]), (1e-9, "ns"))
    return f"{seconds / unit:.3g} {name}"


def section(everything: dict[str, Any]) -> str:
    """The section of ``docs/benchmarks.md``."""
    curves = everything["curves"]
    lines = [
        "| a round against | range | milliseconds | exponent, upper half (all) | MB above imports | the bend |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for curve, label in AXES.items():
        points = curves[curve]
        x, y, held = sizes(curve, points), column(points, "seconds"), memory(points)
        lines.append(
            f"| {label} | {x[0]:,.0f} .. {x[-1]:,.0f} | {y[0] * 1e3:.1f} .. {y[-1] * 1e3:.1f} | "
            f"{exponent(x, y, upper=True):.2f} ({exponent(x, y, upper=False):.2f}) | "
            f"{held[0]:,.0f} .. {held[-1]:,.0f} | {explanation(curve, curves)} |"
        )
    (largest,), (alone,) = curves[LARGEST], curves[LARGEST_ON_ONE]
    late = sum(point["compilations_after_first_round"] for points in curves.values() for point in points)
    lines += [
        "",
        f"10^6 clients that keep 1,000 parameters each ({largest['row_megabytes'] / 1e3:.1f} GB of rows), 100 a round: "
        f"{largest['seconds'] * 1e3:.1f} ms a round on all cores, {alone['seconds'] * 1e3:.1f} on one. The process "
        f"peaks at {_gigabytes(largest, 'rounds')} in rounds ({_gigabytes(alone, 'rounds')} on one device), and before "
        f"them, while the state is laid out, at {_gigabytes(largest, 'setup')} ({_gigabytes(alone, 'setup')}). "
        f"Programs compiled after the first round, all points together: {late}.",
    ]
    return "\n".join(lines) + "\n"


def _gigabytes(point: dict[str, Any], when: str) -> str:
    return f"{point[f'{when}_peak_megabytes'] / 1e3:.1f} GB"


def _panel(axes: Axes, label: str, title: str) -> None:
    axes.set(xscale="log", yscale="log", xlabel=label)
    axes.set_title(title, fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.9", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())


def _time(axes: Axes, curve: str, points: Found, colour: str) -> None:
    x, y = sizes(curve, points), column(points, "seconds") * 1e3
    slopes = [exponent(x, y, upper=upper) for upper in (True, False)]
    _panel(axes, AXES[curve], f"exponent {slopes[0]:.2f} (all: {slopes[1]:.2f})")
    axes.fill_between(
        x, column(points, "lowest") * 1e3, column(points, "highest") * 1e3, color=colour, alpha=0.2, linewidth=0
    )
    axes.plot(x, y, color=colour, linewidth=1.8, marker="o", markersize=4)
    low, high = axes.get_ylim()
    if high / low < 30:  # more numbers on a short axis
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    if len(x) <= 3:
        axes.set_xticks(x, [f"{n:.0f}" for n in x])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(x[0] / 1.3, x[-1] * 1.3)
        axes.set_ylim(min(low, y.min() / 2.5), max(high, y.max() * 2.5))  # a small change shall look small


def draw(everything: dict[str, Any]) -> Path:
    """Draws time against each size, and memory against all of them; returns the file."""
    curves = everything["curves"]
    figure = Figure(figsize=(9.5, 6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"How a round grows (median of {everything['repeats']}; band: lowest to highest)",
        x=0.01,
        horizontalalignment="left",
        fontsize=11,
    )
    panels = figure.subplots(2, 3)
    held = panels[1, 2]
    _panel(held, "size (each in its unit)", "memory, peak in rounds")
    for axes, (curve, label), colour in zip(panels.flat, AXES.items(), COLOURS, strict=False):
        _time(axes, curve, curves[curve], colour)
        x, peak = sizes(curve, curves[curve]), column(curves[curve], "rounds_peak_megabytes")
        held.plot(x, peak, color=colour, linewidth=1.5, marker="o", markersize=3, label=label.split(" (")[0])
    for axes in panels[:, 0]:
        axes.set_ylabel("time of a round, ms")
    held.set_ylabel("resident memory, MB")
    (largest,) = curves[LARGEST]
    mark = {"color": COLOURS[1], "marker": "D", "markersize": 5, "linestyle": ""}
    panels[0, 1].plot(1e6, largest["seconds"] * 1e3, **mark)
    held.plot(1e6, largest["rounds_peak_megabytes"], **mark, label="1,000 personal numbers each")
    panels[0, 1].annotate(
        "1,000 personal\nnumbers each",
        (1e6, largest["seconds"] * 1e3),
        (-10, 4),
        textcoords="offset points",
        fontsize=8,
        horizontalalignment="right",
        verticalalignment="bottom",
        color=COLOURS[1],
    )
    control = curves[NOT_DRAWN]
    x, y = sizes(NOT_DRAWN, control), column(control, "seconds") * 1e3
    panels[0, 1].plot(x, y, color="0.35", linewidth=1.2, dashes=(4, 2), marker="o", markersize=3)
    panels[0, 1].annotate(
        "without the draw",
        (np.sqrt(x.prod()), y.mean()),
        (0, -5),
        textcoords="offset points",
        fontsize=8,
        horizontalalignment="center",
        verticalalignment="top",
        color="0.35",
    )
    panels[0, 1].set_ylim(y.min() / 2, 2.5 * max(largest["seconds"] * 1e3, y.max()))
    held.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    held.legend(fontsize=7, frameon=False, loc="upper left")
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE)
    return PICTURE


if __name__ == "__main__":
    found = json.loads(RESULTS.read_text())
    draw(found)
    print(section(found))
