"""SCAFFOLD: control variates against client drift."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from fedjax_pers.aggregators import Aggregator, Sender, Server, mean
from fedjax_pers.aggregators.base import copy_to_all
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Array, Batch, Context, Leaves, Parts, Report, Task
from fedjax_pers.checks import number, one_of
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.layouts import Layout, Statistics, by_role, replace, trainable_leaves
from fedjax_pers.local import ClientUpdate, full_gradient, train
from fedjax_pers.objectives import add, task_loss

_SERVER, _CLIENT = "control/", "client_control/"


@register(
    "scaffold",
    title="SCAFFOLD",
    paper='Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated '
    'Learning", ICML 2020, arXiv:1910.06378',
    family="regularised",
    personal="a control variate of the size of the model",
    reduction="one local step: FedAvg in its first round; controls held at 0: FedAvg",
)
def scaffold(
    task: Task,
    *,
    lr: float = 0.1,
    server_lr: float = 1.0,
    option: Literal["I", "II"] = "II",
    weights: str = "uniform",
    statistics: Statistics = "average",
    batch_size: int = 10,
    epochs: int | None = None,
    steps: int | None = None,
    drop_last: bool = False,
) -> Algorithm:
    """Local steps are corrected by the difference of the server's and the client's control variates.

    ``y <- y - lr (g_i(y) - c_i + c)``, K steps from x. Afterwards option I: ``c_i <- g_i(x)`` over all the client's
    examples; option II: ``c_i <- c_i - c + (x - y) / (K lr)``. Server: ``x <- x + server_lr mean(y_i - x)`` and
    ``c <- c + sum_i (c_i' - c_i) / N``, N being all clients, not the cohort.

    Args:
      task: model and loss.
      lr: step size of the clients; plain SGD, since option II divides by it (so that it must not be 0 there).
      server_lr: step size of the server.
      option: how the client's control variate is renewed.
      weights: ``"uniform"`` as in the paper, or ``"examples"``.
      statistics: treatment of running statistics; they have no control variate.
      batch_size: examples a step.
      epochs: passes over the client's examples (1 where neither is given), or
      steps: number of steps.
      drop_last: leave out short batches.

    Differences from the paper: none. Model and control variate travel, twice FedAvg's traffic each way.
    """
    one_of("option", option, ("I", "II"))
    number("lr", lr, low=1e-12 if option == "II" else 0)
    schedule = {"batch_size": batch_size, "epochs": epochs, "steps": steps, "drop_last": drop_last}
    descent = train(lr, objective=add(task_loss(), _correction), roles="shared", **schedule)
    return compose(
        task,
        layout=_with_controls(by_role(statistics=statistics)),
        client=_renewing_control(descent, lr, option, batch_size),
        aggregator=_mean_with_controls(server_lr, weights),
    )


def _with_controls(base: Any) -> Any:
    """The base layout, with a control variate for every trainable shared leaf on the server and on each client."""

    def bind(task: Task) -> Layout:
        layout = base(task)

        def init(variables: Any) -> Parts:
            parts = layout.init(variables)
            zeros = {n: jnp.zeros_like(x) for n, x in trainable_leaves(layout, parts, "shared").items()}
            return parts._replace(
                shared={**parts.shared, **{_SERVER + n: x for n, x in zeros.items()}},
                personal={**parts.personal, **{_CLIENT + n: x for n, x in zeros.items()}},
            )

        return layout._replace(init=init)

    return bind


def _correction(layout: Layout, parts: Parts, received: Parts, batch: Batch, key: Array) -> tuple[Array, Leaves]:
    """A linear term whose gradient is ``c - c_i``."""
    terms = [
        jnp.sum((received.shared[_SERVER + n] - received.personal[_CLIENT + n]) * x)
        for n, x in sorted(trainable_leaves(layout, parts, "shared").items())
    ]
    return sum(terms, start=jnp.zeros(())), {}


def _renewing_control(descent: ClientUpdate, lr: Any, option: str, batch_size: int) -> ClientUpdate:
    def update(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
        after, report = descent(layout, parts, context)
        x, y = (trainable_leaves(layout, each, "shared") for each in (parts, after))
        own = {n: parts.personal[_CLIENT + n] for n in x}
        if option == "I":
            renewed, _, _ = full_gradient(layout, parts, context, x, task_loss(), batch_size=batch_size)
        else:
            scale = lr * jnp.maximum(report.steps, 1)
            renewed = {n: own[n] - parts.shared[_SERVER + n] + (x[n] - y[n]) / scale for n in x}
        # The upload of a control is the server's value moved by the client's change, so its difference is the change.
        sent = {_SERVER + n: parts.shared[_SERVER + n] + (renewed[n] - own[n]) for n in x}
        return replace(after, {**sent, **{_CLIENT + n: c for n, c in renewed.items()}}), report

    return update


def _mean_with_controls(server_lr: Any, weights: str) -> Aggregator:
    base = mean(optax.sgd(server_lr), weights=weights)

    def model(leaves: Leaves) -> Leaves:
        return {n: x for n, x in leaves.items() if not n.startswith(_SERVER)}

    def controls(leaves: Leaves) -> Leaves:
        return {n: x for n, x in leaves.items() if n.startswith(_SERVER)}

    def init(shared: Leaves, trainable: frozenset[str], num_clients: int) -> Server:
        return base.init(model(shared), trainable, num_clients)._replace(
            shared=shared, aux={"num_clients": jnp.asarray(num_clients, jnp.float32)}
        )

    def lift(weight: Array, received: Leaves, upload: Leaves, sender: Sender) -> Any:
        change = jax.tree.map(jnp.subtract, controls(upload), controls(received))
        return base.lift(weight, model(received), model(upload), sender), change

    def finish(server: Server, total: Any, trainable: frozenset[str]) -> Server:
        summed, change = total
        moved = base.finish(server._replace(shared=model(server.shared)), summed, trainable)
        count = server.aux["num_clients"]
        new = {n: x + (change[n] / count).astype(x.dtype) for n, x in controls(server.shared).items()}
        return moved._replace(shared={**moved.shared, **new})

    return Aggregator(init, copy_to_all, base.weigh, lift, finish)
