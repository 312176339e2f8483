"""Mixtures that are other methods: the same bits where the computation is the same, else equal up to rounding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_pers as fp
from fedjax_pers.mixtures import constant_gate, inputs_of, linear_gate, mixture
from tests import toys

ROUNDS = ((0, 2), (1, 2), (0, 1, 2))
LOCAL = {"batch_size": 3, "epochs": 2}
CERTAIN = 1e4
"""A score that makes a gate exactly 1 and all others exactly 0."""


def task():
    """With running statistics, of which each expert has its own."""
    return toys.classifier(norm=True)


@pytest.fixture(scope="module")
def clients():
    return toys.labelled_clients((7, 4, 10))


@pytest.fixture(scope="module")
def fedavg(clients):
    return toys.trajectory("fedavg", task(), clients, ROUNDS, lr=0.1, **LOCAL)


def expert(state, number):
    """The shared leaves of one expert, by their names in the task's own model."""
    prefix = f"experts/{number}/"
    return {name.removeprefix(prefix): x for name, x in state.shared.items() if name.startswith(prefix)}


def close(found, expected, rtol=2e-6, atol=2e-7):
    assert set(found) == set(expected)
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol, atol, err_msg=name)


def experts_alike(state):
    """Every expert starts where the first does."""
    first = expert(state, 0)
    return state._replace(shared={name: first[name.split("/", 2)[2]] for name in state.shared})


def trained(algorithm, state, clients, rounds=ROUNDS):
    step = jax.jit(algorithm.step)
    for members in rounds:
        state, _ = step(state, toys.only(clients, list(members)), jax.random.key(0))
    return state


def test_one_component_is_fedavg_to_the_bit(fedavg, clients):
    states = toys.trajectory("fedem", task(), clients, ROUNDS, lr=0.1, components=1, **LOCAL)
    for found, expected in zip(states, fedavg, strict=True):
        toys.same_bits(expert(found, 0), expected.shared)


def test_the_shared_model_of_pfl_moe_is_that_of_fedavg_to_the_bit(fedavg, clients):
    states = toys.trajectory("pfl_moe", task(), clients, ROUNDS, lr=0.1, **LOCAL)
    for found, expected in zip(states, fedavg, strict=True):
        toys.same_bits(expert(found, 0), expected.shared)


def test_one_expert_is_fedavg_up_to_rounding(fedavg, clients):
    """The loss passes through the logarithm of a mixture of one."""
    states = toys.trajectory("fedmix", task(), clients, ROUNDS, lr=0.1, experts=1, **LOCAL)
    close(expert(states[-1], 0), fedavg[-1].shared, rtol=1e-5, atol=1e-6)


def test_equal_components_stay_equal_and_are_fedavg_with_a_step_divided_by_their_number(clients):
    algorithm = fp.method("fedem").make(task(), lr=0.3, components=3, **LOCAL)
    state = trained(algorithm, experts_alike(toys.start(algorithm, 3)), clients)
    expected = toys.trajectory("fedavg", task(), clients, ROUNDS, lr=0.1, **LOCAL)[-1].shared
    for number in range(3):
        toys.same_bits(expert(state, number), expert(state, 0))
        close(expert(state, number), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.rows["gate/weights"], np.full((3, 3), 1 / 3), rtol=1e-6)


def test_equal_experts_under_a_uniform_gate_stay_equal_and_the_gate_uniform(clients):
    algorithm = fp.method("fedmix").make(task(), lr=0.3, **LOCAL)
    first = experts_alike(toys.start(algorithm, 3))
    state = trained(algorithm, first, clients)
    toys.same_bits(expert(state, 1), expert(state, 0))
    assert not np.array_equal(expert(state, 0)["params/head/bias"], expert(first, 0)["params/head/bias"])
    for x in state.rows.values():
        np.testing.assert_allclose(x, 0, atol=1e-7)


def certain_of(algorithm, groups):
    """A first state in which each client's gate is certain of the expert of its group."""
    state = toys.start(algorithm, len(groups))
    bias = CERTAIN * jax.nn.one_hot(jnp.array(groups), state.rows["gate/bias"].shape[1])
    return state._replace(rows={**state.rows, "gate/bias": bias})


