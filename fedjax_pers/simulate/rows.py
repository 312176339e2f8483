"""Where clients' personal rows lie: all on the device, or on the host, which lends each block those of its clients.

A state says so itself: rows that are numpy arrays lie on the host. Rounds on lent rows give the bytes of rounds on
resident ones: a client is known by its id in both, only the place of its row is another.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pers.base import Array, Metrics, State
from fedjax_pers.simulate.placement import place_of, placed
from fedjax_pers.simulate.pools import Visitors
from fedjax_pers.simulate.programs import Pool
from fedjax_pers.trees import NOWHERE, num_bytes

Rounds = Callable[[State, Pool, int, int], tuple[State, Metrics]]
"""``rounds(state, pool, first, count) -> (state, metrics)``."""


def place_of_rows(state: Callable[[], State], rows_on: str, devices: int) -> str:
    """``"device"`` or ``"host"`` for the rows of a state, of which the shapes are enough.

    ``"auto"`` is the host where a device's share would take too much of its memory.
    """
    return place_of("rows_on", rows_on, lambda: num_bytes(state().rows) // devices)


def shapes_on_host(shapes: State) -> State:
    """The same shapes, whose rows stand for numpy arrays."""
    rows = {name: np.broadcast_to(np.zeros((), x.dtype), x.shape) for name, x in shapes.rows.items()}
    return shapes._replace(rows=rows)


def first_state_on_host(make: Callable[[], State]) -> State:
    """The first state that ``make`` gives, with its rows on the host; they never are on the device."""
    state = jax.jit(lambda: make()._replace(rows={}))()
    clients = state.seen.shape[0]
    rows = {name: np.tile(np.asarray(x), (clients, *[1] * x.ndim)) for name, x in state.fresh.items()}
    return state._replace(rows=rows)


def moved(state: State, place: str) -> State:
    """A copy of the state, with its rows on the host or on the device."""
    copy = np.array if place == "host" else jnp.array
    rest = jax.tree.map(jnp.array, state._replace(rows={}))
    return rest._replace(rows={name: copy(x) for name, x in state.rows.items()})


def lent(state: State, clients: np.ndarray, room: int, devices: int) -> State:
    """The state with the rows of some clients alone, on the devices.

    Args:
      state: its rows lie on the host.
      clients: ids of clients in training.
      room: so many rows lie on the devices (or a few more, to be shared out evenly): one number for all blocks of a
        run, so that they share a compiled program.
      devices: on which the rows will lie.
    """
    room += -room % devices
    chosen = np.concatenate([clients, np.zeros(room - len(clients), clients.dtype)])
    return placed(state._replace(rows={name: jnp.asarray(x[chosen]) for name, x in state.rows.items()}), devices)


def slots_of(clients: np.ndarray, num_clients: int) -> Array:
    """Where the row of each client lies among lent ones, ``int32 [num_clients]``."""
    slots = np.full(num_clients, NOWHERE, np.int32)
    slots[clients] = np.arange(len(clients))
    return jnp.asarray(slots)


def on_lent_rows(rounds: Rounds, visitors: Visitors, room: int, devices: int) -> Rounds:
    """The same rounds for a state whose rows lie on the host; what they write is written there."""

    def run(state: State, pool: Pool, first: int, count: int) -> tuple[State, Metrics]:
        clients = visitors(first, count)
        pool = pool._replace(slots=slots_of(clients, state.seen.shape[0]))
        after, metrics = rounds(lent(state, clients, room, devices), pool, first, count)
        for name, x in after.rows.items():
            state.rows[name][clients] = np.asarray(x)[: len(clients)]
        return after._replace(rows=state.rows), metrics

    return run
