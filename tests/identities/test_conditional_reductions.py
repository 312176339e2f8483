"""Choices of personal layers under which the method is another one, to the bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import fedjax_pers as fp
from fedjax_pers.aggregators.masked import masked_mean
from fedjax_pers.masks import OWN, chosen_by_client, masked_copies, masks_of, values_of
from fedjax_pers.objectives import task_loss
from fedjax_pers.testing import assert_close
from tests import toys

ROUNDS = ((0, 2), (1, 2), (0, 1, 2))
LOCAL = {"batch_size": 3, "epochs": 2}
TASK = toys.classifier()


@pytest.fixture(scope="module")
def clients():
    return toys.labelled_clients((7, 4, 10))


def of_clients(rows):
    return {name.removeprefix(OWN): x for name, x in rows.items() if name.startswith(OWN)}


@pytest.fixture(scope="module")
def fedavg(clients):
    return toys.trajectory("fedavg", TASK, clients, ROUNDS, lr=0.1, **LOCAL)


FEDAVG = {
    "conditional_layers": {"layers": 0},
    "layers_by_client": {"examples": (1000,)},
    "fedlp": {"preserve": 1.0},
}
CLOSE = {
    "fedcac": {"tau": 0.0},  # it adds up models, FedAvg differences
    "fedselect": {"growth": 0.0},  # elements of gradients are selected, so that the compiler joins other operations
}
"""FedAvg up to the last bits."""


@pytest.mark.parametrize("name", FEDAVG)
def test_with_nothing_personal_it_is_fedavg(fedavg, clients, name):
    states = toys.trajectory(name, TASK, clients, ROUNDS, lr=0.1, **LOCAL, **FEDAVG[name])
    for found, other in zip(states, fedavg, strict=True):
        toys.same_bits(values_of(found.shared), other.shared)


@pytest.mark.parametrize("name", CLOSE)
def test_without_personal_parameters_it_is_fedavg_up_to_rounding(fedavg, clients, name):
    states = toys.trajectory(name, TASK, clients, ROUNDS, lr=0.1, **LOCAL, **CLOSE[name])
    for found, other in zip(states, fedavg, strict=True):
        assert_close(values_of(found.shared), other.shared, name)


def test_with_everything_personal_it_is_local_training(clients):
    def everything(layout, before, after, context):
        return {path: jnp.array(True) for path in masks_of(before.shared)}

    training = fp.train(0.1, objective=task_loss("shared"), **LOCAL)
    algorithm = fp.compose(
        TASK, layout=masked_copies(), client=chosen_by_client(training, everything), aggregator=masked_mean()
    )
    step, state = jax.jit(algorithm.step), toys.start(algorithm, 3)
    first = state
    expected = toys.trajectory("local_only", TASK, clients, ROUNDS, lr=0.1, **LOCAL)
    for members, other in zip(ROUNDS, expected[1:], strict=True):
        state, _ = step(state, toys.only(clients, list(members)), jax.random.key(0))
        toys.same_bits(of_clients(state.rows), other.rows)
        toys.same_bits(state.shared, first.shared)


def test_with_the_head_personal_for_all_it_is_fedper(clients):
    states = toys.trajectory("layers_by_client", TASK, clients, ROUNDS, lr=0.1, examples=(0,), **LOCAL)
    expected = toys.trajectory("fedper", TASK, clients, ROUNDS, lr=0.1, personal=fp.head(1), **LOCAL)
    for found, other in zip(states[1:], expected[1:], strict=True):
        toys.same_bits({name: found.shared[name] for name in other.shared}, other.shared)
        toys.same_bits({name: found.rows[OWN + name] for name in other.rows}, other.rows)
