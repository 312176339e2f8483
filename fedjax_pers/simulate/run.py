"""Runs an algorithm over a federation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pers.base import Array, Metrics, State
from fedjax_pers.checks import positive_int, require
from fedjax_pers.compose import Algorithm
from fedjax_pers.data import Federation
from fedjax_pers.keys import as_key
from fedjax_pers.simulate.compilations import compilations
from fedjax_pers.simulate.matching import check_federation
from fedjax_pers.simulate.placement import devices_for, on_host, placed
from fedjax_pers.simulate.pools import (
    most_visitors,
    place_of_examples,
    pool_of_clients,
    pools_for,
    training_pools,
    visitors_of,
)
from fedjax_pers.simulate.programs import (
    Pool,
    evaluation_program,
    first_state,
    rounds_program,
    split_floats,
    start_program,
)
from fedjax_pers.simulate.rows import first_state_on_host, lent, moved, on_lent_rows, place_of_rows, slots_of
from fedjax_pers.simulate.sampling import Sampler, by_examples, dropouts, everyone, uniform
from fedjax_pers.traffic import Traffic, traffic
from fedjax_pers.trees import num_bytes

MODELS, MEMORY = 32, 2**28
"""At most so many clients' models, of so many bytes together, are judged at once."""


class Table(NamedTuple):
    """Per-client numbers of one evaluation.

    Attributes:
      client_ids: the clients' own names.
      examples: examples judged on, ``[clients]``; a client with 0 has NaN below.
      personal: ``{metric: [clients]}`` of each client's personalised model.
      common: the same of the one global model on the same examples; ``{}`` where the method has none.
      rounds_taken_part: ``[clients]``.
    """

    client_ids: tuple[Any, ...]
    examples: np.ndarray
    personal: dict[str, np.ndarray]
    common: dict[str, np.ndarray]
    rounds_taken_part: np.ndarray


class History(NamedTuple):
    """A run's record.

    Attributes:
      metrics: :class:`~fedjax_pers.Metrics` of numpy arrays ``[rounds, ...]``.
      evaluations: ``(rounds done, Table)`` in order.
      traffic: bytes a client sends and receives in a round in which it communicates.
      compilations: programs compiled during the run.
    """

    metrics: Metrics
    evaluations: tuple[tuple[int, Table], ...]
    traffic: Traffic
    compilations: int


class Block(NamedTuple):
    """What a run reports after each block of rounds: the state (do not keep it), its metrics, and an evaluation."""

    state: State
    metrics: Metrics
    table: Table | None


class RejectedUploads(RuntimeError):
    """A round in which uploads were not finite, in a run that was told to stop then."""


def start(algorithm: Algorithm, federation: Federation, key: Array | int = 0, *, rows_on: str = "auto") -> State:
    """The first state: the task's initial variables, and a row for every client.

    Args:
      algorithm: what will run.
      federation: the clients.
      key: a seed or a key.
      rows_on: as in :func:`run`.

    Example:
      >>> import fedjax_pers as fp
      >>> federation = fp.data.load("vowel_speakers")
      >>> algorithm = fp.method("fedper").make(fp.tasks.from_model(federation, "linear"))
      >>> int(fp.start(algorithm, federation, 0).round)
      0
    """
    check_federation(algorithm.task, federation)
    static, floats = split_floats(algorithm)
    devices, key = devices_for(algorithm), as_key(key)

    def make() -> State:
        return first_state(static, federation.num_clients)(floats, key)

    if place_of_rows(lambda: jax.eval_shape(make), rows_on, devices) == "host":
        return first_state_on_host(make)
    return start_program(static, federation.num_clients, devices)(floats, key)


