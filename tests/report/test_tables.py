from __future__ import annotations

import math

import pytest
from rich.console import Console

from fedjax_pers.report.tables import comparison_table, to_markdown

ROWS = [
    {
        "method": "fedavg",
        "weighted_mean": (0.9159, 0.0042),
        "unweighted_mean": (0.9, math.nan),
        "bottom_decile_mean": (0.74, 0.02),
        "worst": (0.7, 0.03),
        "hurt": (0.0, 0.0),
        "megabytes_up": (12.5, 0.0),
        "megabytes_down": (12.5, 0.0),
        "seeds": 3,
    },
    {
        "method": "local|only [x]",
        "weighted_mean": (0.9861, 0.001),
        "unweighted_mean": (0.98, None),
        "bottom_decile_mean": (0.7401, 0.0),
        "worst": None,
        "hurt": (0.125, 0.05),
        "megabytes_up": (0.0, 0.0),
        "megabytes_down": (0.0, 0.0),
        "seeds": 3,
    },
]


def test_markdown_by_hand():
    lines = to_markdown(ROWS).splitlines()
    assert lines[0].count("|") == lines[1].count("|") == 10
    cells = [cell.strip() for cell in lines[2].split("|")][1:-1]
    assert cells[:4] == ["fedavg", "91.6 ± 0.4", "90.0", "**74.0 ± 2.0**"]
    assert cells[4:] == ["**70.0 ± 3.0**", "**0.0 ± 0.0**", "12.50 ± 0.00", "12.50 ± 0.00", "3"]
    cells = [cell.strip() for cell in lines[3].replace(r"\|", "/").split("|")]
    # 74.01 is shown as 74.0, so that it ties with the row above: both are bold
    assert cells[1:7] == ["local/only [x]", "**98.6 ± 0.1**", "**98.0**", "**74.0 ± 0.0**", "–", "12.5 ± 5.0"]


def test_what_was_forgotten_has_columns_where_it_was_looked_for():
    tuned = ROWS[0] | {"method": "fedavg_ft", "local_gain": (0.25, 0.01), "retention": (-0.125, 0.02)}
    held = ROWS[0] | {"method": "fedavg_l2sp", "local_gain": (0.2, 0.01), "retention": (-0.031, 0.02)}
    lines = to_markdown([ROWS[0], tuned, held]).splitlines()
    cells = [[cell.strip() for cell in line.split("|")][9:-1] for line in lines[:5]]
    assert cells[0] == ["local gain, points", "retention, points", "seeds"]
    assert cells[2:] == [
        ["–", "–", "3"],
        ["**25.0 ± 1.0**", "-12.5 ± 2.0", "3"],
        ["20.0 ± 1.0", "**-3.1 ± 2.0**", "3"],
    ]
    assert comparison_table([ROWS[0], tuned]).columns[-1].header == "reten-\ntion"
    assert len(comparison_table(ROWS).columns) == 8
    assert "retention" in lines[-1] and "retention" not in to_markdown(ROWS)
    console = Console(width=80, record=True, force_terminal=False)
    with console.capture() as captured:
        console.print(comparison_table([ROWS[0], tuned]))
    for whole in ("fedavg_ft", "12.50", "25.0 ±", "-12.5 ±"):  # wrapped rather than cut
        assert whole in captured.get()


def test_the_terminal_shows_the_same_cells():
    console = Console(width=200, record=True, force_terminal=False)
    with console.capture() as captured:
        console.print(comparison_table(ROWS, title="Digits"))
    shown = captured.get()
    assert "Digits" in shown
    assert "local|only [x]" in shown  # not taken for markup
    for cell in ("91.6 ± 0.4", "98.6 ± 0.1", "12.5 ± 5.0", "–"):
        assert cell in shown


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"method": None}, "'method' is None"),
        ({"seeds": 0}, "row 'fedavg': 'seeds' is 0"),
        ({"worst": 0.7}, r"row 'fedavg': worst is 0.7; expected a pair"),
        ({"weighted": (0.7, 0.1)}, "row 'fedavg': unknown weighted; allowed are"),
    ],
)
@pytest.mark.parametrize("make", [comparison_table, to_markdown])
def test_bad_rows_are_named(make, change, words):
    with pytest.raises(ValueError, match=words):
        make([ROWS[0] | change])
