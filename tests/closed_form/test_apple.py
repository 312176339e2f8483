"""APPLE against float64 rounds of the same formulas, written out for numbers instead of models."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import fedjax_pers as fp
from tests import toys

A, H = np.array([0.0, 1.0, -1.0]), np.array([1.0, 4.0, 2.0])
COUNTS = [2, 6, 4]
COHORT = toys.copies(COUNTS, {"a": A[:, None].tolist(), "h": H[:, None].tolist()})


def by_hand(rounds, *, lr, relations_lr, mu, fading):
    """Core models, relations less shares, and the models that predict; a step for each batch of two."""
    cores, relations = np.zeros(3), np.zeros((3, 3))
    for round in range(rounds):
        shares = np.full(3, 1 / 3) if round == 0 else np.array(COUNTS) / sum(COUNTS)
        strength = mu * (1 + np.cos(np.pi * min(round / fading, 1))) / 2
        sent = cores.copy()
        for i in range(3):
            now = sent.copy()
            for _ in range(COUNTS[i] // 2):
                p = shares + relations[i]
                slope = H[i] * (p @ now - A[i])
                own, r = (
                    now[i] - lr * p[i] * slope,
                    relations[i] - relations_lr * (slope * now + strength * relations[i]),
                )
                now[i], relations[i] = own, r
            cores[i] = now[i]
    shares = np.array(COUNTS) / sum(COUNTS)
    return cores, relations, (shares + relations) @ cores


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.1, "relations_lr": 0.1, "mu": 0.5, "fading": 3},
        {"lr": 0.2, "relations_lr": 0.05, "mu": 0.0, "fading": 1},
        {"lr": 0.1, "relations_lr": 0.0, "mu": 0.5, "fading": 3},
    ],
)
def test_five_rounds(settings):
    fading = settings["fading"]
    floats = {name: value for name, value in settings.items() if name != "fading"}
    run = toys.experiment("apple", toys.quadratic(), num_clients=3, batch_size=2, fading=fading)
    state, _ = run(COHORT, 5, **floats)
    cores, relations, models = by_hand(5, **settings)
    np.testing.assert_allclose(state.aux["models"]["w"], cores, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(state.rows["/relations"], relations, rtol=2e-5, atol=1e-6)
    algorithm = fp.method("apple").make(toys.quadratic(), batch_size=2, **settings)
    found = jax.jit(algorithm.personalize)(state, COHORT, jax.random.key(0))
    np.testing.assert_allclose(found["w"], models, rtol=2e-5, atol=1e-6)


def test_without_relations_everybody_predicts_with_the_mean_of_core_models():
    run = toys.experiment("apple", toys.quadratic(), num_clients=3, batch_size=2)
    state, _ = run(COHORT, 4, lr=0.1, relations_lr=0.0)
    algorithm = fp.method("apple").make(toys.quadratic(), batch_size=2)
    found = jax.jit(algorithm.personalize)(state, COHORT, jax.random.key(0))["w"]
    expected = np.average(np.asarray(state.aux["models"]["w"], float), weights=COUNTS)
    np.testing.assert_allclose(found, np.full(3, expected), rtol=1e-5)


def test_core_models_and_sizes_are_kept_by_id():
    """Client 2 alone comes: the others' cores stay, and the shares are of those that came once."""
    algorithm = fp.method("apple").make(toys.quadratic(), batch_size=2)
    state = jax.jit(algorithm.step)(toys.start(algorithm, 3), toys.only(COHORT, [2]), jax.random.key(0))[0]
    assert state.aux["sizes"].tolist() == [0, 0, 4]
    assert (np.asarray(state.aux["models"]["w"]) != 0).tolist() == [False, False, True]


@pytest.mark.parametrize(("setting", "value"), [("relations_lr", -0.1), ("mu", -1.0), ("fading", 0)])
def test_settings_that_cannot_be(setting, value):
    with pytest.raises(ValueError, match=setting):
        fp.method("apple").make(toys.quadratic(), **{setting: value})
