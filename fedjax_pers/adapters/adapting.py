"""From a task to one with further leaves: what every kind of adapter shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pers.base import Array, Leaves, Task
from fedjax_pers.checks import require
from fedjax_pers.keys import fold_name
from fedjax_pers.paths import SelectorLike, as_selector, flatten, nearest, select, unflattener
from fedjax_pers.presets import bias, model_of

Function = Callable[..., Any]


def adapted(
    task: Task, fresh: Callable[[Array], Leaves], merged: Callable[[Leaves], Leaves], around: Callable[[Function], Any]
) -> Task:
    """A task whose variables are the leaves of ``task`` and further ones, in one flat dict by path.

    Args:
      task: the model that is adapted.
      fresh: ``fresh(key) -> leaves`` of the adapters.
      merged: ``merged(leaves) -> leaves of the model`` with the adapters in them, as far as they fit into its weights.
      around: ``around(function)``, where ``function(variables, batch, ...)`` is the model's own loss, metrics or apply:
        the same function of the variables of the new task.
    """
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    rebuild = unflattener(shapes)

    def init(key: Array) -> Leaves:
        return adopt(task.init(key), key)

    def adopt(variables: Any, key: Array) -> Leaves:
        leaves = flatten(variables)
        if set(leaves) >= set(new):
            return leaves
        return fresh(fold_name(key, "adapters")) | flatten(task.adopt(variables, key))

    def plain(variables: Any) -> Any:
        return task.plain(rebuild(merged(flatten(variables))))

    def lifted(function: Function | None) -> Function | None:
        if function is None:
            return None
        inner = around(lambda leaves, *rest: function(rebuild(leaves), *rest))
        return lambda variables, *rest: inner(flatten(variables), *rest)

    new = jax.eval_shape(fresh, jax.random.key(0))
    taken = sorted(set(new) & set(flatten(shapes)))
    require(not taken, f"task: its leaves {taken} have the names of adapters; it is adapted already")
    return task._replace(
        init=init,
        loss=lifted(task.loss),
        metrics=lifted(task.metrics),
        apply=lifted(task.apply),
        adopt=adopt,
        plain=plain,
    )


def weights_at(task: Task, on: SelectorLike, what: str) -> Leaves:
    """Shapes of the weights that ``on`` selects, by path: floating, of at least two axes, no bias.

    ValueError where there are none.
    """
    leaves, model = flatten(jax.eval_shape(task.init, jax.random.key(0))), model_of(task)
    names = select(on, leaves, model) - bias().select(leaves, model)
    found = {
        name: x
        for name, x in leaves.items()
        if name in names and len(x.shape) >= 2 and jnp.issubdtype(x.dtype, jnp.floating)
    }
    require(
        bool(found),
        f"on: {as_selector(on)} selects no floating weight of at least two axes in this model, so there is nothing "
        f"{what} can adapt",
    )
    return found


def beside(path: str, marker: str) -> str:
    """The name of an adapter's leaf: that of the leaf it adapts, within its layer.

    Example:
      >>> beside("params/head/kernel", "lora_a")
      'params/head/lora_a/kernel'
    """
    layer, _, name = path.rpartition("/")
    return f"{layer}/{marker}/{name}".lstrip("/")


def starting_from(task: Task, variables: Any) -> Task:
    """The same task, whose ``init`` starts at these variables: a backbone that was trained before.

    Leaves that are not among them (a new head, adapters) start as they do.

    Example:
      >>> import fedjax_pers as fp
      >>> task = fp.tasks.from_model(fp.data.load("vowel_speakers"), "linear")
      >>> trained = {"params/head/bias": jnp.ones(11)}
      >>> float(flatten(starting_from(task, trained).init(jax.random.key(0)))["params/head/bias"][0])
      1.0

    Args:
      task: the task.
      variables: a tree of the task's form, or leaves by path.

    Raises:
      ValueError: a leaf that the task does not have, or of another shape.
    """
    shapes, given = jax.eval_shape(task.init, jax.random.key(0)), flatten(variables)
    known, rebuild = flatten(shapes), unflattener(shapes)
    for name, x in given.items():
        near = ", ".join(nearest(name, known))
        require(name in known, f"variables: found {name}, which the task does not have; nearest: {near}")
        found, expected = jnp.shape(x), known[name].shape
        require(found == expected, f"variables: found {name} of shape {found}; the task has {expected}")

    def init(key: Array) -> Any:
        fresh = flatten(task.init(key))
        return rebuild({name: jnp.asarray(given.get(name, x), x.dtype) for name, x in fresh.items()})

    return task._replace(init=init)
