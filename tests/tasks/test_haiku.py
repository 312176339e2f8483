"""Haiku: functions and transformed pairs, averages and their counters."""

from __future__ import annotations

import haiku as hk
import jax
import numpy as np
import pytest

from fedjax_pers.paths import flatten
from fedjax_pers.tasks import haiku

EXAMPLE = (("x", (3,), "float32"), ("y", (), "int32"))
BATCH = {"x": np.array([[1.0, 2, 3], [0, 0, 1]], np.float32), "y": np.array([0, 1])}


def head(x):
    return hk.Linear(2, name="head")(x)


def normed(x, is_training):
    return head(hk.BatchNorm(True, True, decay_rate=0.9, name="norm")(x, is_training))


def test_a_function_and_its_transformed_forms_are_one_model():
    forms = [head, hk.transform(head), hk.transform_with_state(head)]
    losses = []
    for form in forms:
        task = haiku(form, EXAMPLE)
        variables = task.init(jax.random.key(0))
        assert list(flatten(variables)) == ["params/head/b", "params/head/w"]
        losses.append(task.loss(variables, BATCH, jax.random.key(0))[0].item())
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("form", [normed, hk.transform_with_state(normed)])
def test_averages_and_counters_are_tracked(form):
    task = haiku(form, EXAMPLE)
    variables = task.init(jax.random.key(0))
    _, tracked = task.loss(variables, BATCH, jax.random.key(0))
    assert set(tracked) == {
        f"state/norm/~/{average}_ema/{name}" for average in ("mean", "var") for name in ("average", "counter", "hidden")
    }
    before = flatten(variables)["state/norm/~/mean_ema/counter"]
    assert tracked["state/norm/~/mean_ema/counter"] == before + 1


def test_init_leaves_no_trace_of_the_examples_it_was_made_with():
    task = haiku(normed, EXAMPLE)
    state = task.init(jax.random.key(0))["state"]
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(state))


def test_nested_names_are_paths():
    task = haiku(lambda x: hk.nets.MLP([4, 2], name="mlp")(x), EXAMPLE)
    assert "params/mlp/~/linear_0/w" in flatten(task.init(jax.random.key(0)))
    assert dict(task.kinds)["params/mlp/~/linear_0"] == "Linear"


def test_wrong_arguments():
    with pytest.raises(ValueError, match="function: found 3; expected a function, or what hk.transform made of it"):
        haiku(3, EXAMPLE)
    with pytest.raises(ValueError, match=r"fails on a batch of 13 examples of x float32\[3\]"):
        haiku(lambda x: hk.Conv2D(2, 3)(x), EXAMPLE)
