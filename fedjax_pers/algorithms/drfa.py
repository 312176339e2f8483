"""DRFA: minimax over mixtures of clients with several local steps and two cohorts a round."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pers.aggregators.distributional import SNAPSHOT, distributionally_robust, model_of, with_snapshot
from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Context, Parts, Report, Task
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.keys import round_key
from fedjax_pers.layouts import Layout, LayoutMaker, Statistics, by_role, replace, shared_or_refused
from fedjax_pers.local import ClientUpdate, phases, train
from fedjax_pers.paths import SelectorLike, nothing
from fedjax_pers.surveys import surveyed


@register(
    "drfa",
    title="DRFA",
    paper='Deng, Kamani, Mahdavi, "Distributionally Robust Federated Averaging", NeurIPS 2020, arXiv:2102.12660',
    family="agnostic",
    personal="nothing, or any chosen leaves: the losses are then of personalised models",
    reduction="ascent_lr = 0: uniform FedAvg over clients drawn with replacement",
    secure_aggregation=False,  # the server sees each loss
)
def drfa(
    task: Task,
    *,
    lr: float = 0.1,
    ascent_lr: float = 0.01,
    clients: int = 10,
    steps: int = 10,
    personal: SelectorLike = nothing,
    newcomer_epochs: int = 5,
    statistics: Statistics = "average",
    batch_size: int = 10,
) -> Algorithm:
    """``min_w max_lambda sum_i lambda_i f_i(w)``: clients are drawn by ``lambda`` and train, others say their losses.

    ``clients`` draws from ``lambda``, with replacement, train for ``steps`` steps; the model is their plain mean. The
    mean ``w'`` of their models after t' steps, t' drawn uniformly from 1 .. ``steps``, is sent to as many clients,
    drawn uniformly, who say their losses; then ``lambda <- project(lambda + steps ascent_lr v)``.

    Args:
      task: model and loss.
      lr: step size of the model.
      ascent_lr: step size of the weights, at least 0.
      clients: draws in a round. All clients must be there: the method draws among them itself.
      steps: local steps.
      personal: leaves that stay; losses are of the personalised models.
      newcomer_epochs: passes over its data that an unseen client trains its personal leaves for before it predicts.
      statistics: treatment of running statistics that ``personal`` does not name.
      batch_size: examples a step.

    Differences from the paper: a client that is drawn twice trains once and counts twice; as many clients are asked as
    have trained; the order of batches begins anew after the snapshot; the last iterate predicts.
    """
    aggregator, survey = distributionally_robust(clients, steps, ascent_lr)
    algorithm = compose(
        task,
        layout=shared_or_refused(_with_snapshot(by_role(personal=personal, statistics=statistics)), task),
        client=_stopping_on_the_way(lr, steps, batch_size),
        aggregator=aggregator,
        newcomer=train(lr, batch_size=batch_size, epochs=newcomer_epochs, roles="personal"),
        participation="everyone",
    )
    return surveyed(algorithm, survey)


def _with_snapshot(base: LayoutMaker) -> LayoutMaker:
    def bind(task: Task) -> Layout:
        layout = base(task)

        def init(variables: Any) -> Parts:
            parts = layout.init(variables)
            return parts._replace(shared=with_snapshot(parts.shared))

        return layout._replace(init=init)

    return bind


def _stopping_on_the_way(lr: Any, steps: int, batch_size: int) -> ClientUpdate:
    def update(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
        # The server's draw, the same for all clients of the round.
        stop = jax.random.randint(round_key(context.common, "snapshot", context.round), (), 1, steps + 1)

        def keep(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
            copies = {SNAPSHOT + name: x for name, x in model_of(parts.shared).items()}
            return replace(parts, copies), Report(jnp.float32(jnp.nan), jnp.int32(0), jnp.array(True))

        first = train(lr, steps=stop, batch_size=batch_size)
        rest = train(lr, steps=steps - stop, batch_size=batch_size, order="batches after the snapshot")
        return phases(first, keep, rest)(layout, parts, context)

    return update