def test_gates_that_are_certain_by_group_are_clusters_that_are_known(clients):
    """Each expert goes the way of FedAvg over its group; an expert that nobody of a round uses stays, to the bit."""
    groups, rounds = (0, 1, 1), ((0, 1), (1, 2), (0, 1, 2))
    algorithm = fp.method("fedmix").make(toys.classifier(), lr=0.1, **LOCAL)
    first = certain_of(algorithm, groups)
    for number in range(2):
        members = [tuple(c for c in some if groups[c] == number) for some in rounds]
        alone = fp.method("fedavg").make(toys.classifier(), lr=0.1, **LOCAL)
        state = toys.start(alone, 3)._replace(shared=expert(first, number))
        state = trained(alone, state, clients, members)
        found = trained(algorithm, first, clients, rounds)
        close(expert(found, number), state.shared, rtol=1e-5, atol=1e-6)
        toys.same_bits(found.rows, first.rows)
    once = trained(algorithm, first, clients, ((1, 2),))
    toys.same_bits(expert(once, 0), expert(first, 0))


def test_a_gate_that_always_trusts_the_common_model_is_fedavg_up_to_rounding(fedavg, clients):
    algorithm = fp.method("domain_experts").make(task(), lr=0.1, **LOCAL)
    first = toys.start(algorithm, 3)
    first = first._replace(rows={**first.rows, "gate/bias": jnp.full(3, CERTAIN, jnp.float32)})
    state = trained(algorithm, first, clients)
    close(expert(state, 0), fedavg[-1].shared, rtol=1e-5, atol=1e-6)
    own = {name: x for name, x in state.rows.items() if "/params/" in name}
    toys.same_bits(own, {name: first.rows[name] for name in own})


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("gate", ["constant", "linear"])
def test_a_gate_that_is_certain_gives_the_expert_itself_to_the_bit(clients, gate, number):
    base = toys.classifier()
    make = {"constant": lambda: constant_gate(2), "linear": lambda: linear_gate(inputs_of(base), 2)}[gate]
    both = mixture(base, make())
    variables = both.init(jax.random.key(0))
    certain = jax.nn.one_hot(number, 2)
    gates = {
        "constant": {"weights": certain},
        "linear": {"kernel": jnp.zeros((toys.FEATURES, 2)), "bias": CERTAIN * certain},
    }
    batch = {name: x[:7] for name, x in clients.data.items()} | {"weight": jnp.ones(7)}
    found = jax.jit(both.metrics)({**variables, "gate": gates[gate]}, batch)

    def alone(variables):
        log_probabilities = jax.nn.log_softmax(base.apply(variables, batch, None)[0])
        return base.criterion(log_probabilities, batch)

    toys.same_bits(found["loss"], jax.jit(alone)(variables["experts"][number]))
    pure = jax.jit(base.metrics)(variables["experts"][number], batch)
    np.testing.assert_allclose(found["loss"], pure["loss"], rtol=1e-6)
    toys.same_bits(found["accuracy"], pure["accuracy"])
    assert (np.asarray(found["routing_entropy"]) == 0).all() and (np.asarray(found[f"usage_{number}"]) == 1).all()


def test_without_fine_tuning_pfl_moe_predicts_with_the_global_model(fedavg, clients):
    algorithm = fp.method("pfl_moe").make(task(), tune_epochs=0, gate_epochs=0, **LOCAL)
    state = toys.trajectory("pfl_moe", task(), clients, ROUNDS, lr=0.1, **LOCAL)[-1]
    models = jax.jit(algorithm.personalize)(state, clients, jax.random.key(0))
    found = fp.evaluate(algorithm.task, models, clients)
    alike = jax.tree.map(lambda x: jnp.stack([x] * 3), fp.method("fedavg").make(task()).common(fedavg[-1]))
    expected = fp.evaluate(task(), alike, clients)
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-6)
    toys.same_bits(algorithm.common(state)["experts"][1], algorithm.common(state)["experts"][0])
