"""FedCAC's server: what is critical to a client is averaged among the clients to which the same is critical.

Beside its leaves a client sends masks, elementwise: false where a parameter is critical to it. All of the model travels
both ways.
"""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_pers.aggregators.base import Aggregator, Collected, Server, nothing_added
from fedjax_pers.aggregators.mean import Weights, client_weight
from fedjax_pers.aggregators.pairwise import inner_products
from fedjax_pers.aggregators.similarity import mean_of_models, mixtures, row_of
from fedjax_pers.base import Array, Leaves
from fedjax_pers.checks import positive_int
from fedjax_pers.masks import inverse, masks_of, values_of
from fedjax_pers.trees import scatter_rows, stack_rows

TOLERANCE = 1e-6
"""Overlaps are ratios of whole numbers, in float32: so near to the threshold they are at it."""


def critical_collaboration(beta: int = 100, *, weights: Weights = "examples") -> Aggregator:
    """A client receives the mean of everybody, and where a parameter is critical to it, that of its collaborators.

    Overlap ``O_ij = 1 - sum |M_i - M_j| / (2 n)`` of critical masks with n true elements. In round t (from 1 on) client
    j is a collaborator of i where ``O_ij >= mean O + t / beta (max O - mean O)``, mean and maximum over pairs of
    different clients; after ``beta`` rounds each client is alone. Collaborators count the same.

    ``Server.aux`` holds ``"weights"`` (``[num_clients, num_clients]``: from whom a client's critical parameters were
    made last), ``"critical"`` and ``"custom"`` (masks and values, ``[num_clients, ...]``), and ``"rounds"``.

    Args:
      beta: rounds in which there is collaboration.
      weights: of the mean of everybody.

    Source: Wu, Liu, Niu, Zhu, Tang, "Bold but Cautious", ICCV 2023, arXiv:2309.11103.
    """
    positive_int("beta", beta)

    def init(shared: Leaves, trainable: frozenset[str], num_clients: int) -> Server:
        aux = {
            "weights": jnp.zeros((num_clients, num_clients), jnp.float32),
            "critical": stack_rows(masks_of(shared), num_clients),
            "custom": stack_rows(values_of(shared), num_clients),
            "rounds": jnp.zeros((), jnp.int32),
        }
        return Server(shared, (), aux)

    def render(server: Server, client: Array) -> Leaves:
        values = values_of(server.shared)
        custom = row_of(server.aux["custom"], client, values)
        critical = row_of(server.aux["critical"], client, masks_of(server.shared))
        return server.shared | {name: jnp.where(mask, custom[name], values[name]) for name, mask in critical.items()}

    def finish(server: Server, received: Collected, trainable: frozenset[str]) -> Server:
        models, critical = received.each
        there, rounds, count = received.accepted, server.aux["rounds"], server.aux["weights"].shape[0]
        found = collaborators(overlaps(critical), there, rounds + 1, beta)
        ids = jnp.where(there, received.ids, count)
        place = jnp.full(count, ids.shape[0]).at[ids].set(jnp.arange(ids.shape[0]), mode="drop")
        whole = jnp.take(found, place, axis=1, mode="fill", fill_value=0)
        aux = {
            "weights": server.aux["weights"].at[ids].set(whole, mode="drop"),
            "critical": scatter_rows(server.aux["critical"], ids, critical),
            "custom": scatter_rows(server.aux["custom"], ids, mixtures(found, models)),
            "rounds": rounds + there.any(),
        }
        everybody = mean_of_models(received.weight, models, values_of(server.shared))
        return server._replace(shared=server.shared | everybody, aux=aux)

    return Aggregator(
        init,
        render,
        client_weight(weights),
        nothing_added,
        finish,
        collect=lambda received, upload, sender: (values_of(upload), inverse(masks_of(upload))),
    )


def overlaps(critical: Leaves) -> Array:
    """``O_ij``, ``[clients, clients]``, of masks ``[clients, ...]`` with as many true elements each.

    Example:
      >>> overlaps({"w": jnp.array([[True, True, False, False], [True, False, True, False]])}).tolist()
      [[1.0, 0.5], [0.5, 1.0]]
    """
    common = inner_products({name: x.astype(jnp.float32) for name, x in critical.items()})
    number = jnp.diagonal(common)
    differ = number[:, None] + number[None] - 2 * common
    return 1 - differ / jnp.maximum(2 * number[:, None], 1)


def collaborators(overlap: Array, there: Array, number: Array, beta: int) -> Array:
    """Weights ``[clients, clients]`` of FedCAC's collaboration in round ``number``; rows of absent clients are zeros.

    Args:
      overlap: ``[clients, clients]``.
      there: ``bool [clients]``.
      number: of the round, from 1 on.
      beta: the last round with collaboration.
    """
    itself = jnp.eye(there.shape[0], dtype=bool)
    pairs = there[:, None] & there[None] & ~itself
    average = jnp.where(pairs, overlap, 0).sum() / jnp.maximum(pairs.sum(), 1)
    highest = jnp.max(jnp.where(pairs, overlap, -jnp.inf))
    threshold = average + number / beta * (jnp.where(pairs.any(), highest, 0) - average)
    chosen = pairs & (overlap >= threshold - TOLERANCE) & (number <= beta) | (itself & there[:, None])
    return chosen / jnp.maximum(chosen.sum(1, keepdims=True), 1).astype(jnp.float32)
