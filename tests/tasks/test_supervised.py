"""The weighted mean, and the checks on a hand-written model before any work starts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pers.paths import as_selector
from fedjax_pers.tasks import Criterion, supervised, weighted_mean

EXAMPLE = (("x", (3,), "float32"), ("y", (), "int32"))


def init(key):
    return {"w": jnp.zeros((3, 2)), "seen": 0}


def apply(variables, batch, key):
    tracked = {} if key is None else {"seen": variables["seen"] + len(batch["x"])}
    return batch["x"] @ variables["w"], tracked


def built(**changed):
    return supervised(
        **{"init": init, "apply": apply, "example": EXAMPLE, "statistics": as_selector("seen"), **changed}
    )


def test_weighted_mean_by_hand():
    assert weighted_mean(jnp.array([1.0, 4.0, 7.0]), jnp.array([3.0, 1.0, 0.0])) == 1.75


def test_weighted_mean_of_nothing_is_zero_with_gradient_zero():
    value, gradient = jax.value_and_grad(weighted_mean)(jnp.array([1.0, jnp.inf, jnp.nan]), jnp.zeros(3))
    assert value == 0 and gradient.tolist() == [0, 0, 0]


def test_weighted_mean_does_not_look_at_values_of_weight_zero():
    value, gradient = jax.value_and_grad(weighted_mean)(jnp.array([2.0, jnp.nan]), jnp.array([0.5, 0.0]))
    assert value == 2 and gradient.tolist() == [1, 0]


def test_weight_may_be_boolean_or_of_another_width():
    assert weighted_mean(jnp.array([1.0, 5.0], jnp.bfloat16), jnp.array([True, True])).dtype == jnp.bfloat16
    assert weighted_mean(jnp.array([1.0, 5.0]), jnp.array([1, 1])) == 3


def test_a_counter_is_tracked_by_path_and_keeps_its_dtype():
    task = built()
    batch = {"x": np.ones((4, 3), np.float32), "y": np.zeros(4, int)}
    variables = task.init(jax.random.key(0))
    _, tracked = task.loss(variables, batch, jax.random.key(0))
    assert tracked == {"seen": 4} and tracked["seen"].dtype == variables["seen"].dtype == jnp.int32
    _, tracked = task.loss(variables, {**batch, "weight": np.zeros(4)}, jax.random.key(0))
    assert tracked == {"seen": 0}


def test_tracked_may_be_flat_by_path():
    def nested(key):
        return {"w": jnp.zeros((3, 2)), "inner": {"seen": jnp.zeros(())}}

    def flat(variables, batch, key):
        return batch["x"] @ variables["w"], {} if key is None else {"inner/seen": variables["inner"]["seen"] + 1}

    task = built(init=nested, apply=flat)
    _, tracked = task.loss(nested(None), {"x": np.ones((2, 3)), "y": np.zeros(2, int)}, jax.random.key(0))
    assert tracked == {"inner/seen": 1}


def test_a_criterion_of_ones_own():
    criterion = Criterion(
        loss=lambda outputs, batch: outputs[:, 0],
        metrics=lambda outputs, batch: {"loss": outputs[:, 0]},
        classes=lambda outputs: None,
    )
    task = built(criterion=criterion)
    variables = {"w": jnp.ones((3, 2)), "seen": jnp.int32(0)}
    loss, _ = task.loss(variables, {"x": np.array([[1.0, 2, 3], [0, 0, 1]]), "y": np.zeros(2, int)}, jax.random.key(0))
    assert loss == 3.5 and task.num_classes is None


def test_the_number_of_classes_is_the_width_of_the_outputs():
    assert built().num_classes == 2 and built(num_classes=2).num_classes == 2
    with pytest.raises(ValueError, match="num_classes: found 3, but the model tells 2 classes apart"):
        built(num_classes=3)


def test_a_number_of_classes_where_y_is_no_class():
    example = (("x", (3,), "float32"), ("y", (2,), "float32"))
    assert built(criterion="squared_error", example=example).num_classes is None
    with pytest.raises(ValueError, match="for this criterion y is no class"):
        built(criterion="squared_error", example=example, num_classes=2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"criterion": "cross_entrop"}, "Did you mean 'cross_entropy'"),
        ({"example": (("x", (4,), "float32"), ("y", (), "int32"))}, r"training fails .* x float32\[4\], y int32\[\]"),
        ({"example": (("x", (3,), "float32"), ("z", (), "int32"))}, "the criterion fails.*KeyError: 'y'"),
        ({"example": (("x", (3,), "float32"), ("y", (), "float32"))}, "labels y of dtype float32"),
        ({"example": (("x", (3,), "float32"), ("y", (1,), "int32"))}, r"for labels y \(13, 1\)"),
        ({"example": (("x", (3,), "float32"), ("weight", (), "float32"))}, "'weight' is taken"),
        ({"example": (("x", (3,), "float32"), ("x", (3,), "float32"))}, "expected each once"),
        ({"example": ()}, "expected each once"),
        ({"example": {"x": np.zeros(3)}}, r"example: found .* expected \(field, shape, dtype\)"),
        ({"example": (("x", (3,), "float33"),)}, r"example: found .* expected \(field, shape, dtype\)"),
        ({"statistics": as_selector([])}, r"statistics: selects \[\], but training tracks \['seen'\]"),
        ({"statistics": as_selector(["seen", "w"])}, r"selects \['seen', 'w'\], but training tracks \['seen'\]"),
        ({"apply": lambda v, b, k: (b["x"] @ v["w"], {"sen": 1})}, r"found \['sen'\], which are no leaves"),
        ({"apply": lambda v, b, k: (b["x"] @ v["w"], {"seen": jnp.zeros(2)})}, r"found seen of shape \(2,\)"),
        ({"init": lambda key: 1 / 0}, "initialising the model fails .*ZeroDivisionError"),
    ],
)  # fmt: skip
def test_what_does_not_fit_fails_when_the_task_is_made(changed, message):
    with pytest.raises(ValueError, match=message):
        built(**changed)


def test_a_criterion_that_averages_over_the_batch_is_refused():
    criterion = Criterion(lambda o, b: o.mean(), lambda o, b: {"loss": o.mean()}, lambda o: None)
    with pytest.raises(ValueError, match=r"criterion: found the loss of shape \(\); expected \[batch\]"):
        built(criterion=criterion)
    criterion = Criterion(lambda o, b: o[:, 0], lambda o, b: {"area": o.mean()}, lambda o: None)
    with pytest.raises(ValueError, match=r"criterion: found area of shape \(\); expected \[batch\]"):
        built(criterion=criterion)
