"""Equinox modules as tasks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax

from fedjax_pers.base import Array, Batch, Task
from fedjax_pers.checks import require
from fedjax_pers.tasks.criteria import Criterion
from fedjax_pers.tasks.examples import as_example, explained, reader
from fedjax_pers.tasks.kinds import equinox_kinds
from fedjax_pers.tasks.supervised import outside_params, supervised


def equinox(
    make: Callable[[Array], Any],
    example: Any,
    *,
    criterion: str | Criterion = "cross_entropy",
    num_classes: int | None = None,
    inputs: str | tuple[str, ...] = "x",
) -> Task:
    """A task from an Equinox module, made by ``make(key)`` and called on *one example*: ``module(*inputs)``.

    The call is mapped over the batch, under the axis name ``"batch"`` (which an ``eqx.nn.BatchNorm`` must be told). A
    parameter ``key`` of ``__call__`` gets a key for each example in training and ``None`` in evaluation, for which
    ``eqx.nn.inference_mode`` is switched on. The variables are ``{"params": arrays of the module}``; a module with
    stateful layers is called as ``module(*inputs, state=state) -> (output, state)``, and the variables have ``"state"``
    as well, which is tracked.

    ``eqx.nn.BatchNorm`` knows no mask: rows that pad a short batch (copies of the client's own examples) enter its
    statistics like others, though never the loss.

    Example:
      >>> import equinox as eqx
      >>> make = lambda key: eqx.nn.Linear(4, 3, key=key)
      >>> task = equinox(make, (("x", (4,), "float32"), ("y", (), "int32")))
      >>> task.init(jax.random.key(0))["params"].weight.shape
      (3, 4)

    Args:
      make: ``make(key) -> module``.
      example: field, shape and dtype of one example (``Federation.example``).
      criterion: ``"cross_entropy"``, ``"squared_error"``, ``"binary_cross_entropy"`` or a :class:`Criterion`.
      num_classes: labels lie below; by default the width of the outputs.
      inputs: field, or fields in the order of the module's arguments.

    Raises:
      ValueError: see :func:`supervised`; or a stateful module whose ``__call__`` takes no ``state``.
    """
    import equinox as eqx

    example = as_example(example)
    read = reader(inputs, example)
    made = eqx.nn.make_with_state(make)
    with explained("the model", example):
        template, state = eqx.filter_eval_shape(made, jax.random.key(0))
    require(callable(template), f"make: found {template!r}; expected a function of a key that returns a module")
    static = eqx.partition(template, _is_shape)[1]
    accepted = inspect.signature(template.__call__).parameters
    stateful = bool(jax.tree.leaves(state))
    require(
        not stateful or "state" in accepted,
        f"module: {type(template).__name__} has stateful layers, but its __call__ takes no 'state': "
        "write __call__(self, x, state) -> (output, state) and hand the state through",
    )

    def init(key: Array) -> dict[str, Any]:
        module, state = made(key)
        arrays = {"params": eqx.filter(module, eqx.is_array)}
        return {**arrays, "state": state} if stateful else arrays

    def apply(variables: Any, batch: Batch, key: Array | None) -> tuple[Any, Any]:
        module = eqx.nn.inference_mode(eqx.combine(variables["params"], static), value=key is None)
        keys = None if key is None else jax.random.split(key, len(batch["weight"]))

        def one(inputs: tuple[Array, ...], key: Array | None, state: Any) -> tuple[Any, Any]:
            own = {"key": key} if "key" in accepted else {}
            return module(*inputs, state=state, **own) if stateful else (module(*inputs, **own), None)

        over_batch = jax.vmap(one, in_axes=(0, 0, None), out_axes=(0, None), axis_name="batch")
        outputs, state = over_batch(read(batch), keys, variables.get("state"))
        return outputs, {"state": state} if stateful and key is not None else {}

    variables = jax.eval_shape(init, jax.random.key(0))
    return supervised(
        init,
        apply,
        criterion,
        example=example,
        statistics=outside_params(variables),
        kinds=equinox_kinds(variables),
        num_classes=num_classes,
    )


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)
