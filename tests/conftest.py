"""Tests run on the CPU unless the environment says otherwise, and keep what JAX compiled for the next run."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before anything imports JAX


def pytest_configure(config: pytest.Config) -> None:
    """Programs that took a tenth of a second or more are read back from pytest's cache: half the time of a second run.

    Set in the process and not in the environment, so that processes that a test starts, and kills, do without.
    """
    import jax

    cache = getattr(config, "cache", None)
    if cache is not None and jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache.mkdir("jax")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


MOST_MAPS = 20_000
"""Of 65,530 that Linux gives a process: each compiled program takes some, and without any left the compiler crashes."""
_run = 0


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Lets go of compiled programs before there are too many in this process."""
    global _run
    _run += 1
    maps = Path("/proc/self/maps")
    if _run % 20 == 0 and maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        import jax

        jax.clear_caches()
        gc.collect()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one file share what they compile, and so a process; those of each method are grouped already."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
