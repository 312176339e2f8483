"""A run in a folder: checked before any work, resumed where a kill has left it, the same bytes every time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pers import data
from fedjax_pers.algorithms import method
from fedjax_pers.base import State, Task
from fedjax_pers.checks import one_of, require
from fedjax_pers.compose import Algorithm, require_sums, with_executor
from fedjax_pers.config import Config
from fedjax_pers.data import SPLITS, Federation
from fedjax_pers.executors import Executor
from fedjax_pers.executors.default import default_executor
from fedjax_pers.executors.lanes import devices_of
from fedjax_pers.report import files, results
from fedjax_pers.report.plots import learning_curves
from fedjax_pers.simulate import checkpoint, records
from fedjax_pers.simulate.compilations import compilations
from fedjax_pers.simulate.interrupts import between_blocks
from fedjax_pers.simulate.matching import check_federation
from fedjax_pers.simulate.placement import devices_for
from fedjax_pers.simulate.pools import pool_of_clients
from fedjax_pers.simulate.retention import require_before, retention
from fedjax_pers.simulate.rows import first_state_on_host, place_of_rows, shapes_on_host
from fedjax_pers.simulate.run import Block, chosen_sampler, evaluate_clients, run, start
from fedjax_pers.simulate.settings import method_settings
from fedjax_pers.tasks import from_model
from fedjax_pers.traffic import Traffic, traffic

CHECKPOINTS = "checkpoints"
Progress = Callable[[int, int, float | None], None]
"""``progress(rounds done, rounds, accuracy)``: the unweighted mean of the personalised models, or ``None``.