def run(
    algorithm: Algorithm,
    state: State | None,
    federation: Federation,
    rounds: int,
    key: Array | int = 0,
    *,
    cohort_size: int | None = None,
    sampler: Sampler | None = None,
    evaluate_every: int | None = None,
    split: str = "test",
    stop_on_rejected: bool = False,
    on_block: Callable[[Block], None] | None = None,
    data_on: str = "auto",
    rows_on: str = "auto",
) -> tuple[State, History]:
    """Runs until ``rounds`` rounds are done; rounds are compiled and dispatched in blocks.

    The state that is passed in is not changed, and a state that has done some rounds goes on from there: the same bytes
    come out as in one uninterrupted run.

    Example:
      >>> import fedjax_pers as fp
      >>> federation = fp.data.load("vowel_speakers")
      >>> algorithm = fp.method("fedper").make(fp.tasks.from_model(federation, "linear"))
      >>> state, history = fp.run(algorithm, None, federation, 3, key=0)
      >>> history.metrics.loss.shape
      (3, 15)

    Args:
      algorithm: what to run.
      state: where to go on from; ``None`` starts afresh.
      federation: the clients and their data.
      rounds: total number of rounds.
      key: a seed or a key; all randomness is folded from it.
      cohort_size: clients a round, sampled uniformly or as the method says (q-FFL); everyone where neither this nor a
        sampler is given.
      sampler: another way of choosing clients.
      evaluate_every: rounds between evaluations; ``None`` evaluates at the end, 0 never.
      split: the split to judge on.
      stop_on_rejected: raise :class:`RejectedUploads` when a client's upload is not finite (after the block).
      on_block: called after each block, for progress, results and checkpoints.
      data_on: ``"device"`` keeps all examples there; ``"host"`` brings those of the next clients before each block of
        rounds, with the same results; ``"auto"`` is the host where they take more than 0.4 of a device's memory.
      rows_on: the same for the personal rows of all clients; ``"host"`` keeps them there as numpy arrays, and the
        device has those of a block's clients. What a server keeps for each client (``State.aux``) is on the device.
    """
    key, before = as_key(key), compilations()
    positive_int("rounds", rounds)
    sampler = chosen_sampler(algorithm, federation, cohort_size, sampler)
    require(
        evaluate_every is None or evaluate_every >= 0, f"evaluate_every: found {evaluate_every}; allowed is 0 or more"
    )
    check_federation(algorithm.task, federation)
    federation.split(split)  # a misspelt name, before any work
    # The program takes its state's memory over (donation); the caller's stays the caller's.
    if state is None:
        state = start(algorithm, federation, key, rows_on=rows_on)
    else:
        state = moved(state, _place(state, rows_on, devices_for(algorithm)))
    require(
        state.seen.shape[0] == federation.num_clients,
        f"state: it has rows for {state.seen.shape[0]} clients, the federation has {federation.num_clients}",
    )
    devices, (static, floats) = devices_for(algorithm), split_floats(algorithm)
    visitors = visitors_of(sampler, key, federation.num_clients)
    state, pool = placed(state, devices), training_pools(federation, visitors, data_on, devices)
    costs = traffic(algorithm, state, pool_of_clients(federation, "train", np.arange(1)))
    block = evaluate_every or 10
    program = rounds_program(static, sampler, block, devices)

    def resident(state: State, pool: Pool, first: int, count: int) -> tuple[State, Metrics]:
        return program(floats, state, pool, key, jnp.int32(count))

    room = most_visitors(sampler, block, federation.num_clients)
    rounds_of = on_lent_rows(resident, visitors, room, devices) if on_host(state) else resident
    collected, evaluations = [], []
    for first, count, judge in blocks(int(state.round), rounds, block, evaluate_every):
        state, metrics = rounds_of(state, pool(first, count), first, count)
        metrics = jax.tree.map(lambda x: np.asarray(x)[:count], metrics)  # noqa: B023 (used at once)
        table = evaluate_clients(algorithm, state, federation, split, key, data_on=data_on) if judge else None
        collected.append(metrics)
        if table is not None:
            evaluations.append((first + count, table))
        if on_block is not None:
            on_block(Block(state, metrics, table))
        if stop_on_rejected and metrics.rejected.any():
            raise RejectedUploads(rejected_message(metrics, first, federation))
    metrics = jax.tree.map(lambda *parts: np.concatenate(parts), *collected) if collected else _no_metrics()
    return state, History(metrics, tuple(evaluations), costs, compilations() - before)


def _place(state: State, rows_on: str, devices: int) -> str:
    """Where rows go that are there already: what is on the host was put there, and stays unless it is told to go."""
    return "host" if rows_on == "auto" and on_host(state) else place_of_rows(lambda: state, rows_on, devices)


def blocks(done: int, rounds: int, block: int, evaluate_every: int | None) -> Iterable[tuple[int, int, bool]]:
    """``(first round, rounds, evaluate after?)``, cut at multiples of the block, so a resumed run is cut alike."""
    while done < rounds:
        count = min(block - done % block, rounds - done)
        end = done + count
        due = bool(evaluate_every) and end % evaluate_every == 0
        yield done, count, due or (evaluate_every != 0 and end == rounds)
        done = end


def evaluate_clients(
    algorithm: Algorithm,
    state: State,
    federation: Federation,
    split: str = "test",
    key: Array | int = 0,
    *,
    adapt: bool = True,
    group: int | None = None,
    data_on: str = "auto",
) -> Table:
    """Judges every client of a federation: the clients in training, or ``federation.unseen``.

    Where the method adapts (fine-tuning, newcomers), clients do so on their training split; all are judged on
    ``split``. Nothing is written back.

    Args:
      algorithm: what to evaluate.
      state: its state.
      federation: clients; those of an ``unseen`` federation get the treatment of newcomers.
      split: ``"test"``, ``"validation"`` or ``"train"``.
      key: the run's key.
      adapt: false judges clients as they are before they have adapted.
      group: models held at once; by default 32, or as many as have 256 MiB.
      data_on: as in :func:`run`.
    """
    judged = pools_for(federation, split, data_on, devices_for(algorithm))
    return judge(algorithm, state, federation, judged, key, adapt=adapt, group=group, data_on=data_on)


