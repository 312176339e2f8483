"""How many programs XLA has compiled in this process."""

from __future__ import annotations

import functools

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class _Counter:
    total = 0


@functools.cache
def _listen() -> None:
    def count(event: str, duration: float, **_: object) -> None:
        if event == _EVENT:
            _Counter.total += 1

    jax.monitoring.register_event_duration_secs_listener(count)


def compilations() -> int:
    """Programs compiled since the first call of this function; the difference of two calls counts what lies between.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> before = compilations()
      >>> _ = jax.jit(lambda x: x * 3.125)(jnp.ones(17))
      >>> compilations() > before
      True
    """
    _listen()
    return _Counter.total
