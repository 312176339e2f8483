"""Layer by layer, each client's own mixture of all models, learnt by a hypernetwork a client on the server (pFedLA)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_pers.aggregators.base import Aggregator, Collected, Server, nothing_added
from fedjax_pers.aggregators.mean import client_weight
from fedjax_pers.aggregators.similarity import mean_of_models
from fedjax_pers.base import Array, Leaves
from fedjax_pers.checks import require
from fedjax_pers.generators import Generator, mlp
from fedjax_pers.keys import fold_name
from fedjax_pers.trees import as_dtype, entry, scatter_rows, stack_rows

WEIGHTS = "weights"


def layer_weights(
    groups: Sequence[Sequence[str]],
    *,
    generator: Generator | None = None,
    embedding: int = 8,
    optimizer: optax.GradientTransformation | None = None,
) -> Aggregator:
    """Client i receives ``sum_j alpha_ilj w_jl`` of each layer l, where ``alpha_il = softmax(h_i(v_i)_l)``.

    ``w_j`` is what client j sent last. With ``d_i``, old minus new, what training took from the received model, the
    generator h_i and the embedding v_i take a step along the pull-back of ``d_i`` by ``(h_i, v_i) -> received model``.
    The server keeps the models, generators and embeddings of all clients; those of absent clients stay.

    Args:
      groups: names of the shared leaves by layer; leaves in none of them are a layer of their own together.
      generator: h_i, a hidden layer of 32 by default; its outputs start near equal weights.
      embedding: numbers in v_i.
      optimizer: of generators and embeddings, ``optax.sgd(0.01)`` by default.

    Source: Ma, Zhang, Guo, Xu, "Layer-wised Model Aggregation for Personalized Federated Learning", CVPR 2022.
    """
    network, tx = generator or mlp((32,)), optax.sgd(0.01) if optimizer is None else optimizer
    require(len(groups) > 0, "groups: found none; expected the leaves of at least one layer")
    layer_of = {name: place for place, names in enumerate(groups) for name in names}

    def init(shared: Leaves, trainable: frozenset[str], num_clients: int) -> Server:
        server = Server(shared, (), {"models": stack_rows(shared, num_clients)})
        return draw(server, jax.random.key(0))

    def draw(server: Server, key: Array) -> Server:
        count = _count(server)
        like = {WEIGHTS: jnp.zeros((len(groups) + 1, count))}

        def one(key: Array) -> Any:
            return network.init(key, like, embedding), jax.random.normal(fold_name(key, "embedding"), (embedding,))

        keys = jax.vmap(lambda client: jax.random.fold_in(fold_name(key, "layer weights"), client))(jnp.arange(count))
        learnt = jax.vmap(one)(keys)
        return server._replace(aux=server.aux | {"learnt": learnt, "opt": jax.vmap(tx.init)(learnt)})

    def mixed(models: Leaves, learnt: Any) -> Leaves:
        """The model of one client, of all models ``[clients, ...]``."""
        weights = jax.nn.softmax(network.apply(*learnt)[WEIGHTS], axis=1)

        def one(name: str, x: Array) -> Array:
            whole = x.astype(jnp.promote_types(x.dtype, jnp.float32))
            shares = weights[layer_of.get(name, len(groups))]
            return as_dtype(jnp.tensordot(shares, whole, 1, precision="highest"), x.dtype)

        return {name: one(name, x) for name, x in models.items()}

    def render(server: Server, client: Array) -> Leaves:
        known, place = client < _count(server), jnp.minimum(client, _count(server) - 1)
        own = mixed(server.aux["models"], entry(server.aux["learnt"], place))
        return jax.tree.map(lambda a, b: jnp.where(known, a, b), own, server.shared)

    def finish(server: Server, collected: Collected, trainable: frozenset[str]) -> Server:
        aux, accepted = server.aux, collected.accepted
        uploads, took = collected.each
        rows = jnp.where(accepted, collected.ids, _count(server))
        places = jnp.minimum(collected.ids, _count(server) - 1)

        def learnt_of(learnt: Any, opt: Any, took: Leaves) -> Any:
            trained = {name: x for name, x in aux["models"].items() if name in trainable}
            made, pull = jax.vjp(lambda learnt: mixed(trained, learnt), learnt)
            (gradient,) = pull({name: took[name].astype(x.dtype) for name, x in made.items()})
            moves, opt = tx.update(gradient, opt, learnt)
            return optax.apply_updates(learnt, moves), opt

        learnt, opt = jax.vmap(learnt_of)(entry(aux["learnt"], places), entry(aux["opt"], places), took)
        models = scatter_rows(aux["models"], rows, uploads)
        after = {
            "models": models,
            "learnt": scatter_rows(aux["learnt"], rows, learnt),
            "opt": scatter_rows(aux["opt"], rows, opt),
        }
        shared = mean_of_models(jnp.ones(_count(server), jnp.float32), models, server.shared)
        new = server._replace(shared=shared, aux=after)
        return jax.tree.map(lambda new, old: jnp.where(accepted.any(), new, old), new, server)

    return Aggregator(
        init,
        render,
        client_weight("uniform"),
        nothing_added,
        finish,
        collect=lambda received, upload, sender: (upload, jax.tree.map(jnp.subtract, received, upload)),
        whole=None,
        draw=draw,
    )


def _count(server: Server) -> int:
    return jax.tree.leaves(server.aux["models"])[0].shape[0]
