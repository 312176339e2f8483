"""Options that are ``NAME=VALUE`` pairs, and fields of a run from a file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from fedjax_pers.config import Config

Pairs = Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=VALUE ...")]
OPTIONS = {"data_options": "data-option", "model_options": "model-option", "settings": "set"}


def file_fields(args: Sequence[str]) -> dict[str, Any]:
    """The fields in the file of --config, but for options and settings, which are merged by name later."""
    for index, arg in enumerate(args):
        option, _, path = arg.partition("=")
        if option == "--config" and (path or index + 1 < len(args)):
            config = Config.from_dict(read_json(Path(path or args[index + 1])))
            config.check()
            names = (each.name for each in dataclasses.fields(Config))
            return {name: getattr(config, name) for name in names if name not in OPTIONS}
    return {}


def pairs(option: str, groups: Iterable[Iterable[str]]) -> dict[str, Any]:
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


def read_json(path: Path) -> Any:
    """What a file holds; ValueError, with its name, where it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
