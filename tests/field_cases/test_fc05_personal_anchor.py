"""FC-05: a personal model that is pulled towards the wrong anchor."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import fedjax_pers as fp
from fedjax_pers.objectives import add, pull_to_shared, task_loss
from tests import toys

BOTH = {"a": [[1.0], [-1.0]], "h": [[1.0], [1.0]]}


@pytest.fixture(scope="module")
def ditto():
    """``run(cohort, rounds, lam)``, 10 global and 10 personal steps of 0.1."""
    return toys.experiment("ditto", toys.quadratic(), batch_size=1, steps=10, lr=0.1, personal_lr=0.1)


@pytest.fixture(scope="module")
def alone():
    """Client 1 of the two takes no part."""
    return toys.only(toys.clients(BOTH), [0])


def test_the_tie_is_to_the_round_start(ditto, alone):
    # Tied to the copy that was trained before it would end at 0.73701.
    assert float(ditto(alone, 1, lam=1.0)[0].rows["own/w"][0]) == pytest.approx(0.44631, abs=1e-5)
    assert float(ditto(alone, 1, lam=0.0)[0].rows["own/w"][0]) == pytest.approx(0.65132, abs=1e-5)


def test_the_global_model_does_not_depend_on_the_tie(ditto, alone):
    states = [ditto(alone, 3, lam=lam)[0] for lam in (0.0, 1.0, 5.0)]
    for state in states[1:]:
        toys.same_bits(state.shared, states[0].shared)
    assert float(ditto(alone, 1, lam=1.0)[0].shared["w"]) == pytest.approx(0.65132, abs=1e-5)


def test_two_clients_that_pull_apart(ditto):
    state, _ = ditto(toys.clients(BOTH), 1, lam=1.0)
    assert float(state.shared["w"]) == 0.0
    np.testing.assert_allclose(state.rows["own/w"], [0.44631, -0.44631], atol=1e-5)


def test_the_order_of_the_two_updates_changes_nothing():
    shared = fp.train(0.1, steps=10, batch_size=1, objective=task_loss("shared"), roles="shared")
    own = fp.train(0.1, steps=10, batch_size=1, objective=add(task_loss("own"), pull_to_shared(1.0)), roles="personal")
    states = []
    for client in (fp.phases(shared, own), fp.phases(own, shared)):
        algorithm = fp.compose(toys.quadratic(), layout=fp.twin(), client=client)
        state, step = toys.start(algorithm, 2), jax.jit(algorithm.step)
        for members in ([0, 1], [0], [1]):
            state, _ = step(state, toys.only(toys.clients(BOTH), members), jax.random.key(0))
        states.append((state.shared, state.rows))
    toys.same_bits(states[1], states[0])
