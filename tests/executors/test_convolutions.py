"""Plain JAX is the reference: values, tangents and gradients of operations with and without the transform."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedjax_pers.executors.fast import fast_convolutions
from tests.executors.convolving import (
    NAMED,
    REPLACED,
    assert_close,
    compiled,
    convolution,
    generated,
    primitives,
)


def derivatives(convolve: Any, lhs: Any, rhs: Any) -> Any:
    """The value, its tangent, and the gradients of a weighted sum of it."""

    value, tangent = jax.jvp(convolve, (lhs, rhs), (jnp.cos(lhs), jnp.cos(rhs)))
    weights = jnp.cos(jnp.arange(value.size, dtype=value.dtype)).reshape(value.shape)
    return {"value": value, "tangent": tangent, "gradients": jax.vjp(convolve, lhs, rhs)[1](weights)}


@pytest.mark.parametrize(("dtype", "rtol"), [("float64", 1e-10), ("float32", 1e-5), ("bfloat16", 2e-2)])
def test_derivatives_of_the_fast_function_are_those_of_the_plain_one(dtype: str, rtol: float) -> None:
    cases = NAMED + generated(6) if dtype == "float64" else NAMED[:12:4]

    def everything(transform: Any, arrays: Any) -> Any:
        return {case.name: derivatives(transform(case.convolve), *arrays[case.name]) for case in cases}

    def differentiated_first(arrays: Any) -> Any:
        return {
            case.name: fast_convolutions(functools.partial(derivatives, case.convolve))(*arrays[case.name])
            for case in cases[1::7]
        }

    with jax.enable_x64(dtype == "float64"):
        arrays = {case.name: (jnp.asarray(case.lhs, dtype), jnp.asarray(case.rhs, dtype)) for case in cases}
        expected = compiled(functools.partial(everything, lambda fn: fn))(arrays)
        assert_close(compiled(functools.partial(everything, fast_convolutions))(arrays), expected, rtol)
        first = compiled(differentiated_first)(arrays)
        assert_close(first, {name: expected[name] for name in first}, rtol)
        assert not REPLACED & set(primitives(functools.partial(everything, fast_convolutions), arrays))


@pytest.mark.parametrize("axes", [(0, 2), (1, None), (None, 0)])
def test_under_vmap_for_clients_with_their_own_images_kernels_or_both(axes: tuple[int | None, int | None]) -> None:
    names = ["few products", "strided", "groups", "groups of the batch"]
    cases = {case.name: case for case in NAMED if case.name in names}

    def stacked(array: np.ndarray, axis: int | None) -> Any:
        return jnp.asarray(array) if axis is None else jnp.stack([jnp.asarray(array) * (i + 1) for i in range(3)], axis)

    def everything(transform: Any, arrays: Any) -> Any:
        results = {
            name: jax.vmap(functools.partial(derivatives, transform(case.convolve)), axes)(*arrays[name])
            for name, case in cases.items()
        }
        lhs, rhs = arrays["groups"]
        clients = jax.vmap(transform(cases["groups"].convolve), axes)
        results["nested, one shared"] = jax.vmap(clients, (0, None))(jnp.stack([lhs, 2 * lhs]), rhs)
        results["nested"] = jax.vmap(clients)(jnp.stack([lhs, 2 * lhs]), jnp.stack([rhs, 3 * rhs]))
        return results

    with jax.enable_x64(True):
        arrays = {name: tuple(map(stacked, case[2:], axes)) for name, case in cases.items()}
        expected = compiled(functools.partial(everything, lambda fn: fn))(arrays)
        assert_close(compiled(functools.partial(everything, fast_convolutions))(arrays), expected, 1e-10)


def in_a_scan(convolve: Any) -> Any:
    """Two steps, of which the second sees another image."""

    def scanned(lhs: Any, rhs: Any) -> Any:
        return lax.scan(lambda scale, _: (scale * 2, convolve(lhs * scale, rhs)), jnp.ones((), lhs.dtype), length=2)[1]

    return scanned


def of_two_clients(convolve: Any) -> Any:
    """Two kernels and two images at once."""

    def both(lhs: Any, rhs: Any) -> Any:
        return jax.vmap(convolve)(jnp.stack([lhs, 2 * lhs]), jnp.stack([rhs, 3 * rhs]))

    return both


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "rtol"), [("float64", 1e-10), ("float32", 1e-5)])
@pytest.mark.parametrize("way", [of_two_clients, in_a_scan, jax.checkpoint], ids=lambda way: way.__name__)
@pytest.mark.parametrize("part", range(4))
def test_a_large_grid_in_every_program(way: Any, dtype: str, rtol: float, part: int) -> None:
    cases = (NAMED + generated(60))[part::4]

    def everything(transform: Any, arrays: Any) -> Any:
        return {case.name: derivatives(way(transform(case.convolve)), *arrays[case.name]) for case in cases}

    with jax.enable_x64(dtype == "float64"):
        arrays = {case.name: (jnp.asarray(case.lhs, dtype), jnp.asarray(case.rhs, dtype)) for case in cases}
        expected = compiled(functools.partial(everything, lambda fn: fn))(arrays)
        assert_close(compiled(functools.partial(everything, fast_convolutions))(arrays), expected, rtol)


@pytest.mark.parametrize("features", [(1, 4), (7, 8)])
def test_the_type_that_is_asked_for_comes_out(features: tuple[int, int]) -> None:
    case = convolution("preferred", (8, 7), (3, 3), features, preferred_element_type=jnp.float32)
    args = jnp.asarray(case.lhs, "bfloat16"), jnp.asarray(case.rhs, "bfloat16")
    assert_close(jax.jit(fast_convolutions(case.convolve))(*args), jax.jit(case.convolve)(*args), 1e-5)


POOLINGS = {
    "window 2": ((1, 2, 2, 1), "VALID"),
    "with a rest": ((1, 3, 2, 1), "VALID"),
    "padded": ((1, 3, 4, 1), "SAME"),
    "padded in front": ((1, 2, 3, 1), ((0, 0), (1, 0), (2, 2), (0, 0))),
    "over batch and features": ((2, 2, 1, 3), "VALID"),
}


@pytest.mark.parametrize("special", ["none", "ties", "nan", "infinite"])
def test_max_pooling_gives_the_gradient_to_the_element_that_xla_selects(special: str) -> None:
    rng = np.random.default_rng(2)
    image = rng.normal(size=(4, 7, 8, 3))
    if special == "ties":
        image = np.round(image)
    elif special == "nan":
        image[rng.random(image.shape) < 0.3] = np.nan
    elif special == "infinite":
        image[rng.random(image.shape) < 0.7] = -np.inf
    image, other = jnp.asarray(image, "float32"), jnp.asarray(rng.normal(size=(4, 7, 8, 3)), "float32")

    def everything(transform: Any, image: Any) -> Any:
        results = {}
        for name, (window, padding) in POOLINGS.items():
            plain = functools.partial(
                lax.reduce_window,
                init_value=-jnp.inf,
                computation=lax.max,
                window_dimensions=window,
                window_strides=window,
                padding=padding,
            )
            pool = transform(plain)
            value, pull = jax.vjp(pool, image)
            cotangent = 1 + jnp.arange(value.size, dtype="float32").reshape(value.shape)
            mapped = jax.vmap(lambda x, cotangent=cotangent, pool=pool: jax.vjp(pool, x)[1](cotangent)[0], 1)
            inside = transform(lambda x, c, plain=plain: jax.vjp(plain, x)[1](c)[0])
            results[name] = value, pull(cotangent), inside(image, cotangent), mapped(jnp.stack([image, -image], 1))
            if special in ("none", "ties"):
                results[name] += (jax.jvp(pool, (image,), (other,)),)
        return results

    expected = compiled(functools.partial(everything, lambda fn: fn))(image)
    found = compiled(functools.partial(everything, fast_convolutions))(image)
    assert "select_and_scatter_add" in primitives(functools.partial(everything, lambda fn: fn), image)
    assert not REPLACED & set(primitives(functools.partial(everything, fast_convolutions), image))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
