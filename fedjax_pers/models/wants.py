"""What a model wants of an example and of its settings, checked before the model exists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from fedjax_pers.base import Example
from fedjax_pers.checks import positive_int, require


def _field(model: str, example: Example, name: str) -> tuple[tuple[int, ...], str]:
    found = {field: (tuple(shape), dtype) for field, shape, dtype in example}
    require(name in found, f"{model}: found the fields {sorted(found)}; expected {name!r} among them")
    return found[name]


def _floating(model: str, example: Example) -> tuple[int, ...]:
    shape, dtype = _field(model, example, "x")
    require(
        jnp.issubdtype(dtype, jnp.floating),
        f"{model}: found x of dtype {dtype}; expected floating numbers of about unit size (scale the features first)",
    )
    return shape


def features(model: str, example: Example) -> None:
    """ValueError unless ``x`` is an array of floating numbers of any shape."""
    shape = _floating(model, example)
    require(0 not in shape, f"{model}: found x of shape {shape}; expected at least one feature")


def images(model: str, example: Example, smallest: int) -> None:
    """ValueError unless ``x`` is ``(height, width, channels)``, floating, with sides of at least ``smallest``."""
    shape = _floating(model, example)
    require(
        len(shape) == 3 and min(shape[:2]) >= smallest and shape[2] >= 1,
        f"{model}: found x of shape {shape}; expected (height, width, channels) with sides of at least {smallest}",
    )


def series(model: str, example: Example, shortest: int) -> None:
    """ValueError unless ``x`` is ``(time, ...)``, floating, of at least ``shortest`` steps."""
    shape = _floating(model, example)
    require(
        len(shape) >= 1 and shape[0] >= shortest and 0 not in shape,
        f"{model}: found x of shape {shape}; expected (time, channels) with at least {shortest} steps",
    )


def _whole(model: str, example: Example, name: str, expected: str) -> None:
    shape, dtype = _field(model, example, name)
    require(
        len(shape) == expected.count("time") and jnp.issubdtype(dtype, jnp.integer),
        f"{model}: found {name} of shape {shape} and dtype {dtype}; expected whole numbers of shape {expected}",
    )


def tokens(model: str, example: Example) -> None:
    """ValueError unless ``x`` and ``y`` are whole numbers of shape ``(time,)``."""
    _whole(model, example, "x", "(time,)")
    _whole(model, example, "y", "(time,)")


def texts(model: str, example: Example) -> None:
    """ValueError unless ``x`` is whole numbers of shape ``(time,)`` and ``y`` one whole number."""
    _whole(model, example, "x", "(time,)")
    _whole(model, example, "y", "()")


def widths(name: str, values: Iterable[Any]) -> tuple[int, ...]:
    """The values as a tuple; ValueError unless they are whole numbers of at least 1, and at least one."""
    found = tuple(values) if isinstance(values, Iterable) and not isinstance(values, str) else ()
    require(bool(found), f"{name}: found {values!r}; allowed is a list of whole numbers, such as (64, 64)")
    for value in found:
        positive_int(name, value)
    return found
