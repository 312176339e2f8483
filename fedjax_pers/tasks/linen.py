"""Flax Linen modules as tasks."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
from flax import linen as nn

from fedjax_pers.base import Array, Batch, Example, Task
from fedjax_pers.tasks.calling import keywords
from fedjax_pers.tasks.criteria import Criterion, as_criterion
from fedjax_pers.tasks.examples import as_example, explained, reader, shapes, zeros
from fedjax_pers.tasks.kinds import linen_kinds
from fedjax_pers.tasks.supervised import outside_params, supervised


def linen(
    module: nn.Module,
    example: Any,
    *,
    criterion: str | Criterion = "cross_entropy",
    num_classes: int | None = None,
    inputs: str | tuple[str, ...] = "x",
) -> Task:
    """A task from a Flax Linen module, called as ``module(*inputs)`` on a batch.

    The variables are ``{"params": ..., "batch_stats": ...}`` as ``module.init`` makes them; every collection but
    ``params`` is tracked. Where ``__call__`` has parameters of these names, they are set: ``train`` (``training``,
    ``is_training``), ``deterministic``, ``use_running_average``, and ``mask``, in training ``[batch]`` and true for
    the rows that count. Hand ``mask`` on to ``nn.BatchNorm`` in a shape that broadcasts against the features
    (``mask[:, None]``). In a module that does not take it, the rows that pad a short batch (copies of the client's own
    examples) enter the batch statistics like others, though never the loss.

    An equal module with equal settings gives the very same task, so that what was compiled for it is used again.

    Example:
      >>> import jax
      >>> from flax import linen as nn
      >>> task = linen(nn.Dense(3), (("x", (4,), "float32"), ("y", (), "int32")))
      >>> jax.tree.map(lambda x: x.shape, task.init(jax.random.key(0)))
      {'params': {'bias': (3,), 'kernel': (4, 3)}}

    Args:
      module: an unbound module.
      example: field, shape and dtype of one example (``Federation.example``).
      criterion: ``"cross_entropy"``, ``"squared_error"``, ``"binary_cross_entropy"`` or a :class:`Criterion`.
      num_classes: labels lie below; by default the width of the outputs.
      inputs: field, or fields in the order of the module's arguments.

    Raises:
      ValueError: see :func:`supervised`.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"module: found {module!r}; expected an instance of flax.linen.Module")
    inputs = inputs if isinstance(inputs, str) else tuple(inputs)
    settings = (module, as_example(example), as_criterion(criterion), num_classes, inputs)
    try:
        hash(module)
    except TypeError:  # an attribute is a list or an array: there is no telling which modules are equal
        return _task(*settings)
    return _remembered(*settings)


def _task(
    module: nn.Module, example: Example, criterion: Criterion, num_classes: int | None, inputs: str | tuple[str, ...]
) -> Task:
    read = reader(inputs, example)
    told = keywords(module.__call__, positional=len(read(shapes(example))))

    def init(key: Array) -> Any:
        batch = zeros(example)
        return module.init(key, *read(batch), **told(batch["weight"], False))

    def apply(variables: Any, batch: Batch, key: Array | None) -> tuple[Any, Any]:
        arguments = told(batch["weight"], key is not None)
        if key is None:
            return module.apply(variables, *read(batch), **arguments), {}
        # Streams without a key of their own ("dropout", "noise", ...) fall back to "params", each with another fold.
        tracked = [name for name in variables if name != "params"]
        return module.apply(variables, *read(batch), **arguments, rngs={"params": key}, mutable=tracked)

    with explained("the model", example):
        variables = jax.eval_shape(init, jax.random.key(0))
        kinds = linen_kinds(module, variables, *read(shapes(example)), **told(zeros(example)["weight"], False))
    return supervised(
        init,
        apply,
        criterion,
        example=example,
        statistics=outside_params(variables),
        kinds=kinds,
        num_classes=num_classes,
    )


_remembered = lru_cache(maxsize=256)(_task)
