"""A mean in which each client counts only where it shares.

Beside a leaf ``w`` an upload may have its mask ``mask/w``: true where the client shares it, for the leaf as a whole (a
scalar) or element by element (of the leaf's shape). A leaf without a mask is shared by everyone.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_pers.aggregators.base import Aggregator, Sender, Server, copy_to_all
from fedjax_pers.aggregators.mean import Weights, client_weight, not_zero, server_step, weighted_difference
from fedjax_pers.base import Array, Leaves
from fedjax_pers.checks import require
from fedjax_pers.masks import MASK, masks_of, values_of


def masked_mean(optimizer: optax.GradientTransformation | None = None, *, weights: Weights = "examples") -> Aggregator:
    """``w[e] <- sum_{i shares e} n_i w_i[e] / sum_{i shares e} n_i``; what nobody shares stays as it is.

    With a server optimiser: a step along the masked mean of differences, which changes neither an element that nobody
    shared nor what the optimiser keeps of it. With all masks true it is :func:`~fedjax_pers.aggregators.mean`.
    The server's own masks (``Server.shared["mask/..."]``, what it sends down) are nothing that this changes.

    Example:
      >>> from fedjax_pers.aggregators import aggregate
      >>> from fedjax_pers.masks import with_masks
      >>> server = masked_mean().init(with_masks({"v": jnp.zeros(2), "w": jnp.full(2, 7.0)}), frozenset({"v", "w"}), 2)
      >>> uploads = {"v": jnp.array([[1.0, 2.0], [3.0, 4.0]]), "w": jnp.zeros((2, 2))}
      >>> masks = {"mask/v": jnp.array([True, False]), "mask/w": jnp.array([False, False])}
      >>> server, _ = aggregate(masked_mean(), server, uploads | masks, [1.0, 3.0])
      >>> server.shared["v"].tolist(), server.shared["w"].tolist()
      ([1.0, 2.0], [7.0, 7.0])

    Args:
      optimizer: as in :func:`~fedjax_pers.aggregators.mean`.
      weights: ``"examples"`` or ``"uniform"``.

    Raises:
      ValueError: a mask is of no leaf, not of its shape, or not of true and false.
    """
    optimizer = optax.sgd(1.0) if optimizer is None else optimizer
    step = server_step(optimizer)

    def init(shared: Leaves, trainable: frozenset[str], num_clients: int) -> Server:
        values = values_of(shared)
        _check(values, masks_of(shared))
        return step.init(values, trainable & frozenset(values), num_clients)._replace(shared=shared)

    def lift(weight: Array, received: Leaves, upload: Leaves, sender: Sender) -> Any:
        masks = masks_of(upload)
        differences = weighted_difference(weight, values_of(received), values_of(upload))
        shares = {name: masks.get(name, jnp.array(True)) for name in differences}
        summed = {name: jnp.where(shares[name], x, 0) for name, x in differences.items()}
        return summed, {name: jnp.where(mask, weight, 0) for name, mask in shares.items()}

    def finish(server: Server, total: Any, trainable: frozenset[str]) -> Server:
        summed, mass = total
        values = values_of(server.shared)
        share = {name: x / not_zero(mass[name]).astype(x.dtype) for name, x in summed.items()}
        came = {name: x > 0 for name, x in mass.items()}
        anything = jnp.stack([x.any() for x in came.values()]).any()
        learns = trainable & frozenset(values)
        moved = step.move(server._replace(shared=values), share, anything, learns)
        kept = {name: jnp.where(came[name], x, values[name]) for name, x in moved.shared.items()}
        opt = _where_it_came(optimizer, {name: came[name] for name in learns}, moved.opt, server.opt)
        return server._replace(shared=server.shared | kept, opt=opt)

    return Aggregator(init, copy_to_all, client_weight(weights), lift, finish, sees="which leaves each client shares")


def _where_it_came(optimizer: optax.GradientTransformation, came: Leaves, new: Any, old: Any) -> Any:
    """The optimiser's state, with the old numbers of elements that nobody shared (its counters are of all)."""
    touched = optax.tree_map_params(
        optimizer, lambda _, mask: mask, new, came, transform_non_params=lambda _: jnp.array(True)
    )
    return jax.tree.map(jnp.where, touched, new, old)


def _check(values: Leaves, masks: Leaves) -> None:
    strangers = sorted(set(masks) - set(values))
    require(not strangers, f"shared: found masks of {strangers}, which are no leaves; there are {sorted(values)}")
    for name, mask in masks.items():
        mask, shape = jnp.asarray(mask), jnp.shape(values[name])
        require(
            mask.shape in ((), shape) and mask.dtype == bool,
            f"shared[{MASK + name!r}]: found {mask.dtype}{mask.shape}; expected bool of shape () or {shape}",
        )
