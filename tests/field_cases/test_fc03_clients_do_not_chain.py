"""FC-03: clients that train in a chain because they share one parameter object."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

import fedjax_pers as fp
from tests import toys

SLOPES = np.array([-1.0, -2.0, 1.0], np.float32)
TASK = toys.plain_task(lambda variables, batch: batch["slope"] * variables["w"], w=1.0)


@pytest.fixture(scope="module")
def algorithm():
    return fp.method("fedavg").make(TASK, lr=1.0, steps=1, batch_size=1)


@pytest.fixture(scope="module")
def step(algorithm):
    return jax.jit(algorithm.step)


def cohort(order):
    return fp.cohort_of({"slope": SLOPES[list(order), None]})


def test_every_client_starts_from_the_round_start(algorithm, step):
    first = toys.start(algorithm, 3)
    exchange = jax.jit(algorithm.exchange)
    uploads = [float(exchange(first, cohort([client]), jax.random.key(0))[1]["w"]) for client in range(3)]
    assert uploads == [2.0, 3.0, 0.0]
    for order in itertools.permutations(range(3)):
        state, _ = step(first, cohort(order), jax.random.key(0))
        assert float(state.shared["w"]) == pytest.approx(5 / 3, abs=1e-6)


def test_one_client_after_another_in_one_program_is_no_chain(algorithm):
    state, _ = fp.with_executor(algorithm, fp.looped()).step(
        toys.start(algorithm, 3), cohort(range(3)), jax.random.key(0)
    )
    assert float(state.shared["w"]) == pytest.approx(5 / 3, abs=1e-6)


def test_the_same_call_twice_gives_the_same_and_changes_nothing(algorithm, step):
    first, clients = toys.start(algorithm, 3), cohort(range(3))
    before = jax.tree.map(np.array, (first, clients))
    results = [step(first, clients, jax.random.key(0)) for _ in range(2)]
    toys.same_bits(results[0], results[1])
    toys.same_bits((first, clients), before)
