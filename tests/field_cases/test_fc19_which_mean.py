"""A table that shows "the mean" and "the deviation" without saying which is worth little."""

from __future__ import annotations

import numpy as np
import pytest

from fedjax_pers.evaluation.statistics import summarize
from fedjax_pers.report.results import prepare, read_clients, write_clients


def test_two_clients_of_unequal_size():
    numbers = summarize([1.0, 0.0], [90, 10])
    assert numbers["weighted_mean"] == pytest.approx(0.9, abs=1e-12)
    assert numbers["unweighted_mean"] == 0.5
    assert numbers["population_std"] == 0.5


def test_twenty_clients_of_equal_size():
    numbers = summarize(np.arange(20) * 0.05, np.full(20, 20))
    assert numbers["bottom_decile_mean"] == pytest.approx(0.025, abs=1e-12)
    assert numbers["top_decile_mean"] == pytest.approx(0.925, abs=1e-12)
    assert numbers["worst"] == 0.0
    assert numbers["median"] == pytest.approx(0.475, abs=1e-12)


def test_any_other_summary_can_be_computed_from_the_file(tmp_path):
    folder = prepare(tmp_path / "run", {"seed": 0})
    accuracy = np.arange(20) * 0.05
    write_clients(folder, {"client": [f"c{i}" for i in range(20)], "test_examples": [20] * 20, "accuracy": accuracy})
    columns = read_clients(folder)
    assert columns["accuracy"] == accuracy.tolist()
    assert columns["test_examples"] == [20] * 20
