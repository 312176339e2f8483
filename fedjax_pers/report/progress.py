"""Progress bars: rounds done, and the accuracy so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Report = Callable[[str, int, int, int, float | None], None]
"""``report(method, seed, rounds done, rounds, accuracy or None)``."""


@contextmanager
def bars(rounds: Mapping[str, int]) -> Iterator[Report]:
    """A bar for each method, as long as its rounds over all seeds; yields what :func:`compare` calls.

    Args:
      rounds: total rounds by method, all seeds together.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns) as progress:
        tasks = {name: progress.add_task(name, total=total, start=False, state="") for name, total in rounds.items()}
        finished: dict[str, dict[int, int]] = {name: {} for name in rounds}

        def report(name: str, seed: int, done: int, total: int, accuracy: float | None) -> None:
            progress.start_task(tasks[name])
            finished[name][seed] = done
            state = f"seed {seed}: " + ("running" if accuracy is None else f"accuracy {100 * accuracy:.1f} %")
            progress.update(tasks[name], completed=sum(finished[name].values()), state=state)

        yield report
