"""How a model is told that it is being trained: libraries and users call the same switch by different names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from fedjax_pers.base import Array

_ON_IN_TRAINING = ("train", "training", "is_training")
_OFF_IN_TRAINING = ("deterministic", "use_running_average")

Keywords = Callable[[Array, bool], dict[str, Any]]


def counted(weight: Array) -> Array:
    """``[batch]``, true for the rows that count; all of them where none does, since statistics of no row are NaN.

    Example:
      >>> import numpy as np
      >>> counted(np.array([1.0, 0.0])).tolist(), counted(np.array([0.0, 0.0])).tolist()
      ([True, False], [True, True])
    """
    return (weight > 0) | ~(weight > 0).any()


def keywords(call: Callable[..., Any], positional: int) -> Keywords:
    """The keyword arguments with which a model is called, read from its signature.

    ``train``, ``training`` and ``is_training`` are true in training; ``deterministic`` and ``use_running_average`` are
    true in evaluation; ``mask`` is, in training, ``[batch]`` and true for the rows that count, else ``None``.

    Example:
      >>> import numpy as np
      >>> of = keywords(lambda x, train: x, positional=1)
      >>> of(np.ones(2), True), of(np.ones(2), False)
      ({'train': True}, {'train': False})

    Args:
      call: the function or bound method.
      positional: how many of its first parameters are taken by the inputs, whatever they are called.

    Returns:
      ``of(weight, training) -> keyword arguments``.
    """
    known = {*_ON_IN_TRAINING, *_OFF_IN_TRAINING, "mask"}
    parameters = list(inspect.signature(call).parameters.values())[positional:]
    accepted = [p.name for p in parameters if p.name in known and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]

    def of(weight: Array, training: bool) -> dict[str, Any]:
        values: dict[str, Any] = {
            **dict.fromkeys(_ON_IN_TRAINING, training),
            **dict.fromkeys(_OFF_IN_TRAINING, not training),
            "mask": counted(weight) if training else None,
        }
        return {name: values[name] for name in accepted}

    return of
