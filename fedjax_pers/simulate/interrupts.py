"""Ctrl-C while rounds run.

A ``KeyboardInterrupt`` that is raised while a compiled library calls back into Python can be lost there, so that the
run goes on, or can end the process with another status. So the first Ctrl-C waits for the end of a block of rounds.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def between_blocks() -> Iterator[Callable[[], None]]:
    """Gives ``check()``, which raises ``KeyboardInterrupt`` if Ctrl-C was pressed; a second one acts at once.

    Outside the main thread, and where interrupts are ignored or handled by somebody else, nothing is changed.
    """
    pressed = False

    def keep(number: int, frame: Any) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("stops when this block of rounds is done; press Ctrl-C again to stop at once", file=sys.stderr)

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield check
        return
    signal.signal(signal.SIGINT, keep)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
