"""Whether a task and a federation fit, before any training."""

from __future__ import annotations

from fedjax_pers.base import Task
from fedjax_pers.checks import require
from fedjax_pers.data import Federation


def check_federation(task: Task, federation: Federation) -> None:
    """ValueError unless the federation has the fields, shapes and labels that the task was made for."""
    require(federation.sizes("train").sum() > 0, f"{federation.name}: no client has a training example")
    if task.example is not None:
        found = {name: (tuple(shape), dtype) for name, shape, dtype in federation.example}
        for name, shape, dtype in task.example:
            require(name in found, f"field {name!r}: the task needs it; {federation.name} has {sorted(found)}")
            require(
                found[name] == (tuple(shape), dtype),
                f"field {name!r}: an example of {federation.name} is {found[name]}; "
                f"the task was made for {(tuple(shape), dtype)}",
            )
    if task.num_classes is not None and federation.num_classes is not None:
        require(
            federation.num_classes <= task.num_classes,
            f"num_classes: {federation.name} has {federation.num_classes} classes; the task has {task.num_classes}",
        )
