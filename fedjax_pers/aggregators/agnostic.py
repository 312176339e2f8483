"""Aggregators that look after the clients which are worst off: minimax weights, fair and tilted means.

Clients say the loss of the model they received, in evaluation mode, before they train. It is the loss of the model that
predicts for them: with personal leaves, of the personalised one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_pers.aggregators.base import Aggregator, Collected, Sender, Server, copy_to_all
from fedjax_pers.aggregators.mean import Weights, client_weight, mean, not_zero, server_step, weighted_difference
from fedjax_pers.base import Array, Context, Leaves, Parts
from fedjax_pers.checks import number, one_of, positive, require
from fedjax_pers.judging import mean_loss
from fedjax_pers.layouts import Layout

Ascent = Literal["projected", "exponentiated"]
FURTHEST = 40.0  # e^40 times a difference and a number of examples is a float32


def loss_of_received(layout: Layout, parts: Parts, context: Context) -> dict[str, Array]:
    """``ask`` of an aggregator: the loss of the model that the client would predict with now."""
    return {"loss": mean_loss(layout.task, layout.view("model").read(parts), context)}


def minimax(
    ascent_lr: Any = 0.1,
    optimizer: optax.GradientTransformation | None = None,
    *,
    ascent: Ascent = "projected",
    domains: Sequence[int] | None = None,
) -> Aggregator:
    """Weights of the clients, or of domains of clients, that rise where the loss is high.

    ``w <- w + server_step(sum_k lambda_k mean_{i in k} (w_i - w))`` and at the same time
    ``lambda <- project(lambda + ascent_lr f(w))`` onto the simplex, or ``lambda_k <- lambda_k exp(ascent_lr f_k(w))``,
    normalised. ``f_k(w)`` is the mean loss of domain k at the model that was *sent*. The model to predict with is the
    mean of all iterates.

    ``Server.aux`` holds ``"weights"`` (``lambda``, ``[domains]``), ``"average"`` and ``"rounds"``.

    Args:
      ascent_lr: step size of the weights, at least 0; with 0 they stay uniform over domains.
      optimizer: as in :func:`~fedjax_pers.aggregators.mean`.
      ascent: the projected gradient, or the exponentiated one (which never lets a weight be 0).
      domains: the domain of every client, ``0 .. domains - 1``; each client is one of its own by default. Within a
        domain clients count by their examples.

    Source: Mohri, Sivek, Suresh, "Agnostic Federated Learning", ICML 2019.
    """
    number("ascent_lr", ascent_lr, low=0)
    one_of("ascent", ascent, ("projected", "exponentiated"))
    step, named = server_step(optimizer), _domains(domains)

    def domain_of(ids: Array) -> Array:
        return ids if named is None else jnp.asarray(named)[jnp.minimum(ids, len(named) - 1)]

    def init(shared: Leaves, trainable: frozenset[str], num_clients: int) -> Server:
        require(
            named is None or len(named) == num_clients,
            f"domains: found {0 if named is None else len(named)}; expected one for each of {num_clients} clients",
        )
        count = num_clients if named is None else int(named.max()) + 1
        aux = {"weights": jnp.full(count, 1 / max(count, 1), jnp.float32), "average": shared, "rounds": jnp.int32(0)}
        return step.init(shared, trainable, num_clients)._replace(aux=aux)

    def weigh(server: Server, sender: Sender) -> Array:
        own, weights = domain_of(sender.id), server.aux["weights"]
        beside = jnp.where(domain_of(sender.cohort) == own, sender.sizes, 0).sum()
        # Times their start, and one domain has no other to be equal to: weights that stay are those of the plain mean.
        share = sender.size / jnp.maximum(beside, 1) if len(weights) > 1 else sender.size.astype(jnp.float32)
        return weights[own] / jnp.float32(1 / len(weights)) * share

    def finish(server: Server, received: Collected, trainable: frozenset[str]) -> Server:
        summed, mass = received.total
        difference = jax.tree.map(lambda x: x / jnp.where(mass > 0, mass, 1).astype(x.dtype), summed)
        moved = step.move(server, difference, mass > 0, trainable)
        weights = server.aux["weights"]
        losses = _by_domain(received, domain_of(received.ids), weights)
        anyone = received.accepted.any()
        rounds = server.aux["rounds"] + anyone
        aux = {
            "weights": jnp.where(anyone, _ascended(weights, losses, ascent_lr, ascent), weights),
            "average": _averaged(server.aux["average"], moved.shared, jnp.where(anyone, rounds, 0)),
            "rounds": rounds,
        }
        return moved._replace(aux=aux)

    return Aggregator(
        init,
        copy_to_all,
        weigh,
        lambda weight, received, upload, sender: (weighted_difference(weight, received, upload), weight),
        finish,
        collect=lambda received, upload, sender: {"loss": sender.said["loss"], "size": sender.size},
        ask=loss_of_received,
        says=("loss",),
        deliver=lambda server, client: server.aux["average"],
        whole=lambda server: server.aux["average"],
        sees="each client's loss",
    )


def _domains(domains: Sequence[int] | None) -> np.ndarray | None:
    if domains is None:
        return None
    found = np.asarray(domains)
    require(
        found.ndim == 1 and found.size > 0 and np.issubdtype(found.dtype, np.integer) and found.min() >= 0,
        f"domains: found {domains!r}; expected a whole number from 0 for each client",
    )
    missing = sorted(set(range(int(found.max()) + 1)) - set(found.tolist()))
    require(not missing, f"domains: nobody is in {missing}; domains are numbered 0 .. {int(found.max())} without gaps")
    return found


def _by_domain(received: Collected, domain: Array, weights: Array) -> Array:
    """Mean loss of each domain; where nobody spoke for it, the weighted mean of the others, which moves nothing."""
    size = jnp.where(received.accepted, received.each["size"], 0).astype(jnp.float32)
    loss = jnp.where(received.accepted, received.each["loss"], 0)
    count = jnp.zeros_like(weights).at[domain].add(size, mode="drop")
    total = jnp.zeros_like(weights).at[domain].add(size * loss, mode="drop")
    there = count > 0
    means = jnp.where(there, total / jnp.maximum(count, 1), 0)
    spoken = jnp.where(there, weights, 0)
    usual = (spoken * means).sum() / jnp.where(spoken.sum() > 0, spoken.sum(), 1)
    return jnp.where(there, means, usual)


def _ascended(weights: Array, losses: Array, lr: Any, ascent: Ascent) -> Array:
    if ascent == "projected":
        risen = optax.projections.projection_simplex(weights + lr * losses)
    else:
        risen = jax.nn.softmax(jnp.log(weights) + lr * losses)
    # A loss near the largest float32 would overflow: better no step than weights that are not finite.
    return jnp.where(jnp.isfinite(risen).all(), risen, weights).astype(weights.dtype)


def _averaged(average: Leaves, new: Leaves, count: Array) -> Leaves:
    """The running mean of ``count`` iterates; unchanged where that is 0."""

    def mixed(old: Array, new: Array) -> Array:
        if not jnp.issubdtype(new.dtype, jnp.floating):
            return jnp.where(count > 0, new, old)
        return jnp.where(count > 0, old + (new - old) / jnp.maximum(count, 1).astype(new.dtype), old)

    return jax.tree.map(mixed, average, new)


def fair(q: Any, lr: Any, optimizer: optax.GradientTransformation | None = None) -> Aggregator:
    """q-FedAvg: differences weighted by the q-th power of the loss, with a step size that q does not upset.

    ``w <- w - sum_k F_k^q D_k / sum_k (q F_k^{q-1} |D_k|^2 + F_k^q / lr)`` with ``D_k = (w - w_k) / lr`` and ``F_k``
    the loss of the client at ``w`` (plus 1e-10). Leaves that are not trained move by their mean weighted by ``F_k^q``.

    Args:
      q: at least 0; 0 is the uniform mean, more is fairer.
      lr: step size of the clients (1 / L).
      optimizer: as in :func:`~fedjax_pers.aggregators.mean`.

    Source: Li, Sanjabi, Beirami, Smith, "Fair Resource Allocation in Federated Learning", ICLR 2020.
    """
    number("q", q, low=0)
    positive("lr", lr)
    step = server_step(optimizer)

    def lift(weight: Array, received: Leaves, upload: Leaves, sender: Sender) -> Any:
        there = (weight > 0).astype(jnp.float32)
        loss = sender.said["loss"] + 1e-10
        difference = weighted_difference(there, received, upload)
        power, slope = there * loss**q, there * q * loss ** (q - 1)
        squares = {name: slope * jnp.sum(jnp.square(x / lr)) for name, x in difference.items()}
        return jax.tree.map(lambda x: x * (power / lr).astype(x.dtype), difference), squares, power / lr

    def finish(server: Server, total: Any, trainable: frozenset[str]) -> Server:
        summed, squares, mass = total
        whole = mass + sum((squares[name] for name in sorted(trainable)), start=jnp.zeros(()))
        share = {name: x / not_zero(whole if name in trainable else mass) for name, x in summed.items()}
        return step.move(server, share, mass > 0, trainable)

    return Aggregator(
        step.init, copy_to_all, client_weight("uniform"), lift, finish, ask=loss_of_received, says=("loss",)
    )


def tilted(
    t: Any, optimizer: optax.GradientTransformation | None = None, *, weights: Weights = "examples"
) -> Aggregator:
    """TERM: the mean with weights ``p_k exp(t f_k) / sum_j p_j exp(t f_j)``, ``f_k`` being the loss at ``w``.

    ``t -> 0`` is the mean, ``t -> infinity`` looks at the worst client alone, ``t < 0`` leaves out the worst.
    ``Server.aux["level"]`` is the tilted loss ``log(sum_k p_k exp(t f_k)) / t`` of the last round, to which exponents
    are relative; they are cut at 40 on both sides, so that nothing overflows.

    Args:
      t: the tilt, any finite number.
      optimizer: as in :func:`~fedjax_pers.aggregators.mean`.
      weights: ``p_k``, by examples or uniform.

    Source: Li, Beirami, Sanjabi, Smith, "Tilted Empirical Risk Minimization", ICLR 2021.
    """
    number("t", t)
    plain, base = mean(optimizer, weights=weights), client_weight(weights)

    def init(shared: Leaves, trainable: frozenset[str], num_clients: int) -> Server:
        return plain.init(shared, trainable, num_clients)._replace(aux={"level": jnp.zeros(())})

    def weigh(server: Server, sender: Sender) -> Array:
        exponent = t * (sender.said["loss"] - server.aux["level"])
        return base(server, sender) * jnp.exp(jnp.clip(exponent, -FURTHEST, FURTHEST))

    def finish(server: Server, received: Collected, trainable: frozenset[str]) -> Server:
        moved = plain.finish(server, received.total, trainable)
        share = jnp.where(received.accepted, received.each["share"], 0)
        level = _tilted_loss(received.each["loss"], share, t)
        return moved._replace(aux={"level": jnp.where(share.sum() > 0, level, server.aux["level"])})

    return plain._replace(
        init=init,
        weigh=weigh,
        finish=finish,
        collect=lambda received, upload, sender: {"loss": sender.said["loss"], "share": base(None, sender)},
        ask=loss_of_received,
        says=("loss",),
        sees="each client's loss",
    )


def _tilted_loss(losses: Array, share: Array, t: Any) -> Array:
    share = share / not_zero(share.sum())
    steep = jnp.abs(t) > 1e-6
    scale = jnp.where(steep, t, 1)
    exact = jax.nn.logsumexp(scale * losses, b=share) / scale
    return jnp.where(steep, exact, (share * losses).sum())
