"""The command line: ``fedjax-pers list``, ``describe``, ``data``, ``run``, ``compare``, ``resume``.

Whatever cannot be done is said before any training, with the field, what was found and what is allowed (exit status 2).
What takes long to import is imported by the command that needs it.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Union

import tyro

from fedjax_pers.config import Config

if TYPE_CHECKING:
    from fedjax_pers.simulate.compare import Comparison
    from fedjax_pers.simulate.study import Study

MISTAKE, STOPPED, INTERRUPTED = 2, 1, 130
Pairs = Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=VALUE ...")]
_OPTIONS = {"data_options": "data-option", "model_options": "model-option", "settings": "set"}
_ABOUT = "Personalised federated learning: methods side by side, over many simulated clients."


@dataclass(frozen=True)
class List:
    """Methods, models and data sets."""

    def execute(self) -> None:
        """Prints three tables."""
        from fedjax_pers import models
        from fedjax_pers.algorithms import methods

        rows = [(name, found.title, found.family, found.personal) for name, found in methods().items()]
        _print_table("methods", ("method", "title", "family", "personal"), rows)
        settings = [(name, ", ".join(f"{k}={v}" for k, v in models.settings(name).items())) for name in models.names()]
        _print_table("models", ("model", "settings"), settings)
        ListData().execute()


@dataclass(frozen=True)
class ListData:
    """The data sets that have a name."""

    def execute(self) -> None:
        """Prints a table."""
        from fedjax_pers import data

        rows = [(name, _first_line(getattr(data, name))) for name in (*data.names(), *data.local_names())]
        rows.append(("tfds:NAME", _first_line(data.tfds)))
        rows.append(("PATH", "An .npz or .sqlite file, or a folder of a known form."))
        _print_table("data sets", ("data set", "what it is"), rows)


@dataclass(frozen=True)
class DescribeData:
    """Sizes, label mix, notes and licence of a data set.

    Attributes:
      name: of the data set, or a path.
      data_options: options of the data set.
      unseen: share of the clients that never take part in training.
      out: file of a picture to write (.png).
    """

    name: tyro.conf.Positional[str]
    data_options: Annotated[Pairs, tyro.conf.arg(name="data-option")] = ()
    unseen: float = 0.0
    out: Path | None = None

    def execute(self) -> None:
        """Prints what is in the data set, and draws it."""
        import rich

        from fedjax_pers import data
        from fedjax_pers.simulate.study import federation_of

        federation = federation_of(
            Config(data=self.name, unseen=self.unseen, data_options=_pairs("data-option", self.data_options))
        )
        rich.print(data.describe(federation))
        if self.out is not None:
            data.picture(federation, self.out)
            print(f"picture: {self.out}")


@dataclass(frozen=True)
class Data:
    """What data sets there are, and what is in one."""

    action: (
        Annotated[ListData, tyro.conf.subcommand("list")] | Annotated[DescribeData, tyro.conf.subcommand("describe")]
    )

    def execute(self) -> None:
        """Does what the second word says."""
        self.action.execute()


@dataclass(frozen=True)
class Describe:
    """A method (paper, settings, what is personal), or what a mask makes personal of a model: MODEL+MASK.

    Attributes:
      name: a method's name, or a model and a mask such as "mlp+head(1)".
      data: with a data set, also the leaves of the model by role, and the bytes that are sent.
      model: the model, for a method.
      data_options: options of the data set.
      model_options: settings of the model.
      settings: settings of the method.
    """

    name: tyro.conf.Positional[str]
    data: str | None = None
    model: str = "mlp"
    data_options: Annotated[Pairs, tyro.conf.arg(name="data-option")] = ()
    model_options: Annotated[Pairs, tyro.conf.arg(name="model-option")] = ()
    settings: Annotated[Pairs, tyro.conf.arg(name="set")] = ()

    def execute(self) -> None:
        """Prints the method or the layout."""
        if "+" in self.name:
            self._mask(*self.name.split("+", 1))
        else:
            self._method()

    def _config(self, **fields: Any) -> Config:
        return Config(
            data=self.data or Config.data,
            data_options=_pairs("data-option", self.data_options),
            model_options=_pairs("model-option", self.model_options),
            **fields,
        )

    def _mask(self, model: str, mask: str) -> None:
        import rich

        from fedjax_pers.layouts import by_role, describe
        from fedjax_pers.parsing import parse
        from fedjax_pers.simulate.study import validate

        rich.print(describe(by_role(personal=parse(mask))(validate(self._config(model=model)).task)))

    def _method(self) -> None:
        import rich

        from fedjax_pers.algorithms import method
        from fedjax_pers.layouts import describe
        from fedjax_pers.simulate.study import costs_of, plain_settings, validate

        found = method(self.name)
        lines = {"method": found.title, "paper": found.paper, "family": found.family, "personal": found.personal}
        lines |= {"reduction": found.reduction, "secure aggregation": "yes" if found.secure_aggregation else "no"}
        _print_table(None, ("", ""), list(lines.items()))
        _print_table("settings", ("setting", "default"), list(plain_settings(self.name).items()))
        if self.data is not None:
            config = self._config(model=self.model, method=self.name, settings=_pairs("set", self.settings))
            study = validate(config)
            whole = validate(dataclasses.replace(config, method="fedavg", settings={}), study)
            if study.algorithm.layout is not None:
                rich.print(describe(study.algorithm.layout))
            costs, model = costs_of(study), costs_of(whole).up
            print(f"down: {costs.down:,} B a client and round; {costs.first_down:,} B once")
            print(f"up: {costs.up:,} B ({costs.up / model:.2%} of the model), and {costs.metadata_up} B for its size")


@dataclass(frozen=True)
class _Choices(Config):
    """The fields of a run, with options as pairs."""

    data_options: Annotated[Pairs, tyro.conf.arg(name="data-option")] = ()  # type: ignore[assignment]
    model_options: Annotated[Pairs, tyro.conf.arg(name="model-option")] = ()  # type: ignore[assignment]
    settings: Annotated[Pairs, tyro.conf.arg(name="set")] = ()  # type: ignore[assignment]

    def chosen(self, file: Path | None) -> Config:
        """The run as the package wants it; options and settings of the file stay where none of that name is given."""
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(Config)}
        before = Config() if file is None else Config.from_dict(_read_json(file))
        options = {name: getattr(before, name) | _pairs(option, fields[name]) for name, option in _OPTIONS.items()}
        return Config(**fields | options)


@dataclass(frozen=True)
class Run(_Choices):
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
class Compare(_Choices):
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
        by_method = {} if self.settings_file is None else _read_json(self.settings_file)
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
            plan = _read_json(self.folder / compare.COMPARISON)
            configs = {name: Config.from_dict(each) for name, each in plan["configs"].items()}
            _use_devices(next(iter(configs.values())))
            compare_with_bars(configs, plan["seeds"], self.folder)
        elif (self.folder / "config.json").exists():
            config = Config.from_dict(_read_json(self.folder / "config.json"))
            _use_devices(config)
            _run(validate(config), self.folder)
        else:
            raise FileNotFoundError(f"{self.folder}: holds neither a run nor a comparison")


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line; exit status 1 after an upload that was not finite, 2 after a mistake, 130 interrupted."""
    try:
        parse(list(sys.argv[1:] if args is None else args)).execute()
    except (ValueError, OSError) as error:
        _leave(MISTAKE, _said(error))
    except KeyboardInterrupt:
        _leave(
            INTERRUPTED,
            "interrupted; the same command goes on from the last checkpoint, as does fedjax-pers resume FOLDER",
        )
    except RuntimeError as error:
        if type(error).__name__ != "RejectedUploads":  # by name, as importing it would slow down --help
            raise
        _leave(STOPPED, f"stopped: {error}")


