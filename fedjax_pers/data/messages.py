"""How this room refuses what it does not know."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_SHOWN = 12


def listed(values: Iterable[object]) -> str:
    """At most a dozen values in one line, and how many more there are."""
    values = list(values)
    more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
    return ", ".join(repr(value) for value in values[:_SHOWN]) + more


def unknown(kind: str, found: object, allowed: Iterable[object]) -> ValueError:
    """The error for a name that is none of ``allowed``, with the nearest one.

    Example:
      >>> print(unknown("split", "trian", ["train", "test"]))
      split: found 'trian', did you mean 'train'? Allowed: 'train', 'test'
    """
    allowed = list(allowed)
    names = {str(name): name for name in allowed}
    close = difflib.get_close_matches(str(found), names, n=1, cutoff=0.5)
    hint = f", did you mean {names[close[0]]!r}?" if close else "."
    return ValueError(f"{kind}: found {found!r}{hint} Allowed: {listed(allowed) or 'none'}")
