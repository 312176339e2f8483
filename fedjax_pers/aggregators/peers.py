"""Models of other clients, which a client judges or combines on its own data: FedFomo and APPLE.

The server keeps the last model of every client, ``Server.aux["models"]`` (``[num_clients, ...]``), and sends some of
them to a client. FedFomo's clients judge them one after another; no array ``[clients, models, parameters]`` is made.
**Privacy**: clients see models that others have trained, which say more of their data than a mean does.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pers.aggregators.base import Aggregator, Collected, Server, nothing_added
from fedjax_pers.aggregators.mean import Weights, client_weight
from fedjax_pers.aggregators.similarity import mean_of_models, row_of
from fedjax_pers.base import Array, Context, Leaves, Parts
from fedjax_pers.batches import split_off
from fedjax_pers.checks import number, positive_int, require
from fedjax_pers.judging import mean_loss
from fedjax_pers.layouts import Layout
from fedjax_pers.objectives import squared_distance
from fedjax_pers.trees import as_dtype, entry, scatter_rows, stack_rows

SHARES = "shares"
"""What a client says: how much it took of each model that it was sent."""


RELATIONS, SIZE_SHARES, NUMBER, ROUNDS = "/relations", "/shares", "/number", "/rounds"
"""A client's relations to all; what is sent beside core models. No leaf of a model has such a name."""


def first_order(
    models: int = 5, *, explore: Any = 0.3, decay: Any = 0.05, kept_back: Any = 0.2, weights: Weights = "examples"
) -> Aggregator:
    """Each client moves to where the models that it was sent would lower its loss: first-order model optimisation.

    Of models ``w_n`` client i takes shares ``s_n = max(0, (L_i(w_i) - L_i(w_n)) / |w_n - w_i|)``, divided by their sum,
    and begins from ``w_i + sum_n s_n (w_n - w_i)``; where no model is better it begins from its own ``w_i``. ``L_i`` is
    the loss on examples that it does not train on.

    Which models it is sent depends on ``aux["affinity"]`` (``[num_clients, num_clients]``, shares added up over
    rounds): the highest of its row, or, with probability ``max(0, explore - decay * round)``, any. ``aux["weights"]``
    says of whose models each client began last, its own included; ``aux["came"]`` how often each client sent a model:
    only such clients' models are sent.

    Args:
      models: that a client receives at most, its own of last time among them; at least 2.
      explore: probability of random ones in the first round, in 0 .. 1.
      decay: what that probability loses a round, at least 0.
      kept_back: share of a client's training examples on which it judges (:func:`~fedjax_pers.batches.split_off`).
      weights: of the mean of models that clients predict with which were never seen.

    Source: Zhang, Sapra, Fidler, Yeung, Alvarez, "Personalized Federated Learning with First Order Model Optimization",
    ICLR 2021, arXiv:2012.08565.

    Differences from the paper: a client's own model is among those that are sent, so that the simulation keeps it once;
    the coin of exploration falls once for all places.
    """
    positive_int("models", models)
    require(models >= 2, f"models: found {models}; allowed are 2 or more, the client's own among them")
    number("explore", explore, 0, 1)
    number("decay", decay, low=0)
    number("kept_back", kept_back, 0, 1)

    def init(shared: Leaves, trainable: frozenset[str], num_clients: int) -> Server:
        square = jnp.zeros((num_clients, num_clients), jnp.float32)
        came = jnp.zeros(num_clients, jnp.int32)
        aux = {"models": stack_rows(shared, num_clients), "affinity": square, "weights": square, "came": came}
        return Server(shared, (), aux | {"rounds": jnp.zeros((), jnp.int32)})

    def chosen(server: Server, client: Array) -> Array:
        """``[models]``: the client itself, then others; itself again where not enough have come."""
        count = server.aux["came"].shape[0]
        own = jnp.minimum(client, count - 1)
        coin, order = jax.random.split(jax.random.fold_in(server.draws("peers"), own))
        at_random = jax.random.uniform(order, (count,))
        explores = jax.random.uniform(coin) < explore - decay * server.aux["rounds"]
        affinity = jnp.where(explores, 0, server.aux["affinity"][own])
        others = (server.aux["came"] > 0) & (jnp.arange(count) != own)
        best = jnp.lexsort((at_random, affinity, others))[::-1][: min(models, count) - 1]
        return jnp.concatenate([own[None], jnp.where(others[best], best, own)])

    def render(server: Server, client: Array) -> Leaves:
        places = chosen(server, client)
        return jax.tree.map(lambda x: x[places], server.aux["models"])

    def ask(layout: Layout, parts: Parts, context: Context) -> dict[str, Array]:
        _, judged = split_off(context, kept_back)
        own = entry(parts.shared, 0)

        def judge(number: Array) -> tuple[Array, Array]:
            model = entry(parts.shared, number)
            variables = layout.view("model").read(parts._replace(shared=model))
            return mean_loss(layout.task, variables, judged), squared_distance(_floating(model), _floating(own))

        sent = next(iter(parts.shared.values())).shape[0]
        return {SHARES: shares_of(*jax.lax.map(judge, jnp.arange(sent))).astype(jnp.float32)}

    def pick(download: Leaves, said: dict[str, Array]) -> Leaves:
        def moved(x: Array) -> Array:
            if not jnp.issubdtype(x.dtype, jnp.floating):
                return x[0]
            return x[0] + jnp.tensordot(said[SHARES].astype(x.dtype), x - x[0], 1, precision="highest")

        return jax.tree.map(moved, download)

    def finish(server: Server, received: Collected, trainable: frozenset[str]) -> Server:
        models_of, shares = received.each
        count = server.aux["came"].shape[0]
        ids = jnp.where(received.accepted, received.ids, count)
        sent = jax.vmap(lambda client: chosen(server, client))(received.ids)
        row = jax.vmap(lambda places, share: jnp.zeros(count, jnp.float32).at[places].add(share))(sent, shares)
        # What a client did not take from others is of its own model.
        own = jax.nn.one_hot(received.ids, count, dtype=jnp.float32) * (1 - row.sum(1, keepdims=True))
        aux = {
            "models": scatter_rows(server.aux["models"], ids, models_of),
            "affinity": server.aux["affinity"].at[ids].add(row, mode="drop"),
            "weights": server.aux["weights"].at[ids].set(row + own, mode="drop"),
            "came": server.aux["came"].at[ids].add(1, mode="drop"),
            "rounds": server.aux["rounds"] + received.accepted.any(),
        }
        return server._replace(shared=mean_of_models(received.weight, models_of, server.shared), aux=aux)

    return Aggregator(
        init,
        render,
        client_weight(weights),
        nothing_added,
        finish,
        collect=lambda received, upload, sender: (upload, sender.said[SHARES]),
        ask=ask,
        says=(SHARES,),
        pick=pick,
        deliver=lambda server, client: row_of(server.aux["models"], client, server.shared),
        settle=lambda layout, parts, context: parts.shared,
    )


