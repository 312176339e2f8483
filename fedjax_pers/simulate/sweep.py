"""Many runs in one program: float settings and seeds are array axes, so that nothing is compiled twice."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pers.base import Array, Metrics, State
from fedjax_pers.checks import positive_int, require
from fedjax_pers.compose import Algorithm
from fedjax_pers.config import check_names
from fedjax_pers.data import Federation
from fedjax_pers.keys import as_key
from fedjax_pers.simulate.compilations import compilations
from fedjax_pers.simulate.matching import check_federation
from fedjax_pers.simulate.placement import everywhere
from fedjax_pers.simulate.pools import pool_of
from fedjax_pers.simulate.programs import split_floats, starts_program, sweep_program
from fedjax_pers.simulate.run import Table, blocks, chosen_sampler, evaluate_clients
from fedjax_pers.simulate.sampling import Sampler

if TYPE_CHECKING:  # a study brings plots and checkpoints with it, which take long to import
    from fedjax_pers.simulate.study import Study


class Sweep(NamedTuple):
    """Runs of one algorithm, for every point (its float settings) and every seed.

    Attributes:
      points: the settings of each point.
      seeds: of the runs.
      metrics: :class:`~fedjax_pers.Metrics` of numpy arrays ``[points, seeds, rounds, ...]``.
      evaluations: ``(rounds done, tables [points][seeds])`` in order.
      states: the last states, leaves ``[points, seeds, ...]``.
      compilations: programs compiled for all runs together.
    """

    points: tuple[dict[str, float], ...]
    seeds: tuple[int, ...]
    metrics: Metrics
    evaluations: tuple[tuple[int, list[list[Table]]], ...]
    states: State
    compilations: int

    def scores(self, metric: str = "accuracy") -> np.ndarray:
        """``[points, seeds]``: the unweighted mean over clients of their personalised models at the last evaluation."""
        require(len(self.evaluations) > 0, "scores: the sweep was not evaluated (evaluate_every = 0)")
        tables = self.evaluations[-1][1]
        one_of_them = tables[0][0].personal
        require(metric in one_of_them, f"metric: found {metric!r}; allowed are {', '.join(one_of_them)}")
        return np.array([[np.nanmean(table.personal[metric]) for table in seeds] for seeds in tables])

    def best(self, metric: str = "accuracy", lowest: bool = False) -> dict[str, float]:
        """The point with the highest (or lowest) mean score over seeds; of equal ones the first."""
        means = self.scores(metric).mean(1)
        return self.points[int(np.nanargmin(means) if lowest else np.nanargmax(means))]


def sweep(study: Study, settings: Mapping[str, Sequence[float]], seeds: Sequence[int]) -> Sweep:
    """All runs of a study's method for a grid of float settings and for every seed, in memory.

    Example:
      >>> from fedjax_pers import sweep
      >>> from fedjax_pers.config import Config
      >>> from fedjax_pers.simulate.study import validate
      >>> study = validate(Config(method="fedprox", model="linear", rounds=3))
      >>> found = sweep(study, {"lr": [0.05, 0.2], "mu": [0.1]}, seeds=[0, 1])
      >>> found.scores().shape, found.points[0]
      ((2, 2), {'lr': 0.05, 'mu': 0.1})

    Args:
      study: data, model, method, rounds, cohort and evaluation; its own seed is not used.
      settings: values by name; every combination is a point.
      seeds: of initial models, batches and cohorts.

    Raises:
      ValueError: names the setting, what was found and what is allowed.
    """
    config = study.config
    require(study.warm is None, f"warm_start: found {config.warm_start}; a sweep starts without one")
    return sweep_runs(
        study.algorithm,
        study.federation,
        config.rounds,
        settings,
        seeds,
        sampler=chosen_sampler(study.algorithm, study.federation, config.cohort_size, dropout=config.dropout),
        evaluate_every=config.evaluate_every or None,
        split=config.split,
    )


def sweep_runs(
    algorithm: Algorithm,
    federation: Federation,
    rounds: int,
    settings: Mapping[str, Sequence[float]],
    seeds: Sequence[int],
    *,
    cohort_size: int | None = None,
    sampler: Sampler | None = None,
    evaluate_every: int | None = None,
    split: str = "test",
) -> Sweep:
    """:func:`sweep` for an algorithm of the registry; the other arguments are those of :func:`fedjax_pers.run`.

    The states of all runs are in memory at the same time. Each run gives what :func:`fedjax_pers.run` gives for its
    settings and its seed.

    Example:
      >>> import fedjax_pers as fp
      >>> federation = fp.data.load("vowel_speakers")
      >>> algorithm = fp.method("fedper").make(fp.tasks.from_model(federation, "linear"))
      >>> found = fp.sweep_runs(algorithm, federation, 2, {"lr": [0.1, 0.3, 1.0]}, seeds=[0])
      >>> found.metrics.loss.shape
      (3, 1, 2, 15)
    """
    before = compilations()
    positive_int("rounds", rounds)
    points, seeds = _points(algorithm, settings), _seeds(seeds)
    sampler = chosen_sampler(algorithm, federation, cohort_size, sampler)
    check_federation(algorithm.task, federation)
    federation.split(split)
    runs, shape = list(itertools.product(points, seeds)), (len(points), len(seeds))
    devices = min(jax.local_device_count(), len(runs))
    block = evaluate_every or 10
    program = sweep_program(split_floats(algorithm)[0], sampler, block, devices)
    floats, states, keys = _started(algorithm, federation, runs, devices)
    pool = everywhere(pool_of(federation, "train"), devices)
    collected, evaluations = [], []
    for first, count, judge in blocks(0, rounds, block, evaluate_every):
        states, metrics = program(states, floats, keys, pool, jnp.int32(count))
        collected.append(jax.tree.map(lambda x: np.asarray(x)[: len(runs), :count], metrics))  # noqa: B023 (used at once)
        if judge:
            tables = iter([_judged(algorithm, states, i, run, federation, split) for i, run in enumerate(runs)])
            evaluations.append((first + count, [[next(tables) for _ in seeds] for _ in points]))
    whole = jax.tree.map(lambda *parts: np.concatenate(parts, 1), *collected)
    metrics = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), whole)
    states = jax.tree.map(lambda x: x[: len(runs)].reshape(*shape, *x.shape[1:]), states)
    return Sweep(tuple(points), tuple(seeds), metrics, tuple(evaluations), states, compilations() - before)


def _points(algorithm: Algorithm, settings: Mapping[str, Sequence[float]]) -> list[dict[str, float]]:
    """Every combination, each of which the method accepts."""
    recipe = algorithm.recipe
    require(recipe is not None, "algorithm: found one without settings; a sweep needs one of the registry (fp.method)")
    check_names("settings (of a sweep, numbers only)", settings, recipe.floats)
    for name, values in settings.items():
        require(len(values) > 0, f"{name}: found no value; at least one is needed")
        require(len(set(values)) == len(values), f"{name}: found {list(values)}; expected each value once")
    points = [dict(zip(settings, map(float, values), strict=True)) for values in itertools.product(*settings.values())]
    for point in points:
        recipe.build({**recipe.floats, **point})
    return points


def _seeds(seeds: Sequence[int]) -> list[int]:
    seeds = list(seeds)
    require(len(seeds) > 0 and len(set(seeds)) == len(seeds), f"seeds: found {seeds}; expected some, each once")
    for seed in seeds:
        as_key(seed)
    return seeds


def _started(
    algorithm: Algorithm, federation: Federation, runs: list[tuple[dict[str, float], int]], devices: int
) -> tuple[dict[str, Array], State, Array]:
    """Settings, first states and keys of all runs, ``[runs, ...]``; the last run is repeated to fill the devices."""
    static, floats = split_floats(algorithm)
    padded = runs + runs[-1:] * (-len(runs) % devices)
    columns = {
        name: jnp.asarray([point.get(name, usual) for point, _ in padded], jnp.float32)
        for name, usual in floats.items()
    }
    keys = jnp.stack([as_key(seed) for _, seed in padded])
    return columns, starts_program(static, federation.num_clients)(columns, keys), keys


def _judged(
    algorithm: Algorithm,
    states: State,
    index: int,
    run: tuple[dict[str, float], int],
    federation: Federation,
    split: str,
) -> Table:
    point, seed = run
    state = jax.tree.map(lambda x: x[index], states)
    recipe = algorithm.recipe._replace(floats={**algorithm.recipe.floats, **point})
    return evaluate_clients(algorithm._replace(recipe=recipe), state, federation, split, seed)
