"""One JAX device for each core of the CPU, so that rounds use all of them."""

from __future__ import annotations

import os

import jax

from fedjax_pers.checks import positive_int


def use_cores(count: int | None = None) -> int:
    """Splits the CPU into so many JAX devices, over which rounds then spread their clients. Before JAX's first use.

    XLA runs a loop on one core. With as many devices as cores each core has a loop of its own, and clients are dealt
    onto them by size. On a machine whose default device is an accelerator nothing changes.

    Example:
      >>> import fedjax_pers as fp
      >>> fp.use_cores(2)  # doctest: +SKIP
      2

    Args:
      count: devices; as many as this process has cores by default.

    Returns:
      The number of devices.

    Raises:
      RuntimeError: JAX has already started, with another number.
    """
    count = len(os.sched_getaffinity(0)) if count is None else count
    positive_int("count", count)
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        if len(jax.local_devices(backend="cpu")) == count:
            return count
        raise RuntimeError(
            f"use_cores({count}): JAX has already started; call it first in the program (in a notebook: restart, and "
            "call it in the first cell)"
        ) from error
    return count
