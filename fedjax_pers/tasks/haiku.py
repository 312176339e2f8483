"""Haiku functions as tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from fedjax_pers.base import Array, Batch, Task
from fedjax_pers.checks import require
from fedjax_pers.tasks.calling import keywords
from fedjax_pers.tasks.criteria import Criterion
from fedjax_pers.tasks.examples import as_example, explained, reader, shapes, zeros
from fedjax_pers.tasks.kinds import haiku_kinds
from fedjax_pers.tasks.supervised import outside_params, supervised

_BEFORE_INPUTS = 3  # apply(params, state, rng, *inputs)


def haiku(
    function: Callable[..., Any] | Any,
    example: Any,
    *,
    criterion: str | Criterion = "cross_entropy",
    num_classes: int | None = None,
    inputs: str | tuple[str, ...] = "x",
) -> Task:
    """A task from a function that uses Haiku modules, called as ``function(*inputs)`` on a batch.

    The variables are ``{"params": ..., "state": ...}``; the state is tracked. Parameters of the function are set by
    name as in :func:`linen` (``is_training``, ``mask``, ...). ``hk.BatchNorm`` knows no mask: rows that pad a short
    batch (copies of the client's own examples) enter its statistics like others, though never the loss.

    Example:
      >>> import haiku as hk
      >>> task = haiku(lambda x: hk.Linear(3, name="head")(x), (("x", (4,), "float32"), ("y", (), "int32")))
      >>> jax.tree.map(lambda x: x.shape, task.init(jax.random.key(0)))
      {'params': {'head': {'b': (3,), 'w': (4, 3)}}, 'state': {}}

    Args:
      function: the function, or what ``hk.transform`` or ``hk.transform_with_state`` made of it.
      example: field, shape and dtype of one example (``Federation.example``).
      criterion: ``"cross_entropy"``, ``"squared_error"``, ``"binary_cross_entropy"`` or a :class:`Criterion`.
      num_classes: labels lie below; by default the width of the outputs.
      inputs: field, or fields in the order of the function's arguments.

    Raises:
      ValueError: see :func:`supervised`.
    """
    import haiku as hk

    example = as_example(example)
    read = reader(inputs, example)
    model = _with_state(hk, function)
    told = keywords(model.apply, positional=_BEFORE_INPUTS + len(read(shapes(example))))

    def init(key: Array) -> dict[str, Any]:
        batch = zeros(example)
        # In training mode: averages are created where they are first updated.
        params, state = model.init(key, *read(batch), **told(batch["weight"], True))
        return {"params": params, "state": state}

    def apply(variables: Any, batch: Batch, key: Array | None) -> tuple[Any, Any]:
        arguments = told(batch["weight"], key is not None)
        outputs, state = model.apply(variables["params"], variables["state"], key, *read(batch), **arguments)
        return outputs, {} if key is None else {"state": state}

    with explained("the model", example):
        variables = jax.eval_shape(init, jax.random.key(0))
        kinds = haiku_kinds(model.init, variables, *read(shapes(example)), **told(zeros(example)["weight"], True))
    return supervised(
        init,
        apply,
        criterion,
        example=example,
        statistics=outside_params(variables),
        kinds=kinds,
        num_classes=num_classes,
    )


def _with_state(hk: Any, function: Any) -> Any:
    if isinstance(function, hk.TransformedWithState):
        return function
    if isinstance(function, hk.Transformed):
        return hk.with_empty_state(function)
    require(callable(function), f"function: found {function!r}; expected a function, or what hk.transform made of it")
    return hk.transform_with_state(function)
