"""Equinox: modules of one example, state, and what cannot be done."""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pers.paths import flatten
from fedjax_pers.tasks import equinox

EXAMPLE = (("x", (3,), "float32"), ("y", (), "int32"))
BATCH = {"x": np.array([[1.0, 2, 3], [0, 0, 1]], np.float32), "y": np.array([0, 1])}


def test_a_sequential_with_state_and_dropout():
    def make(key):
        first, second = jax.random.split(key)
        norm = eqx.nn.BatchNorm(4, axis_name="batch", mode="ema")
        layers = [eqx.nn.Linear(3, 4, key=first), norm, eqx.nn.Lambda(jax.nn.relu), eqx.nn.Dropout(0.5)]
        return eqx.nn.Sequential([*layers, eqx.nn.Linear(4, 2, key=second)])

    task = equinox(make, EXAMPLE)
    variables = task.init(jax.random.key(0))
    _, tracked = task.loss(variables, BATCH, jax.random.key(0))
    weight, bias = (np.asarray(x) for x in (variables["params"].layers[0].weight, variables["params"].layers[0].bias))
    hidden = BATCH["x"] @ weight.T + bias
    means = [x for x in tracked.values() if x.shape == (4,)]
    np.testing.assert_allclose(means[0], hidden.mean(0), rtol=1e-5)
    np.testing.assert_allclose(means[1], hidden.var(0), rtol=1e-5)


def test_each_example_has_its_own_dropout():
    class Dropped(eqx.Module):
        scale: jax.Array
        dropout: eqx.nn.Dropout

        def __call__(self, x, key):
            return self.dropout(jnp.ones(64), key=key).reshape(2, 32).sum(1) * self.scale

    task = equinox(lambda key: Dropped(jnp.ones(()), eqx.nn.Dropout(0.5)), EXAMPLE)
    outputs, _ = task.apply(task.init(jax.random.key(0)), BATCH, jax.random.key(0))
    assert not np.array_equal(outputs[0], outputs[1])
    assert task.apply(task.init(jax.random.key(0)), BATCH, None)[0].tolist() == [[32, 32], [32, 32]]


def test_what_is_no_array_is_no_leaf_and_stays_as_it_is():
    class Scaled(eqx.Module):
        kernel: jax.Array
        activation: Callable
        factor: float

        def __call__(self, x):
            return self.factor * self.activation(x @ self.kernel)

    task = equinox(lambda key: Scaled(jnp.ones((3, 2)), jax.nn.relu, 2.0), EXAMPLE)
    variables = task.init(jax.random.key(0))
    assert list(flatten(variables)) == ["params/kernel"]
    assert task.apply(variables, BATCH, None)[0].tolist() == [[12, 12], [2, 2]]


def test_a_stateful_module_must_hand_its_state_through():
    class Forgetful(eqx.Module):
        norm: eqx.nn.BatchNorm

        def __call__(self, x):
            return x

    with pytest.raises(ValueError, match="Forgetful has stateful layers, but its __call__ takes no 'state'"):
        equinox(lambda key: Forgetful(eqx.nn.BatchNorm(3, axis_name="batch", mode="ema")), EXAMPLE)


def test_batch_normalisation_over_another_axis_is_an_error():
    def make(key):
        norm = eqx.nn.BatchNorm(3, axis_name="rows", mode="ema")
        return eqx.nn.Sequential([norm, eqx.nn.Linear(3, 2, key=key)])

    with pytest.raises(ValueError, match="the model in training fails .* rows"):
        equinox(make, EXAMPLE)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="make: found .* expected a function of a key that returns a module"):
        equinox(lambda key: jnp.zeros(3), EXAMPLE)
    with pytest.raises(ValueError, match=r"fails on a batch of 13 examples of x float32\[3\]"):
        equinox(lambda key: eqx.nn.Linear(4, 2, key=key), EXAMPLE)
