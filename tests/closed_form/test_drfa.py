"""DRFA by hand on two clients: f_0 = 1/2 w^2 and f_1 = 2 (1 - w)^2, from w = 0."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_pers as fp
from fedjax_pers.aggregators import Collected, distributionally_robust
from tests import toys

LR, ASCENT = 0.1, 0.05
COHORT = toys.clients()
KEYS = jax.vmap(jax.random.key)(jnp.arange(400))


@functools.cache
def stepper(**settings):
    """``step(keys, weights) -> (states, metrics)`` of one round from the first state, for each key."""
    algorithm = fp.method("drfa").make(toys.quadratic(), lr=LR, ascent_lr=ASCENT, **settings)

    @jax.jit
    def step(keys, weights):
        state = toys.start(algorithm, 2)._replace(aux={"weights": weights})
        return jax.vmap(lambda key: algorithm.step(state, COHORT, key))(keys)

    return step


def losses(w):
    return np.array([0.5 * w**2, 2 * (1 - w) ** 2])


def risen(weights, estimate, steps):
    return np.asarray(optax.projections.projection_simplex(jnp.asarray(weights + steps * ASCENT * estimate)))


def test_one_step_is_one_of_afl_in_expectation():
    """AFL goes to 0.2. Here it is 0.4 for each draw of client 1, of two draws with equal chances."""
    states, _ = stepper(clients=2, steps=1)(KEYS, jnp.full(2, 0.5))
    w = np.asarray(states.shared["w"])
    np.testing.assert_allclose(np.unique(w.round(6)), [0, 0.2, 0.4], atol=1e-6)
    assert abs(w.mean() - 0.2) < 4 * 0.1414 / np.sqrt(len(w))
    # Both different, or twice one of them: 200 and 100 and 100 of 400, give or take four standard deviations.
    counts = [np.sum(np.isclose(w, value)) for value in (0, 0.2, 0.4)]
    assert (abs(np.array(counts) - [100, 200, 100]) < [35, 40, 35]).all()


def test_weights_ascend_along_the_losses_of_those_who_were_asked():
    states, metrics = stepper(clients=2, steps=1)(KEYS, jnp.full(2, 0.5))
    asked = np.zeros(2)
    for w, found, ids in zip(states.shared["w"], states.aux["weights"], metrics.ids, strict=True):
        both = risen([0.5, 0.5], losses(float(w)), 1)
        alone = [risen([0.5, 0.5], 2 * np.eye(2)[j] * losses(float(w)), 1) for j in range(2)]
        if (np.asarray(ids) < 2).all():
            np.testing.assert_allclose(found, both, atol=1e-6)
        else:
            matches = [np.allclose(found, each, atol=1e-6) for each in alone]
            assert any(matches)
            asked += np.array(matches) if sum(matches) == 1 else 0
    assert (asked > 0.35 * asked.sum()).all()  # about 200 rounds in which one was asked, either equally often


def test_a_client_that_is_drawn_twice_counts_twice_and_takes_part_once():
    states, metrics = stepper(clients=3, steps=1)(KEYS, jnp.full(2, 0.5))
    shares = {tuple(row) for row in np.asarray(metrics.weight, float).round(4).tolist()}
    assert shares == {(1.0, 0.0), (0.3333, 0.6667), (0.6667, 0.3333)}
    moved = np.where(np.asarray(metrics.ids) == 1, 0.4, 0)
    np.testing.assert_allclose(states.shared["w"], (np.asarray(metrics.weight) * moved).sum(1), rtol=1e-5)
    assert np.asarray(states.seen).max() == 1


def test_the_snapshot_is_a_step_on_the_way_and_the_ascent_counts_all_steps():
    """Client 1 alone: after t steps it is at 1 - 0.6^t."""
    states, _ = stepper(clients=2, steps=3)(KEYS, jnp.array([0.0, 1.0]))
    np.testing.assert_allclose(states.shared["w"], 1 - 0.6**3, rtol=1e-6)
    snapshots = np.asarray(states.shared["snapshot/w"])
    stops = np.rint(np.log(1 - snapshots) / np.log(0.6)).astype(int)
    np.testing.assert_allclose(snapshots, 1 - 0.6**stops, rtol=1e-5)
    # A third of 400 each, give or take four standard deviations of 9.4.
    assert (abs(np.bincount(stops, minlength=4)[1:] - 400 / 3) < 38).all()
    for snapshot, found in zip(snapshots, states.aux["weights"], strict=True):
        options = [risen([0.0, 1.0], 2 * np.eye(2)[j] * losses(snapshot), 3) for j in range(2)]
        assert any(np.allclose(found, each, atol=1e-6) for each in options)


def test_it_goes_towards_the_minimax_point_and_not_to_the_mean():
    """The mean's optimum is 0.8, the minimax point 2/3."""
    algorithm = fp.method("drfa").make(toys.quadratic(), lr=0.02, ascent_lr=0.02, clients=16, steps=2)

    @jax.jit
    def run(state):
        def one(state, _):
            state, _ = algorithm.step(state, COHORT, jax.random.key(0))
            return state, state.shared["w"]

        return jax.lax.scan(one, state, length=3000)[1]

    found = np.asarray(run(toys.start(algorithm, 2)))[1000:].mean()
    assert abs(found - 2 / 3) < 0.03


def test_without_an_ascent_weights_stay_uniform():
    algorithm = fp.method("drfa").make(toys.quadratic(), ascent_lr=0.0, clients=2)
    state = jax.jit(algorithm.step)(toys.start(algorithm, 2), COHORT, jax.random.key(0))[0]
    assert state.aux["weights"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("loss", [1e38, np.nan])
def test_a_loss_beyond_all_measure_leaves_finite_weights(loss):
    aggregator, survey = distributionally_robust(clients=2, ascent_lr=0.1)
    server = aggregator.init({"w": jnp.zeros(())}, frozenset({"w"}), 4)
    said, there = {"loss": jnp.array([loss, 1.0])}, jnp.array([np.isfinite(loss), True])
    after = survey.finish(server, Collected((), said, jnp.ones(2), jnp.array([0, 3]), there))
    assert np.isfinite(after.aux["weights"]).all()
    np.testing.assert_allclose(after.aux["weights"].sum(), 1, rtol=1e-6)


def test_traffic_is_of_both_cohorts():
    """Down the model to one that trains and the snapshot to one that is asked; up both models and a loss."""
    algorithm = fp.method("drfa").make(toys.quadratic())
    download, upload, _ = algorithm.exchange(toys.start(algorithm, 2), COHORT, 0)
    assert sorted(download) == ["surveyed/w", "w"]
    assert sorted(upload) == ["said/loss", "snapshot/w", "w"]


@pytest.mark.parametrize(("setting", "value"), [("clients", 0), ("steps", 0), ("ascent_lr", -1.0)])
def test_settings_that_cannot_be(setting, value):
    with pytest.raises(ValueError, match=setting):
        fp.method("drfa").make(toys.quadratic(), **{setting: value})
