"""The comparison table, for a terminal and for a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table

MISSING = "–"
Pair = tuple[float, float]


class Column(NamedTuple):
    """One column: the field of a row, its headings, its format, and whether more or less is better."""

    field: str
    heading: str
    narrow: str  # over two lines, for a terminal of 80 columns
    scale: float
    decimals: int
    best: Any = None


COLUMNS = (
    Column("weighted_mean", "mean by example, %", "mean by\nexample %", 100, 1, max),
    Column("unweighted_mean", "mean by client, %", "mean by\nclient %", 100, 1, max),
    Column("bottom_decile_mean", "worst tenth, %", "worst\ntenth %", 100, 1, max),
    Column("worst", "worst client, %", "worst\nclient %", 100, 1, max),
    Column("hurt", "hurt, %", "\nhurt %", 100, 1, min),
    Column("megabytes_up", "MB up", "MB\nup", 1, 2),
    Column("megabytes_down", "MB down", "MB\ndown", 1, 2),
)


WHERE_FOUND = (
    Column("local_gain", "local gain, points", "local\ngain", 100, 1, max),
    Column("retention", "retention, points", "reten-\ntion", 100, 1, max),
)
"""Columns that a table has where any of its rows has a number for them."""


def comparison_table(rows: Sequence[Mapping[str, Any]], *, title: str | None = None, note: str | None = None) -> Table:
    """A table of methods for the terminal; the best of each column of accuracy is bold, ties included.

    Example:
      >>> row = {"method": "fedavg", "weighted_mean": (0.915, 0.004), "megabytes_up": (1.5, 0.0), "seeds": 3}
      >>> comparison_table([row]).row_count
      1

    Args:
      rows: one mapping a method: ``method``, ``seeds`` and, as pairs ``(mean, standard deviation over seeds)``,
        ``weighted_mean`` (by test examples), ``unweighted_mean``, ``bottom_decile_mean`` (the ceil(N/10) worst
        clients), ``worst``, ``hurt`` (share of clients below the model without personalisation), ``megabytes_up`` and
        ``megabytes_down`` (of one client in the whole run), and, in a table that has any, ``local_gain`` and
        ``retention``. Shares are in 0 .. 1. Absent, ``None`` and NaN are a dash.
      title: shown above.
      note: added to the caption, for instance what ``hurt`` compares with.

    Raises:
      ValueError: a row has no method or number of seeds, a field is not a pair, or a field is unknown.
    """
    table = Table(title=title, caption=_caption(rows, note), box=SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("\nmethod", no_wrap=True)
    columns = _columns(rows)
    for column in columns:
        table.add_column(column.narrow, justify="right", no_wrap=len(columns) == len(COLUMNS))  # more do not fit in 80
    for name, cells, best, _ in _cells(rows):
        # Traffic hardly differs between seeds; its deviation is in the page and in the files.
        cells = [cell if column.best else cell.split(" ")[0] for cell, column in zip(cells, columns, strict=True)]
        shown = [f"[bold]{cell}[/bold]" if bold else cell for cell, bold in zip(cells, best, strict=True)]
        table.add_row(name.replace("[", r"\["), *shown)
    return table


def to_markdown(rows: Sequence[Mapping[str, Any]], *, note: str | None = None) -> str:
    """The same table as :func:`comparison_table` for a Markdown page.

    Example:
      >>> print(to_markdown([{"method": "local", "worst": (0.86, 0.02), "seeds": 5}]).splitlines()[2])
      | local | – | – | – | **86.0 ± 2.0** | – | – | – | 5 |

    Args:
      rows: as for :func:`comparison_table`.
      note: added to the caption.
    """
    columns = _columns(rows)
    headings = ["method", *(column.heading for column in columns), "seeds"]
    lines = [headings, ["---", *["---:"] * (len(columns) + 1)]]
    for name, cells, best, seeds in _cells(rows):
        shown = [f"**{cell}**" if bold else cell for cell, bold in zip(cells, best, strict=True)]
        lines.append([name.replace("|", r"\|"), *shown, str(seeds)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{_caption(rows, note)}\n"


def _caption(rows: Sequence[Mapping[str, Any]], note: str | None) -> str:
    seeds = sorted({_seeds(row) for row in rows})
    count = " or ".join(map(str, seeds))
    spread = f"mean ± sample standard deviation over {count} seeds" if seeds[-1:] > [1] else "one seed"
    caption = f"{spread}; bold: best of the column; worst tenth: mean of the ceil(N/10) worst clients; MB of one client"
    if len(_columns(rows)) > len(COLUMNS):
        caption += "; local gain, retention: change by personalisation on a client's own examples, and on everybody's"
    return f"{caption}; {note}" if note else caption


def _cells(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str], list[bool], int]]:
    columns = _columns(rows)
    pairs = [[_pair(row, column.field) for column in columns] for row in rows]
    texts = [[_text(pair, column) for pair, column in zip(line, columns, strict=True)] for line in pairs]
    best = [_best(column, [line[index] for line in pairs]) for index, column in enumerate(columns)]
    return [
        (
            _method(row),
            [mean + spread for mean, spread in line],
            [mean == top for (mean, _), top in zip(line, best, strict=True)],
            _seeds(row),
        )
        for row, line in zip(rows, texts, strict=True)
    ]


def _columns(rows: Sequence[Mapping[str, Any]]) -> tuple[Column, ...]:
    found = (column for column in WHERE_FOUND if any(math.isfinite(_pair(row, column.field)[0]) for row in rows))
    return (*COLUMNS, *found)


def _best(column: Column, pairs: Sequence[Pair]) -> str | None:
    """The best mean as it is shown, so that what looks equal is a tie."""
    means = [mean for mean, _ in pairs if math.isfinite(mean)]
    return _text((column.best(means), math.nan), column)[0] if column.best and means else None


def _text(pair: Pair, column: Column) -> tuple[str, str]:
    mean, deviation = (f"{value * column.scale:.{column.decimals}f}" if math.isfinite(value) else "" for value in pair)
    return (mean, f" ± {deviation}" if deviation else "") if mean else (MISSING, "")


def _method(row: Mapping[str, Any]) -> str:
    known = {"method", "seeds", *(column.field for column in (*COLUMNS, *WHERE_FOUND))}
    if not isinstance(row.get("method"), str):
        raise ValueError(f"row: 'method' is {row.get('method')!r}; expected its name")
    if unknown := sorted(set(row) - known):
        raise ValueError(f"row {row['method']!r}: unknown {', '.join(unknown)}; allowed are {', '.join(sorted(known))}")
    return row["method"]


def _seeds(row: Mapping[str, Any]) -> int:
    seeds = row.get("seeds")
    if not isinstance(seeds, int) or seeds < 1:
        raise ValueError(f"row {row.get('method')!r}: 'seeds' is {seeds!r}; expected a whole number of at least 1")
    return seeds


def _pair(row: Mapping[str, Any], field: str) -> Pair:
    found = row.get(field)
    if found is None:
        return math.nan, math.nan
    try:
        mean, deviation = (math.nan if each is None else float(each) for each in found)
    except (TypeError, ValueError):
        method = row.get("method")
        raise ValueError(f"row {method!r}: {field} is {found!r}; expected a pair (mean, deviation)") from None
    return mean, deviation
