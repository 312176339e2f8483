"""Checks of settings: what was found, what is allowed, the nearest match. Traced values pass: they have none yet."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def require(condition: bool, message: str) -> None:
    """ValueError with that message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def _concrete(value: Any) -> bool:
    return not isinstance(value, jax.core.Tracer)


def _dtype(value: Any) -> Any:
    return value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype


def positive_int(name: str, value: Any) -> None:
    """ValueError unless ``value`` is a whole number of at least 1."""
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    require(whole and value >= 1, f"{name}: found {value!r}; allowed is a whole number of at least 1")


def whole_number(name: str, value: Any, low: int = 0) -> None:
    """ValueError unless ``value`` is a whole number of at least ``low``; traced ones pass whatever their value."""
    whole = np.ndim(value) == 0 and jnp.issubdtype(_dtype(value), jnp.integer)
    message = f"{name}: found {value!r}; allowed is a whole number of at least {low}"
    require(whole and (not _concrete(value) or value >= low), message)


def number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> None:
    """ValueError unless ``value`` is a finite number in ``low .. high``; traced scalars pass."""
    if not _concrete(value):
        return
    real = jnp.issubdtype(_dtype(value), jnp.integer) or jnp.issubdtype(_dtype(value), jnp.floating)
    require(real and np.ndim(value) == 0, f"{name}: found {value!r}; allowed is a number")
    found = float(value)
    bounds = (
        f"{low:g} .. {high:g}" if high < math.inf else f"at least {low:g}" if low > -math.inf else "any finite number"
    )
    require(math.isfinite(found) and low <= found <= high, f"{name}: found {found:g}; allowed is {bounds}")


def positive(name: str, value: Any) -> None:
    """ValueError unless ``value`` is a finite number above 0; traced scalars pass."""
    number(name, value)
    require(not _concrete(value) or value > 0, f"{name}: found {value}; allowed is a finite number above 0")


def one_of(name: str, value: Any, allowed: Iterable[str]) -> None:
    """ValueError unless ``value`` is one of the words; names the nearest."""
    allowed = sorted(allowed)
    if value in allowed:
        return
    near = difflib.get_close_matches(str(value), allowed, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name}: found {value!r}; allowed are {', '.join(allowed)}.{hint}")
