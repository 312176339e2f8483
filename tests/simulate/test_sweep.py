"""A sweep gives, run by run, the bytes of single runs, and compiles one program for all of them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import fedjax_pers as fp
from fedjax_pers.config import Config
from fedjax_pers.simulate.study import validate

FEDERATION = fp.data.load("vowel_speakers")
ALGORITHM = fp.method("fedprox").make(fp.tasks.from_model(FEDERATION, "linear"), batch_size=20)
SETTINGS: dict[str, Any] = {"lr": [0.03, 0.3], "mu": [0.0, 0.5]}
OPTIONS: dict[str, Any] = {"cohort_size": 5, "evaluate_every": 2}


@pytest.fixture(scope="module")
def found() -> fp.Sweep:
    return fp.sweep_runs(ALGORITHM, FEDERATION, 4, SETTINGS, [3, 0], **OPTIONS)


def test_every_run_has_the_bytes_of_a_single_run(found: fp.Sweep) -> None:
    assert found.points[1] == {"lr": 0.03, "mu": 0.5} and found.seeds == (3, 0)
    for i, point in enumerate(found.points):
        algorithm = fp.method("fedprox").make(ALGORITHM.task, batch_size=20, **point)
        for j, seed in enumerate(found.seeds):
            state, history = fp.run(algorithm, None, FEDERATION, 4, seed, **OPTIONS)
            one = (state, history.metrics)
            same = jax.tree.map(lambda x: x[i, j], (found.states, found.metrics))  # noqa: B023 (used at once)
            jax.tree.map(np.testing.assert_array_equal, same, one)
            for (done, tables), (expected, table) in zip(found.evaluations, history.evaluations, strict=True):
                assert done == expected
                jax.tree.map(np.testing.assert_array_equal, tables[i][j].personal, table.personal)
            np.testing.assert_array_equal(found.scores()[i, j], np.nanmean(table.personal["accuracy"]))


def test_the_best_point_is_that_of_the_highest_mean_over_seeds(found: fp.Sweep) -> None:
    means = {tuple(point.values()): row.mean() for point, row in zip(found.points, found.scores(), strict=True)}
    assert means[tuple(found.best().values())] == max(means.values())
    assert found.best("loss", lowest=True) == found.points[int(found.scores("loss").mean(1).argmin())]


def test_other_values_and_seeds_compile_nothing(found: fp.Sweep) -> None:
    again = fp.sweep_runs(ALGORITHM, FEDERATION, 4, {"lr": [0.1, 0.2], "mu": [0.1, 0.2]}, [7, 8], **OPTIONS)
    assert again.compilations == 0


def test_a_study_is_swept_as_it_was_configured() -> None:
    config = Config(method="fedper", model="linear", rounds=3, cohort_size=4, evaluate_every=0, split="validation")
    found = fp.sweep(validate(config), {"lr": [0.1]}, [0, 1])
    assert found.metrics.loss.shape == (1, 2, 3, 4) and found.scores().shape == (1, 2)
    found = fp.sweep_runs(ALGORITHM, FEDERATION, 2, {"lr": [0.1]}, [0], evaluate_every=0)
    with pytest.raises(ValueError, match="scores: the sweep was not evaluated"):
        found.scores()


@pytest.mark.parametrize(
    ("settings", "seeds", "message"),
    [
        ({"learning_rate": [0.1]}, [0], "found 'learning_rate'; allowed are lr, mu"),
        ({"batch_size": [10]}, [0], "settings .of a sweep, numbers only.: found 'batch_size'"),
        ({"lr": []}, [0], "lr: found no value"),
        ({"lr": [0.1, 0.1]}, [0], "lr: found .0.1, 0.1.; expected each value once"),
        ({"lr": [0.1, -1.0]}, [0], "lr: found -1"),
        ({"lr": [float("nan")]}, [0], "lr: found nan"),
        ({"lr": [0.1]}, [], "seeds: found ..; expected some"),
        ({"lr": [0.1]}, [1, 1], "seeds: found .1, 1.; expected some, each once"),
        ({"lr": [0.1]}, [-1], "found the seed -1"),
    ],
)
def test_what_cannot_be_swept_is_named(settings: Any, seeds: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fp.sweep_runs(ALGORITHM, FEDERATION, 2, settings, seeds)


def test_an_algorithm_without_settings_and_a_warm_start_are_refused() -> None:
    with pytest.raises(ValueError, match="algorithm: found one without settings"):
        fp.sweep_runs(fp.compose(ALGORITHM.task), FEDERATION, 2, {"lr": [0.1]}, [0])
    with pytest.raises(ValueError, match="warm_start: found 2"):
        fp.sweep(validate(Config(model="linear", warm_start=2, rounds=2)), {"lr": [0.1]}, [0])
