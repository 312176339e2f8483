"""Methods side by side: the same clients, the same examples, several seeds each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from fedjax_pers.checks import require
from fedjax_pers.config import Config
from fedjax_pers.evaluation.statistics import over_seeds, summarize
from fedjax_pers.report import files, plots, strict_json, tables
from fedjax_pers.simulate import records
from fedjax_pers.simulate.study import Result, Study, run_study, validate

COMPARISON = "comparison.json"
BASELINE = "fedavg"
SHOWN = ("weighted_mean", "unweighted_mean", "bottom_decile_mean", "worst", "hurt")
OWN = "the method's own global model"
SAME = ("data", "data_options", "unseen", "split")
"""Fields that configs must share, so that their clients and examples are the same."""

Progress = Callable[[str, int, int, int, float | None], None]
"""``progress(method, seed, rounds done, rounds, accuracy)``."""


class Comparison(NamedTuple):
    """What a comparison found, and left in its folder.

    Attributes:
      folder: holds ``comparison.md``, ``comparison.json``, three figures, and the runs in ``METHOD/seed_K``.
      rows: one a method, as :func:`fedjax_pers.report.comparison_table` takes them.
      hurt_against: what ``hurt`` compares with, in words.
      results: by method, one a seed.
    """

    folder: Path
    rows: list[dict[str, Any]]
    hurt_against: str
    results: dict[str, list[Result]]

    def table(self, title: str | None = None) -> Table:
        """The table for a terminal."""
        return tables.comparison_table(self.rows, title=title, note=_note(self.hurt_against))


def configs_of(
    base: Config, methods: Iterable[str], settings: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, Config]:
    """One config a method, equal but for the method and its settings.

    Example:
      >>> configs = configs_of(Config(), ["fedavg", "fedper"], {"fedper": {"personal": "head(1)"}})
      >>> configs["fedper"].settings
      {'personal': 'head(1)'}

    Args:
      base: all other fields; its own settings are those of methods that have none in ``settings``.
      methods: names.
      settings: by method.

    Raises:
      ValueError: a method is named twice, or settings are for a method that is not compared.
    """
    methods, settings = list(methods), settings or {}
    require(len(set(methods)) == len(methods), f"methods: found {methods}; each may be there once")
    strangers = [name for name in settings if name not in methods]
    require(not strangers, f"settings: found {strangers}; the methods compared are {', '.join(methods)}")
    return {name: replace(base, method=name, settings=settings.get(name, base.settings)) for name in methods}


def compare(
    configs: Mapping[str, Config], seeds: Sequence[int], folder: str | Path, progress: Progress | None = None
) -> Comparison:
    """Runs every config for every seed, and sums up. Started again, it goes on where it was killed.

    The data set and its partition are those of the configs: seeds change initial models, batches and cohorts only. A
    method is compiled once for all seeds.

    Args:
      configs: by the name to show, for instance from :func:`configs_of`.
      seeds: of the runs, in place of the configs' own.
      folder: gets ``NAME/seed_K`` for each run, and the tables and figures.
      progress: called when rounds begin and after every block of rounds.

    Raises:
      ValueError: a config is not valid, or they do not have the same clients and examples. Nothing has run then.
    """
    require(len(configs) > 0, "methods: found none; at least one is needed")
    seeds = list(seeds)
    require(len(seeds) > 0 and len(set(seeds)) == len(seeds), f"seeds: found {seeds}; expected some, each once")
    folder = Path(folder).absolute()
    studies: dict[str, Study] = {}
    for name, config in configs.items():
        like = next(iter(studies.values()), None)
        studies[name] = validate(config, like)
        for seed in seeds:
            replace(config, seed=seed).check()
        for field in SAME if like is not None else ():
            found, expected = getattr(config, field), getattr(like.config, field)
            require(found == expected, f"{name}: {field} is {found!r}, but {expected!r} in others; it must be the same")
    plan = {"configs": {name: study.config.to_dict() for name, study in studies.items()}, "seeds": seeds}
    folder.mkdir(parents=True, exist_ok=True)
    files.write_atomic(folder / COMPARISON, strict_json.document(plan))  # from which it can be resumed
    results = {name: _runs(name, study, seeds, folder / name, progress) for name, study in studies.items()}
    baseline = next((name for name, study in studies.items() if study.config.method == BASELINE), None)
    rows = [_row(name, runs, results[baseline] if baseline else runs) for name, runs in results.items()]
    against = f"the global model of {baseline} of the same seed" if baseline else OWN
    comparison = Comparison(folder, rows, against, results)
    _write(comparison, plan)
    return comparison


def alone(name: str, result: Result) -> Comparison:
    """The numbers of one run in the form of a comparison; ``hurt`` is against its own global model."""
    return Comparison(result.folder, [_row(name, [result], [result])], OWN, {name: [result]})


def _runs(name: str, study: Study, seeds: list[int], folder: Path, progress: Progress | None) -> list[Result]:
    results = []
    for seed in seeds:
        seeded = study._replace(config=replace(study.config, seed=seed))

        def report(done: int, rounds: int, accuracy: float | None, seed: int = seed) -> None:
            if progress is not None:
                progress(name, seed, done, rounds, accuracy)

        results.append(run_study(seeded, folder / f"seed_{seed}", report))
    return results


def _row(name: str, runs: list[Result], baselines: list[Result]) -> dict[str, Any]:
    summaries = [_numbers(run, baseline) for run, baseline in zip(runs, baselines, strict=True)]
    return {"method": name, "seeds": len(runs), **over_seeds(summaries)}


def _numbers(run: Result, baseline: Result) -> dict[str, float]:
    """The numbers of one run that the table shows, over the clients in training."""
    own, counts = _column(run, "accuracy"), _column(run, "test_examples")
    reference = _column(baseline, "global_accuracy") if "global_accuracy" in baseline.clients else None
    numbers = {"hurt": float("nan")} | summarize(own, counts, reference)
    traffic, kept = run.summary["traffic"], run.summary.get("retention")
    found = {name: numbers[name] for name in SHOWN} | {
        f"megabytes_{way}": traffic[f"megabytes_{way}_per_client"] for way in ("up", "down")
    }
    changes = {"local_gain": "local_gain", "retention": "accuracy"} if kept else {}
    return found | {name: kept[place]["unweighted_mean"] for name, place in changes.items()}


def _column(run: Result, name: str) -> np.ndarray:
    trained = np.asarray(run.clients["unseen"]) == 0
    return np.asarray(run.clients[name], float)[trained]


def _note(against: str) -> str:
    return f"hurt: share of clients strictly below {against}, on the same examples"


def _write(comparison: Comparison, plan: dict[str, Any]) -> None:
    folder, results = comparison.folder, comparison.results
    note = _note(comparison.hurt_against)
    files.write_atomic(folder / "comparison.md", tables.to_markdown(comparison.rows, note=note).encode())
    styles = plots.method_styles(results)
    curves = {name: [_curve(run) for run in runs] for name, runs in results.items()}
    score = "mean accuracy of a client"
    plots.learning_curves(curves, folder / "learning_curves.png", score=score, styles=styles)
    plots.accuracy_against_traffic(curves, folder / "accuracy_against_traffic.png", score=score, styles=styles)
    accuracies = {name: np.stack([_tested(run) for run in runs]) for name, runs in results.items()}
    plots.accuracy_ecdf(accuracies, folder / "accuracy_ecdf.png", styles=styles)
    found = {"rows": comparison.rows, "hurt_against": comparison.hurt_against}
    files.write_atomic(folder / COMPARISON, strict_json.document(plan | found))


def _curve(run: Result) -> dict[str, list[float]]:
    return records.curve(run.rows, run.summary["clients"])


def _tested(run: Result) -> np.ndarray:
    return np.where(_column(run, "test_examples") > 0, _column(run, "accuracy"), np.nan)
