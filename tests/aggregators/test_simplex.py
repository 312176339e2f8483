"""Projections onto the simplex against the threshold that sorting finds in float64, and against optax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_pers.aggregators.simplex import onto_simplex

ROWS = {
    "random": lambda rng, n: rng.normal(size=n),
    "narrow": lambda rng, n: rng.normal(size=n) * 1e-3,
    "wide": lambda rng, n: rng.normal(size=n) * 1e6,
    "ties": lambda rng, n: rng.integers(0, 3, n) / 4,
    "constant": lambda rng, n: np.full(n, -7.25),
    "one-hot": lambda rng, n: 1.0 * (np.arange(n) == n // 2),
    "inside already": lambda rng, n: rng.dirichlet(np.ones(n)),
    "far below": lambda rng, n: np.where(rng.random(n) < 0.5, -1e30, rng.normal(size=n)),
    "geometric": lambda rng, n: -(0.5 ** np.arange(n)),
    "many just below one": lambda rng, n: np.where(np.arange(n) == 0, 0.9, -1e-5 * rng.random(n)),
}


def by_sorting(x: np.ndarray) -> np.ndarray:
    """Held, Wolfe, Crowder 1974: the largest k with x_(k) > (x_(1) + ... + x_(k) - 1) / k."""
    x = x - x.max()
    largest = np.sort(x)[::-1]
    thresholds = (np.cumsum(largest) - 1) / np.arange(1, len(x) + 1)
    return np.maximum(x - thresholds[np.flatnonzero(largest > thresholds)[-1]], 0)


@pytest.mark.parametrize("n", [1, 2, 7, 1000])
def test_against_sorting_in_float64_and_optax(n):
    rng = np.random.default_rng(n)
    x = np.stack([make(rng, n) for make in ROWS.values()]).astype(np.float32)
    found = np.asarray(jax.jit(onto_simplex)(x))
    for name, row, one in zip(ROWS, x, found, strict=True):
        # Numbers less than 1 below the largest count, and are no more exact than it.
        atol = max(np.spacing(np.abs(row).max(where=row > row.max() - 1, initial=0)), 1e-7)
        np.testing.assert_allclose(one, by_sorting(row.astype(np.float64)), rtol=1e-6, atol=atol, err_msg=name)
        if name not in ("wide", "far below"):  # whose cumulative sums have lost the digits
            np.testing.assert_allclose(one, optax.projections.projection_simplex(row), rtol=1e-5, atol=2e-6)
    np.testing.assert_array_less(-1e-30, found)
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-6)


def test_minus_infinity_gets_nothing():
    found = onto_simplex(jnp.array([[-jnp.inf, 0.25, 0.5], [3.0, -jnp.inf, -jnp.inf]]))
    np.testing.assert_allclose(found, [[0, 0.375, 0.625], [1, 0, 0]], rtol=1e-6)


def test_what_is_not_a_number_ends():
    found = onto_simplex(jnp.array([[jnp.nan, 1.0], [0.5, 0.5]]))
    np.testing.assert_array_equal(found[1], [0.5, 0.5])
