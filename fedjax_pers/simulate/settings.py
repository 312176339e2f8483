"""Settings of methods in the plain form that files and command lines have."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import optax

from fedjax_pers.algorithms import method
from fedjax_pers.checks import number, one_of, require
from fedjax_pers.config import check_names
from fedjax_pers.parsing import parse
from fedjax_pers.paths import Selector

OPTIMIZERS: Mapping[str, Callable[..., optax.GradientTransformation]] = {
    "sgd": optax.sgd,
    "momentum": functools.partial(optax.sgd, momentum=0.9),
    "adam": optax.adam,
    "adamw": optax.adamw,
}
"""Optimizers by name. One object for each name, so that compiled programs are found again."""


def method_settings(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a method from their plain form: checked by name and type, selectors read, optimizers looked up.

    Example:
      >>> method_settings("fedper", {"personal": "head(2)", "lr": 1})
      {'personal': Selector(head(2)), 'lr': 1.0}

    Raises:
      ValueError: names the setting, what was found and what is allowed.
    """
    known = method(name).settings
    check_names(f"settings of {name}", settings, known)
    return {setting: _typed(f"{name}: {setting}", value, known[setting]) for setting, value in settings.items()}


def plain_settings(name: str) -> dict[str, str]:
    """The settings of a method with their defaults, as text that :func:`method_settings` reads.

    Example:
      >>> plain_settings("fedper")["personal"], plain_settings("fedper")["optimizer"]
      ('head(1)', 'sgd')
    """
    names = {optimizer: text for text, optimizer in OPTIMIZERS.items()}
    return {
        setting: names[default] if callable(default) else str(default)
        for setting, default in method(name).settings.items()
    }


def _typed(name: str, value: Any, default: Any) -> Any:
    """A value in the type of the setting's default. All numbers among the settings are at least 0."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    match default:
        case bool():
            require(isinstance(value, bool), f"{name}: found {value!r}; allowed are true and false")
        case float():
            require(whole or isinstance(value, float), f"{name}: found {value!r}; allowed is a number of at least 0")
            number(name, value, low=0)
            return float(value)
        case None if value is None:
            pass
        case int() | None:
            require(whole and value >= 0, f"{name}: found {value!r}; allowed is a whole number of at least 0")
        case Selector():
            require(isinstance(value, str | list), f"{name}: found {value!r}; allowed is a selector, such as 'head(1)'")
            return parse(value if isinstance(value, str) else " | ".join(value))
        case str():
            require(isinstance(value, str), f"{name}: found {value!r}; allowed is a word")
        case tuple():
            numbers = isinstance(value, list | tuple) and all(isinstance(each, int) for each in value)
            require(numbers, f"{name}: found {value!r}; allowed is a list of whole numbers")
            return tuple(value)
        case _:
            one_of(name, value, OPTIMIZERS)
            return OPTIMIZERS[value]
    return value
