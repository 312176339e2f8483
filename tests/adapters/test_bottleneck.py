"""Bottlenecks behind the layers of any model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import fedjax_pers as fp
from fedjax_pers.adapters import bottleneck
from tests import toys
from tests.adapters.test_low_rank import IMAGES, TASKS, Convolution, batch_of, moved


def away_from_start(variables):
    return moved({name.replace("bottleneck_", "lora_"): x for name, x in variables.items()})


def test_a_dense_layer_against_float64():
    task = toys.classifier()
    adapted, batch = bottleneck(task, "**/hidden1/kernel", size=2), batch_of(toys.EXAMPLE)
    leaves = adapted.init(jax.random.key(0))
    toys.same_bits(jax.jit(adapted.metrics)(leaves, batch), jax.jit(task.metrics)(task.init(jax.random.key(0)), batch))

    leaves = {n.replace("lora_", "bottleneck_"): x for n, x in away_from_start(leaves).items()}
    wide = {name: np.asarray(x, np.float64) for name, x in leaves.items()}
    h = np.asarray(batch["x"], np.float64) @ wide["params/hidden1/kernel"]
    narrow = h @ wide["params/hidden1/bottleneck_down/kernel"] + wide["params/hidden1/bottleneck_bias/kernel"]
    h = h + np.maximum(narrow, 0) @ wide["params/hidden1/bottleneck_up/kernel"] + wide["params/hidden1/bias"]
    scores = np.maximum(h, 0) @ wide["params/head/kernel"] + wide["params/head/bias"]
    losses = np.log(np.exp(scores).sum(1)) - scores[np.arange(5), batch["y"]]
    np.testing.assert_allclose(adapted.metrics(leaves, batch)["loss"], losses, rtol=1e-5)


def test_channels_of_a_convolution():
    """A bottleneck on the channels is a network of 1 x 1 convolutions."""
    adapted, batch = bottleneck(fp.tasks.linen(Convolution(), IMAGES), "**/conv", size=2), batch_of(IMAGES)

    class WithBottleneck(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Conv(4, (3, 3), use_bias=False, name="conv")(x)
            x = x + nn.Conv(4, (1, 1), use_bias=False, name="up")(nn.relu(nn.Conv(2, (1, 1), name="down")(x)))
            x = x + self.param("bias", nn.initializers.zeros, (4,))
            return nn.Dense(3, name="head")(nn.relu(x).mean((1, 2)))

    leaves = {n.replace("lora_", "bottleneck_"): x for n, x in away_from_start(adapted.init(jax.random.key(0))).items()}
    of = {name.removeprefix("params/"): x for name, x in leaves.items()}
    written_out = {
        "conv": {"kernel": of["conv/kernel"]},
        "down": {"kernel": of["conv/bottleneck_down/kernel"][None, None], "bias": of["conv/bottleneck_bias/kernel"]},
        "up": {"kernel": of["conv/bottleneck_up/kernel"][None, None]},
        "bias": of["conv/bias"],
        "head": {"kernel": of["head/kernel"], "bias": of["head/bias"]},
    }
    task = fp.tasks.linen(WithBottleneck(), IMAGES)
    expected = task.metrics({"params": written_out}, batch)["loss"]
    np.testing.assert_allclose(adapted.metrics(leaves, batch)["loss"], expected, rtol=1e-5)


def test_weights_of_equinox_and_of_attention():
    for name in ("equinox", "attention, embedding"):
        make, example, _ = TASKS[name]
        on = "**/layers/0/weight" if name == "equinox" else "**/attention/out"
        task = make()
        adapted, batch = bottleneck(task, on, size=2), batch_of(example)
        leaves = adapted.init(jax.random.key(0))
        shapes = sorted(x.shape for n, x in leaves.items() if "bottleneck_up" in n)
        assert shapes == [(2, 5 if name == "equinox" else 8)]
        expected = jax.jit(task.metrics)(task.init(jax.random.key(0)), batch)
        toys.same_bits(jax.jit(adapted.metrics)(leaves, batch), expected)
        gradient = jax.grad(lambda v: adapted.loss(v, batch, jax.random.key(0))[0])(leaves)  # noqa: B023
        assert all(jnp.any(x != 0) for n, x in gradient.items() if "bottleneck_up" in n)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("dense", {"on": "**/hidden1/kernel", "size": 6}, "size: found 6; params/hidden1/kernel has 5 features"),
        ("dense", {"on": "**/hidden1/kernel", "size": 0}, "size: found 0"),
        ("dense", {"on": "**/bias", "size": 2}, "selects no floating weight"),
        ("recurrent", {"on": "**/cell/**", "size": 2}, "is not multiplied with anything in the open"),
        ("attention, embedding", {"on": "**/embedding", "size": 2}, "is not multiplied with anything in the open"),
    ],
)
def test_what_cannot_be(name, settings, message):
    with pytest.raises(ValueError, match=message):
        bottleneck(TASKS[name][0](), **settings)


def test_a_bottleneck_is_no_weight_of_the_model():
    adapted = bottleneck(toys.classifier(), "**/hidden1/kernel", size=2)
    with pytest.raises(ValueError, match="does not fit into the model's own weights"):
        adapted.plain(adapted.init(jax.random.key(0)))
