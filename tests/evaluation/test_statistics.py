"""Expected values are worked out by hand from the definitions, not taken from the package's output."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedjax_pers.evaluation.statistics import bottom_mean, over_seeds, summarize, top_mean

VALUES = [0.7, 0.55, 0.9, 0.8, 0.95, 0.9, 0.6, 0.97, 0.9, 0.5]
BASELINE = [0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 0.4, 0.95, 0.85, 0.3]
COUNTS = list(range(10, 101, 10))


def test_the_worked_table():
    numbers = summarize(VALUES, COUNTS, BASELINE)
    assert numbers["unweighted_mean"] == pytest.approx(0.777, abs=1e-12)
    assert numbers["weighted_mean"] == pytest.approx(4291 / 5500, abs=1e-12)
    assert numbers["weighted_mean"] == pytest.approx(0.7801818, abs=5e-8)
    assert numbers["worst"] == 0.5
    assert numbers["best"] == 0.97
    assert numbers["bottom_decile_mean"] == 0.5
    assert numbers["top_decile_mean"] == 0.97
    assert numbers["population_std"] == pytest.approx(0.1669161, abs=5e-8)
    assert numbers["population_variance"] == pytest.approx(0.027861, abs=1e-12)
    assert numbers["median"] == pytest.approx(0.85, abs=1e-12)
    assert numbers["percentile_10"] == pytest.approx(0.545, abs=1e-12)
    assert numbers["hurt"] == pytest.approx(0.2, abs=1e-12)  # clients 1 and 5; client 3 ties
    assert (numbers["clients"], numbers["clients_without_test"]) == (10, 0)
    assert bottom_mean(VALUES, percent=20) == pytest.approx(0.525, abs=1e-12)
    assert summarize(BASELINE, COUNTS)["unweighted_mean"] == pytest.approx(0.7, abs=1e-12)


def test_gain_quantiles_by_hand():
    # gains, sorted: -0.1, -0.05, 0, 0.02, 0.05, 0.05, 0.2, 0.2, 0.2, 0.2; linear at positions 0.9, 4.5 and 8.1
    numbers = summarize(VALUES, COUNTS, BASELINE)
    assert numbers["gain_p10"] == pytest.approx(-0.055, abs=1e-12)
    assert numbers["gain_median"] == pytest.approx(0.05, abs=1e-12)
    assert numbers["gain_p90"] == pytest.approx(0.2, abs=1e-12)


def test_without_a_baseline_nothing_is_said_about_gains():
    assert not {"hurt", "gain_p10", "gain_median", "gain_p90"} & set(summarize(VALUES, COUNTS))


@pytest.mark.parametrize(("clients", "tail"), [(1, 1), (9, 1), (10, 1), (11, 2), (70, 7), (71, 8)])
def test_a_decile_is_rounded_up_and_only_then(clients, tail):
    values = np.arange(clients, dtype=float)[::-1]
    assert bottom_mean(values) == pytest.approx((tail - 1) / 2)
    assert top_mean(values) == pytest.approx(clients - 1 - (tail - 1) / 2)


def test_clients_without_test_examples_are_left_out_and_counted():
    numbers = summarize([math.nan, 0.0, 1.0, 0.5], [0, 1, 8, 1], [math.nan, 0.5, 0.5, 0.5])
    assert (numbers["clients"], numbers["clients_without_test"]) == (3, 1)
    assert numbers["unweighted_mean"] == 0.5
    assert numbers["weighted_mean"] == pytest.approx(0.85)
    assert numbers["hurt"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("clients", [0, 3])
def test_nobody_with_test_examples_gives_nan_and_no_warning(clients):
    numbers = summarize(np.zeros(clients), np.zeros(clients, int), np.zeros(clients))
    assert (numbers.pop("clients"), numbers.pop("clients_without_test")) == (0, clients)
    assert all(math.isnan(value) for value in numbers.values())


def test_a_value_in_float32_ties_with_its_float64_baseline():
    # float32(0.7) is 0.699999988..., so comparing in float64 would call this client hurt.
    assert summarize(np.float32([0.7]), [5], [0.7])["hurt"] == 0
    assert summarize([0.9], [5], np.float32([0.9]))["hurt"] == 0
    assert summarize(np.float32([0.69]), [5], [0.7])["hurt"] == 1


def test_float32_values_are_averaged_in_float64():
    values = np.full(10_000, 0.1, np.float32)
    assert summarize(values, np.ones(10_000, int))["population_std"] < 1e-12


def test_results_are_plain_numbers():
    for name, value in summarize(VALUES, COUNTS, BASELINE).items():
        assert type(value) is (int if name.startswith("clients") else float), name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([0.5, math.nan, math.inf], [1, 2, 3]), r"values: found nan at clients \[1, 2\] \(2 in all\)"),
        (([0.5, 0.5], [1, 2], [0.5, math.nan]), r"baseline: found nan at clients \[1\]"),
        (([0.5, 0.5], [1]), r"counts: found shape \(1,\), expected \(2,\)"),
        (([0.5, 0.5], [1, 1], [0.5]), r"baseline: found shape \(1,\), expected \(2,\)"),
        (([[0.5]], [1]), r"values: found shape \(1, 1\), expected \[clients\]"),
        (([0.5, 0.5], [1, -2]), r"counts: found \[-2.0\] at clients \[1\]"),
        (([0.5, 0.5], [1, 2.5]), r"counts: found \[2.5\] at clients \[1\]"),
        (([0.5, 0.5], [1, math.nan]), r"counts: found \[nan\] at clients \[1\]"),
        ((["high"], [1]), r"values: found dtype .*expected numbers"),
    ],
)
def test_bad_input_names_what_is_wrong(arguments, words):
    with pytest.raises(ValueError, match=words):
        summarize(*arguments)


@pytest.mark.parametrize("percent", [0, 101, 0.1, "10"])
def test_a_tail_is_a_whole_percentage(percent):
    with pytest.raises(ValueError, match="percent: found"):
        bottom_mean(VALUES, percent=percent)


def test_over_seeds_uses_the_sample_deviation():
    # 1, 2, 4: mean 7/3, squared deviations 16/9 + 1/9 + 25/9 = 42/9, over 2
    table = over_seeds([{"worst": 1.0, "clients": 3}, {"worst": 2.0, "clients": 3}, {"worst": 4.0, "clients": 3}])
    assert table["worst"] == pytest.approx((7 / 3, math.sqrt(42 / 18)))
    assert table["clients"] == (3.0, 0.0)


def test_one_seed_has_no_deviation_and_none_is_nan():
    mean, deviation = over_seeds([{"worst": 0.5}])["worst"]
    assert mean == 0.5
    assert math.isnan(deviation)
    assert math.isnan(over_seeds([{"worst": None}, {"worst": 1.0}])["worst"][0])


def test_seeds_must_hold_the_same_names():
    with pytest.raises(ValueError, match=r"summaries\[1\]: best, worst not in both"):
        over_seeds([{"worst": 0.5}, {"best": 0.5}])
    with pytest.raises(ValueError, match="empty list"):
        over_seeds([])
