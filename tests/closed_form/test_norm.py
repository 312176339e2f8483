"""Batch normalisation over clients: what is averaged, what stays, what is forgotten; statistics by hand."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import linen as nn

import fedjax_pers as fp
from tests import toys

MOMENTUM, STEPS, SIZES = 0.9, 3, (30, 10)
MEAN, VAR = "batch_stats/odd/mean", "batch_stats/odd/var"
SCALE, BIAS = "params/odd/scale", "params/odd/bias"
STATISTICS, NORM = {MEAN, VAR}, {MEAN, VAR, SCALE, BIAS}


class Normed(nn.Module):
    """Batch normalisation of the features themselves, under a name that gives nothing away, and a linear head."""

    affine: bool = True

    @nn.compact
    def __call__(self, x, train, mask=None):
        mask = None if mask is None else mask[:, None]
        x = nn.BatchNorm(
            not train,
            momentum=MOMENTUM,
            use_scale=self.affine,
            use_bias=self.affine,
            use_fast_variance=False,
            name="odd",
        )(x, mask=mask)
        return nn.Dense(toys.CLASSES, name="head")(x)


TASK, PLAIN_NORM = (fp.tasks.linen(Normed(affine), toys.EXAMPLE) for affine in (True, False))


@pytest.fixture(scope="module")
def clients():
    """Client 0 has 30 examples, client 1 has 10 that are shifted and wider."""
    data = toys.labelled(SIZES)
    data["x"][1] = 8 + 3 * data["x"][1]
    return fp.cohort_of(data, sizes=SIZES)


def features(clients, client):
    first = int(clients.start[client])
    return np.asarray(clients.data["x"][first : first + SIZES[client]], np.float64)


def running(clients, client, steps=STEPS):
    """Moving averages from (0, 1) after full batches: ``r <- 0.9 r + 0.1 batch``."""
    kept, x = MOMENTUM**steps, features(clients, client)
    return {MEAN: (1 - kept) * x.mean(axis=0), VAR: kept + (1 - kept) * x.var(axis=0)}


def one_round(algorithm, clients):
    return jax.jit(algorithm.step)(toys.start(algorithm, 2), clients, jax.random.key(0))[0]


@pytest.fixture(scope="module")
def after(clients):
    """The state after one round of each treatment; three steps on all of a client's examples."""
    local = {"steps": STEPS, "batch_size": 30}
    made = {
        "average": fp.method("fedavg").make(TASK, **local),
        "server": fp.method("fedavgm").make(TASK, server_lr=0.5, **local),
        "ignore": fp.method("fedavg").make(TASK, statistics="ignore", **local),
        "silobn": fp.method("silobn").make(TASK, newcomer_passes=25, **local),
        "fedbn": fp.method("fedbn").make(TASK, newcomer_passes=25, **local),
    }
    return {name: (algorithm, one_round(algorithm, clients)) for name, algorithm in made.items()}


@pytest.mark.parametrize("name", ["average", "server"])
def test_averaged_statistics(after, clients, name):
    """Plainly: the server's optimiser has nothing to do with them."""
    _, state = after[name]
    assert NORM <= set(state.shared) and state.rows == {}
    for name in STATISTICS:
        expected = 0.75 * running(clients, 0)[name] + 0.25 * running(clients, 1)[name]
        np.testing.assert_allclose(state.shared[name], expected, rtol=1e-5, atol=1e-6)


def test_ignored_statistics_stay_as_they_were(after):
    algorithm, state = after["ignore"]
    assert set(state.frozen) == STATISTICS and STATISTICS.isdisjoint(state.shared)
    np.testing.assert_array_equal(state.frozen[MEAN], np.zeros(toys.FEATURES))
    np.testing.assert_array_equal(state.frozen[VAR], np.ones(toys.FEATURES))


@pytest.mark.parametrize(("name", "personal"), [("silobn", STATISTICS), ("fedbn", NORM)])
def test_local_statistics(after, clients, name, personal):
    algorithm, state = after[name]
    assert set(state.rows) == personal
    assert personal.isdisjoint(state.shared)
    for client in range(2):
        for leaf in STATISTICS:
            expected = running(clients, client)[leaf]
            np.testing.assert_allclose(state.rows[leaf][client], expected, rtol=1e-5, atol=1e-6)
    assert algorithm.common is None


