"""Commands that show what there is: ``list``, ``data``, ``describe``."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from fedjax_pers.cli.options import Pairs, pairs
from fedjax_pers.config import Config


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
            Config(data=self.name, unseen=self.unseen, data_options=pairs("data-option", self.data_options))
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
            data_options=pairs("data-option", self.data_options),
            model_options=pairs("model-option", self.model_options),
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
        from fedjax_pers.simulate.settings import plain_settings
        from fedjax_pers.simulate.study import costs_of, validate

        found = method(self.name)
        lines = {"method": found.title, "paper": found.paper, "family": found.family, "personal": found.personal}
        lines |= {"reduction": found.reduction, "secure aggregation": "yes" if found.secure_aggregation else "no"}
        _print_table(None, ("", ""), list(lines.items()))
        _print_table("settings", ("setting", "default"), list(plain_settings(self.name).items()))
        if self.data is not None:
            config = self._config(model=self.model, method=self.name, settings=pairs("set", self.settings))
            study = validate(config)
            whole = validate(dataclasses.replace(config, method="fedavg", settings={}), study)
            if study.algorithm.layout is not None:
                rich.print(describe(study.algorithm.layout))
            costs, model = costs_of(study), costs_of(whole).up
            print(f"down: {costs.down:,} B a client and round; {costs.first_down:,} B once")
            print(f"up: {costs.up:,} B ({costs.up / model:.2%} of the model), and {costs.metadata_up} B for its size")


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
