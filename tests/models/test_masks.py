"""The table of masks in the documentation is what presets select."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import pytest

from fedjax_pers import models
from fedjax_pers.layouts import by_role
from fedjax_pers.parsing import parse
from fedjax_pers.paths import flatten, select
from fedjax_pers.presets import model_of
from fedjax_pers.tasks import from_model
from tests.models.by_hand import SMALL

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
HEADINGS, _, *ROWS = (
    [cell.strip().strip("`") for cell in line.strip("|").split("|")]
    for line in re.findall(r"^\|(?:[^|\n]*\|){7}$", PAGE, re.M)
)
TABLE = {name: dict(zip(HEADINGS[1:], cells, strict=True)) for name, *cells in ROWS if name in models.names()}


def test_every_model_is_in_the_table():
    assert tuple(TABLE) == models.names() and len(HEADINGS) == 7


@pytest.mark.parametrize("name", models.names())
def test_masks_by_name_select_what_the_table_says(name):
    task = from_model(SMALL[name][0], name, num_classes=9)
    leaves = flatten(jax.eval_shape(task.init, jax.random.key(0)))
    for preset, meant in TABLE[name].items():
        expected = frozenset() if meant == "-" else select(parse(meant), leaves)
        assert select(parse(preset), leaves, model_of(task)) == expected, preset


def test_a_mask_that_selects_nothing_is_refused():
    task = from_model(SMALL["linear"][0], "linear", num_classes=9)
    with pytest.raises(ValueError, match=r"personal: ~depth\(1, by=block\) selects no leaf of this model"):
        by_role(personal=parse("deep()"))(task)
    with pytest.raises(ValueError, match=r"personal: attention\(\) selects no leaf"):
        by_role(personal=parse("attention()"))(task)
