"""DRFA: clients are drawn by weights that rise where the loss is high, and a second cohort says where it is."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_pers.aggregators.agnostic import loss_of_received
from fedjax_pers.aggregators.base import Aggregator, Collected, Sender, Server, Survey
from fedjax_pers.aggregators.mean import mean
from fedjax_pers.base import Array, Cohort, Leaves
from fedjax_pers.batches import shuffled
from fedjax_pers.checks import number, positive_int

SNAPSHOT = "snapshot/"
"""The model some steps into training goes by these names, beside the one after all of them."""


def distributionally_robust(clients: int = 10, steps: int = 10, ascent_lr: Any = 0.01) -> tuple[Aggregator, Survey]:
    """The mean over clients drawn in proportion to ``lambda``, and the survey by which ``lambda`` ascends.

    ``clients`` are drawn from ``lambda`` with replacement; ``w`` becomes the plain mean of their models over draws, and
    ``w'`` that of their models after a step that is drawn for the round (:data:`SNAPSHOT`). As many clients as were
    different, drawn uniformly, then say their losses of ``w'``, and ``lambda <- project(lambda + steps ascent_lr v)``
    with ``v_j = N / asked * f_j(w')`` for those and 0 for all others.

    ``Server.aux`` holds ``"weights"`` (``lambda``, ``[num_clients]``).

    Args:
      clients: draws in a round.
      steps: of local training, by which the step of the ascent is scaled.
      ascent_lr: step size of the weights, at least 0.

    Source: Deng, Kamani, Mahdavi, "Distributionally Robust Federated Averaging", NeurIPS 2020, arXiv:2102.12660.

    Differences from the paper: a client that is drawn twice trains once and counts twice; as many clients are asked as
    have trained (the paper asks as many as were drawn), so that what is sent can be counted by client.
    """
    positive_int("clients", clients)
    positive_int("steps", steps)
    number("ascent_lr", ascent_lr, low=0)
    base = mean(weights="uniform")

    def init(shared: Leaves, trainable: frozenset[str], num_clients: int) -> Server:
        aux = {"weights": jnp.full(num_clients, 1 / max(num_clients, 1), jnp.float32)}
        return base.init(shared, trainable, num_clients)._replace(aux=aux)

    def drawn(server: Server) -> Array:
        """How often each client was drawn, ``[num_clients]``."""
        weights = server.aux["weights"]
        ids = jax.random.choice(server.draws("drawn"), weights.shape[0], (clients,), p=weights)
        return jnp.zeros(weights.shape, jnp.int32).at[ids].add(1)

    def invite(server: Server, cohort: Cohort) -> Cohort:
        return _only(cohort, drawn(server) > 0, clients)

    def weigh(server: Server, sender: Sender) -> Array:
        counts = drawn(server)
        return counts[jnp.minimum(sender.id, counts.shape[0] - 1)].astype(jnp.float32)

    def finish(server: Server, total: Any, trainable: frozenset[str]) -> Server:
        # Uploads are differences to the model that was sent, those of the snapshot too.
        moved = base.finish(server._replace(shared=with_snapshot(model_of(server.shared))), total, trainable)
        _, mass = total
        return jax.tree.map(lambda new, old: jnp.where(mass > 0, new, old), moved, server)

    def ask_some(server: Server, cohort: Cohort) -> Cohort:
        count = server.aux["weights"].shape[0]
        words = jax.random.bits(server.draws("asked"), (2,), jnp.uint32)
        order = shuffled(words, jnp.arange(min(clients, count)), count)
        asked = jnp.arange(order.shape[0]) < (drawn(server) > 0).sum()
        chosen = jnp.zeros(count, bool).at[jnp.where(asked, order, count)].set(True, mode="drop")
        return _only(cohort, chosen, clients)

    def ascend(server: Server, answers: Collected) -> Server:
        weights, asked = server.aux["weights"], answers.accepted.sum()
        losses = jnp.where(answers.accepted, answers.each["loss"], 0) * weights.shape[0] / jnp.maximum(asked, 1)
        estimate = jnp.zeros_like(weights).at[answers.ids].add(losses, mode="drop")
        risen = optax.projections.projection_simplex(weights + steps * ascent_lr * estimate).astype(weights.dtype)
        # A loss near the largest float32 would overflow: better no step than weights that are not finite.
        return server._replace(aux={"weights": jnp.where((asked > 0) & jnp.isfinite(risen).all(), risen, weights)})

    aggregator = base._replace(
        init=init,
        render=lambda server, client: model_of(server.shared),
        weigh=weigh,
        finish=finish,
        pick=lambda download, said: with_snapshot(download),
        invite=invite,
        sees="each client's loss",
    )
    return aggregator, Survey(ask_some, lambda server, client: snapshot_of(server.shared), loss_of_received, ascend)


def with_snapshot(model: Leaves) -> Leaves:
    """The leaves of a model and a snapshot that is equal."""
    return model | {SNAPSHOT + name: jnp.array(x) for name, x in model.items()}


def model_of(leaves: Leaves) -> Leaves:
    """Those that are not of the snapshot."""
    return {name: x for name, x in leaves.items() if not name.startswith(SNAPSHOT)}


def snapshot_of(leaves: Leaves) -> Leaves:
    """Those of the snapshot, under the model's names."""
    return {name.removeprefix(SNAPSHOT): x for name, x in leaves.items() if name.startswith(SNAPSHOT)}


def _only(cohort: Cohort, chosen: Array, places: int) -> Cohort:
    """The clients of an ordered cohort for which ``chosen`` (``[num_clients]``) holds, in so many places."""
    count, there = chosen.shape[0], cohort.ids.shape[0]
    those = cohort.valid & (cohort.ids < count) & chosen[jnp.minimum(cohort.ids, count - 1)]
    (index,) = jnp.nonzero(those, size=min(places, there), fill_value=there)
    some = cohort.at(jnp.minimum(index, there - 1))
    found = index < there
    return some._replace(ids=jnp.where(found, some.ids, count), valid=found)
