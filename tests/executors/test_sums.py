"""Sums over examples as products: what NumPy adds up in float64, and derivatives of a sum."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedjax_pers.executors.fast import fast_convolutions
from tests.executors.convolving import compiled, primitives

LARGE = (2, 40, 7, 16)
COVERED = {"examples": (0,), "examples and places": (0, 1, 2), "places": (1, 2), "one axis inside": (2,)}
LEFT = {
    "the last axis": ((3,), LARGE),
    "apart": ((0, 2), LARGE),
    "small": ((0,), (10, 200)),
    "narrow": ((0,), (9999, 2)),
}


def numbers(shape: tuple[int, ...], dtype: Any = "float32") -> Any:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)


@pytest.mark.parametrize(("dtype", "rtol"), [("float64", 1e-12), ("float32", 1e-5), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("name", COVERED)
def test_sums_and_their_derivatives(name: str, dtype: str, rtol: float) -> None:
    axes = COVERED[name]
    with jax.enable_x64(dtype == "float64"):
        x, direction = numbers(LARGE, dtype), numbers(LARGE, dtype) + 1
        fast = fast_convolutions(lambda x: x.sum(axes))
        assert "fast_reduce_sum" in primitives(fast, x)
        total, tangent = jax.jit(lambda x: jax.jvp(fast, (x,), (direction,)))(x)
        gradient = jax.jit(jax.grad(lambda x: (fast(x) ** 2).sum().astype(float)))(x)
        stacked = jax.jit(jax.vmap(fast, 1, 1))(jnp.stack([x, 2 * x], 1))
    exact, scale = np.asarray(x, np.float64), np.sqrt(np.prod([LARGE[axis] for axis in axes]))
    np.testing.assert_allclose(np.asarray(total, np.float64), exact.sum(axes), rtol, rtol * scale)
    np.testing.assert_allclose(
        np.asarray(tangent, np.float64), np.asarray(direction, np.float64).sum(axes), rtol, rtol * scale
    )
    expected = np.broadcast_to(2 * exact.sum(axes, keepdims=True), LARGE)
    np.testing.assert_allclose(np.asarray(gradient, np.float64), expected, 2 * rtol, 2 * rtol * scale)
    twice = np.stack([exact.sum(axes), 2 * exact.sum(axes)], 1)
    np.testing.assert_allclose(np.asarray(stacked, np.float64), twice, rtol, 2 * rtol * scale)


def test_an_infinite_or_missing_number_stays_in_its_column() -> None:
    x = numbers((600, 8)).at[3, 1].set(jnp.inf).at[4, 2].set(jnp.nan)
    total = np.asarray(jax.jit(fast_convolutions(lambda x: x.sum(0)))(x))
    assert np.isinf(total[1]) and np.isnan(total[2]) and np.isfinite(np.delete(total, [1, 2])).all()


@pytest.mark.parametrize("name", LEFT)
def test_what_the_compiler_does_well_is_left(name: str) -> None:
    axes, shape = LEFT[name]
    assert "reduce_sum" in primitives(fast_convolutions(lambda x: x.sum(axes)), numbers(shape))


def test_whole_numbers_are_left() -> None:
    x = jnp.ones((600, 8), jnp.int32)
    assert "reduce_sum" in primitives(fast_convolutions(lambda x: x.sum(0)), x)


def test_what_a_sum_adds_is_computed_once() -> None:
    """A written-out convolution has a bias, a nonlinearity, and a gradient by each: many readers of its products."""

    def loss(params: Any, images: Any) -> Any:
        layout = ("NHWC", "HWIO", "NHWC")
        out = lax.conv_general_dilated(images, params[0], (1, 1), "SAME", dimension_numbers=layout) + params[1]
        return (jax.nn.relu(out) ** 2 * jnp.cos(out)).sum((1, 2)).mean()

    def step(params: Any, images: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, images))

    args = [numbers((3, 3, 1, 8)), numbers((8,))], numbers((20, 10, 10, 1))

    def multiplications(function: Any) -> int:
        return compiled(function).lower(*args).compile().as_text().count(" multiply(")

    assert multiplications(fast_convolutions(step)) - multiplications(step) == 9  # those of the kernel, once