Called when rounds begin, which takes some seconds to compile, and after every block.
"""


def silent(done: int, rounds: int, accuracy: float | None) -> None:
    """The progress that nobody watches."""


class Study(NamedTuple):
    """A run that has been checked: everything that could fail has been built.

    Attributes:
      config: what was asked.
      federation: the clients.
      task: the model and its loss.
      algorithm: the method.
      warm: FedAvg for the rounds before, or ``None``.
    """

    config: Config
    federation: Federation
    task: Task
    algorithm: Algorithm
    warm: Algorithm | None

    @property
    def rounds(self) -> int:
        """Rounds of the whole run."""
        return self.config.warm_start + self.config.rounds


class Result(NamedTuple):
    """What a finished run's folder holds.

    Attributes:
      folder: the run's folder.
      summary: of ``summary.json``.
      rows: of ``metrics.jsonl``, one a round.
      clients: columns of ``clients.csv``, ``[clients]``.
      compilations: programs that were compiled for it in this process (0 for a run that was finished before).
    """

    folder: Path
    summary: dict[str, Any]
    rows: list[dict[str, Any]]
    clients: dict[str, list[Any]]
    compilations: int


def validate(config: Config, like: Study | None = None) -> Study:
    """Builds all that can fail, before any work: data, model, method with its settings, cohort.

    Example:
      >>> validate(Config(model="linear", method="fedprox", settings={"weigths": "uniform"}))
      Traceback (most recent call last):
      ValueError: settings of fedprox: found 'weigths'; allowed are lr, mu, ... Did you mean 'weights'?

    Args:
      config: what is asked.
      like: another study, whose data and task are used again where the config asks for the same ones: studies that
        share a task share compiled programs.

    Raises:
      ValueError: names the field, what was found and what is allowed.
      FileNotFoundError: the data are not there.
    """
    config = Config.from_dict(config.to_dict())  # as a file would give it back
    config.check()
    federation = like.federation if _same(config, like, "data", "data_options", "unseen") else federation_of(config)
    asked = ("data", "data_options", "unseen", "model", "model_options")
    task = like.task if _same(config, like, *asked) else _task(config, federation)
    check_federation(task, federation)
    one_of("split", config.split, SPLITS)
    judged = federation.split(config.split).num_rows
    require(judged > 0, f"split: found {config.split!r}, which has no rows in {config.data}")
    algorithm = method(config.method).make(task, **method_settings(config.method, config.settings))
    if config.secure_aggregation:
        require_sums(algorithm.sees)
    if config.retention:
        require_before(algorithm)
    algorithm = _mapped(config, algorithm, federation.num_clients)
    chosen_sampler(algorithm, federation, config.cohort_size, dropout=config.dropout)
    warm = _warm(config, task, algorithm, federation.num_clients) if config.warm_start else None
    return Study(config, federation, task, algorithm, warm)


def run_study(what: Config | Study, folder: str | Path, progress: Progress = silent) -> Result:
    """Runs a study in a folder, or goes on where it was killed; a finished one is only read.

    Whatever moment a run is killed at, starting it again gives the bytes that it would have given. Only
    ``timings.jsonl`` and ``environment.json`` tell runs of one config apart.

    Args:
      what: a config, or the study that :func:`validate` has made of it.
      folder: of this run alone.
      progress: called when rounds begin and after every block of rounds.

    Raises:
      ValueError: as for :func:`validate`; or the folder holds another run.
      OSError: the folder cannot be written to, or another process is writing there.
      RejectedUploads: an upload was not finite, and the config asks to stop then.
    """
    before = compilations()
    study = what if isinstance(what, Study) else validate(what)
    folder = results.prepare(folder, study.config.to_dict())
    with files.locked(folder):
        if (folder / results.SUMMARY).exists():
            print(f"{folder}: this run is finished ({study.rounds} rounds); nothing to do")
            result = read_result(folder)
            progress(study.rounds, study.rounds, records.accuracy(result.rows[-1]))
            return result
        results.write_environment(folder)
        with between_blocks() as check_interrupt:

            def report(done: int, rounds: int, accuracy: float | None) -> None:
                progress(done, rounds, accuracy)
                check_interrupt()

            state = _run_rounds(study, folder, report)
        _finish(study, folder, state)
    return read_result(folder)._replace(compilations=compilations() - before)


def read_result(folder: str | Path) -> Result:
    """What a finished run has left in its folder.

    Raises:
      FileNotFoundError: the run is not finished, or was never there.
    """
    folder = Path(folder).absolute()
    if not (folder / results.SUMMARY).exists():
        raise FileNotFoundError(f"{folder}: holds no finished run ({results.SUMMARY} is missing)")
    return Result(folder, results.read_summary(folder), results.read_rows(folder), results.read_clients(folder), 0)


def last_state(folder: str | Path) -> tuple[Study, State]:
    """The study of a run's folder and its state at the last checkpoint: for predictions, or to go on by hand.

    Raises:
      FileNotFoundError: there is no run, or no checkpoint yet.
    """
    folder = Path(folder).absolute()
    study = validate(Config.from_dict(results.read_config(folder)))
    step = checkpoint.latest(folder / CHECKPOINTS)
    if step is None:
        raise FileNotFoundError(f"{folder / CHECKPOINTS}: holds no checkpoint yet")
    return study, _restored(study, folder, step)


def _same(config: Config, like: Study | None, *fields: str) -> bool:
    return like is not None and all(getattr(config, name) == getattr(like.config, name) for name in fields)


def federation_of(config: Config) -> Federation:
    """The clients that a config asks for."""
    require("unseen" not in config.data_options, "data_options: found 'unseen', which is a field of its own")
    try:
        return data.load(config.data, unseen=config.unseen or None, **config.data_options)
    except TypeError as error:
        raise ValueError(f"data_options: found {dict(config.data_options)}; {config.data} says: {error}") from error


def _task(config: Config, federation: Federation) -> Task:
    try:
        return from_model(federation, config.model, **config.model_options)
    except TypeError as error:
        raise ValueError(f"model_options: found {dict(config.model_options)}; {config.model} says: {error}") from error


def _warm(config: Config, task: Task, following: Algorithm, num_clients: int) -> Algorithm:
    """FedAvg with the method's own local training, as far as the two have settings of one name."""
    key, of_method = jax.random.key(0), following.task
    made: list[Any] = [
        jax.tree.structure(jax.eval_shape(make, key))
        for make in (of_method.init, lambda key: of_method.adopt(task.init(key), key))
    ]
    require(
        made[0] == made[1],
        f"warm_start: found {config.warm_start}; the model of {config.method} is not the one that FedAvg trains",
    )
    settings = {**method(config.method).settings, **method_settings(config.method, config.settings)}
    shared = {name: value for name, value in settings.items() if name in method("fedavg").settings}
    algorithm = method("fedavg").make(task, **shared)
    require(algorithm.common is not None, f"warm_start: FedAvg with {shared} has no whole model to start from")
    return _mapped(config, algorithm, num_clients)


def _mapped(config: Config, algorithm: Algorithm, num_clients: int) -> Algorithm:
    """The algorithm with the lanes and devices that are asked for; what is not asked for is as by default.

    Its first state is traced with so many clients: what cannot be with them (more clusters) is refused before any work.
    """
    key = jax.random.key(0)
    state = jax.eval_shape(lambda: algorithm.init(algorithm.task.init(key), key, num_clients=num_clients))
    if config.lanes is None and config.devices is None:
        return algorithm
    usual = default_executor((state.shared, state.fresh, state.frozen))
    executor = Executor(usual.lanes if config.lanes is None else config.lanes, devices=config.devices)
    devices_of(executor)  # more than there are, before any work
    return with_executor(algorithm, executor)