def judge(
    algorithm: Algorithm,
    state: State,
    federation: Federation,
    judged: Callable[[np.ndarray], Pool],
    key: Array | int = 0,
    *,
    adapt: bool = True,
    group: int | None = None,
    data_on: str = "auto",
) -> Table:
    """:func:`evaluate_clients` on any rows: ``judged(clients)`` is a pool that says which are those of each client."""
    static, floats = split_floats(algorithm)
    count = federation.num_clients
    devices, tables = devices_for(algorithm), []
    state, training = placed(state, devices), pools_for(federation, "train", data_on, devices)
    group = min(_models_at_once(algorithm, state, training(np.arange(1))) if group is None else group, count)
    index = np.minimum(np.arange(-(-count // group) * group), count - 1).reshape(-1, group)
    program = evaluation_program(static, group)
    resident = not on_host(state) and place_of_examples(federation, data_on) == "device"
    for some in [index] if resident else index[:, None]:
        clients, there = np.unique(some), state
        train = training(clients)
        if not adapt:  # without an example there is no step to take
            train = train._replace(size=jnp.zeros_like(train.size))
        if on_host(state):
            known = clients if federation.first_id == 0 else clients[:0]
            train, there = train._replace(slots=slots_of(known, count)), lent(state, known, group, devices)
        tables.append(jax.tree.map(np.asarray, program(floats, there, train, judged(clients), as_key(key), some)))
    own, common = jax.tree.map(lambda *parts: np.concatenate(parts).reshape(-1)[:count], *tables)
    examples = own.pop("examples")
    seen = np.asarray(state.seen) if federation.first_id == 0 else np.zeros(count, np.int32)
    return Table(federation.client_ids, examples, own, common, seen)


def _models_at_once(algorithm: Algorithm, state: State, pool: Pool) -> int:
    """How many clients' models are held at once: each is a whole one, frozen leaves and memories included."""
    leaves, structure = jax.tree.flatten((state, pool))
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    return max(1, min(MODELS, MEMORY // max(_model_bytes(algorithm.personalize, structure, shapes), 1)))


@functools.lru_cache(maxsize=64)  # a client's personalisation is traced for it
def _model_bytes(personalize: Callable[..., Any], structure: Any, shapes: tuple[jax.ShapeDtypeStruct, ...]) -> int:
    state, pool = jax.tree.unflatten(structure, shapes)
    first = jnp.zeros(1, jnp.int32)
    key = jax.random.key(0)
    return num_bytes(jax.eval_shape(lambda s, p, key: personalize(s, p.cohort(first), key), state, pool, key))


def rejected_message(metrics: Metrics, first: int, federation: Federation) -> str:
    """Which client in which round sent something that is not finite."""
    rounds, places = np.nonzero(metrics.rejected)
    names = [federation.client_ids[i] for i in metrics.ids[rounds[0]][places[rounds == rounds[0]]]]
    return f"round {first + rounds[0] + 1}: uploads of {names} were not finite; they were left out of the aggregate"


def chosen_sampler(
    algorithm: Algorithm,
    federation: Federation,
    cohort_size: int | None,
    sampler: Sampler | None = None,
    dropout: float = 0.0,
) -> Sampler:
    """The sampler of a run; ValueError where the method or the federation cannot have it."""
    require(cohort_size is None or sampler is None, "cohort_size, sampler: both were given; a run has one or the other")
    whole = cohort_size in (None, federation.num_clients) and sampler in (None, everyone)
    require(
        algorithm.participation == "any" or whole,
        f"cohort_size: found {cohort_size}; this method needs everyone each round, {federation.num_clients} clients",
    )
    require(
        algorithm.participation == "any" or not dropout,
        f"dropout: found {dropout}; this method needs everyone each round",
    )
    chosen = everyone if whole else sampler or _of_size(cohort_size, algorithm, federation)
    places = most_visitors(chosen, 1, federation.num_clients)
    require(
        places >= algorithm.at_least,
        f"cohort_size: found {places}; this method needs at least {algorithm.at_least} clients in a round",
    )
    return dropouts(chosen, dropout) if dropout else chosen


def _of_size(cohort_size: int | None, algorithm: Algorithm, federation: Federation) -> Sampler:
    """The method's own way of drawing so many clients."""
    positive_int("cohort_size", cohort_size)
    require(
        cohort_size <= federation.num_clients,
        f"cohort_size: found {cohort_size}; allowed are 1 .. {federation.num_clients}, the clients of the federation",
    )
    if algorithm.sampling == "examples":
        return by_examples(cohort_size, tuple(federation.sizes("train").tolist()))
    return uniform(cohort_size)


def _no_metrics() -> Metrics:
    nobody: dict[str, Any] = {name: np.zeros((0, 0)) for name in Metrics._fields}
    return Metrics(**nobody | {"said": {}})
