"""What figures are of, and where they go."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, str | int]:
    """Processor, cores and versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(": ")[1] for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count() or 1,
        "python": platform.python_version(),
        **{package: version(package) for package in ("jax", "flax")},
    }
