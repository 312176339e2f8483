"""FedAdagrad, FedAdam, FedYogi: adaptive optimisers on the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_pers.aggregators import mean
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Array, Task
from fedjax_pers.checks import number
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import Statistics, by_role
from fedjax_pers.local import train

_ABOUT = {
    "paper": "Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "
    '"Adaptive Federated Optimization", ICLR 2021, arXiv:2003.00295',
    "family": "server optimiser",
    "personal": "nothing",
    "reduction": "beta1 = 0, server_lr = 2 tau, tau -> infinity (and beta2 = 1 for FedAdam): FedAvg",
}


def adaptive(second_moment: Callable[[Array, Array], Array], beta1: Any, tau: Any) -> optax.GradientTransformation:
    """``m <- beta1 m + (1 - beta1) g``, ``v <- second_moment(v, g^2)``, step ``m / (sqrt(v) + tau)``.

    Starts from ``m = 0`` and ``v = tau^2`` and has no bias correction, unlike optax's Adam and Yogi.
    """

    def init(params: Any) -> tuple[Any, Any]:
        return jax.tree.map(jnp.zeros_like, params), jax.tree.map(lambda x: jnp.full_like(x, tau) ** 2, params)

    def update(grads: Any, state: tuple[Any, Any], params: Any = None) -> tuple[Any, tuple[Any, Any]]:
        m = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state[0], grads)
        v = jax.tree.map(lambda v, g: second_moment(v, jnp.square(g)), state[1], grads)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + tau), m, v), (m, v)

    return optax.GradientTransformation(init, update)


def _fedopt(
    task: Task,
    second_moment: Callable[[Array, Array], Array],
    lr: float,
    server_lr: float,
    beta1: float,
    tau: float,
    weights: str,
    statistics: Statistics,
    local: dict[str, Any],
) -> Algorithm:
    number("server_lr", server_lr, low=0)
    number("beta1", beta1, 0, 1)
    number("tau", tau, low=1e-12)  # at 0, a leaf that does not change divides 0 by 0
    server = optax.chain(adaptive(second_moment, beta1, tau), optax.scale_by_learning_rate(server_lr))
    aggregator = mean(server, weights=weights)
    return compose(task, layout=by_role(statistics=statistics), client=train(lr, **local), aggregator=aggregator)


@register("fedadagrad", title="FedAdagrad", **_ABOUT)
def fedadagrad(
    task: Task,
    *,
    lr: float = 0.1,
    server_lr: float = 0.1,
    beta1: float = 0.0,
    tau: float = 1e-3,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """FedAvg with Adagrad on the server: ``v <- v + delta^2``, ``w <- w + server_lr m / (sqrt(v) + tau)``.

    Args:
      task: model and loss.
      lr: step size of the clients.
      server_lr: step size of the server.
      beta1: momentum of the first moment.
      tau: adaptivity, above 0; also ``v_0 = tau^2``.
      weights: as in FedAvg.
      statistics: running statistics are averaged plainly.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: the mean is weighted by examples by default (the paper's is uniform).
    """
    return _fedopt(task, lambda v, s: v + s, lr, server_lr, beta1, tau, weights, statistics, local)


@register("fedadam", title="FedAdam", **_ABOUT)
def fedadam(
    task: Task,
    *,
    lr: float = 0.1,
    server_lr: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """FedAvg with Adam on the server, without bias correction: ``v <- beta2 v + (1 - beta2) delta^2``.

    Args:
      task: model and loss.
      lr: step size of the clients.
      server_lr: step size of the server.
      beta1: decay of the first moment.
      beta2: decay of the second moment.
      tau: adaptivity, above 0; also ``v_0 = tau^2``.
      weights: as in FedAvg.
      statistics: running statistics are averaged plainly.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: the mean is weighted by examples by default (the paper's is uniform).
    """
    number("beta2", beta2, 0, 1)

    def rule(v: Array, s: Array) -> Array:
        return beta2 * v + (1 - beta2) * s

    return _fedopt(task, rule, lr, server_lr, beta1, tau, weights, statistics, local)


@register("fedyogi", title="FedYogi", **_ABOUT)
def fedyogi(
    task: Task,
    *,
    lr: float = 0.1,
    server_lr: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    weights: str = "examples",
    statistics: Statistics = "average",
    **local: Any,
) -> Algorithm:
    """FedAvg with Yogi on the server: ``v <- v - (1 - beta2) delta^2 sign(v - delta^2)``.

    Args:
      task: model and loss.
      lr: step size of the clients.
      server_lr: step size of the server.
      beta1: decay of the first moment.
      beta2: decay of the second moment.
      tau: adaptivity, above 0; also ``v_0 = tau^2``.
      weights: as in FedAvg.
      statistics: running statistics are averaged plainly.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: the mean is weighted by examples by default (the paper's is uniform).
    """
    number("beta2", beta2, 0, 1)

    def rule(v: Array, s: Array) -> Array:
        return v - (1 - beta2) * s * jnp.sign(v - s)

    return _fedopt(task, rule, lr, server_lr, beta1, tau, weights, statistics, local)
