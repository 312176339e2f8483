"""Training on the pooled data of all clients: what federation gives up."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pers.algorithms.registry import register
from fedjax_pers.base import Array, Cohort, State, Task
from fedjax_pers.compose import Algorithm, compose
from fedjax_pers.keys import as_key
from fedjax_pers.local import train


@register(
    "centralised",
    title="Centralised",
    paper="baseline with pooled data",
    family="baseline",
    personal="nothing",
    reduction="one client that owns all examples: FedAvg",
)
def centralised(task: Task, *, lr: float = 0.1, **local: Any) -> Algorithm:
    """Each round trains one model on the union of the cohort's examples, as one client would.

    Args:
      task: model and loss.
      lr: step size.
      **local: ``batch_size``, ``epochs`` or ``steps``, ``optimizer``, ``drop_last``.

    Differences from the paper: there is none. The ledger counts nothing: the data travelled before the first round.
    """
    alone = compose(task, client=train(lr, **local))

    def step(state: State, cohort: Cohort, key: Array | int) -> tuple[State, Any]:
        one = alone.init(alone.common(state), key, num_clients=1)._replace(round=state.round)
        after, metrics = alone.step(one, _pooled(cohort), as_key(key))
        order = jnp.argsort(cohort.ids)
        valid = cohort.valid[order]
        took_part = valid & (cohort.size[order] > 0) & ~metrics.rejected[0]
        new = state._replace(
            shared=after.shared,
            seen=state.seen.at[cohort.ids[order]].add(took_part.astype(jnp.int32), mode="drop"),
            round=state.round + 1,
        )
        spread = jax.tree.map(lambda x: jnp.broadcast_to(x, valid.shape) if x.ndim else x, metrics)
        sizes = jnp.where(valid, cohort.size[order], 0)
        return new, spread._replace(
            ids=cohort.ids[order],
            loss=jnp.where(took_part, metrics.loss[0], jnp.nan),
            steps=jnp.where(took_part, metrics.steps[0], 0),
            examples=sizes,
            weight=sizes / jnp.maximum(sizes.sum(), 1),
            rejected=valid & metrics.rejected[0],
            empty=valid & (sizes == 0),
            transmitted=jnp.zeros(valid.shape, bool),
        )

    return alone._replace(step=step, exchange=None, participation="everyone")


def _pooled(cohort: Cohort) -> Cohort:
    """One client that owns the rows of all valid clients, in ascending order of id."""
    order = jnp.argsort(cohort.ids)
    size = jnp.where(cohort.valid, cohort.size, 0)[order]
    ends = jnp.cumsum(size)
    rows = next(iter(cohort.data.values())).shape[0]
    place = jnp.arange(rows)
    owner = jnp.minimum(jnp.searchsorted(ends, place, side="right"), size.shape[0] - 1)
    source = cohort.start[order][owner] + place - (ends - size)[owner]
    data = {name: x[jnp.clip(source, 0, rows - 1)] for name, x in cohort.data.items()}
    zero = jnp.zeros(1, jnp.int32)
    return Cohort(zero, zero.astype(jnp.uint32), zero, ends[-1:], jnp.ones(1, bool), data)
