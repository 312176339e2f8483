"""User-level differential privacy of what the server learns: an aggregator with clipping and noise around a mean."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_pers.aggregators.base import Aggregator, Sender, Server, seen_of_one
from fedjax_pers.aggregators.mean import client_weight, clipped
from fedjax_pers.base import Array, Leaves, Report
from fedjax_pers.checks import number, positive, require


def private(aggregator: Aggregator, *, clip_norm: Any, noise_multiplier: Any, clients: Any) -> Aggregator:
    """``w <- w + server_step((sum_i clip(w_i - w, C) + N(0, (z C)^2 I)) / clients)``: DP-FedAvg.

    Every client counts the same, one norm is over all of its shared leaves (running statistics too), noise is added
    once, to the sum, and the denominator is a constant. In a round without anybody there is noise all the same.
    Personal leaves are neither clipped nor noisy: nothing of them is sent.

    Example:
      >>> import fedjax_pers as fp
      >>> aggregator = private(fp.aggregators.mean(), clip_norm=1.0, noise_multiplier=1.0, clients=50)

    Args:
      aggregator: a mean (``mean``, ``norm_clipping``), with its server optimiser. One whose server must see something
        of single clients, or to which they say something beside their leaves, is refused: that would have no noise.
      clip_norm: C, the largest L2 norm of a client's difference, above 0.
      noise_multiplier: z, at least 0.
      clients: expected clients in a round: with Poisson sampling (``fp.poisson``) rate times the number of clients.

    Source: McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018.

    Differences from the paper: no accountant is included; a client's loss and size, which the simulation records,
    are not part of what is released.
    """
    sees = seen_of_one(aggregator)
    require(not sees, f"aggregator: found one whose server must see {sees}; differential privacy releases sums alone")
    require(not aggregator.says, f"aggregator: clients say {list(aggregator.says)} to it, which would be without noise")
    positive("clip_norm", clip_norm)
    number("noise_multiplier", noise_multiplier, low=0)
    positive("clients", clients)

    def init(shared: Leaves, trainable: frozenset[str], num_clients: int) -> Server:
        one = Sender(jnp.int32(0), jnp.int32(1), Report(*[jnp.zeros(())] * 3), {}, jnp.arange(1), jnp.ones(1))
        found: Any = jax.tree.structure(jax.eval_shape(aggregator.lift, jnp.ones(()), shared, shared, one))
        require(
            found == jax.tree.structure((dict(shared), jnp.zeros(()))),
            "aggregator: found one that adds up something else than differences and weights; allowed are means",
        )
        return aggregator.init(shared, trainable, num_clients)

    def lift(weight: Array, received: Leaves, upload: Leaves, sender: Sender) -> Any:
        there = (weight > 0).astype(jnp.float32)
        difference, _ = aggregator.lift(there, received, upload, sender)
        return clipped(difference, clip_norm), there

    def finish(server: Server, total: Any, trainable: frozenset[str]) -> Server:
        summed, _ = total
        key, std = server.draws("noise"), jnp.float32(noise_multiplier) * clip_norm
        noisy = optax.tree.add_scale(summed, std, optax.tree.random_like(key, summed))
        return aggregator.finish(server, (noisy, jnp.float32(clients)), trainable)

    return aggregator._replace(init=init, weigh=client_weight("uniform"), lift=lift, finish=finish)
