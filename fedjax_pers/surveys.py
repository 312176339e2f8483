"""Rounds with a second cohort, which is asked for numbers once the server has moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pers.aggregators.base import Collected, Server, Survey
from fedjax_pers.base import Array, Cohort, Leaves, Metrics, Parts, State
from fedjax_pers.compose import SAID, Algorithm, Item, items_of, ordered, server_of
from fedjax_pers.executors.default import default_executor
from fedjax_pers.executors.lanes import map_reduce, padding
from fedjax_pers.keys import as_key, fold_name
from fedjax_pers.trees import all_finite, where

SURVEYED = "surveyed/"
"""Leaves that are sent to the second cohort go by these names in a download."""


def surveyed(algorithm: Algorithm, survey: Survey) -> Algorithm:
    """The algorithm, each of whose rounds ends with a survey.

    Answers that are not finite are left out. Traffic of the survey is charged to the clients that trained, so it is
    counted rightly where as many are asked as have trained.

    Args:
      algorithm: from :func:`~fedjax_pers.compose`.
      survey: whom to ask what, and what the server makes of it.
    """
    layout = algorithm.layout

    def answer(server: Server, state: State, cohort: Cohort, item: Item) -> tuple[Leaves, dict[str, Array]]:
        download = survey.render(server, item.id)
        parts = Parts(download, item.row, state.frozen)
        return download, survey.ask(layout, parts, item.context(cohort, state, parts))

    def step(state: State, cohort: Cohort, key: Array | int) -> tuple[State, Metrics]:
        after, metrics = algorithm.step(state, cohort, key)
        key = as_key(key)
        server = _moved(server_of(state, fold_name(key, "common")), after)
        asked = survey.invite(server, ordered(cohort))
        chosen = algorithm.executor or default_executor((state.shared, state.fresh, state.frozen))
        items = items_of(after._replace(round=state.round), asked, key, "survey", padding(chosen, asked.ids.shape[0]))

        def one(common: tuple[Server, State, Cohort], item: Item) -> tuple[tuple, Any]:
            _, said = answer(*common, item)
            accepted = item.valid & (item.size > 0) & all_finite(said)
            return (), (where(accepted, said, jax.tree.map(jnp.zeros_like, said)), accepted)

        _, out = map_reduce(chosen, one, (server, after._replace(rows={}), asked), items, items.size)
        said, accepted = jax.tree.map(lambda x: x[: asked.ids.shape[0]], out)
        told = survey.finish(server, Collected((), said, accepted.astype(jnp.float32), asked.ids, accepted))
        return after._replace(shared=told.shared, opt=told.opt, aux=told.aux), metrics

    def exchange(
        state: State, cohort: Cohort, key: Array | int, tamper: Callable[[Leaves], Leaves] = lambda row: row
    ) -> tuple[Leaves, Leaves, Leaves]:
        download, upload, row = algorithm.exchange(state, cohort, key, tamper)
        server = server_of(state, fold_name(as_key(key), "common"))
        first = jax.tree.map(lambda x: x[0], items_of(state, ordered(cohort), as_key(key), "survey", 0))
        sent, said = answer(server, state, cohort, first)
        return (
            download | {f"{SURVEYED}{name}": x for name, x in sent.items()},
            upload | {f"{SAID}{name}": x for name, x in said.items()},
            row,
        )

    return algorithm._replace(step=step, exchange=exchange, sees=algorithm.sees or "each client's answer")


def _moved(server: Server, state: State) -> Server:
    return server._replace(shared=state.shared, opt=state.opt, aux=state.aux)
