"""The package's own models as tasks, by name: what the command line offers."""

from __future__ import annotations

from typing import Any

from fedjax_pers import models
from fedjax_pers.base import Task
from fedjax_pers.tasks.linen import linen


def from_model(federation: Any, model: str = "mlp", *, num_classes: int | None = None, **settings: Any) -> Task:
    """The task of classifying a federation's examples with one of the package's models.

    Example:
      >>> task = from_model((("x", (10,), "float32"), ("y", (), "int32")), "mlp", num_classes=11, hidden=(32,))
      >>> task.num_classes, dict(task.kinds)["params/head"]
      (11, 'Dense')

    Args:
      federation: says what an example looks like and how many classes there are; or the example alone, as in
        ``Task.example``, together with ``num_classes``.
      model: one of :func:`fedjax_pers.models.names`.
      num_classes: by default that of the federation.
      settings: of the model, see :func:`fedjax_pers.models.settings`.

    Raises:
      ValueError: no such model or setting, examples that do not suit the model, or no number of classes.
    """
    example = getattr(federation, "example", federation)
    known = getattr(federation, "num_classes", None)
    classes = known if num_classes is None else num_classes
    if classes is None:
        raise ValueError("num_classes: found None, and the federation has no classes; expected the number of classes")
    if known not in (None, classes):
        raise ValueError(f"num_classes: found {num_classes}, but the federation has {known}; leave it out")
    return linen(models.build(model, example, classes, **settings), example, num_classes=classes)
