"""How a cohort is mapped: a compiled loop over groups of ``lanes`` clients, each group vectorised.

``lanes=1`` runs clients one after another, ``lanes=cohort`` all at once, and anything between in chunks: one code path.
Summands are added client by client in the order of the cohort, whatever the grouping (with one lane the compiler may
still round a client's last product and its addition at once), and no ``[clients, parameters]`` array is ever kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pers.checks import one_of, positive_int
from fedjax_pers.executors.convolutions import fast_convolutions
from fedjax_pers.once import traced


class Executor(NamedTuple):
    """How clients are run.

    Attributes:
      lanes: clients that are vectorised together; ``None`` for the whole cohort.
      convolutions: ``"fast"`` re-emits convolutions in the layout that XLA's CPU compiler runs well inside loops,
        ``"plain"`` leaves them, ``"auto"`` is fast on CPU and plain elsewhere.
    """

    lanes: int | None = None
    convolutions: str = "auto"


def looped() -> Executor:
    """One client after another in a compiled loop."""
    return Executor(1)


def chunked(lanes: int) -> Executor:
    """Groups of ``lanes`` clients, each group vectorised."""
    positive_int("lanes", lanes)
    return Executor(lanes)


def vectorised() -> Executor:
    """The whole cohort at once."""
    return Executor(None)


def prepared(executor: Executor, client: Callable) -> Callable:
    """The client function as this executor runs it on this machine."""
    one_of("convolutions", executor.convolutions, ("auto", "fast", "plain"))
    fast = executor.convolutions == "fast" or (executor.convolutions == "auto" and jax.default_backend() == "cpu")
    return fast_convolutions(client) if fast else client


def map_reduce(executor: Executor, client: Callable[[Any], tuple[Any, Any]], items: Any) -> tuple[Any, Any]:
    """``summand, output = client(item)`` for every item; the sum of summands, and the outputs stacked.

    Args:
      executor: how many at once.
      client: a function of one item; what it closes over is held once.
      items: leaves ``[clients, ...]``. The number of clients must be a multiple of the lanes (see :func:`padding`).
    """
    count = jax.tree.leaves(items)[0].shape[0]
    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), items)
    client, (summand, output) = traced(prepared(executor, client), first)
    total = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), summand)
    if count == 0:
        return total, jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), output)
    lanes = width(executor, count)

    def add(total: Any, summand: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, summand), None

    def one(total: Any, item: Any) -> tuple[Any, Any]:
        summand, output = client(item)
        return add(total, summand)[0], output

    def group(total: Any, items: Any) -> tuple[Any, Any]:
        summands, outputs = jax.vmap(client)(items)
        return jax.lax.scan(add, total, summands)[0], outputs

    if lanes == 1:
        return jax.lax.scan(one, total, items)
    if lanes == count:
        return group(total, items)
    grouped = jax.tree.map(lambda x: x.reshape(count // lanes, lanes, *x.shape[1:]), items)
    total, outputs = jax.lax.scan(group, total, grouped)
    return total, jax.tree.map(lambda x: x.reshape(count, *x.shape[2:]), outputs)


def width(executor: Executor, clients: int) -> int:
    """Lanes that are used for so many clients."""
    if executor.lanes is None:
        return clients
    positive_int("lanes", executor.lanes)
    return min(executor.lanes, max(clients, 1))


def padding(executor: Executor, clients: int) -> int:
    """Items to add so that the number of clients is a multiple of the lanes."""
    return -clients % width(executor, clients) if clients else 0