def _run_rounds(study: Study, folder: Path, progress: Progress) -> State:
    config = study.config
    done = checkpoint.latest(folder / CHECKPOINTS) or 0
    results.truncate_after(folder, done)
    if done:
        print(f"{folder}: resumes after round {done} of {study.rounds}")
    state = _restored(study, folder, done) if done else None
    if study.warm is not None and done <= config.warm_start:
        state = _run_phase(study, study.warm, state, config.warm_start, folder, progress)
        state = warm_started(study, state)
    return _run_phase(study, study.algorithm, state, study.rounds, folder, progress)


def _run_phase(
    study: Study, algorithm: Algorithm, state: State | None, rounds: int, folder: Path, progress: Progress
) -> State:
    config = study.config
    name = config.method if algorithm is study.algorithm else "fedavg"
    last = results.read_rows(folder)[-1:] if (folder / results.METRICS).exists() else []
    ledger = records.Ledger(name, costs_of(study, algorithm), study.federation, last[0] if last else None)
    blocks, began, compiled = 0, time.perf_counter(), compilations()

    def keep(block: Block) -> None:
        nonlocal blocks, began, compiled
        blocks += 1
        rows = ledger.rows(block)
        results.append_rows(folder, rows)
        done, now = rows[-1]["round"], time.perf_counter()
        timing = {"round": done, "rounds": len(rows), "seconds": now - began, "compilations": compilations() - compiled}
        results.append_timings(folder, timing)
        # Without a checkpoint after it, a run that stops here stops here again.
        stops = config.stop_on_rejected and block.metrics.rejected.any()
        if not stops and (done == rounds or blocks % config.checkpoint_every == 0):
            results.sync(folder)
            checkpoint.save(folder / CHECKPOINTS, done, block.state)
        progress(done, study.rounds, records.accuracy(rows[-1]))
        began, compiled = time.perf_counter(), compilations()

    progress(last[0]["round"] if last else 0, study.rounds, None)
    state, _ = run(
        algorithm,
        state,
        study.federation,
        rounds,
        config.seed,
        sampler=chosen_sampler(algorithm, study.federation, config.cohort_size, dropout=config.dropout),
        evaluate_every=config.evaluate_every or None,
        split=config.split,
        stop_on_rejected=config.stop_on_rejected,
        on_block=keep,
    )
    return state


def costs_of(study: Study, algorithm: Algorithm | None = None) -> Traffic:
    """Bytes that a client sends and receives in a round of the study's method (or of its warm start)."""
    algorithm = algorithm or study.algorithm
    one = pool_of_clients(study.federation, "train", np.arange(1))
    return traffic(algorithm, state_shapes(algorithm, study.federation), one)


def state_shapes(algorithm: Algorithm, federation: Federation) -> State:
    """Shapes and dtypes of an algorithm's state, the template of its checkpoints."""
    return jax.eval_shape(lambda: start(algorithm, federation, 0, rows_on="device"))


def _rows_on_host(study: Study, algorithm: Algorithm) -> bool:
    return place_of_rows(lambda: state_shapes(algorithm, study.federation), "auto", devices_for(algorithm)) == "host"


def _restored(study: Study, folder: Path, done: int) -> State:
    warm = study.warm is not None and done <= study.config.warm_start
    algorithm = study.warm if warm else study.algorithm
    template = state_shapes(algorithm, study.federation)
    there = shapes_on_host(template) if _rows_on_host(study, algorithm) else template
    return checkpoint.restore(folder / CHECKPOINTS, there, done)


def warm_started(study: Study, state: State) -> State:
    """The method's first state, from FedAvg's model; rounds and participation are counted on."""

    def first() -> State:
        variables = study.warm.common(state)
        key = jax.random.key(study.config.seed)
        new = study.algorithm.init(variables, key, num_clients=study.federation.num_clients)
        return new._replace(round=state.round, seen=state.seen)

    return first_state_on_host(first) if _rows_on_host(study, study.algorithm) else jax.jit(first)()


def _finish(study: Study, folder: Path, state: State) -> None:
    config, federation = study.config, study.federation
    trained = evaluate_clients(study.algorithm, state, federation, config.split, config.seed)
    unseen = None
    if federation.unseen is not None:
        before, after = (
            evaluate_clients(study.algorithm, state, federation.unseen, config.split, config.seed, adapt=adapt)
            for adapt in (False, True)
        )
        unseen = records.Newcomers(before, after)
    kept = None
    if config.retention:
        kept = retention(study.algorithm, state, federation, config.split, config.seed, most=config.retention)
    rows = results.read_rows(folder)
    results.write_clients(folder, records.client_columns(federation, trained, unseen, kept))
    curve = records.curve(rows, federation.num_clients)
    learning_curves({config.method: [curve]}, folder / "learning_curve.png", score="mean accuracy of a client")
    results.write_summary(folder, records.summary(config, rows, costs_of(study), trained, unseen, kept))
