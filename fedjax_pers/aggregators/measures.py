"""How alike clients are: functions ``measure(crowd) -> [clients, clients]`` for ``by_similarity``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax.numpy as jnp

from fedjax_pers.aggregators.pairwise import cosines
from fedjax_pers.base import Array, Batch, Context, Leaves, Parts
from fedjax_pers.batches import sweep
from fedjax_pers.checks import require
from fedjax_pers.layouts import Layout


class Crowd(NamedTuple):
    """Clients whose models are mixed; all leading axes are ``[clients]``.

    Attributes:
      models: their leaves after training.
      differences: after training less before.
      share: weights by examples or uniform, adding up to 1; 0 for those that are not there.
      said: what they said, where they were asked.
    """

    models: Leaves
    differences: Leaves
    share: Array
    said: dict[str, Array]


MOMENTS = "moments"
"""What clients say for :func:`of_moments`."""


def of_updates(crowd: Crowd) -> Array:
    """Cosines of differences: who moved the same way."""
    return cosines(crowd.differences)


def of_models(crowd: Crowd) -> Array:
    """Cosines of models after training."""
    return cosines(crowd.models)


def of_leaves(names: Iterable[str]) -> Callable[[Crowd], Array]:
    """Cosines of some leaves of the models, such as their heads.

    Example:
      >>> heads = of_leaves(["params/head/kernel", "params/head/bias"])

    Args:
      names: paths of shared leaves.
    """
    names = tuple(names)

    def measure(crowd: Crowd) -> Array:
        missing = sorted(set(names) - set(crowd.models))
        require(not missing, f"names: found {missing}, which are not shared; allowed are {sorted(crowd.models)}")
        return cosines({name: crowd.models[name] for name in names})

    return measure


def of_moments(crowd: Crowd) -> Array:
    """Cosines of what :func:`input_moments` says, less its mean over the clients: whose inputs deviate the same way."""
    moments = crowd.said[MOMENTS]
    share = crowd.share / jnp.maximum(crowd.share.sum(), 1e-30)
    return cosines({MOMENTS: moments - share @ moments})


def input_moments(layout: Layout, parts: Parts, context: Context) -> dict[str, Array]:
    """Mean and standard deviation of every number of a client's inputs: ``ask`` of an aggregator; labels are not read.

    ``[2 * numbers]``, over all fields of the task's examples that are floating and have an axis (targets have none).
    **Privacy**: moments of a client's inputs leave it.
    """
    fields = input_fields(layout)
    zeros = {name: jnp.zeros(context.data[name][0].size, jnp.float32) for name in fields}

    def mean_of(function: Callable[[str, Array], Array]) -> dict[str, Array]:
        def add(sums: dict[str, Array], batch: Batch) -> dict[str, Array]:
            def of(name: str) -> Array:
                x = batch[name].reshape(len(batch["weight"]), -1).astype(jnp.float32)
                return jnp.where(batch["weight"][:, None] > 0, function(name, x), 0).sum(0)

            return {name: total + of(name) for name, total in sums.items()}

        sums = sweep(add, zeros, context, batch_size=64)
        return {name: x / jnp.maximum(context.size, 1) for name, x in sums.items()}

    # Relative to the client's first example: nothing is lost of inputs that lie far from 0.
    first = {name: jnp.ravel(context.data[name][context.start]).astype(jnp.float32) for name in fields}
    middle = mean_of(lambda name, x: x - first[name])
    spread = mean_of(lambda name, x: jnp.square(x - first[name] - middle[name]))
    means = [jnp.where(context.size > 0, first[name] + middle[name], 0) for name in fields]
    return {MOMENTS: jnp.concatenate([*means, *[jnp.sqrt(spread[name]) for name in fields]])}


def input_fields(layout: Layout) -> list[str]:
    """The fields of a task's examples of which there are moments; ValueError where there is none."""
    example = layout.task.example or ()
    fields = sorted(name for name, shape, dtype in example if shape and jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    require(
        bool(fields),
        f"measure: found 'moments', which needs a floating input with an axis; the task's examples are {example}",
    )
    return fields
