"""Flax Linen: programs used again, switches by name, several inputs, and errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from fedjax_pers.tasks import linen

EXAMPLE = (("x", (3,), "float32"), ("y", (), "int32"))
BATCH = {"x": np.ones((2, 3), np.float32), "y": np.array([0, 1])}


class Wide(nn.Module):
    widths: tuple[int, ...] = (4, 2)

    @nn.compact
    def __call__(self, x):
        for width in self.widths:
            x = nn.Dense(width)(x)
        return x


def test_equal_modules_give_the_same_task_and_program():
    task = linen(Wide((4, 2)), EXAMPLE)
    assert linen(Wide((4, 2)), [["x", [3], "float32"], ["y", [], "int64"]], num_classes=None) is task
    assert linen(Wide((5, 2)), EXAMPLE) is not task
    assert linen(Wide((4, 2)), (("x", (6,), "float32"), ("y", (), "int32"))) is not task
    step = jax.jit(lambda task, variables, key: task.loss(variables, BATCH, key), static_argnums=0)
    for made in (task, linen(Wide((4, 2)), EXAMPLE)):
        step(made, made.init(jax.random.key(0)), jax.random.key(0))
    assert step._cache_size() == 1


def test_a_module_that_cannot_be_compared_works_all_the_same():
    variables = linen(Wide([4, 2]), EXAMPLE).init(jax.random.key(0))
    assert variables["params"]["Dense_0"]["kernel"].shape == (3, 4)


@pytest.mark.parametrize("switch", ["train", "training", "is_training", "deterministic", "use_running_average"])
def test_the_switch_is_set_whatever_it_is_called(switch):
    off_in_training = switch in ("deterministic", "use_running_average")
    body = f"""
class Switched(nn.Module):
    @nn.compact
    def __call__(self, x, {switch}):
        x = nn.Dense(2, kernel_init=nn.initializers.zeros)(x)
        return x + (1.0 if {switch} else 0.0)
"""
    scope = {"nn": nn}
    exec(body, scope)
    task = linen(scope["Switched"](), EXAMPLE)
    variables = task.init(jax.random.key(0))
    training = task.apply(variables, BATCH, jax.random.key(0))[0].mean()
    evaluation = task.apply(variables, BATCH, None)[0].mean()
    assert (training, evaluation) == ((0, 1) if off_in_training else (1, 0))


def test_several_inputs_go_in_by_order_and_are_not_taken_for_switches():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, mask, x):  # "mask" is an input here
            return nn.Dense(2, use_bias=False, name="head")(x * mask)

    task = linen(Two(), (*EXAMPLE, ("gate", (3,), "float32")), inputs=("gate", "x"))
    batch = {**BATCH, "gate": np.array([[0, 0, 0], [1, 0, 0]], np.float32)}
    variables = task.init(jax.random.key(0))
    outputs, _ = task.apply(variables, batch, jax.random.key(0))
    kernel = variables["params"]["head"]["kernel"]
    np.testing.assert_allclose(outputs, np.stack([np.zeros(2), kernel[0]]), rtol=1e-6)


def test_every_random_stream_has_its_own_key_from_the_steps():
    class Streams(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            scale = self.param("scale", nn.initializers.ones, (2,))
            if not train:
                return scale * x[:, :2]
            first = jax.random.uniform(self.make_rng("noise"), (len(x), 1))
            second = jax.random.uniform(self.make_rng("dropout"), (len(x), 1))
            return scale * jnp.concatenate([first, second], axis=1)

    task = linen(Streams(), EXAMPLE)
    variables = task.init(jax.random.key(0))
    a, b = (np.asarray(task.apply(variables, BATCH, jax.random.key(k))[0]) for k in (0, 1))
    assert len(np.unique([a, b])) == 8


def test_statistics_keep_their_width_when_features_are_wider():
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            return nn.Dense(2)(nn.BatchNorm(not train)(x))

    task = linen(Normed(), EXAMPLE)
    variables = task.init(jax.random.key(0))
    with jax.enable_x64(True):
        _, tracked = task.loss(variables, {**BATCH, "x": np.ones((2, 3))}, jax.random.key(0))
    assert {x.dtype for x in tracked.values()} == {jnp.dtype("float32")}


def test_a_sequence_model_of_token_labels():
    class Bigram(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Embed(7, 7, name="table")(x)

    task = linen(Bigram(), (("x", (5,), "int32"), ("y", (5,), "int32")))
    variables = task.init(jax.random.key(0))
    table = np.asarray(variables["params"]["table"]["embedding"], np.float64)
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 7, (2, 3, 5))
    outputs = table[x]
    each = np.log(np.exp(outputs).sum(-1)) - np.take_along_axis(outputs, y[..., None], -1)[..., 0]
    loss, _ = task.loss(variables, {"x": x, "y": y, "weight": np.array([1.0, 0, 1])}, jax.random.key(0))
    np.testing.assert_allclose(loss, (each[0].mean() + each[2].mean()) / 2, rtol=1e-5)
    assert task.num_classes == 7
    assert dict(task.kinds)["params/table"] == "Embed"


def test_a_module_that_fails_says_on_which_examples():
    class Convolution(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Conv(4, (3, 3))(x).reshape(len(x), 1, 2)[:, 0]

    with pytest.raises(ValueError, match=r"the model fails on a batch of 13 examples of x float32\[3\], y int32\[\]"):
        linen(Convolution(), EXAMPLE)


def test_a_mask_that_would_broadcast_along_the_features_is_an_error():
    class Careless(nn.Module):
        @nn.compact
        def __call__(self, x, train, mask):
            return nn.Dense(2)(nn.BatchNorm(not train)(x, mask=mask))

    with pytest.raises(ValueError, match="the model in training fails"):
        linen(Careless(), EXAMPLE)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="module: found .* expected an instance of flax.linen.Module"):
        linen(Wide, EXAMPLE)
    with pytest.raises(ValueError, match=r"inputs: found 'X'; allowed are x, y"):
        linen(Wide(), EXAMPLE, inputs="X")
    with pytest.raises(ValueError, match="inputs: found none"):
        linen(Wide(), EXAMPLE, inputs=())
    with pytest.raises(ValueError, match="Did you mean 'squared_error'"):
        linen(Wide(), EXAMPLE, criterion="squared_eror")
