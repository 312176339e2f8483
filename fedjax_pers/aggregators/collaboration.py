"""FedPAC's server: one body, a head for each client, and the centroids of the classes.

A client says, of the body that it received, the mean over its examples of ``onehot(y) x z`` (features z in the row of
the label), ``[classes, features]``, and the variance of that mean. How much of each other head it gets follows from
these. Beside its model it sends the means of each class's features after training, and how many examples they are of.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pers.aggregators.base import Aggregator, Ask, Collected, Sender, Server
from fedjax_pers.aggregators.mean import Weights, mean
from fedjax_pers.aggregators.measures import Crowd
from fedjax_pers.aggregators.pairwise import inner_products
from fedjax_pers.aggregators.similarity import mixing
from fedjax_pers.aggregators.simplex import onto_simplex
from fedjax_pers.base import Array, Leaves

CENTROIDS, COUNTS = "class/centroids", "class/counts"
"""Shared leaves beside the model, ``[classes, features]`` and ``[classes]``; a count of 0 is no centroid."""
MEAN, VARIANCE = "mean", "variance"
"""What clients say."""
MOST_TURNS, AT_REST = 2000, 3e-8
"""Steps of the solver, and the change of a weight below which it stops: what float32 tells apart."""


def collaborating_heads(head: Collection[str], ask: Ask, *, weights: Weights = "examples") -> Aggregator:
    """The body is averaged, heads are mixed by :func:`collaboration`, centroids are means over examples.

    ``Server.aux`` is that of :func:`~fedjax_pers.aggregators.mixing`, of the head alone. The shared leaves are the mean
    model, which clients never seen receive. A class that nobody in a round has keeps its centroid.

    Args:
      head: names of the leaves of the head.
      ask: how a client finds ``"mean"`` and ``"variance"``.
      weights: of the body's mean, by examples or uniform.

    Source: Xu, Tong, Huang, "Personalized Federated Learning with Feature Alignment and Classifier Collaboration", ICLR
    2023.
    """
    body, heads, names = mean(weights=weights), mixing(collaboration, weights=weights), frozenset(head)

    def of_body(leaves: Leaves) -> Leaves:
        return {name: x for name, x in leaves.items() if name not in names | {CENTROIDS, COUNTS}}

    def of_head(leaves: Leaves) -> Leaves:
        return {name: x for name, x in leaves.items() if name in names}

    def init(shared: Leaves, trainable: frozenset[str], num_clients: int) -> Server:
        opt = body.init(of_body(shared), trainable - names, num_clients).opt
        return Server(shared, opt, heads.init(of_head(shared), trainable & names, num_clients).aux)

    def render(server: Server, client: Array) -> Leaves:
        return server.shared | heads.render(server._replace(shared=of_head(server.shared)), client)

    def lift(weight: Array, received: Leaves, upload: Leaves, sender: Sender) -> Any:
        counts = jnp.where(weight > 0, upload[COUNTS], 0)
        summed = counts[:, None] * upload[CENTROIDS]
        return body.lift(weight, of_body(received), of_body(upload), sender), counts, summed

    def collect(received: Leaves, upload: Leaves, sender: Sender) -> Any:
        return heads.collect(of_head(received), of_head(upload), sender)

    def finish(server: Server, received: Collected, trainable: frozenset[str]) -> Server:
        differences, counts, summed = received.total
        moved = body.finish(server._replace(shared=of_body(server.shared)), differences, trainable - names)
        mixed = heads.finish(server._replace(shared=of_head(server.shared)), received, trainable & names)
        found = counts > 0
        centroids = {
            CENTROIDS: jnp.where(
                found[:, None], summed / jnp.where(found, counts, 1)[:, None], server.shared[CENTROIDS]
            ),
            COUNTS: jnp.where(found, counts, server.shared[COUNTS]),
        }
        return server._replace(shared=moved.shared | mixed.shared | centroids, opt=moved.opt, aux=mixed.aux)

    return Aggregator(
        init,
        render,
        body.weigh,
        lift,
        finish,
        collect=collect,
        ask=ask,
        says=(MEAN, VARIANCE),
        sees="each client's head and its classes' mean features",
    )


def collaboration(crowd: Crowd) -> Array:
    """``a_i = argmin_{a on the simplex} sum_j V_j a_j^2 + |h_i - sum_j a_j h_j|^2``, a rule for ``mixing``.

    ``h_j`` is what client j says as ``"mean"``, ``V_j`` as ``"variance"``: the expected squared distance of the mixture
    from the true ``h_i``, bias and variance. Where all ``h`` are equal, ``a_j`` is in proportion to ``1 / V_j``.

    Features should be of like scale at all clients: steps are as short as the largest needs, so that with means a
    thousand times further away at one client, the weights of the others are not reached and stay near their own.

    Source: Xu et al., ICLR 2023; with ``sum_j a_j = 1`` it is the paper's quadratic form in
    ``diag(V) + [(h_i - h_j) . (h_i - h_k)]_jk``.
    """
    there = crowd.share > 0
    means = crowd.said[MEAN]
    # Products of differences alone matter: less is lost of what is centred.
    middle = jnp.tensordot(there / jnp.maximum(there.sum(), 1), means, 1)
    centred = jnp.where(there.reshape(-1, *[1] * (means.ndim - 1)), means - middle, 0)
    inner = inner_products({MEAN: centred})
    return on_the_simplex(inner + jnp.diag(jnp.where(there, crowd.said[VARIANCE], 0)), inner, there)


def on_the_simplex(quadratic: Array, linear: Array, there: Array) -> Array:
    """``argmin_a a' Q a - 2 L_i' a`` over the simplex, for every row i of L at once; 0 for those that are not there.

    Accelerated projected gradient steps of length ``1 / |Q|`` from ``a_ii = 1``; momentum that leads uphill is dropped.

    Args:
      quadratic: ``Q``, ``[clients, clients]``, symmetric and with no negative eigenvalue.
      linear: ``L``, ``[clients, clients]``.
      there: ``bool [clients]``; others have zeros in ``Q`` and ``L``.

    Source: Beck, Teboulle, SIAM J. Imaging Sci. 2009; O'Donoghue, Candes, Found. Comput. Math. 2015.
    """
    length = 1 / jnp.maximum(jnp.linalg.eigvalsh(quadratic)[-1], jnp.finfo(quadratic.dtype).tiny)

    def projected(x: Array) -> Array:
        return onto_simplex(jnp.where(there.any(), jnp.where(there[None], x, -jnp.inf), 0))

    def turn(carry: Any) -> Any:
        number, now, ahead, pace, _ = carry
        slope = jnp.matmul(ahead, quadratic, precision="highest") - linear
        new = projected(ahead - length * slope)
        faster = (1 + jnp.sqrt(1 + 4 * pace**2)) / 2
        uphill = ((ahead - new) * (new - now)).sum(1) > 0
        momentum = jnp.where(uphill, 0, (pace - 1) / faster)
        moved = jnp.abs(new - ahead).max()
        return number + 1, new, new + momentum[:, None] * (new - now), jnp.where(uphill, 1, faster), moved

    def going(carry: Any) -> Array:
        return (carry[0] < MOST_TURNS) & (carry[4] > AT_REST)

    start = jnp.eye(there.shape[0], dtype=quadratic.dtype)
    pace = jnp.ones(there.shape, quadratic.dtype)
    return jax.lax.while_loop(going, turn, (jnp.int32(0), start, start, pace, jnp.array(jnp.inf, quadratic.dtype)))[1]
