"""The compiled programs of a run: a block of rounds, and the evaluation of clients.

Programs are kept by what is static about an algorithm. Its float settings are arguments, so a second learning rate, a
second seed or a second run of the same shape compiles nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from fedjax_pers.base import Array, Cohort, Metrics, State
from fedjax_pers.compose import Algorithm
from fedjax_pers.evaluation.evaluate import evaluate
from fedjax_pers.executors.lanes import CLIENTS, mesh_of
from fedjax_pers.judging import mean_metrics
from fedjax_pers.keys import round_key
from fedjax_pers.once import traced
from fedjax_pers.simulate.placement import everywhere, placed, places
from fedjax_pers.simulate.sampling import Sampler
from fedjax_pers.trees import NOWHERE


class Pool(NamedTuple):
    """A split of a federation on the device: examples, which of them each client owns, and where its row lies."""

    data: dict[str, Array]
    start: Array
    size: Array
    tags: Array
    ids: Array
    room: Array
    slots: Array | None = None

    def cohort(self, index: Array) -> Cohort:
        """The cohort of the clients at these places; a place past the end is nobody's."""
        count = self.ids.shape[0]
        valid, at = index < count, jnp.minimum(index, count - 1)
        ids = jnp.where(valid, self.ids[at], index)
        slots = None if self.slots is None else jnp.where(valid, self.slots[at], NOWHERE)
        return Cohort(ids, self.tags[at], self.start[at], self.size[at], valid, self.data, self.room, slots)


class _Static(NamedTuple):
    """An algorithm without the values of its float settings: what a compiled program is keyed by."""

    make: Any
    names: tuple[str, ...]

    def algorithm(self, floats: dict[str, Array]) -> Algorithm:
        return self.make.build(floats) if self.names else self.make


def split_floats(algorithm: Algorithm) -> tuple[_Static, dict[str, Any]]:
    """What is static about an algorithm, and its float settings as arrays."""
    recipe = algorithm.recipe
    if recipe is None or not recipe.floats:
        return _Static(algorithm._replace(layout=None), ()), {}  # a layout holds dicts, which have no hash
    floats = {name: jnp.float32(value) for name, value in recipe.floats.items()}
    return _Static(recipe._replace(floats=_Named(sorted(floats))), tuple(sorted(floats))), floats


class _Named(tuple):
    """Names of float settings in place of their values, so that a recipe can be hashed."""


def first_state(static: _Static, num_clients: int) -> Callable:
    """``program(floats, key) -> state``: the first state of a run."""

    def program(floats: dict[str, Array], key: Array) -> State:
        algorithm = static.algorithm(floats)
        return algorithm.init(algorithm.task.init(round_key(key, "init", 0)), key, num_clients=num_clients)

    return program


@functools.lru_cache(maxsize=64)
def start_program(static: _Static, num_clients: int, devices: int) -> Callable:
    """The compiled :func:`first_state`. It is made where it will lie: rows may be too large to be moved."""
    program = first_state(static, num_clients)
    if devices == 1:
        return jax.jit(program)
    floats = dict.fromkeys(static.names, jax.ShapeDtypeStruct((), jnp.float32))
    shapes = jax.eval_shape(lambda floats: program(floats, jax.random.key(0)), floats)
    return jax.jit(program, out_shardings=places(shapes, devices))


@functools.lru_cache(maxsize=64)
def starts_program(static: _Static, num_clients: int) -> Callable:
    """``program(floats [runs], keys [runs]) -> states [runs, ...]``: the first states of many runs."""
    one = first_state(static, num_clients)
    return jax.jit(lambda floats, keys: jax.lax.map(lambda run: one(*run), (floats, keys)))


