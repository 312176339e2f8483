"""The weighted mean, with any optax optimiser as the server's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_pers.aggregators.base import Aggregator, Sender, Server, copy_to_all
from fedjax_pers.base import Array, Leaves
from fedjax_pers.checks import one_of
from fedjax_pers.trees import as_dtype

Weights = Literal["examples", "uniform"]


def weighted_difference(weight: Array, download: Leaves, upload: Leaves) -> Leaves:
    """``weight * (upload - download)``, accumulated in float32 at least."""

    def scaled(up: Array, down: Array) -> Array:
        dtype = jnp.promote_types(up.dtype, jnp.float32)
        return (up.astype(dtype) - down.astype(dtype)) * weight.astype(dtype)

    return jax.tree.map(scaled, upload, download)


def clipped(difference: Leaves, bound: Any) -> Leaves:
    """A client's difference with an L2 norm over all leaves of at most ``bound``."""
    norm = optax.tree.norm(difference)
    scale = jnp.minimum(1, bound / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
    return jax.tree.map(lambda x: x * scale.astype(x.dtype), difference)


def not_zero(x: Array) -> Array:
    """A divisor in whose place 1 is good where it is 0: what it divides is 0 there too."""
    return jnp.where(x > 0, x, 1)


class ServerStep(NamedTuple):
    """What the server does with a difference.

    Attributes:
      init: that of an aggregator.
      move: ``move(server, difference, received, trainable) -> Server``; unchanged where ``received`` is false.
    """

    init: Callable[[Leaves, frozenset[str], int], Server]
    move: Callable[[Server, Leaves, Array, frozenset[str]], Server]


def server_step(optimizer: optax.GradientTransformation | None) -> ServerStep:
    """A step along a difference: the optimiser on trainable leaves, plain addition on the others.

    Args:
      optimizer: sees the negative difference as the gradient; ``optax.sgd(1.0)`` by default.
    """
    optimizer = optax.sgd(1.0) if optimizer is None else optimizer

    def init(shared: Leaves, trainable: frozenset[str], num_clients: int) -> Server:
        return Server(shared, optimizer.init({name: x for name, x in shared.items() if name in trainable}), ())

    def move(server: Server, difference: Leaves, received: Array, trainable: frozenset[str]) -> Server:
        shared, plain = server.shared, {name: as_dtype(x, server.shared[name].dtype) for name, x in difference.items()}
        steep = {name: -plain[name] for name in shared if name in trainable}
        moving = {name: x for name, x in shared.items() if name in trainable}
        updates, opt = optimizer.update(steep, server.opt, moving)
        moved = optax.apply_updates(moving, updates)
        new = {name: moved[name] if name in trainable else x + plain[name] for name, x in shared.items()}
        after = server._replace(shared=new, opt=opt)
        return jax.tree.map(lambda new, old: jnp.where(received, new, old), after, server)

    return ServerStep(init, move)


def client_weight(weights: Weights) -> Any:
    """``weigh`` of an aggregator: a client counts by its training examples, or every client counts 1."""
    one_of("weights", weights, ("examples", "uniform"))

    def weigh(server: Server, sender: Sender) -> Array:
        return sender.size.astype(jnp.float32) if weights == "examples" else jnp.ones((), jnp.float32)

    return weigh


def mean(optimizer: optax.GradientTransformation | None = None, *, weights: Weights = "examples") -> Aggregator:
    """The weighted mean of client differences as a pseudo-gradient: ``w + server_step(sum_i p_i (w_i - w))``.

    ``p_i`` are the weights of the accepted uploads, divided by their sum. Leaves that are not trained (running
    statistics) move by the plain mean. With no accepted upload neither the leaves nor the optimiser's state change.

    Example:
      >>> import optax
      >>> server_momentum = mean(optax.sgd(1.0, momentum=0.9))

    Args:
      optimizer: sees ``-sum p_i (w_i - w)`` as the gradient; ``optax.sgd(1.0)`` (plain averaging) by default.
      weights: ``"examples"`` (a client counts by its training examples) or ``"uniform"``.

    Source: McMahan et al., AISTATS 2017; Reddi et al., "Adaptive Federated Optimization", ICLR 2021.
    """
    step = server_step(optimizer)

    def lift(weight: Array, received: Leaves, upload: Leaves, sender: Sender) -> Any:
        return weighted_difference(weight, received, upload), weight

    def finish(server: Server, total: Any, trainable: frozenset[str]) -> Server:
        summed, mass = total
        share = jax.tree.map(lambda x: x / jnp.where(mass > 0, mass, 1).astype(x.dtype), summed)
        return step.move(server, share, mass > 0, trainable)

    return Aggregator(step.init, copy_to_all, client_weight(weights), lift, finish)
