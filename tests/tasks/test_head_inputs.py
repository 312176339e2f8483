"""The features that enter a head, read from losses and metrics of every library, against numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_pers as fp
from fedjax_pers.head_inputs import from_head_input, with_head_input
from fedjax_pers.paths import select
from fedjax_pers.presets import head, model_of
from tests import toys


def head_of(task, variables):
    return select(head(1), fp.flatten(variables), model_of(task))


def features_by_hand(weights, batch):
    w1, b1, *_ = weights
    return np.tanh(batch["x"] @ w1 + b1)


def test_features_of_every_library(plain, precise, batch):
    variables = precise(plain.task)
    observed = with_head_input(plain.task.metrics, head_of(plain.task, variables))
    metrics, features = jax.jit(observed)(variables, batch)
    np.testing.assert_allclose(features, features_by_hand(plain.weights(variables), batch), rtol=1e-12)
    toys.same_bits(metrics, jax.jit(plain.task.metrics)(variables, batch))


def test_other_features_in_their_place(plain, precise, batch):
    variables = precise(plain.task)
    changed = from_head_input(plain.task.apply, head_of(plain.task, variables))
    features = np.random.default_rng(2).normal(size=features_by_hand(plain.weights(variables), batch).shape)
    outputs, _ = jax.jit(lambda *arguments: changed(*arguments, None))(variables, batch, features)
    *_, w2, b2 = plain.weights(variables)
    np.testing.assert_allclose(outputs, features @ w2 + b2, rtol=1e-12)


def test_gradients_pass_through_features(plain, precise, batch):
    variables = precise(plain.task)
    observed = with_head_input(plain.task.loss, head_of(plain.task, variables))
    key = jax.random.key(0)
    total = jax.jit(jax.grad(lambda v: observed(v, batch, key)[1].sum(), allow_int=True))
    d_w1, d_b1, d_w2, d_b2 = plain.weights(total(variables))
    slope = 1 - features_by_hand(plain.weights(variables), batch) ** 2
    np.testing.assert_allclose(d_w1, batch["x"].T @ slope, rtol=1e-10)
    np.testing.assert_allclose(d_b1, slope.sum(0), rtol=1e-10)
    assert not d_w2.any() and not d_b2.any()


def test_in_training_they_are_those_that_the_loss_is_made_of(noisy, precise, batch):
    """Dropout included: the loss follows from the features by hand."""
    variables = precise(noisy.task)
    observed = with_head_input(noisy.task.loss, head_of(noisy.task, variables))
    (loss, _), features = jax.jit(observed)(variables, batch, jax.random.key(3))
    *_, w2, b2 = noisy.weights(variables)
    outputs = np.asarray(features) @ w2 + b2
    losses = np.log(np.exp(outputs).sum(1)) - outputs[np.arange(6), batch["y"]]
    assert (np.asarray(features) == 0).any()
    np.testing.assert_allclose(loss, (losses * batch["weight"]).sum() / 4, rtol=1e-10)


IMAGES = (("x", (8, 8, 3), "float32"), ("y", (), "int32"))


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"params/conv1/kernel"}, r"head: its first operation is conv_general_dilated on examples \[\(2, 8, 8, 3\)\]"),
        ({"params/head/bias"}, r"head: its first operation is add on examples \[\(2, 5\)\]"),
        (set(), "head: its leaves never meet the examples"),
    ],
)
def test_what_is_no_dense_layer_is_refused(chosen, message):
    task = fp.tasks.from_model(IMAGES, "cnn", num_classes=5)
    batch = {"x": jnp.zeros((2, 8, 8, 3)), "y": jnp.zeros(2, jnp.int32)}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            with_head_input(task.metrics, frozenset(chosen)), jax.eval_shape(task.init, jax.random.key(0)), batch
        )