def many_rounds(static: _Static, sampler: Sampler, block: int) -> Callable:
    """``program(floats, state, pool, key, count) -> (state, metrics [block, ...])``: ``count <= block`` rounds."""

    def program(floats: dict[str, Array], state: State, pool: Pool, key: Array, count: Array) -> tuple[State, Metrics]:
        algorithm = static.algorithm(floats)

        def one_round(state: State) -> tuple[State, Metrics]:
            ids = sampler(key, state.round, state.seen.shape[0])
            return algorithm.step(state, pool.cohort(ids), key)

        one, (_, shape) = traced(one_round, state)
        history = jax.tree.map(lambda x: jnp.zeros((block, *x.shape), x.dtype), shape)

        def body(carry: tuple[Array, State, Metrics]) -> tuple[Array, State, Metrics]:
            index, state, history = carry
            state, metrics = one(state)
            return index + 1, state, jax.tree.map(lambda h, m: h.at[index].set(m), history, metrics)

        return jax.lax.while_loop(lambda c: c[0] < count, body, (jnp.int32(0), state, history))[1:]

    return program


@functools.lru_cache(maxsize=64)
def rounds_program(static: _Static, sampler: Sampler, block: int, devices: int) -> Callable:
    """The compiled :func:`many_rounds`.

    State and pool lie on so many devices (:mod:`~fedjax_pers.simulate.placement`), before as after.
    """
    rounds = many_rounds(static, sampler, block)
    if devices == 1:
        return jax.jit(rounds, donate_argnums=1)

    def program(floats: dict[str, Array], state: State, pool: Pool, key: Array, count: Array) -> tuple[State, Metrics]:
        state, history = rounds(floats, state, pool, key, count)
        return placed(state, devices), everywhere(history, devices)

    return jax.jit(program, donate_argnums=1)


@functools.lru_cache(maxsize=64)
def sweep_program(static: _Static, sampler: Sampler, block: int, devices: int) -> Callable:
    """Rounds of many runs: floats, states and keys, and what comes out, have a leading axis ``[runs]``.

    Runs are spread over devices, each of which runs a whole one at a time on a CPU, all of its own at once elsewhere.
    """
    rounds = many_rounds(static, sampler, block)

    def on_one(states: State, floats: dict[str, Array], keys: Array, pool: Pool, count: Array) -> tuple[State, Metrics]:
        def one(run: tuple[State, dict[str, Array], Array]) -> tuple[State, Metrics]:
            state, floats, key = run
            return rounds(floats, state, pool, key, count)

        runs = (states, floats, keys)
        return jax.lax.map(one, runs) if jax.default_backend() == "cpu" else jax.vmap(one)(runs)

    if devices == 1:
        return jax.jit(on_one, donate_argnums=0)
    share, whole = PartitionSpec(CLIENTS), PartitionSpec()
    specs = (share, share, share, whole, whole)
    spread = jax.shard_map(on_one, mesh=mesh_of(devices), in_specs=specs, out_specs=share, check_vma=False)
    return jax.jit(spread, donate_argnums=0)


@functools.lru_cache(maxsize=64)
def evaluation_program(static: _Static, group: int) -> Callable:
    """``program(floats, state, train, judged, key, index [groups, group]) -> (own, common)``, tables of that shape.

    ``own`` are the metrics of each client's personalised model, ``common`` those of the one global model on the same
    examples (``{}`` where the method has none). Clients are taken in groups, so memory holds one group of models.
    """

    def program(
        floats: dict[str, Array], state: State, train: Pool, judged: Pool, key: Array, index: Array
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        algorithm = static.algorithm(floats)
        whole = algorithm.common(state) if algorithm.common else None

        def one_group(index: Array) -> tuple[dict[str, Array], dict[str, Array]]:
            cohort = judged.cohort(index)
            personalised = algorithm.personalize(state, train.cohort(index), key)
            own = evaluate(algorithm.task, personalised, cohort)
            if whole is None:
                return own, {}

            def judge(start: Array, size: Array) -> dict[str, Array]:
                return mean_metrics(algorithm.task, whole, judged.data, start, size)

            return own, jax.vmap(judge)(cohort.start, cohort.size)

        return jax.lax.map(one_group, index)

    return jax.jit(program)
