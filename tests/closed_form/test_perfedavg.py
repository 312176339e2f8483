"""Per-FedAvg against the meta-gradient written out: on quadratics by hand, on a logistic model with numpy's Hessian."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_pers as fp
from tests import toys

H, A = np.array([1.0, 4.0]), np.array([0.0, 1.0])
LR, ALPHA = 0.1, 0.15

# By how much a meta step at w exceeds that of FedAvg at w: grad F = factor * h (w - a).
FACTORS = {
    "perfedavg": (1 - ALPHA * H) ** 2,
    "perfedavg_fo": 1 - ALPHA * H,
    "perfedavg_hf": (1 - ALPHA * H) ** 2,  # a central difference of a linear gradient is exact
}


@pytest.mark.parametrize("name", FACTORS)
def test_on_quadratics(name):
    run = toys.experiment(name, toys.quadratic(), batch_size=1, steps=7, alpha=ALPHA)
    rho = (1 - LR * FACTORS[name] * H) ** 7
    one, many = (run(toys.clients(), rounds)[0] for rounds in (1, 300))
    assert float(one.shared["w"]) == pytest.approx(np.mean((1 - rho) * A), abs=3e-6)
    expected = ((1 - rho) * A).sum() / (1 - rho).sum()
    assert float(many.shared["w"]) == pytest.approx(expected, abs=2e-5)

    algorithm = fp.method(name).make(toys.quadratic(), batch_size=1, steps=7, alpha=ALPHA)
    own = jax.jit(algorithm.personalize)(many, toys.clients(), jax.random.key(0))["w"]
    np.testing.assert_allclose(own, A + (1 - ALPHA * H) * (expected - A), atol=2e-5)


# A logistic model of two parameters, five examples, one full-batch step.

X = np.array([[1.0, 0.5], [-1.5, 1.0], [0.3, -2.0], [2.0, 1.0], [-0.7, -0.4]])
Y = np.array([1.0, -1.0, 1.0, -1.0, -1.0])
START = (0.8, -0.6)


def logistic_loss(variables, batch):
    return jnp.logaddexp(0.0, -batch["y"] * (batch["x"] @ variables["w"]))


def gradient(w):
    return -(Y / (1 + np.exp(Y * (X @ w)))) @ X / len(Y)


def hessian(w):
    slope = 1 / (1 + np.exp(-Y * (X @ w)))
    return (X.T * (slope * (1 - slope))) @ X / len(Y)


def meta_step(w, alpha, lr, second_order=True):
    g = gradient(w - alpha * gradient(w))
    return w - lr * (g - alpha * hessian(w) @ g if second_order else g)


@pytest.mark.parametrize(
    ("name", "second_order", "atol"),
    [("perfedavg", True, 1e-6), ("perfedavg_fo", False, 1e-6), ("perfedavg_hf", True, 1e-4)],
)
def test_on_a_logistic_model(name, second_order, atol):
    task = toys.plain_task(logistic_loss, w=START)
    cohort = toys.clients({"x": X[None], "y": Y[None]})
    run = toys.experiment(name, task, num_clients=1, batch_size=5, steps=1)
    for alpha in (0.0, 0.5, 2.0):
        state, _ = run(cohort, 1, alpha=alpha, lr=0.4)
        expected = meta_step(np.array(START), alpha, 0.4, second_order)
        np.testing.assert_allclose(state.shared["w"], expected, atol=atol)
    # The three differ here by much more than the tolerance.
    assert np.abs(meta_step(np.array(START), 2.0, 0.4) - meta_step(np.array(START), 2.0, 0.4, False)).max() > 1e-2


def test_the_three_batches_are_drawn_independently():
    examples = {"a": [[0.0, 1.0]], "h": [[1.0, 3.0]]}

    @jax.jit
    @jax.vmap
    def one_step(seed):
        algorithm = fp.method("perfedavg").make(toys.quadratic(2.0), batch_size=1, steps=1, alpha=ALPHA)
        return algorithm.step(toys.start(algorithm, 1), toys.clients(examples), jax.random.key(seed))[0].shared["w"]

    def expected(inner, outer, second):
        a, h = np.array([0.0, 1.0]), np.array([1.0, 3.0])
        adapted = 2.0 - ALPHA * h[inner] * (2.0 - a[inner])
        return 2.0 - LR * (1 - ALPHA * h[second]) * h[outer] * (adapted - a[outer])

    table = np.array([expected(*each) for each in itertools.product((0, 1), repeat=3)])
    found = np.asarray(one_step(jnp.arange(256)))
    nearest = np.abs(found[:, None] - table).argmin(axis=1)
    np.testing.assert_allclose(found, table[nearest], atol=1e-6)
    # 32 of each combination are expected, with a standard deviation of 5.3.
    assert (np.abs(np.bincount(nearest, minlength=8) - 32) < 22).all()
