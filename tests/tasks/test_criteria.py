"""Criteria against numpy, and the shapes that would broadcast silently."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pers.tasks import binary_cross_entropy, cross_entropy, squared_error
from fedjax_pers.tasks.criteria import as_criterion

OUTPUTS = np.array([[2.0, 0.0, -1.0], [0.5, 0.5, 3.0]], np.float32)


def test_cross_entropy_of_two_examples_by_hand():
    batch = {"y": np.array([0, 1])}
    expected = [np.log(np.exp(2) + 1 + np.exp(-1)) - 2, np.log(2 * np.exp(0.5) + np.exp(3)) - 0.5]
    np.testing.assert_allclose(cross_entropy.loss(OUTPUTS, batch), expected, rtol=1e-6)
    metrics = cross_entropy.metrics(OUTPUTS, batch)
    assert set(metrics) == {"loss", "accuracy"}
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)
    assert metrics["accuracy"].tolist() == [1.0, 0.0]


def test_cross_entropy_of_a_sequence_is_the_mean_over_its_positions():
    outputs = np.stack([OUTPUTS, OUTPUTS])  # [batch 2, time 2, classes 3]
    batch = {"y": np.array([[0, 2], [1, 2]])}
    each = np.log(np.exp(outputs).sum(-1)) - np.take_along_axis(outputs, batch["y"][..., None], -1)[..., 0]
    np.testing.assert_allclose(cross_entropy.loss(outputs, batch), each.mean(1), rtol=1e-6)
    assert cross_entropy.metrics(outputs, batch)["accuracy"].tolist() == [1.0, 0.5]


def test_cross_entropy_of_wide_outputs_stays_finite():
    loss = cross_entropy.loss(np.array([[1e4, -1e4]], np.float32), {"y": np.array([1])})
    assert loss.tolist() == [2e4]


def test_half_width_outputs_are_judged_in_float32():
    loss = cross_entropy.loss(jnp.asarray(OUTPUTS, jnp.bfloat16), {"y": np.array([0, 1])})
    assert loss.dtype == jnp.float32


def test_squared_error_is_the_mean_over_the_targets_of_an_example():
    outputs, targets = np.array([[1.0, 2.0], [0.0, -1.0]]), np.array([[0.0, 4.0], [0.0, -1.0]])
    assert squared_error.loss(outputs, {"y": targets}).tolist() == [2.5, 0.0]
    assert squared_error.metrics(outputs, {"y": targets})["squared_error"].tolist() == [2.5, 0.0]
    assert set(squared_error.metrics(outputs, {"y": targets})) == {"loss", "squared_error"}


def test_one_output_for_one_target_does_not_broadcast():
    assert squared_error.loss(np.array([[1.0], [5.0]]), {"y": np.array([0.0, 3.0])}).tolist() == [1.0, 4.0]
    with pytest.raises(ValueError, match=r"squared_error: found outputs \(2,\) for targets y \(2, 1\)"):
        squared_error.loss(np.array([1.0, 5.0]), {"y": np.array([[0.0], [3.0]])})


def test_binary_cross_entropy_by_hand():
    outputs, targets = np.array([0.0, 2.0, -3.0], np.float32), np.array([1, 1, 1])
    np.testing.assert_allclose(
        binary_cross_entropy.loss(outputs, {"y": targets}), np.log1p(np.exp(-outputs)), rtol=1e-6
    )
    np.testing.assert_allclose(
        binary_cross_entropy.loss(outputs, {"y": 0 * targets}), np.log1p(np.exp(outputs)), rtol=1e-6
    )
    assert binary_cross_entropy.metrics(outputs, {"y": targets})["accuracy"].tolist() == [0.0, 1.0, 0.0]


def test_gradients_of_the_losses_are_the_known_ones():
    y = np.array([0, 1])
    softmax = np.exp(OUTPUTS) / np.exp(OUTPUTS).sum(1, keepdims=True)
    found = jax.grad(lambda o: cross_entropy.loss(o, {"y": y}).sum())(OUTPUTS)
    np.testing.assert_allclose(found, softmax - np.eye(3)[y], rtol=1e-5, atol=1e-7)
    found = jax.grad(lambda o: squared_error.loss(o, {"y": np.array([1.0, 1.0])}).sum())(np.array([3.0, 0.0]))
    assert found.tolist() == [4.0, -2.0]


@pytest.mark.parametrize("labels", [np.array([0.0, 1.0]), np.array([True, False])])
def test_labels_of_cross_entropy_are_whole_numbers(labels):
    with pytest.raises(ValueError, match="cross_entropy: found labels y of dtype"):
        cross_entropy.loss(OUTPUTS, {"y": labels})


def test_labels_must_have_the_shape_of_the_outputs_without_classes():
    with pytest.raises(ValueError, match=r"found outputs \(2, 3\) for labels y \(2, 1\)"):
        cross_entropy.loss(OUTPUTS, {"y": np.array([[0], [1]])})


def test_a_misspelt_criterion_names_the_nearest():
    with pytest.raises(ValueError, match=r"criterion: found 'crossentropy'.*Did you mean 'cross_entropy'"):
        as_criterion("crossentropy")
