"""Models whose layers are named for what they are, so that masks read well: ``head``, ``norm*``, ``conv1``.

They are Flax Linen modules. A Linen module is a description, hashable and comparable, and applying it is a pure
function of its variables: the same settings give the same task, hence the same compiled program; the shape of the input
need not be given; and nothing but arrays is in the variables. A model in another library is brought in by the adapters
of :mod:`fedjax_pers.tasks` instead.

Models with batch normalisation take ``mask``, the rows of a batch that count.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from flax import linen as nn

from fedjax_pers.base import Example
from fedjax_pers.checks import one_of, positive_int, require
from fedjax_pers.models.dense import Mlp, linear, mlp, mlp_norm
from fedjax_pers.models.images import Cnn, MobileNet, ResNet, cnn, cnn_norm, mobilenet, resnet8, resnet20
from fedjax_pers.models.layers import Lstm
from fedjax_pers.models.series import Cnn1d, cnn1d
from fedjax_pers.models.text import CharLstm, FastText, TextCnn, char_lstm, fasttext, text_cnn
from fedjax_pers.models.transformer import CharTransformer, char_transformer

__all__ = [
    "CharLstm",
    "CharTransformer",
    "Cnn",
    "Cnn1d",
    "FastText",
    "Lstm",
    "Mlp",
    "MobileNet",
    "ResNet",
    "TextCnn",
    "build",
    "names",
    "settings",
]

_FACTORIES: dict[str, Callable[..., nn.Module]] = {
    factory.__name__: factory
    for factory in (
        *(linear, mlp, mlp_norm),
        *(cnn, cnn_norm, resnet8, resnet20, mobilenet),
        cnn1d,
        *(char_lstm, char_transformer),
        *(fasttext, text_cnn),
    )
}


def names() -> tuple[str, ...]:
    """The models that :func:`build` knows.

    Example:
      >>> len(names()), names()[:5]
      (13, ('linear', 'mlp', 'mlp_norm', 'cnn', 'cnn_norm'))
    """
    return tuple(_FACTORIES)


def settings(name: str) -> dict[str, Any]:
    """The settings of a model with their defaults.

    Example:
      >>> settings("cnn")
      {'channels': (32, 64), 'hidden': 512}
    """
    one_of("model", name, _FACTORIES)
    parameters = inspect.signature(_FACTORIES[name]).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def build(name: str, example: Example, num_classes: int, **chosen: Any) -> nn.Module:
    """The model of that name for examples of that form.

    Example:
      >>> build("mlp", (("x", (10,), "float32"), ("y", (), "int32")), 11, hidden=(32,)).hidden
      (32,)

    Args:
      name: one of :func:`names`.
      example: field, shape and dtype of one example (``Federation.example``).
      num_classes: width of the output.
      chosen: see :func:`settings`.

    Raises:
      ValueError: no model or setting of that name, a value that is not allowed, or examples that do not suit the model.
    """
    allowed = settings(name)
    for setting in chosen:
        require(bool(allowed), f"{name}: found the setting {setting!r}, but this model has none")
        one_of(f"setting of {name}", setting, allowed)
    positive_int("num_classes", num_classes)
    return _FACTORIES[name](example, num_classes, **chosen)
