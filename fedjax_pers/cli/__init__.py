"""The command line: ``fedjax-pers list``, ``describe``, ``data``, ``run``, ``compare``, ``resume``.

Whatever cannot be done is said before any training, with the field, what was found and what is allowed (exit status 2).
What takes long to import is imported by the command that needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn, Union

import tyro

from fedjax_pers.cli.looking import Data, Describe, List
from fedjax_pers.cli.options import file_fields
from fedjax_pers.cli.running import Choices, Compare, Resume, Run

MISTAKE, STOPPED, INTERRUPTED = 2, 1, 130
_ABOUT = "Personalised federated learning: methods side by side, over many simulated clients."


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


def _commands(args: Sequence[str]) -> Any:
    """The union of all commands; fields of a file named by --config are the defaults of run and compare."""
    fields = file_fields(args)
    kinds = {"list": List, "describe": Describe, "data": Data, "run": Run, "compare": Compare, "resume": Resume}
    annotated = [
        Annotated[kind, tyro.conf.subcommand(name, default=kind(**fields))]
        if fields and issubclass(kind, Choices)
        else Annotated[kind, tyro.conf.subcommand(name)]
        for name, kind in kinds.items()
    ]
    return Union[tuple(annotated)]  # noqa: UP007 (made of a list)


def _said(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _leave(status: int, message: str) -> NoReturn:
    print(f"fedjax-pers: {message}", file=sys.stderr)
    raise SystemExit(status)
