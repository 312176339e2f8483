"""A hypernetwork on the server: it makes each client's model of an embedding of the client (pFedHN)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_pers.aggregators.base import Aggregator, Collected, Server, nothing_added
from fedjax_pers.aggregators.mean import client_weight, not_zero
from fedjax_pers.base import Array, Context, Leaves, Parts
from fedjax_pers.checks import positive, whole_number
from fedjax_pers.generators import Generator, mlp
from fedjax_pers.keys import fold_name
from fedjax_pers.layouts import Layout
from fedjax_pers.local import ClientUpdate
from fedjax_pers.trees import as_dtype, entry, scatter_rows

GENERATOR, EMBEDDINGS = "generator", "embeddings"


def hypernetwork(
    update: ClientUpdate,
    *,
    generator: Generator | None = None,
    optimizer: optax.GradientTransformation | None = None,
    embedding_optimizer: optax.GradientTransformation | None = None,
    embedding: int = 0,
    clip: float = 50.0,
    newcomer_rounds: Any = 10,
) -> Aggregator:
    """The server's generator h and one embedding v_i a client: client i receives ``theta_i = h(v_i)`` and no more.

    With ``d_i = theta_i - theta_i'``, what the client's training took from its model, ``(g, g_i)`` is the pull-back of
    ``d_i`` by ``h`` at ``(phi, v_i)``: a product with its Jacobian, exact. The generator takes a step along the mean
    of the cohort's g, each embedding along its own ``g_i``, both from the same linearisation; together they are clipped
    to the norm ``clip``. Embeddings of clients that are absent, and their optimisers, stay as they are. Leaves that do
    not train (running statistics) are averaged. Only models travel. ``Server.shared`` has the model of the mean
    embedding, from which unseen clients start.

    Args:
      update: how clients train; an unseen client goes through it to fit its embedding, the generator being fixed.
      generator: h, of :mod:`fedjax_pers.generators`; three hidden layers of 100 by default.
      optimizer: of the generator; ``optax.sgd(0.01)`` by default.
      embedding_optimizer: of each embedding, ``optax.sgd(0.01)`` by default.
      embedding: numbers in an embedding; 0 for ``1 + clients // 4``.
      clip: bound of the norm of all gradients of a round together.
      newcomer_rounds: exchanges by which an unseen client's embedding is fitted, from the mean of all embeddings.

    Source: Shamsian, Navon, Fetaya, Chechik, "Personalized Federated Learning using Hypernetworks", ICML 2021.
    """
    whole_number("embedding", embedding)
    whole_number("newcomer_rounds", newcomer_rounds)
    positive("clip", clip)
    generator = generator or mlp((100, 100, 100))
    tx = optax.sgd(0.01) if optimizer is None else optimizer
    tx_of_one = optax.sgd(0.01) if embedding_optimizer is None else embedding_optimizer

    def init(shared: Leaves, trainable: frozenset[str], num_clients: int) -> Server:
        size = embedding or 1 + num_clients // 4
        phi = generator.init(jax.random.key(0), {name: shared[name] for name in sorted(trainable)}, size)
        embeddings = jnp.zeros((num_clients, size), jnp.float32)
        aux = {GENERATOR: phi, EMBEDDINGS: embeddings, "embedding_opt": jax.vmap(tx_of_one.init)(embeddings)}
        return Server(shared, tx.init(phi), aux)

    def draw(server: Server, key: Array) -> Server:
        phi, embeddings = server.aux[GENERATOR], server.aux[EMBEDDINGS]
        made = jax.eval_shape(generator.apply, phi, embeddings[0])
        phi = generator.init(
            fold_name(key, GENERATOR), {name: server.shared[name] for name in made}, embeddings.shape[1]
        )
        embeddings = jax.random.normal(fold_name(key, EMBEDDINGS), embeddings.shape, embeddings.dtype)
        return with_mean_model(server._replace(aux=server.aux | {GENERATOR: phi, EMBEDDINGS: embeddings}))

    def with_mean_model(server: Server) -> Server:
        middle = generator.apply(server.aux[GENERATOR], server.aux[EMBEDDINGS].mean(0))
        return server._replace(shared=server.shared | middle)

    def render(server: Server, client: Array) -> Leaves:
        return server.shared | generator.apply(server.aux[GENERATOR], _embedding_of(server, client))

    def finish(server: Server, collected: Collected, trainable: frozenset[str]) -> Server:
        phi, embeddings, opts = (server.aux[name] for name in (GENERATOR, EMBEDDINGS, "embedding_opt"))
        accepted, lost = collected.accepted, collected.each
        count = not_zero(accepted.sum().astype(jnp.float32))
        places = jnp.minimum(collected.ids, embeddings.shape[0] - 1)
        chosen, chosen_opts = embeddings[places], entry(opts, places)
        made, pull = jax.vjp(jax.vmap(generator.apply, (None, 0)), phi, chosen)
        gradient, scaled = pull({name: (lost[name] / count).astype(x.dtype) for name, x in made.items()})
        of_phi, of_each = _clipped((gradient, scaled * count), clip)
        moves, opt = tx.update(of_phi, server.opt, phi)
        own_moves, new_opts = jax.vmap(tx_of_one.update)(of_each, chosen_opts, chosen)
        rows = jnp.where(accepted, collected.ids, embeddings.shape[0])
        shared = {
            name: x if name in made else as_dtype(x - lost[name].sum(0) / count, x.dtype)
            for name, x in server.shared.items()
        }
        aux = {
            GENERATOR: optax.apply_updates(phi, moves),
            EMBEDDINGS: scatter_rows(embeddings, rows, optax.apply_updates(chosen, own_moves)),
            "embedding_opt": scatter_rows(opts, rows, new_opts),
        }
        after = with_mean_model(server._replace(shared=shared, opt=opt, aux=aux))
        return jax.tree.map(lambda new, old: jnp.where(accepted.any(), new, old), after, server)

    def deliver(server: Server, client: Array) -> Leaves:
        return server.shared | {GENERATOR: server.aux[GENERATOR], EMBEDDINGS: _embedding_of(server, client)}

    def settle(layout: Layout, parts: Parts, context: Context) -> Leaves:
        """The client's model; an unseen client first fits its embedding."""
        given = dict(parts.shared)
        phi, first = given.pop(GENERATOR), given.pop(EMBEDDINGS)

        def exchange(number: Array, carry: Any) -> Any:
            v, opt, personal = carry
            made, pull = jax.vjp(lambda v: generator.apply(phi, v), v)
            start = parts._replace(shared=given | made, personal=personal)
            now = context._replace(key=jax.random.fold_in(context.key, number), received=start)
            after, _ = update(layout, start, now)
            (gradient,) = pull(jax.tree.map(jnp.subtract, made, {name: after.shared[name] for name in made}))
            moves, opt = tx_of_one.update(_clipped(gradient, clip), opt, v)
            return optax.apply_updates(v, moves), opt, after.personal

        rounds = jnp.where(context.unseen & (context.size > 0), newcomer_rounds, 0)
        v, _, _ = jax.lax.fori_loop(0, rounds, exchange, (first, tx_of_one.init(first), parts.personal))
        return given | generator.apply(phi, v)

    return Aggregator(
        init,
        render,
        client_weight("uniform"),
        nothing_added,
        finish,
        collect=lambda received, upload, sender: jax.tree.map(jnp.subtract, received, upload),
        deliver=deliver,
        settle=settle,
        whole=None,
        draw=draw,
    )


def _embedding_of(server: Server, client: Array) -> Array:
    """That of a client in training; the mean of all for one that never was."""
    embeddings = server.aux[EMBEDDINGS]
    known = client < embeddings.shape[0]
    return jnp.where(known, embeddings[jnp.minimum(client, embeddings.shape[0] - 1)], embeddings.mean(0))


def _clipped(gradients: Any, bound: float) -> Any:
    return optax.clip_by_global_norm(bound).update(gradients, optax.EmptyState())[0]
