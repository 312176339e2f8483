"""FC-08: a round in which all weights are zero."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_pers as fp
from fedjax_pers.evaluation import summarize
from tests import toys

UPDATES = {"w": jnp.array([[1.0, 2.0], [3.0, 4.0]])}


@pytest.fixture(params=["plain", "momentum", "adam"])
def aggregator(request):
    optimizers = {"plain": optax.sgd(1.0), "momentum": optax.sgd(1.0, momentum=0.9), "adam": optax.adam(0.1)}
    return fp.mean(optimizers[request.param])


def server_of(aggregator):
    server = aggregator.init({"w": jnp.array([5.0, -5.0])}, frozenset({"w"}), 2)
    return fp.aggregate(aggregator, server, UPDATES, [1.0, 3.0])[0]  # the optimiser's state is not that of the start


@pytest.mark.parametrize(
    ("updates", "weights"), [(UPDATES, [0.0, 0.0]), ({"w": jnp.zeros((0, 2))}, []), (UPDATES, [0, 0])]
)
def test_nothing_received_leaves_the_server_as_it_was(aggregator, updates, weights):
    before = server_of(aggregator)
    after, info = fp.aggregate(aggregator, before, updates, weights)
    toys.same_bits(after, before)
    assert bool(info["skipped"])


@pytest.mark.parametrize(
    ("weights", "found"),
    [([1, -1], "client 1 has -1"), ([np.nan, 1], "client 0 has nan"), ([1, np.inf], "client 1 has inf")],
)
def test_wrong_weights_are_an_error_that_names_the_client(aggregator, weights, found):
    with pytest.raises(ValueError, match=f"weights: {found}"):
        fp.aggregate(aggregator, server_of(aggregator), UPDATES, weights)


def first_two(key, round, num_clients):
    return jnp.array([0, 1], jnp.int32)


def test_a_round_of_clients_without_examples_is_recorded_as_skipped():
    federation = toys.federation((0, 0, 4), (0, 0, 2))
    algorithm = toys.every_method("fedavgm")
    first = fp.start(algorithm, federation, 0)
    state, history, rows = toys.recorded(algorithm, federation, 2, sampler=first_two, evaluate_every=1)
    toys.same_bits((state.shared, state.opt), (first.shared, first.opt))
    assert state.seen.tolist() == [0, 0, 0] and int(state.round) == 2
    assert (
        history.metrics.empty.all() and (history.metrics.weight == 0).all() and (history.metrics.update_norm == 0).all()
    )
    assert [row["skipped"] for row in rows] == ["no upload was accepted: 2 had nothing to train on"] * 2
    assert [row["empty"] for row in rows] == [[0, 1]] * 2
    assert np.isnan(rows[0]["train_loss_weighted_mean"]) and "personal_accuracy_weighted_mean" in rows[0]
    # Evaluation takes clients without examples alike: they have no score and are counted.
    _, table = history.evaluations[-1]
    assert np.isnan(table.personal["accuracy"]).tolist() == [True, True, False]
    numbers = summarize(table.personal["accuracy"], table.examples)
    assert (numbers["clients"], numbers["clients_without_test"]) == (1, 2)
    assert np.isfinite(numbers["weighted_mean"])
