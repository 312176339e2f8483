"""The same small models in every library, and what is needed to compare them with numpy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from fedjax_pers import tasks
from fedjax_pers.base import Task

FEATURES, HIDDEN, CLASSES = 3, 4, 5
EXAMPLE = (("x", (FEATURES,), "float32"), ("y", (), "int32"))


class Small(NamedTuple):
    """A model in one library: ``weights(tree)`` are W1 ``[in, out]``, b1, W2, b2 of its variables or gradients."""

    task: Task
    weights: Callable[[Any], list[np.ndarray]]


class LinenSmall(nn.Module):
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, train):
        x = nn.tanh(nn.Dense(HIDDEN, name="hidden")(x))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(CLASSES, name="head")(x)


class NnxSmall(nnx.Module):
    def __init__(self, rngs, dropout=0.0):
        self.hidden = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.head = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(nnx.tanh(self.hidden(x))))


class EquinoxSmall(eqx.Module):
    hidden: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, key, dropout=0.0):
        first, second = jax.random.split(key)
        self.hidden = eqx.nn.Linear(FEATURES, HIDDEN, key=first)
        self.dropout = eqx.nn.Dropout(dropout)
        self.head = eqx.nn.Linear(HIDDEN, CLASSES, key=second)

    def __call__(self, x, key):
        return self.head(self.dropout(jnp.tanh(self.hidden(x)), key=key))


def haiku_small(dropout):
    def function(x, is_training):
        x = jnp.tanh(hk.Linear(HIDDEN, name="hidden")(x))
        x = hk.dropout(hk.next_rng_key(), dropout, x) if is_training else x
        return hk.Linear(CLASSES, name="head")(x)

    return function


def by_name(*names):
    return lambda v: [np.asarray(v["params"][layer][name]) for layer in ("hidden", "head") for name in names]


@functools.cache
def small(library: str, dropout: float = 0.0) -> Small:
    if library == "linen":
        task = tasks.linen(LinenSmall(dropout), EXAMPLE)
        return Small(task, by_name("kernel", "bias"))
    if library == "nnx":
        task = tasks.nnx(lambda rngs: NnxSmall(rngs, dropout), EXAMPLE)
        return Small(task, by_name("kernel", "bias"))
    if library == "haiku":
        task = tasks.haiku(haiku_small(dropout), EXAMPLE)
        return Small(task, by_name("w", "b"))
    task = tasks.equinox(lambda key: EquinoxSmall(key, dropout), EXAMPLE)

    def weights(variables):
        layers = variables["params"].hidden, variables["params"].head
        return [leaf for layer in layers for leaf in (np.asarray(layer.weight).T, np.asarray(layer.bias))]

    return Small(task, weights)


class LinenNormed(nn.Module):
    @nn.compact
    def __call__(self, x, train, mask=None):
        x = nn.BatchNorm(not train, momentum=0.9, epsilon=1e-5, name="odd")(
            x, mask=None if mask is None else mask[:, None]
        )
        return nn.Dense(CLASSES, name="head")(x)


class NnxNormed(nnx.Module):
    def __init__(self, rngs):
        self.odd = nnx.BatchNorm(FEATURES, momentum=0.9, epsilon=1e-5, rngs=rngs)
        self.head = nnx.Linear(FEATURES, CLASSES, rngs=rngs)

    def __call__(self, x, mask=None):
        return self.head(self.odd(x, mask=None if mask is None else mask[:, None]))


class EquinoxNormed(eqx.Module):
    odd: eqx.nn.BatchNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        self.odd = eqx.nn.BatchNorm(FEATURES, axis_name="batch", momentum=0.9, mode="ema")
        self.head = eqx.nn.Linear(FEATURES, CLASSES, key=key)

    def __call__(self, x, state):
        x, state = self.odd(x, state)
        return self.head(x), state


def haiku_normed(x, is_training):
    x = hk.BatchNorm(True, True, decay_rate=0.9, name="odd")(x, is_training)
    return hk.Linear(CLASSES, name="head")(x)


@functools.cache
def normed(library: str) -> Task:
    """Batch normalisation of the features, called ``odd`` so that no name gives it away, and a linear ``head``."""
    return {
        "linen": lambda: tasks.linen(LinenNormed(), EXAMPLE),
        "nnx": lambda: tasks.nnx(NnxNormed, EXAMPLE),
        "equinox": lambda: tasks.equinox(EquinoxNormed, EXAMPLE),
        "haiku": lambda: tasks.haiku(haiku_normed, EXAMPLE),
    }[library]()


LIBRARIES = ("linen", "nnx", "equinox", "haiku")


@pytest.fixture(params=LIBRARIES)
def plain(request) -> Small:
    return small(request.param)


@pytest.fixture(params=LIBRARIES)
def noisy(request) -> Small:
    return small(request.param, dropout=0.5)


@pytest.fixture(params=LIBRARIES)
def normed_task(request) -> Task:
    return normed(request.param)


@pytest.fixture
def masked_tasks() -> list[Task]:
    """Those whose batch normalisation can leave rows out."""
    return [normed("linen"), normed("nnx")]


@pytest.fixture
def batch() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {
        "x": draw.normal(size=(6, FEATURES)),
        "y": np.array([0, 4, 2, 1, 3, 0]),
        "weight": np.array([1.0, 1, 0, 1, 0, 1]),
    }


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def precise(x64):
    """``precise(task)`` initialises in float64, with biases and scales that are not 0 and 1."""

    def moved(leaf, draw):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return jnp.asarray(np.asarray(leaf, np.float64) + 0.1 * draw.normal(size=leaf.shape))

    def init(task):
        draw = np.random.default_rng(7)
        return jax.tree.map(lambda leaf: moved(leaf, draw), jax.jit(task.init)(jax.random.key(0)))

    return init
