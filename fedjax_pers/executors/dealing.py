"""Who runs which client: the longest first, side by side with clients of like size, devices equally laden."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_pers.base import Array


def dealt(cost: Array, devices: int, lanes: int) -> Array:
    """Items by device, in the order in which they are run, and by lane: ``[devices, groups, lanes]``.

    Items are sorted by falling cost and cut into groups of ``lanes``: a group takes as long as its longest item, and
    items of one group are of like cost. Of every ``devices`` groups in this order each device gets one, the longest
    the device that has the least to do so far. Equal costs stay in the order of the items.

    Example:
      >>> dealt(jnp.array([1, 9, 3, 4]), devices=2, lanes=1).tolist()
      [[[1], [0]], [[3], [2]]]

    Args:
      cost: ``[items]``, such as examples; the number of items is a multiple of ``devices * lanes``.
      devices: how many run at the same time.
      lanes: how many a device runs side by side.
    """
    blocks = jnp.argsort(-cost, stable=True).reshape(cost.shape[0] // (devices * lanes), devices, lanes)
    if devices == 1:
        return blocks.swapaxes(0, 1)

    def deal(load: Array, longest: Array) -> tuple[Array, Array]:
        least_laden_first = jnp.argsort(load, stable=True)
        return load.at[least_laden_first].add(longest), jnp.argsort(least_laden_first)

    _, group = jax.lax.scan(deal, jnp.zeros(devices, cost.dtype), cost[blocks[:, :, 0]])
    return jnp.take_along_axis(blocks, group[:, :, None], axis=1).swapaxes(0, 1)
