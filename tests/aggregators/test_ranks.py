"""Order statistics against NumPy's sort, with ties, infinities, both zeros and clients that are not there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pers.aggregators.ranks import inner_mean, middle, ranked, sum_of_least

CASES = {
    "random": lambda rng, shape: rng.normal(size=shape),
    "ties": lambda rng, shape: np.round(rng.normal(size=shape)),
    "all equal": lambda rng, shape: np.full(shape, -2.5),
    "infinite": lambda rng, shape: np.where(rng.random(shape) < 0.3, np.inf, rng.normal(size=shape)),
    "both zeros": lambda rng, shape: rng.choice([-0.0, 0.0, 1e-45, -1e-45], shape),
    "all sizes": lambda rng, shape: rng.choice([-1, 1], shape) * 10.0 ** rng.integers(-38, 38, shape),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("clients", [1, 2, 7, 12])
def test_every_rank_is_that_of_a_sort(case, clients, dtype):
    with jax.enable_x64(dtype == "float64"):
        x = CASES[case](np.random.default_rng(clients), (clients, 5, 3)).astype(dtype)
        there = np.random.default_rng(0).random(clients) < 0.7
        there[0] = True
        ordered = np.sort(x[there], axis=0)
        for rank in range(there.sum()):
            found = jax.jit(ranked)(jnp.asarray(x), jnp.asarray(there), jnp.int32(rank))
            assert found.dtype == x.dtype
            np.testing.assert_array_equal(found, ordered[rank])


@pytest.mark.parametrize("case", ["random", "ties", "all equal", "both zeros"])
@pytest.mark.parametrize("clients", [1, 2, 3, 8, 11])
def test_medians_and_trimmed_means(case, clients):
    x = CASES[case](np.random.default_rng(clients), (clients, 40)).astype(np.float32)
    there = np.random.default_rng(1).random(clients) < 0.8
    there[-1] = True
    among = np.sort(x[there].astype(np.float64), axis=0)
    np.testing.assert_allclose(jax.jit(middle)(x, there), np.median(among, axis=0), rtol=1e-6, atol=1e-40)
    for cut in range((there.sum() + 1) // 2):
        expected = among[cut : len(among) - cut].mean(0)
        np.testing.assert_allclose(jax.jit(inner_mean)(x, there, cut), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", ["random", "ties", "all equal", "infinite", "both zeros"])
@pytest.mark.parametrize("clients", [1, 2, 7, 12])
def test_sums_of_the_least(case, clients):
    x = CASES[case](np.random.default_rng(clients), (clients, 40)).astype(np.float32)
    there = np.random.default_rng(0).random(clients) < 0.7
    there[0] = True
    among = np.sort(x[there].astype(np.float64), axis=0)
    for count in range(there.sum() + 1):
        found = jax.jit(sum_of_least)(x, there, jnp.int32(count))
        np.testing.assert_allclose(found, among[:count].sum(0), rtol=1e-5, atol=1e-6)


def test_the_median_of_large_numbers_does_not_overflow():
    x = jnp.array([[3e38], [3.2e38]])
    np.testing.assert_allclose(middle(x, jnp.array([True, True])), [3.1e38], rtol=1e-6)
