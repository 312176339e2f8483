"""Flax NNX: collections, random state, lists of layers, recurrent layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from fedjax_pers.paths import flatten
from fedjax_pers.tasks import nnx

EXAMPLE = (("x", (3,), "float32"), ("y", (), "int32"))
BATCH = {"x": np.ones((2, 3), np.float32), "y": np.array([0, 1])}


class Calls(flax_nnx.Variable):
    pass


class Counting(flax_nnx.Module):
    def __init__(self, rngs):
        self.layers = flax_nnx.List([flax_nnx.Linear(3, 3, rngs=rngs), flax_nnx.Linear(3, 2, rngs=rngs)])
        self.low_rank = flax_nnx.LoRA(2, 1, 2, rngs=rngs)
        self.calls = Calls(jnp.zeros((), jnp.int32))
        self.dropout = flax_nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        self.calls[...] += 1
        for layer in self.layers:
            x = layer(x)
        return self.low_rank(self.dropout(x))


def test_parameters_of_every_kind_are_params_and_other_variables_are_tracked():
    task = nnx(Counting, EXAMPLE)
    variables = task.init(jax.random.key(0))
    (other,) = set(variables) - {"params"}
    assert set(flatten(variables["params"])) == {
        "layers/0/bias", "layers/0/kernel", "layers/1/bias", "layers/1/kernel", "low_rank/lora_a", "low_rank/lora_b",
    }  # fmt: skip
    _, tracked = task.loss(variables, BATCH, jax.random.key(0))
    assert tracked == {f"{other}/calls": 1} and tracked[f"{other}/calls"].dtype == jnp.int32
    assert task.statistics.select(flatten(variables)) == {f"{other}/calls"}


def test_dropout_layers_draw_apart_from_one_another():
    class Twice(flax_nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = (flax_nnx.Dropout(0.5, rngs=rngs) for _ in range(2))
            self.scale = flax_nnx.Param(jnp.ones(64))

        def __call__(self, x):
            ones = jnp.ones((len(x), 64))
            return jnp.stack([self.first(ones), self.second(ones)], axis=-1).sum(1) * self.scale[0]

    task = nnx(Twice, EXAMPLE)
    outputs, _ = task.apply(task.init(jax.random.key(0)), {**BATCH, "weight": np.ones(2)}, jax.random.key(0))
    assert len(np.unique(outputs)) > 1 and not np.array_equal(outputs[:, 0], outputs[:, 1])


def test_a_recurrent_layer_needs_no_key_in_evaluation():
    class Recurrent(flax_nnx.Module):
        def __init__(self, rngs):
            self.memory = flax_nnx.RNN(flax_nnx.SimpleCell(3, 4, rngs=rngs), rngs=rngs)
            self.head = flax_nnx.Linear(4, 2, rngs=rngs)

        def __call__(self, x):
            return self.head(self.memory(x)[:, -1])

    task = nnx(Recurrent, (("x", (6, 3), "float32"), ("y", (), "int32")))
    variables = task.init(jax.random.key(0))
    batch = {"x": np.random.default_rng(0).normal(size=(2, 6, 3)).astype(np.float32), "y": np.array([0, 1])}
    leaves = {path: np.asarray(leaf, np.float64) for path, leaf in flatten(variables).items()}
    hidden = np.zeros((2, 4))
    for t in range(6):
        hidden = np.tanh(
            batch["x"][:, t] @ leaves["params/memory/cell/dense_i/kernel"]
            + leaves["params/memory/cell/dense_i/bias"]
            + hidden @ leaves["params/memory/cell/dense_h/kernel"]
        )
    expected = hidden @ leaves["params/head/kernel"] + leaves["params/head/bias"]
    np.testing.assert_allclose(task.apply(variables, batch, None)[0], expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(task.apply(variables, batch, jax.random.key(1))[0], expected, rtol=1e-4, atol=1e-6)


def test_a_module_without_variables_of_its_own_collections_has_params_alone():
    task = nnx(lambda rngs: flax_nnx.Linear(3, 2, rngs=rngs), EXAMPLE)
    assert set(task.init(jax.random.key(0))) == {"params"}


def test_wrong_arguments():
    with pytest.raises(ValueError, match="make: found .* expected a function of rngs that returns a flax.nnx.Module"):
        nnx(lambda rngs: jnp.zeros(3), EXAMPLE)
    with pytest.raises(ValueError, match=r"fails on a batch of 13 examples of x float32\[3\]"):
        nnx(lambda rngs: flax_nnx.Linear(4, 2, rngs=rngs), EXAMPLE)
    with pytest.raises(ValueError, match="num_classes: found 3"):
        nnx(lambda rngs: flax_nnx.Linear(3, 2, rngs=rngs), EXAMPLE, num_classes=3)
