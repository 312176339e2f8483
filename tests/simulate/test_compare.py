"""Methods side by side: the same clients for all, numbers over seeds, one compilation a method."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from fedjax_pers.config import Config
from fedjax_pers.report import read_clients
from fedjax_pers.simulate.compare import alone, compare, configs_of

BASE = Config(model="linear", rounds=4, evaluate_every=2, unseen=0.2)
METHODS, SEEDS = ("fedavg", "local_only"), (0, 1)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    calls = []
    folder = tmp_path_factory.mktemp("compared") / "here"
    found = compare(configs_of(BASE, METHODS), SEEDS, folder, lambda *args: calls.append(args))
    assert [call[:4] for call in calls] == [(m, s, done, 4) for m in METHODS for s in SEEDS for done in (0, 2, 4)]
    return found


def accuracies(comparison, method, column="accuracy"):
    """``[seeds, clients in training]`` from the files."""
    tables = [read_clients(comparison.folder / method / f"seed_{seed}") for seed in SEEDS]
    return np.array([np.array(table[column])[np.array(table["unseen"]) == 0] for table in tables])


def test_numbers_are_means_and_sample_deviations_over_seeds(comparison):
    assert [row["method"] for row in comparison.rows] == list(METHODS)
    for row in comparison.rows:
        by_seed = accuracies(comparison, row["method"]).mean(axis=1)  # all clients have 22 test examples
        for name in ("weighted_mean", "unweighted_mean"):
            assert row[name] == pytest.approx((by_seed.mean(), by_seed.std(ddof=1)), abs=1e-6)
        worst = accuracies(comparison, row["method"]).min(axis=1)
        assert row["worst"] == pytest.approx((worst.mean(), worst.std(ddof=1)), abs=1e-6)
        assert row["seeds"] == 2


def test_hurt_is_against_the_global_model_of_fedavg_of_the_same_seed(comparison):
    shares = (accuracies(comparison, "local_only") < accuracies(comparison, "fedavg", "global_accuracy")).mean(axis=1)
    fedavg, local = comparison.rows
    assert local["hurt"] == pytest.approx((shares.mean(), shares.std(ddof=1)))
    assert fedavg["hurt"] == (0, 0)
    assert comparison.hurt_against == "the global model of fedavg of the same seed"
    assert "strictly below the global model of fedavg" in (comparison.folder / "comparison.md").read_text()


def test_traffic_is_that_of_one_client(comparison):
    fedavg, local = comparison.rows
    assert fedavg["megabytes_down"] == pytest.approx((4 * 484 / 1e6, 0))
    assert fedavg["megabytes_up"] == pytest.approx((4 * 492 / 1e6, 0))
    assert local["megabytes_up"] == local["megabytes_down"] == (0, 0)


def test_all_seeds_have_the_same_clients_and_other_models(comparison):
    counts = accuracies(comparison, "local_only", "test_examples")
    assert counts.shape == (2, 12) and (counts[0] == counts[1]).all()
    assert (accuracies(comparison, "local_only", "loss")[0] != accuracies(comparison, "local_only", "loss")[1]).all()


def test_a_method_is_compiled_once_for_all_seeds(comparison):
    for runs in comparison.results.values():
        assert runs[0].compilations > 0 and runs[1].compilations == 0


def test_what_it_leaves_in_its_folder(comparison):
    names = {path.name for path in comparison.folder.iterdir()}
    figures = {"learning_curves.png", "accuracy_ecdf.png", "accuracy_against_traffic.png"}
    assert names == {"comparison.md", "comparison.json", *figures, *METHODS}
    content = json.loads((comparison.folder / "comparison.json").read_text())
    assert Config.from_dict(content["configs"]["local_only"]) == replace(BASE, method="local_only")
    assert content["seeds"] == [0, 1] and content["rows"][1]["method"] == "local_only"
    assert (comparison.folder / "comparison.md").read_text().count("| local_only |") == 1
    assert comparison.table("title").row_count == 2


def test_started_again_it_reads_what_is_there(comparison, capsys):
    before = {path.name: path.read_bytes() for path in comparison.folder.iterdir() if path.is_file()}
    again = compare(configs_of(BASE, METHODS), SEEDS, comparison.folder)
    assert capsys.readouterr().out.count("nothing to do") == 4
    assert {path.name: path.read_bytes() for path in comparison.folder.iterdir() if path.is_file()} == before
    assert again.rows == comparison.rows


def test_without_fedavg_a_method_is_compared_with_its_own_global_model(comparison):
    found = compare(configs_of(BASE, ["local_only"]), [0], comparison.folder)
    assert found.hurt_against == "the method's own global model"
    assert np.isnan(found.rows[0]["hurt"][0])  # it has none
    compare(configs_of(BASE, METHODS), SEEDS, comparison.folder)  # as the other tests know it


def test_one_run_in_the_form_of_a_comparison(comparison):
    found = alone("fedavg", comparison.results["fedavg"][0])
    assert found.rows[0]["hurt"][0] == 0 and found.rows[0]["seeds"] == 1


def test_settings_by_method():
    configs = configs_of(Config(settings={"lr": 0.3}), ["fedavg", "ditto"], {"ditto": {"lam": 2.0}})
    assert [config.settings for config in configs.values()] == [{"lr": 0.3}, {"lam": 2.0}]
    with pytest.raises(ValueError, match=r"settings: found \['fedper'\]; the methods compared are fedavg"):
        configs_of(Config(), ["fedavg"], {"fedper": {}})
    with pytest.raises(ValueError, match="each may be there once"):
        configs_of(Config(), ["fedavg", "fedavg"])


@pytest.mark.parametrize(
    ("configs", "seeds", "expected"),
    [
        ({}, [0], "methods: found none"),
        ({"fedavg": BASE}, [], r"seeds: found \[\]"),
        ({"fedavg": BASE}, [0, -1], "seed: found -1"),
        ({"fedavg": BASE}, [1, 1], r"seeds: found \[1, 1\]"),
        ({"a": BASE, "b": replace(BASE, split="train")}, [0], "b: split is 'train', but 'test' in others"),
        ({"a": BASE, "b": replace(BASE, unseen=0.4)}, [0], "b: unseen is 0.4, but 0.2 in others"),
        ({"a": BASE, "b": replace(BASE, method="fedavgg")}, [0], "method: found 'fedavgg'"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_any_run(tmp_path, configs, seeds, expected):
    with pytest.raises(ValueError, match=expected):
        compare(configs, seeds, tmp_path / "compared")
    assert not (tmp_path / "compared").exists()