def parse(args: Sequence[str]) -> Any:
    """The command that the arguments ask for; exits with a message where they ask for none."""
    plain_names = (tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes)
    return tyro.cli(_commands(args), prog="fedjax-pers", args=args, description=_ABOUT, config=plain_names)


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


def _commands(args: Sequence[str]) -> Any:
    """The union of all commands; fields of a file named by --config are the defaults of run and compare."""
    fields = _file_fields(args)
    kinds = {"list": List, "describe": Describe, "data": Data, "run": Run, "compare": Compare, "resume": Resume}
    annotated = [
        Annotated[kind, tyro.conf.subcommand(name, default=kind(**fields))]
        if fields and issubclass(kind, _Choices)
        else Annotated[kind, tyro.conf.subcommand(name)]
        for name, kind in kinds.items()
    ]
    return Union[tuple(annotated)]  # noqa: UP007 (made of a list)


def _file_fields(args: Sequence[str]) -> dict[str, Any]:
    """The fields in the file of --config, but for options and settings, which are merged by name later."""
    for index, arg in enumerate(args):
        option, _, path = arg.partition("=")
        if option == "--config" and (path or index + 1 < len(args)):
            config = Config.from_dict(_read_json(Path(path or args[index + 1])))
            config.check()
            names = (each.name for each in dataclasses.fields(Config))
            return {name: getattr(config, name) for name in names if name not in _OPTIONS}
    return {}


def _pairs(option: str, groups: Iterable[Iterable[str]]) -> dict[str, Any]:
    """``NAME=VALUE`` pairs; values are JSON where they read as such (``0.1``, ``null``, ``[64]``), else text."""
    found: dict[str, Any] = {}
    for pair in (pair for group in groups for pair in group):
        name, equals, text = pair.partition("=")
        if not (name and equals):
            raise ValueError(f"--{option}: found {pair!r}; expected NAME=VALUE")
        if name in found:
            raise ValueError(f"--{option}: found {name!r} more than once")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None


def _said(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _leave(status: int, message: str) -> NoReturn:
    print(f"fedjax-pers: {message}", file=sys.stderr)
    raise SystemExit(status)


def _print_table(title: str | None, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    import rich
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE, show_header=any(headings))
    for place, heading in enumerate(headings):
        table.add_column(heading, overflow="fold", no_wrap=place == 0)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    rich.print(table)


def _first_line(function: Any) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0].replace("``", "")