def test_the_four_treatments_train_alike_in_their_first_round(after):
    """In training mode only the batch's own statistics are used, so the treatments differ in what is kept."""
    expected = after["average"][1].shared
    for name in ("ignore", "silobn", "fedbn"):
        found = after[name][1].shared
        assert set(found) == set(expected) - set(after[name][1].rows) - set(after[name][1].frozen)
        for leaf, x in found.items():
            np.testing.assert_allclose(x, expected[leaf], rtol=1e-6, atol=1e-7)


def test_scale_and_bias_of_fedbn_are_those_that_local_training_leaves(after, clients):
    alone = fp.method("local_only").make(TASK, steps=STEPS, batch_size=30)
    expected = one_round(alone, clients).rows
    found = after["fedbn"][1].rows
    for leaf in NORM:
        np.testing.assert_allclose(found[leaf], expected[leaf], rtol=1e-6, atol=1e-7)
    assert not np.allclose(found[SCALE][0], found[SCALE][1])
    # The mean over clients is what SiloBN shares.
    mean = 0.75 * np.asarray(expected[SCALE][0]) + 0.25 * np.asarray(expected[SCALE][1])
    np.testing.assert_allclose(after["silobn"][1].shared[SCALE], mean, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["silobn", "fedbn"])
def test_an_unseen_client_estimates_its_own_statistics(after, clients, name):
    algorithm, state = after[name]
    third = clients._replace(ids=clients.ids.at[1].set(2))  # client 1's examples under an id that training never saw
    models = jax.jit(algorithm.personalize)(state, third, jax.random.key(0))
    known = models["batch_stats"]["odd"]["mean"][0]
    np.testing.assert_array_equal(known, state.rows[MEAN][0])
    expected = running(clients, 1, steps=25)
    np.testing.assert_allclose(models["batch_stats"]["odd"]["mean"][1], expected[MEAN], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(models["batch_stats"]["odd"]["var"][1], expected[VAR], rtol=1e-5, atol=1e-6)
    if name == "fedbn":
        np.testing.assert_array_equal(models["params"]["odd"]["scale"][1], np.ones(toys.FEATURES))
        np.testing.assert_array_equal(models["params"]["odd"]["bias"][1], np.zeros(toys.FEATURES))


def test_a_shift_of_the_features_disappears():
    """A normalisation without parameters comes first, so clients that differ by a shift train as if they did not."""
    algorithm = fp.method("fedbn").make(PLAIN_NORM, steps=4, batch_size=8)
    step = jax.jit(algorithm.step)
    data = toys.labelled(SIZES, seed=2)
    data["x"] = (np.round(data["x"] * 64) / 64).astype(np.float32)  # so that a shift of whole numbers is exact
    shifted = {**data, "x": data["x"] + np.array([[[3.0, -2, 0, 40]], [[-5.0, 1, 7, 0]]], np.float32)}
    state, moved = toys.start(algorithm, 2), toys.start(algorithm, 2)
    for _ in range(3):
        state, _ = step(state, fp.cohort_of(data, sizes=SIZES), jax.random.key(0))
        moved, _ = step(moved, fp.cohort_of(shifted, sizes=SIZES), jax.random.key(0))
    assert not np.allclose(
        moved.shared["params/head/kernel"], toys.start(algorithm, 2).shared["params/head/kernel"], atol=0.01
    )
    for name, x in state.shared.items():
        np.testing.assert_allclose(moved.shared[name], x, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(moved.rows[VAR], state.rows[VAR], rtol=2e-5)
    assert np.abs(np.asarray(moved.rows[MEAN] - state.rows[MEAN])).max() > 10


def test_fedbn_refuses_a_model_without_normalisation():
    with pytest.raises(ValueError, match=r"personal: norm\(\) selects no leaf .* personal=nothing"):
        fp.method("fedbn").make(toys.classifier())
    assert fp.method("fedbn").make(toys.classifier(), personal=fp.nothing).common is not None
