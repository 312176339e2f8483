"""FedALA on one number, by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_pers as fp
from tests import toys

COHORT = {"a": [[0.0], [1.0]], "h": [[1.0], [1.0]]}


def one(**settings):
    return fp.method("fedala").make(toys.quadratic(), head="w", batch_size=1, **settings)


def state_of(algorithm, w, own, taken, before=1):
    state = toys.start(algorithm, 2)
    rows = {
        "own/w": jnp.array(own, jnp.float32),
        "taken/w": jnp.array(taken, jnp.float32),
        "taken_part": jnp.full(2, before, jnp.int32),
    }
    return state._replace(shared={"w": jnp.float32(w)}, rows=rows)


def test_a_round_by_hand():
    """w = 2, own models 0 and 4, A = 1/2: both begin at 0 + 2/2 = 1 and 4 - 2/2 = 3, before A is adapted."""
    algorithm = one(lr=0.1, ala_lr=0.25, ala_share=1.0)
    state = state_of(algorithm, 2.0, [0.0, 4.0], [0.5, 0.5])
    after, _ = algorithm.step(state, toys.clients(COHORT), 0)
    # Client 0: loss (m - 0)^2 / 2 at m = 1: g (w - t) = 1 * 2, A = 0.5 - 0.5 = 0. It begins at 0 and stays.
    # Client 1: m = 3 against 1: g (w - t) = 2 * -2, A = 0.5 + 1 -> 1. It begins at 2 and steps to 1.9.
    np.testing.assert_allclose(after.rows["taken/w"], [0.0, 1.0], atol=1e-6)
    np.testing.assert_allclose(after.rows["own/w"], [0.0, 1.9], atol=1e-6)
    # The server adds the mean of 0 - 2 and 1.9 - 2: differences are to what it sent.
    assert float(after.shared["w"]) == pytest.approx(2 + (-2 - 0.1) / 2, abs=1e-6)
    assert after.rows["taken_part"].tolist() == [2, 2]


def test_the_first_time_takes_more_steps():
    algorithm = one(lr=0.0, ala_lr=0.01, ala_share=1.0, first_passes=4)
    found = []
    for before in (0, 1):
        state = state_of(algorithm, 2.0, [0.0, 4.0], [0.5, 0.5], before)
        found.append(float(algorithm.step(state, toys.clients(COHORT), 0)[0].rows["taken/w"][0]))
    a = 0.5
    for _ in range(4):
        a -= 0.01 * (2 * a) * 2
    assert found[0] == pytest.approx(a, abs=1e-6) and found[1] == pytest.approx(0.5 - 0.01 * 1 * 2, abs=1e-6)


def test_what_predicts_is_the_mixture():
    algorithm = one()
    state = state_of(algorithm, 2.0, [0.0, 4.0], [0.25, 1.0])
    own = algorithm.personalize(state, toys.clients(COHORT), jax.random.key(0))
    np.testing.assert_allclose(own["w"], [0.5, 2.0])
    assert float(algorithm.common(state)["w"]) == 2.0
    stranger = toys.clients({"a": [[0.0]], "h": [[1.0]]}, ids=[2])
    assert float(algorithm.personalize(state, stranger, jax.random.key(0))["w"][0]) == pytest.approx(2.0)


def test_without_steps_of_the_shares_it_is_fedavg():
    """Up to rounding: t + (w - t) is not w to the bit."""
    clients, rounds = toys.labelled_clients((7, 4, 10)), ((0, 2), (1, 2), (0, 1, 2))
    local = {"lr": 0.1, "batch_size": 3, "epochs": 2}
    expected = toys.trajectory("fedavg", toys.classifier(), clients, rounds, **local)
    found = toys.trajectory("fedala", toys.classifier(), clients, rounds, **local, ala_lr=0.0)
    for leaf, x in expected[-1].shared.items():
        np.testing.assert_allclose(found[-1].shared[leaf], x, rtol=1e-5, atol=1e-6)


def test_shares_stay_between_0_and_1():
    algorithm = one(lr=0.1, ala_lr=100.0)
    state = state_of(algorithm, 2.0, [0.0, 4.0], [0.5, 0.5])
    for _ in range(3):
        state, _ = algorithm.step(state, toys.clients(COHORT), 0)
        assert ((state.rows["taken/w"] >= 0) & (state.rows["taken/w"] <= 1)).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ala_share": 1.5}, "ala_share: found 1.5"),
        ({"first_passes": 0}, "first_passes: found 0"),
        ({"ala_lr": -1.0}, "ala_lr"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        one(**settings)