def core_models(*, weights: Weights = "examples") -> Aggregator:
    """Every client is sent the core models of all, trains its own and combines them as its relations say (APPLE).

    A client predicts with ``sum_j p_ij w_j`` of the last core models, ``Server.aux["models"]``
    (``[num_clients, ...]``). Its relations ``p_i`` are its own: among its personal leaves, :data:`RELATIONS` is what
    they differ by from the share that each client has of all examples (of those that came once; ``aux["sizes"]``), or
    from ``1 / num_clients`` before anybody has come. The download is one array for all clients.

    Args:
      weights: of the mean model, ``Server.shared``.

    Source: Luo, Wu, "Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning", IJCAI 2022,
    arXiv:2110.08394.
    """

    def init(shared: Leaves, trainable: frozenset[str], num_clients: int) -> Server:
        sizes, rounds = jnp.zeros(num_clients, jnp.float32), jnp.zeros((), jnp.int32)
        return Server(shared, (), {"models": stack_rows(shared, num_clients), "sizes": sizes, "rounds": rounds})

    def render(server: Server, client: Array) -> Leaves:
        sizes = server.aux["sizes"]
        known = jnp.where(sizes.sum() > 0, sizes, 1)
        own = jnp.minimum(client, sizes.shape[0] - 1)
        told = {SIZE_SHARES: known / known.sum(), NUMBER: own, ROUNDS: server.aux["rounds"]}
        return server.aux["models"] | told

    def finish(server: Server, received: Collected, trainable: frozenset[str]) -> Server:
        models, sizes = received.each
        ids = jnp.where(received.accepted, received.ids, server.aux["sizes"].shape[0])
        aux = {
            "models": scatter_rows(server.aux["models"], ids, models),
            "sizes": server.aux["sizes"].at[ids].set(sizes, mode="drop"),
            "rounds": server.aux["rounds"] + received.accepted.any(),
        }
        return server._replace(shared=mean_of_models(received.weight, models, server.shared), aux=aux)

    return Aggregator(
        init,
        render,
        client_weight(weights),
        nothing_added,
        finish,
        collect=lambda received, upload, sender: (upload, sender.size.astype(jnp.float32)),
        pick=lambda download, said: entry(stacked(download), download[NUMBER]),
        settle=lambda layout, parts, context: combined(layout, parts.shared, parts.personal[RELATIONS]),
    )


def stacked(download: Leaves) -> Leaves:
    """The core models ``[num_clients, ...]`` of APPLE's download."""
    return {name: x for name, x in download.items() if name not in (SIZE_SHARES, NUMBER, ROUNDS)}


def combined(layout: Layout, download: Leaves, relations: Array) -> Leaves:
    """``sum_j p_j w_j`` with ``p`` the shares of all examples plus ``relations``.

    Relations may be negative, so running statistics and counters go by the shares alone.
    """
    shares = download[SIZE_SHARES]

    def one(name: str, x: Array) -> Array:
        weights = shares + relations if name in layout.trainable else shares
        mixed = jnp.tensordot(weights, x.astype(jnp.promote_types(x.dtype, jnp.float32)), 1, precision="highest")
        return as_dtype(mixed, x.dtype)

    return {name: one(name, x) for name, x in stacked(download).items()}


def shares_of(losses: Array, squared_distances: Array) -> Array:
    """FedFomo's shares ``[models]`` of models whose first is the client's own; zeros where none has a lower loss.

    Example:
      >>> shares_of(jnp.array([0.5, 0.125, 0.5, 2.0]), jnp.array([0.0, 0.25, 4.0, 1.0])).tolist()
      [0.0, 1.0, 0.0, 0.0]
    """
    gain, distance = losses[0] - losses, jnp.sqrt(squared_distances)
    better = (gain > 0) & (distance > 0)  # NaN is not better, nor is the model itself
    # Whose own model has an infinite loss may still be helped by others: by the nearest most.
    gain = jnp.minimum(gain, jnp.finfo(gain.dtype).max)
    rate = jnp.where(better, jnp.log(jnp.where(better, gain, 1)) - jnp.log(jnp.where(better, distance, 1)), -jnp.inf)
    return jnp.where(better.any(), jax.nn.softmax(jnp.where(better.any(), rate, 0)), 0)


def _floating(leaves: Leaves) -> Leaves:
    return {name: x for name, x in leaves.items() if jnp.issubdtype(x.dtype, jnp.floating)}
