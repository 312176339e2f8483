"""Who takes part in a round: frequencies against probabilities worked out by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_pers as fp
from fedjax_pers.simulate.compilations import compilations
from tests import toys

# Cohorts whose size is left to chance, or whose clients are not equally likely


def drawn(sampler, num_clients, rounds=2000):
    draw = jax.jit(jax.vmap(lambda round: sampler(jax.random.key(0), round, num_clients)))
    return np.asarray(draw(jnp.arange(rounds)))


def test_poisson_takes_every_client_independently():
    ids = drawn(fp.poisson(0.3), 20)
    there = (ids[:, :, None] == np.arange(20)).any(1)
    assert np.abs(there.mean(0) - 0.3).max() < 5 * np.sqrt(0.21 / 2000)
    together = (there[:, 0] & there[:, 1]).mean()
    assert abs(together - 0.09) < 5 * np.sqrt(0.09 * 0.91 / 2000)
    sizes = there.sum(1)
    assert abs(sizes.mean() - 6) < 5 * np.sqrt(4.2 / 2000) and abs(sizes.var() - 4.2) < 0.7
    assert (np.diff(ids, axis=1)[ids[:, 1:] < 20] > 0).all()


@pytest.mark.parametrize(("rate", "expected"), [(0.0, 0), (1.0, 7)])
def test_poisson_of_nobody_and_of_everybody(rate, expected):
    assert ((drawn(fp.poisson(rate), 7, 5) < 7).sum(1) == expected).all()


def test_one_client_is_drawn_in_proportion_to_its_weight():
    weights = np.array([1.0, 0.0, 3.0, 6.0])
    counts = np.bincount(drawn(fp.weighted(1, weights), 4, 4000).ravel(), minlength=4)
    np.testing.assert_allclose(counts / 4000, weights / 10, atol=0.04)


def test_the_second_client_is_drawn_in_proportion_among_those_left():
    ids = drawn(fp.weighted(2, [1.0, 2.0, 3.0]), 3, 6000)
    # P{0, 1} = 1/6 2/5 + 2/6 1/4, P{0, 2} = 1/6 3/5 + 3/6 1/3, P{1, 2} = 2/6 3/4 + 3/6 2/3
    for pair, expected in (((0, 1), 0.15), ((0, 2), 0.1 + 1 / 6), ((1, 2), 0.25 + 1 / 3)):
        assert abs((ids == pair).all(1).mean() - expected) < 5 * 0.5 / np.sqrt(6000)


def test_dropouts_are_nobody_and_the_others_stay():
    plain, ids = drawn(fp.uniform(5), 9), drawn(fp.dropouts(fp.uniform(5), 0.4), 9)
    assert abs((ids == 9).mean() - 0.4) < 5 * np.sqrt(0.24 / 10000)
    for before, after in zip(plain[:50], ids[:50], strict=True):
        assert set(after[after < 9]) <= set(before)


@pytest.mark.parametrize("sampler", [fp.poisson(0.3), fp.dropouts(fp.uniform(4), 0.5)], ids=["poisson", "dropouts"])
def test_runs_with_places_for_nobody(sampler):
    """On the host as on the device; in a round without anybody nothing moves, and the record says why."""
    federation, algorithm = toys.federation((5, 3, 4, 6, 2), (1,) * 5), toys.every_method("fedper")
    state, history = fp.run(algorithm, None, federation, 12, 0, sampler=sampler)
    streamed, _ = fp.run(algorithm, None, federation, 12, 0, sampler=sampler, data_on="host")
    toys.same_bits(state, streamed)
    there = (history.metrics.ids < 5).sum(1)
    np.testing.assert_array_equal(state.seen.sum(), there.sum())
    np.testing.assert_array_equal(history.metrics.transmitted.sum(1), there)


def test_a_round_of_nobody():
    federation, algorithm = toys.federation((5, 3), (1, 1)), toys.every_method("fedper")
    first = fp.start(algorithm, federation, 0)
    state, history = fp.run(algorithm, None, federation, 2, 0, sampler=fp.poisson(0.0))
    toys.same_bits((state.shared, state.rows), (first.shared, first.rows))
    assert (history.metrics.update_norm == 0).all() and not history.metrics.rejected.any()


BAD = [
    (lambda: fp.poisson(1.5), r"rate: found 1.5; allowed is 0 \.\. 1"),
    (lambda: fp.dropouts(fp.uniform(2), -0.1), "rate: found -0.1"),
    (lambda: fp.weighted(2, [1.0, np.nan]), "weights: client .*nan"),
    (lambda: fp.weighted(2, [1.0, -1.0]), "weights: client"),
    (lambda: fp.weighted(3, [1.0, 0.0, 2.0]), r"cohort_size: found 3; allowed are 1 \.\. 2"),
    (lambda: drawn(fp.weighted(1, [1.0, 2.0]), 3, 1), "weights: found 2; expected one for each of 3"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_settings_that_make_no_sense(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_method_draws_its_cohorts_in_its_own_way():
    """q-FFL in proportion to examples, 1 : 1 : 8; FedAvg uniformly."""
    federation, rounds = toys.federation((1, 1, 8)), 400
    options = {"cohort_size": 1, "evaluate_every": 0}
    _, history = fp.run(toys.every_method("qffl"), None, federation, rounds, 0, **options)
    shares = np.bincount(history.metrics.ids.ravel(), minlength=3) / rounds
    np.testing.assert_allclose(shares, [0.1, 0.1, 0.8], atol=5 * np.sqrt(0.16 / rounds))
    before = compilations()
    fp.run(toys.every_method("qffl"), None, federation, rounds, 0, **options)
    assert compilations() == before
    _, history = fp.run(toys.every_method("fedavg"), None, federation, rounds, 0, **options)
    shares = np.bincount(history.metrics.ids.ravel(), minlength=3) / rounds
    np.testing.assert_allclose(shares, [1 / 3] * 3, atol=5 * np.sqrt(0.22 / rounds))


def test_clients_without_examples_are_not_drawn_by_examples():
    with pytest.raises(ValueError, match=r"cohort_size: found 3; allowed are 1 .. 2, those of a weight"):
        fp.run(toys.every_method("qffl"), None, toys.federation((2, 0, 5, 0)), 1, cohort_size=3)


def test_a_way_of_drawing_that_is_none():
    with pytest.raises(ValueError, match="sampling: found 'exmaples'; allowed are examples, uniform. Did you mean"):
        fp.compose(toys.quadratic(), sampling="exmaples")
