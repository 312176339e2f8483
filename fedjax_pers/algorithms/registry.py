"""The registry: one entry a method; conformance, command line, comparison and documentation are drawn from it."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

from fedjax_pers.base import Task
from fedjax_pers.checks import number, one_of, require
from fedjax_pers.compose import Algorithm, Recipe
from fedjax_pers.local import train

_METHODS: dict[str, Method] = {}
SCHEDULE = ("batch_size", "epochs", "steps", "optimizer", "drop_last")
"""Settings of local training that every method which takes ``**local`` accepts."""


class Method(NamedTuple):
    """An entry of the registry.

    Attributes:
      name: what the command line calls it.
      make: the factory ``make(task, **settings) -> Algorithm``.
      title: the name in the paper.
      paper: authors, title, venue, identifier.
      family: ``"baseline"``, ``"decoupling"``, ``"regularised"``, ``"meta"`` or ``"server optimiser"``.
      personal: what stays with the client, in words.
      reduction: which setting turns it into which other method.
      secure_aggregation: the server needs only sums over clients.
    """

    name: str
    make: Callable[..., Algorithm]
    title: str
    paper: str
    family: str
    personal: str
    reduction: str
    secure_aggregation: bool = True

    @property
    def settings(self) -> dict[str, Any]:
        """Settings with their defaults, those of local training included where the method takes them."""
        return _settings(inspect.unwrap(self.make))


def _settings(factory: Callable[..., Any]) -> dict[str, Any]:
    found = {}
    for name, parameter in list(inspect.signature(factory).parameters.items())[1:]:
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            schedule = inspect.signature(train).parameters
            found.update({each: schedule[each].default for each in SCHEDULE})
        else:
            found[name] = parameter.default
    return found


def register(name: str, **about: Any) -> Callable[[Callable[..., Algorithm]], Callable[..., Algorithm]]:
    """Enters a factory ``factory(task, *, settings...)`` under a name.

    The factory's settings are checked by name, and the algorithm remembers how it was made: a run compiles once for all
    values of its float settings.
    """

    def wrap(factory: Callable[..., Algorithm]) -> Callable[..., Algorithm]:
        @functools.wraps(factory)
        def make(task: Task, **settings: Any) -> Algorithm:
            require(isinstance(task, Task), f"task: found {type(task).__name__}; expected a fedjax_pers.Task")
            known = _settings(factory)
            # Programs are kept by settings, so these must have a hash; JSON knows lists alone.
            settings = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
            for setting in settings:
                one_of(f"{name} setting", setting, known)
                if isinstance(known[setting], float):  # under its own name, before a phase calls it "lr"
                    number(setting, settings[setting], low=0 if setting.endswith("lr") else -math.inf)
            floats = {k: v for k, v in settings.items() if isinstance(v, float)}
            floats |= {k: v for k, v in known.items() if isinstance(v, float) and k not in settings}
            static = tuple((k, v) for k, v in sorted(settings.items()) if k not in floats)
            algorithm = factory(task, **settings)
            return algorithm._replace(recipe=Recipe(factory, task, static, floats))

        require(name not in _METHODS, f"register: {name!r} is already there")
        _METHODS[name] = Method(name, make, **about)
        return make

    return wrap


@functools.cache
def _load_all() -> None:
    package = importlib.import_module("fedjax_pers.algorithms")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"fedjax_pers.algorithms.{module.name}")


def methods() -> dict[str, Method]:
    """All entries by name, in alphabetical order.

    Example:
      >>> "fedper" in methods()
      True
    """
    _load_all()
    return dict(sorted(_METHODS.items()))


def method(name: str) -> Method:
    """The entry of that name; ValueError with the nearest name where there is none."""
    found = methods()
    one_of("method", name, found)
    return found[name]
