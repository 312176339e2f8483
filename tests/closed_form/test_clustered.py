"""IFCA on problems whose clusters are known."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_pers as fp
from fedjax_pers.aggregators import aggregate, hypotheses
from tests import toys

FOUR = {"a": [[0.0], [0.2], [4.0], [4.4]], "h": [[1.0], [1.0], [1.0], [1.0]]}


def with_models(algorithm, *values, num_clients=4):
    """A first state whose clusters start from these values."""
    state = toys.start(algorithm, num_clients)
    return state._replace(shared={"w": jnp.array(values, jnp.float32)})


def rounds(algorithm, state, cohort, count):
    step = jax.jit(algorithm.step)
    for _ in range(count):
        state, metrics = step(state, cohort, jax.random.key(0))
    return state, metrics


def test_each_cluster_becomes_the_mean_of_those_who_chose_it():
    algorithm = fp.method("ifca").make(toys.quadratic(), lr=1.0)  # a step of 1 leads to the client's own optimum
    state, metrics = rounds(algorithm, with_models(algorithm, 1.0, 3.0), toys.copies([1, 1, 1, 3], FOUR), 1)
    np.testing.assert_allclose(state.shared["w"], [0.1, (4 + 3 * 4.4) / 4], rtol=1e-6)
    assert metrics.said["cluster"].tolist() == [0, 0, 1, 1] == state.aux["members"].tolist()
    assert state.aux["counts"].tolist() == [2, 2]
    np.testing.assert_allclose(metrics.said["loss"], 0.5 * np.array([1, 0.8, 1, 1.4]) ** 2, rtol=1e-5)


def test_an_empty_cluster_keeps_its_model_and_is_reported():
    algorithm = fp.method("ifca").make(toys.quadratic(), lr=0.5)
    state, _ = rounds(algorithm, with_models(algorithm, 2.0, 100.0), toys.copies([1] * 4, FOUR), 3)
    assert float(state.shared["w"][1]) == 100
    assert state.aux["counts"].tolist() == [4, 0]


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_model_that_is_not_finite_is_never_chosen(broken):
    algorithm = fp.method("ifca").make(toys.quadratic(), lr=0.5)
    _, metrics = rounds(algorithm, with_models(algorithm, broken, 50.0), toys.copies([1] * 4, FOUR), 1)
    assert metrics.said["cluster"].tolist() == [1] * 4 and not metrics.rejected.any()


def test_of_equal_models_the_first_is_chosen():
    algorithm = fp.method("ifca").make(toys.quadratic(), clusters=3, lr=0.5)
    _, metrics = rounds(algorithm, with_models(algorithm, 2.0, 2.0, 2.0), toys.copies([1] * 4, FOUR), 1)
    assert metrics.said["cluster"].tolist() == [0] * 4


def test_clusters_start_from_different_initialisations():
    algorithm = fp.method("ifca").make(toys.classifier(), clusters=3)
    kernels = toys.start(algorithm, 4).shared["params/hidden1/kernel"]
    plain = toys.start(fp.method("fedavg").make(toys.classifier()), 4).shared["params/hidden1/kernel"]
    toys.same_bits(kernels[0], plain)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(kernels[i] - kernels[j]).max() > 0.01


def test_once_choices_are_settled_ifca_is_fedavg_in_each_cluster():
    """Two far groups of clients: each cluster goes the way of FedAvg over its own group, to the bit."""
    cohort = toys.copies([1, 2, 1, 3], FOUR)
    ifca, fedavg = (fp.method(name).make(toys.quadratic(), lr=0.1) for name in ("ifca", "fedavg"))
    state, _ = rounds(ifca, with_models(ifca, 1.0, 3.0), cohort, 5)
    for cluster, (members, begin) in enumerate((([0, 1], 1.0), ([2, 3], 3.0))):
        alone = toys.start(fedavg, 4)._replace(shared={"w": jnp.float32(begin)})
        alone, _ = rounds(fedavg, alone, toys.only(cohort, members), 5)
        assert float(alone.shared["w"]) == float(state.shared["w"][cluster])


def test_absent_clients_keep_their_last_choice():
    algorithm = fp.method("ifca").make(toys.quadratic(), lr=0.1)
    cohort = toys.copies([1] * 4, FOUR)
    state, _ = rounds(algorithm, with_models(algorithm, 1.0, 3.0), toys.only(cohort, [1, 3]), 1)
    assert state.aux["members"].tolist() == [-1, 0, -1, 1]
    state, _ = rounds(algorithm, state, toys.only(cohort, [2]), 1)
    assert state.aux["members"].tolist() == [-1, 0, 1, 1] and state.aux["counts"].tolist() == [0, 1]


def test_every_client_predicts_with_the_model_of_its_choice_unseen_ones_too():
    algorithm = fp.method("ifca").make(toys.quadratic())
    strangers = toys.clients({"a": [[4.0], [0.0]], "h": [[1.0], [1.0]]}, ids=[4, 5])
    own = algorithm.personalize(with_models(algorithm, 1.0, 3.0), strangers, jax.random.key(0))
    assert own["w"].tolist() == [3.0, 1.0]
    assert algorithm.common is None


def test_leaves_of_everyone_are_averaged_whatever_the_cluster():
    """w is clustered, v is everyone's: losses depend on w alone, and each step moves v towards the client's b."""
    task = toys.plain_task(
        lambda x, batch: 0.5 * (x["w"] - batch["a"]) ** 2 + 0.5 * (x["v"] - batch["b"]) ** 2, w=0.0, v=0.0
    )
    algorithm = fp.method("ifca").make(task, lr=1.0, clustered="w")
    state = toys.start(algorithm, 4)
    assert state.shared["w"].shape == (2,) and state.shared["v"].shape == ()
    state = state._replace(shared=state.shared | {"w": jnp.array([1.0, 3.0])})
    cohort = toys.clients(FOUR | {"b": [[1.0], [2.0], [3.0], [10.0]]})
    state, _ = rounds(algorithm, state, cohort, 1)
    np.testing.assert_allclose(state.shared["w"], [0.1, 4.2], rtol=1e-6)
    assert float(state.shared["v"]) == pytest.approx(4)


def test_hypotheses_in_a_notebook():
    aggregator = hypotheses(2)
    server = aggregator.init({"w": jnp.array([0.0, 10.0])}, frozenset({"w"}), 3)
    said = {"cluster": jnp.array([1, 0, 1]), "loss": jnp.zeros(3)}
    server, _ = aggregate(aggregator, server, {"w": jnp.array([12.0, 1.0, 16.0])}, [1.0, 1.0, 3.0], said=said)
    np.testing.assert_allclose(server.shared["w"], [1.0, 15.0])


BAD = [
    (lambda: hypotheses(0), "clusters: found 0"),
    (lambda: toys.start(fp.method("ifca").make(toys.quadratic(), clusters=5), 4), "clusters: found 5; .* 1 .. 4"),
    (lambda: fp.method("ifca").make(toys.quadratic(), clustered="v"), "the pattern v matches no leaf"),
    (
        lambda: fp.method("ifca").make(toys.quadratic(), personal=fp.everything),
        "personal: nothing is left to be shared",
    ),
    (lambda: hypotheses(3).init({"w": jnp.zeros((2, 4))}, frozenset({"w"}), 9), r"shared\['w'\]: found shape \(2, 4\)"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_settings_that_make_no_sense(make, message):
    with pytest.raises(ValueError, match=message):
        make()
