"""Flax NNX modules as tasks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx as flax_nnx

from fedjax_pers.base import Array, Batch, Task
from fedjax_pers.keys import fold_name
from fedjax_pers.paths import flatten, unflattener
from fedjax_pers.tasks.calling import keywords
from fedjax_pers.tasks.criteria import Criterion
from fedjax_pers.tasks.examples import as_example, explained, reader, shapes
from fedjax_pers.tasks.kinds import nnx_kinds
from fedjax_pers.tasks.supervised import outside_params, supervised


def nnx(
    make: Callable[[flax_nnx.Rngs], flax_nnx.Module],
    example: Any,
    *,
    criterion: str | Criterion = "cross_entropy",
    num_classes: int | None = None,
    inputs: str | tuple[str, ...] = "x",
) -> Task:
    """A task from a Flax NNX module, made by ``make(rngs)`` and called as ``module(*inputs)`` on a batch.

    The variables are plain nested dicts by collection, named as in Linen: ``{"params": ..., "batch_stats": ...}``.
    Every ``nnx.Param`` is in ``params``; other variables are tracked, in a collection named after their type. Random
    state is none of them: in training each stream starts from the step's key. ``module.train()`` and ``module.eval()``
    are called, and parameters of ``__call__`` are set by name as in :func:`linen`; what is said there of ``mask`` and
    batch normalisation holds here.

    Example:
      >>> import jax
      >>> from flax import nnx as flax_nnx
      >>> make = lambda rngs: flax_nnx.Linear(4, 3, rngs=rngs)
      >>> task = nnx(make, (("x", (4,), "float32"), ("y", (), "int32")))
      >>> jax.tree.map(lambda x: x.shape, task.init(jax.random.key(0)))
      {'params': {'bias': (3,), 'kernel': (4, 3)}}

    Args:
      make: ``make(rngs) -> module``; ``rngs`` has the one default stream.
      example: field, shape and dtype of one example (``Federation.example``).
      criterion: ``"cross_entropy"``, ``"squared_error"``, ``"binary_cross_entropy"`` or a :class:`Criterion`.
      num_classes: labels lie below; by default the width of the outputs.
      inputs: field, or fields in the order of the module's arguments.

    Raises:
      ValueError: see :func:`supervised`.
    """
    example = as_example(example)
    read = reader(inputs, example)
    with explained("the model", example):
        template = flax_nnx.eval_shape(lambda: make(flax_nnx.Rngs(0)))
    if not isinstance(template, flax_nnx.Module):
        raise ValueError(f"make: found {template!r}; expected a function of rngs that returns a flax.nnx.Module")
    collections = _collections(template)
    structure, random, *states = flax_nnx.split(template, flax_nnx.RngState, *collections.values())
    told = keywords(template.__call__, positional=len(read(shapes(example))))

    def pure(module: flax_nnx.Module) -> dict[str, Any]:
        _, _, *found = flax_nnx.split(module, flax_nnx.RngState, *collections.values(), ...)
        return {name: flax_nnx.to_pure_dict(state) for name, state in zip(collections, found, strict=False)}

    def init(key: Array) -> dict[str, Any]:
        return pure(make(flax_nnx.Rngs(key)))

    def apply(variables: Any, batch: Batch, key: Array | None) -> tuple[Any, Any]:
        filled = [_filled(state, variables[name]) for name, state in zip(collections, states, strict=True)]
        # Evaluation draws nothing that matters, but a recurrent layer asks for a key to make its carry of zeros.
        seed = jax.random.key(0) if key is None else key
        module = flax_nnx.merge(structure, _seeded(random, seed), *filled)
        module.eval() if key is None else module.train()
        outputs = module(*read(batch), **told(batch["weight"], key is not None))
        tracked = {name: leaves for name, leaves in pure(module).items() if name != "params"}
        return outputs, {} if key is None else tracked

    variables = jax.eval_shape(init, jax.random.key(0))
    return supervised(
        init,
        apply,
        criterion,
        example=example,
        statistics=outside_params(variables),
        kinds=nnx_kinds(template, variables),
        num_classes=num_classes,
    )


def _collections(module: flax_nnx.Module) -> dict[str, Any]:
    """Filters of the variables by the name of their collection, ``params`` first."""
    types = {type(variable) for _, variable in flax_nnx.to_flat_state(flax_nnx.state(module))}
    others = [kind for kind in types if not issubclass(kind, (flax_nnx.Param, flax_nnx.RngState))]
    named = {flax_nnx.variable_name_from_type(kind, allow_register=True): kind for kind in others}
    return {"params": flax_nnx.Param} | {name: _exactly(named[name]) for name in sorted(named)}


def _exactly(kind: type) -> Callable[[Any, Any], bool]:
    return lambda path, variable: type(variable) is kind


def _filled(state: Any, values: Any) -> Any:
    filled = copy.deepcopy(state)
    flax_nnx.replace_by_pure_dict(filled, values)
    return filled


def _seeded(random: Any, key: Array) -> Any:
    """The random state of a module with every stream's key folded from ``key`` and its path, and every count at 0."""

    def fresh(path: str, leaf: Any) -> Array:
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.zeros(leaf.shape, leaf.dtype)
        own = fold_name(key, path)
        return jax.random.split(own, leaf.shape) if leaf.shape else own

    return unflattener(random)({path: fresh(path, leaf) for path, leaf in flatten(random).items()})
