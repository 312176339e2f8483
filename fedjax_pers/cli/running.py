"""Commands that train: ``run``, ``compare``, ``resume``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from fedjax_pers.cli.options import OPTIONS, Pairs, pairs, read_json
from fedjax_pers.config import Config

if TYPE_CHECKING:
    from fedjax_pers.simulate.compare import Comparison
    from fedjax_pers.simulate.study import Study


@dataclass(frozen=True)
class Choices(Config):
    """The fields of a run, with options as pairs."""

    data_options: Annotated[Pairs, tyro.conf.arg(name="data-option")] = ()  # type: ignore[assignment]
    model_options: Annotated[Pairs, tyro.conf.arg(name="model-option")] = ()  # type: ignore[assignment]
    settings: Annotated[Pairs, tyro.conf.arg(name="set")] = ()  # type: ignore[assignment]

    def chosen(self, file: Path | None) -> Config:
        """The run as the package wants it; options and settings of the file stay where none of that name is given."""
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(Config)}
        before = Config() if file is None else Config.from_dict(read_json(file))
        options = {name: getattr(before, name) | pairs(option, fields[name]) for name, option in OPTIONS.items()}
        return Config(**fields | options)


@dataclass(frozen=True)
class Run(Choices):
    """Trains and judges one method. Started again in the same folder, it goes on where it was stopped.

    Attributes:
      config: a JSON file with fields of a run, such as a run's own config.json; what is given here comes before it.
      folder: where the results go; results/DATA-METHOD-seed_N by default.
    """

    config: Path | None = None
    folder: Path | None = None

    def execute(self) -> None:
        """Runs, and prints the numbers and where they are."""
        from fedjax_pers.simulate.study import validate

        config = self.chosen(self.config)
        _use_devices(config)
        folder = self.folder or Path("results") / f"{Path(config.data).name}-{config.method}-seed_{config.seed}"
        _run(validate(config), folder)


@dataclass(frozen=True)
class Compare(Choices):
    """Trains and judges several methods on the same clients, each for several seeds.

    Attributes:
      methods: names of methods.
      seeds: of the runs; the data set keeps its own.
      settings_file: a JSON file with settings by method; --set gives those of all other methods.
      config: a JSON file with fields of a run; what is given here comes before it.
      folder: where the results go; results/compare-DATA by default.
    """

    method: tyro.conf.Suppress[str] = Config.method
    seed: tyro.conf.Suppress[int] = Config.seed
    methods: tuple[str, ...] = ("local_only", "fedavg", "fedavg_ft", "fedper", "fedrep", "ditto")
    seeds: tuple[int, ...] = (0, 1, 2)
    settings_file: Annotated[Path | None, tyro.conf.arg(name="settings")] = None
    config: Path | None = None
    folder: Path | None = None

    def execute(self) -> None:
        """Compares, and prints the table and where the figures are."""
        from fedjax_pers.simulate.compare import configs_of

        base = self.chosen(self.config)
        _use_devices(base)
        by_method = {} if self.settings_file is None else read_json(self.settings_file)
        folder = self.folder or Path("results") / f"compare-{Path(base.data).name}"
        compare_with_bars(configs_of(base, self.methods, by_method), self.seeds, folder)


@dataclass(frozen=True)
class Resume:
    """Goes on with a run or a comparison that was stopped.

    Attributes:
      folder: of the run or of the comparison.
    """

    folder: tyro.conf.Positional[Path]

    def execute(self) -> None:
        """Runs what the folder asks for."""
        from fedjax_pers.simulate import compare
        from fedjax_pers.simulate.study import validate

        if (self.folder / compare.COMPARISON).exists():
            plan = read_json(self.folder / compare.COMPARISON)
            configs = {name: Config.from_dict(each) for name, each in plan["configs"].items()}
            _use_devices(next(iter(configs.values())))
            compare_with_bars(configs, plan["seeds"], self.folder)
        elif (self.folder / "config.json").exists():
            config = Config.from_dict(read_json(self.folder / "config.json"))
            _use_devices(config)
            _run(validate(config), self.folder)
        else:
            raise FileNotFoundError(f"{self.folder}: holds neither a run nor a comparison")


def compare_with_bars(configs: Mapping[str, Config], seeds: Iterable[int], folder: Path) -> Comparison:
    """Compares under progress bars, then prints the table."""
    import rich

    from fedjax_pers.report.progress import bars
    from fedjax_pers.simulate.compare import compare

    seeds = list(seeds)
    rounds = {name: (config.warm_start + config.rounds) * len(seeds) for name, config in configs.items()}
    with bars(rounds) as report:
        comparison = compare(configs, seeds, folder, report)
    rich.print(comparison.table())
    print(f"table, figures and all runs: {comparison.folder}")
    return comparison


def _use_devices(config: Config) -> None:
    """Makes the devices of a CPU that a run asks for, which must be before JAX starts."""
    config.check()
    if config.devices is not None:
        from fedjax_pers.executors import use_cores

        use_cores(config.devices)


def _run(study: Study, folder: Path) -> None:
    import rich

    from fedjax_pers.report.progress import bars
    from fedjax_pers.simulate.compare import alone
    from fedjax_pers.simulate.study import run_study

    name, seed = study.config.method, study.config.seed
    with bars({name: study.rounds}) as report:
        result = run_study(study, folder, lambda done, rounds, score: report(name, seed, done, rounds, score))
    rich.print(alone(name, result).table())
    print(f"results: {result.folder}")
