"""What presets know of a model: order of use and types of its layers."""

from __future__ import annotations

from typing import Any

import jax

from fedjax_pers.base import Task
from fedjax_pers.paths import Model, flatten, nearest
from fedjax_pers.tracing import model_order


def model_of(task: Task, variables: Any = None) -> Model:
    """Order of use and types of layers of a task's model, from an abstract trace of ``task.metrics``.

    Where ``task.example`` is ``None`` the order is unknown, and ``head`` and ``depth`` raise when they are asked.

    Args:
      task: the task.
      variables: its variables or their shapes; by default those of ``task.init``.

    Raises:
      ValueError: ``task.kinds`` names a layer that has no leaves.
    """
    if variables is None:
        variables = jax.eval_shape(task.init, jax.random.key(0))
    paths = list(flatten(variables))
    for path, kind in task.kinds:
        if path and not any(f"{leaf}/".startswith(f"{path}/") for leaf in paths):
            nodes = {leaf.rpartition("/")[0] for leaf in paths}
            raise ValueError(f"Task.kinds: {path!r} ({kind}) has no leaves; nearest: {', '.join(nearest(path, nodes))}")
    if task.example is None:
        return Model(None, task.kinds)
    batch = {name: jax.ShapeDtypeStruct((2, *shape), dtype) for name, shape, dtype in task.example}
    batch["weight"] = jax.ShapeDtypeStruct((2,), "float32")
    return Model(model_order(task.metrics, variables, batch), task.kinds)
