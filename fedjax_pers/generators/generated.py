"""A task of which a network makes some leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pers.base import Array, Leaves, Task
from fedjax_pers.checks import positive_int, require
from fedjax_pers.generators.networks import Generator, mlp
from fedjax_pers.keys import fold_name
from fedjax_pers.paths import SelectorLike, as_selector, flatten, select, unflattener, where
from fedjax_pers.presets import model_of

GENERATOR, CODE = "generator/", "code"
GENERATOR_LEAVES = where(lambda path, leaf: path.startswith(GENERATOR))
CODE_LEAF = where(lambda path, leaf: path == CODE)


def generated(task: Task, on: SelectorLike, *, generator: Generator | None = None, code: int = 8) -> Task:
    """The task of which a small network makes chosen leaves, ``G = h(code)``, out of a code of a few numbers.

    What is generated is in no parameter: the variables are the other leaves, those of the network below ``generator/``
    and ``code``, in a flat dict by path. So who owns the network and who the code is the layout's to say, gradients
    pass through the network by themselves, and generated weights neither travel nor have an optimiser's state. The code
    is private: a layout that shares it is refused. ``task.plain(variables)`` is the model with its generated leaves.

    Example:
      >>> import fedjax_pers as fp
      >>> task = fp.tasks.from_model(fp.data.load("vowel_speakers"), "linear")
      >>> made = generated(task, "**/bias", code=2)
      >>> sorted((name, x.shape) for name, x in made.init(jax.random.key(0)).items() if "kernel" not in name)
      [('code', (2,)), ('generator/outputs/params/head/bias/bias', (11,))]

    Args:
      task: model and loss.
      on: the leaves that are generated: a head, scales and shifts of norms (FiLM), adapters; no running statistics.
      generator: the network; linear by default.
      code: numbers in the code.

    Raises:
      ValueError: nothing selected, leaves that are no weights, or leaves that the task keeps private.
    """
    positive_int("code", code)
    network = generator or mlp()
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    leaves, rebuild = flatten(shapes), unflattener(shapes)
    made = _chosen(task, on, leaves)

    def init(key: Array) -> Leaves:
        return adopt(task.init(key), key)

    def adopt(variables: Any, key: Array) -> Leaves:
        given = flatten(variables)
        if CODE in given:
            return given
        given = flatten(task.adopt(variables, key))
        like = {name: given[name] for name in made}
        drawn = network.init(fold_name(key, "generator"), like, code)
        fresh = {GENERATOR + path: x for path, x in flatten(drawn).items()}
        others = {name: x for name, x in given.items() if name not in made}
        return others | fresh | {CODE: jax.random.normal(fold_name(key, CODE), (code,), jnp.float32)}

    like = {name: leaves[name] for name in made}
    rebuild_network = unflattener(jax.eval_shape(lambda key: network.init(key, _zeros(like), code), jax.random.key(0)))

    def whole(variables: Leaves) -> Any:
        of_network = {n.removeprefix(GENERATOR): x for n, x in variables.items() if n.startswith(GENERATOR)}
        others = {name: x for name, x in variables.items() if name in leaves}
        return rebuild(others | network.apply(rebuild_network(of_network), variables[CODE]))

    def lifted(function: Callable[..., Any] | None) -> Any:
        return function and (lambda variables, *rest: function(whole(flatten(variables)), *rest))

    kept = [name for name in leaves if name not in made]
    return task._replace(
        init=init,
        loss=lifted(task.loss),
        metrics=lifted(task.metrics),
        apply=lifted(task.apply),
        kinds=tuple((path, kind) for path, kind in task.kinds if any(f"{n}/".startswith(f"{path}/") for n in kept)),
        adopt=adopt,
        plain=lambda variables: task.plain(whole(flatten(variables))),
        private=task.private | CODE_LEAF,
    )


def _zeros(like: Leaves) -> Leaves:
    return {name: jnp.zeros(x.shape, x.dtype) for name, x in like.items()}


def _chosen(task: Task, on: SelectorLike, leaves: Leaves) -> tuple[str, ...]:
    """Names of the leaves that are generated."""
    taken = sorted(name for name in leaves if name == CODE or name.startswith(GENERATOR))
    require(not taken, f"task: found leaves {taken}, which are called as a generator's; a task has one generator")
    model = model_of(task)
    names = select(on, leaves, model)
    require(bool(names), f"on: {as_selector(on)} selects no leaf of this model, so there is nothing to generate")
    tracked = task.statistics.select(leaves, model)
    bad = sorted(n for n in names if n in tracked or not jnp.issubdtype(leaves[n].dtype, jnp.floating))
    require(not bad, f"on: {bad} are running statistics or no floating numbers; a network makes weights")
    private = task.private.select(leaves, model)
    kept = sorted(names & private)
    require(not kept, f"on: {kept} are private to a client, which a network that may be shared cannot promise")
    return tuple(sorted(names))
