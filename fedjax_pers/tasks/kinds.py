"""Types of a model's layers as ``Task.kinds``: pairs of the path of a layer in the variables and the name of its type.

One function a library; each imports its library when it is called. Nothing is computed: models are traced for shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from fedjax_pers.paths import flatten
from fedjax_pers.presets import collections_of

Kinds = tuple[tuple[str, str], ...]


def linen_kinds(module: Any, variables: Any, *inputs: Any, **options: Any) -> Kinds:
    """Kinds of the Flax Linen modules that ``module.apply(variables, *inputs, **options)`` calls.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import linen as nn
      >>> model = nn.Sequential([nn.Dense(3), nn.LayerNorm()])
      >>> x = jnp.ones((1, 2))
      >>> linen_kinds(model, model.init(jax.random.key(0), x), x)
      (('params', 'Sequential'), ('params/layers_0', 'Dense'), ('params/layers_1', 'LayerNorm'))

    Args:
      module: the module.
      variables: its variables by collection, arrays or shapes.
      *inputs: arrays or shapes.
      **options: what is not an array (``train=False``).
    """
    from flax import linen as nn

    found: dict[str, str] = {}

    def note(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context: Any) -> Any:
        # A path is first called by its owner; shells of lifted modules (scan, remat) come later under the same path.
        found.setdefault("/".join(context.module.path), type(context.module).__name__)
        return call(*args, **kwargs)

    def run(variables: Any, inputs: Any) -> Any:
        rngs = {name: jax.random.key(0) for name in ("params", "dropout")}
        return module.apply(variables, *inputs, rngs=rngs, mutable=True, **options)

    with nn.intercept_methods(note):
        jax.eval_shape(run, variables, inputs)
    return _with_leaves(found.items(), variables)


def nnx_kinds(module: Any, variables: Any) -> Kinds:
    """Kinds of the modules within a Flax NNX module.

    Example:
      >>> from flax import nnx
      >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu, nnx.LayerNorm(3, rngs=nnx.Rngs(0)))
      >>> dict(nnx_kinds(model, nnx.state(model)))["layers/2"]
      'LayerNorm'

    Args:
      module: the module.
      variables: what the task's ``init`` makes of it: its state (nested dict), or states by collection.
    """
    from flax import nnx

    found = {"/".join(map(str, path)): type(layer).__name__ for path, layer in nnx.iter_modules(module)}
    return _with_leaves(found.items(), variables)


def equinox_kinds(variables: Any) -> Kinds:
    """Kinds of the Equinox modules within a pytree, for example ``{"params": module, "state": state}``.

    The entries of an ``eqx.nn.State`` belong to the layers that hold the indices to them, in the order of the module
    that the state was made with.

    Example:
      >>> import equinox as eqx
      >>> equinox_kinds({"params": [eqx.nn.LayerNorm(3), eqx.nn.Identity()]})
      (('params/0', 'LayerNorm'),)
    """
    import equinox as eqx

    found: list[tuple[str, str]] = []
    states: list[str] = []
    owners: dict[Any, str] = {}

    def walk(node: Any, keys: tuple[Any, ...], owner: str) -> None:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        if isinstance(node, eqx.nn.State):
            states.append(path)
            return
        if isinstance(node, eqx.nn.StateIndex):
            owners.setdefault(node.marker, owner)
            return
        if isinstance(node, eqx.Module):
            owner = type(node).__name__
            found.append((path, owner))
        for key, child in jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda inner: inner is not node)[0]:
            if child is not node:
                walk(child, (*keys, *key), owner)

    walk(variables, (), "")
    entries = [(f"{path}/{i}".lstrip("/"), owner) for path in states for i, owner in enumerate(owners.values())]
    return _reaching([*found, *entries], variables)


def haiku_kinds(init: Callable[..., Any], variables: Any, *inputs: Any, **options: Any) -> Kinds:
    """Kinds of the Haiku modules that ``init(key, *inputs, **options)`` makes.

    Example:
      >>> import haiku as hk, jax.numpy as jnp
      >>> model = hk.transform(lambda x: hk.Linear(2, name="odd")(x))
      >>> x = jnp.ones((1, 3))
      >>> haiku_kinds(model.init, {"params": model.init(jax.random.key(0), x)}, x)
      (('params/odd', 'Linear'),)

    Args:
      init: of ``hk.transform`` or ``hk.transform_with_state``.
      variables: what the task's ``init`` returns: params, or params and states by collection.
      *inputs: arrays or shapes.
      **options: what is not an array.
    """
    import haiku as hk

    found: dict[str, str] = {}

    def note(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context: Any) -> Any:
        result = call(*args, **kwargs)  # a module has its name only after its constructor
        found.setdefault(context.module.module_name, type(context.module).__name__)
        return result

    with hk.intercept_methods(note):
        jax.eval_shape(lambda inputs: init(jax.random.key(0), *inputs, **options), inputs)
    return _with_leaves(found.items(), variables)


def _with_leaves(found: Iterable[tuple[str, str]], variables: Any) -> Kinds:
    """Kinds by path in the variables, once for each collection in which the layer has leaves."""
    roots = sorted(collections_of(flatten(variables)), key=lambda name: (name != "params", name)) or [""]
    return _reaching(((f"{root}/{path}".strip("/"), kind) for path, kind in found for root in roots), variables)


def _reaching(found: Iterable[tuple[str, str]], variables: Any) -> Kinds:
    """Those that have leaves: an activation or a dropout layer has none."""
    nodes: set[str] = {""}
    for path in flatten(variables):
        nodes.update(_upwards(path))
    return tuple((path, kind) for path, kind in found if path in nodes)


def _upwards(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition("/")[0]
