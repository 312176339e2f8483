"""What a run is asked to do, in values that a JSON file holds. Imports nothing heavy, so that help comes at once."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_LEAST = {"rounds": 1, "seed": 0, "evaluate_every": 0, "warm_start": 0, "checkpoint_every": 1, "retention": 0}


@dataclass(frozen=True)
class Config:
    """A run: data, model, method and their settings. With the version of the package it repeats the run.

    Example:
      >>> config = Config(method="fedper", settings={"personal": "head(1)", "lr": 0.05})
      >>> Config.from_dict(config.to_dict()) == config
      True

    Attributes:
      data: a data set's name, or a path (see fedjax-pers data list).
      data_options: options of the data set, such as partitioner or num_clients.
      model: a model's name (see fedjax-pers list).
      model_options: settings of the model, such as hidden.
      method: a method's name (see fedjax-pers list).
      settings: settings of the method; selectors as text (head(1)), optimizers by name (sgd, momentum,
        adam, adamw).
      rounds: rounds of the method.
      cohort_size: clients that take part in a round; all of them by default.
      dropout: probability that a client which was to take part in a round fails, and is not there.
      seed: of everything random but the data set.
      evaluate_every: rounds between evaluations; 0 evaluates at the end only.
      split: the examples that clients are judged on: test, validation or train.
      unseen: share of the clients that never take part in training, and are judged as newcomers.
      retention: examples of the split, drawn from those of all clients together, on which every client's model is
        judged at the end, for what it has forgotten; 0 leaves that out.
      warm_start: rounds of FedAvg that come first; their traffic counts.
      lanes: clients that each device trains side by side; chosen by device and model size by default.
      devices: devices that share the clients, on a CPU its cores; by default all that the process has, on a CPU one
        unless fp.use_cores() was called. The same number gives the same bytes.
      checkpoint_every: blocks of rounds (at most ten rounds, or those between two evaluations) between checkpoints.
      secure_aggregation: the server is to know sums over clients alone; a method that needs more is refused.
      stop_on_rejected: stop when a client's upload is not finite, rather than leave it out.
    """

    data: str = "vowel_speakers"
    data_options: Mapping[str, Any] = field(default_factory=dict)
    model: str = "mlp"
    model_options: Mapping[str, Any] = field(default_factory=dict)
    method: str = "fedavg"
    settings: Mapping[str, Any] = field(default_factory=dict)
    rounds: int = 50
    cohort_size: int | None = None
    dropout: float = 0.0
    seed: int = 0
    evaluate_every: int = 10
    split: str = "test"
    unseen: float = 0.0
    retention: int = 0
    warm_start: int = 0
    lanes: int | None = None
    devices: int | None = None
    checkpoint_every: int = 1
    secure_aggregation: bool = False
    stop_on_rejected: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The run as plain values; selectors, partitioners and paths become text."""
        return {each.name: _plain(each.name, getattr(self, each.name)) for each in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """The run of :meth:`to_dict`; what is absent has its default.

        Raises:
          ValueError: there is a field that no run has, with the nearest one; or options that are no mapping.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"config: found {values!r}; expected an object with the fields of a run")
        check_names("config", values, (each.name for each in dataclasses.fields(cls)))
        return cls(**values)

    def check(self) -> None:
        """ValueError unless every field has a type and a range that a run can have, whatever data and method are."""
        for name in ("data", "model", "method", "split"):
            _need(name, isinstance(getattr(self, name), str), getattr(self, name), "a name")
        for name in ("data_options", "model_options", "settings"):
            _need(name, isinstance(getattr(self, name), Mapping), getattr(self, name), "an object of names and values")
        for name, least in _LEAST.items():
            _whole(name, getattr(self, name), least)
        for name in ("cohort_size", "lanes", "devices"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 1)
        _need("seed", self.seed < 2**32, self.seed, "a whole number below 2^32")
        for name in ("unseen", "dropout"):
            value = getattr(self, name)
            share = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1
            _need(name, share, value, "a share of at least 0 and below 1")
        for name in ("secure_aggregation", "stop_on_rejected"):
            _need(name, isinstance(getattr(self, name), bool), getattr(self, name), "true or false")


def check_names(what: str, found: Iterable[str], allowed: Iterable[str]) -> None:
    """ValueError for the first name that is not allowed, with the nearest that is."""
    allowed = list(allowed)
    for name in found:
        if name not in allowed:
            near = difflib.get_close_matches(str(name), allowed, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{what}: found {name!r}; allowed are {', '.join(allowed) or 'none'}.{hint}")


def _need(name: str, condition: bool, found: Any, allowed: str) -> None:
    if not condition:
        raise ValueError(f"{name}: found {found!r}; allowed is {allowed}")


def _whole(name: str, found: Any, least: int) -> None:
    whole = isinstance(found, int) and not isinstance(found, bool) and found >= least
    _need(name, whole, found, f"a whole number of at least {least}")


def _plain(name: str, value: Any) -> Any:
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            _need(name, math.isfinite(value), value, "a finite number")
            return value
        case os.PathLike():
            return os.fspath(value)
        case Mapping():
            return {str(key): _plain(f"{name}.{key}", each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(f"{name}[{index}]", each) for index, each in enumerate(value)]
    if getattr(value, "shape", None) == ():  # a number of numpy's
        return _plain(name, value.item())
    text = type(value).__module__.startswith("fedjax_pers.")  # selectors and partitioners print as what reads back
    _need(name, text, value, "a number, text, true, false, null, or a list or object of these (optimizers by name)")
    return str(value)
