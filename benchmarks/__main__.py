"""All benchmarks, one after another: ``python -m benchmarks`` (the machine should have nothing else to do)."""

from __future__ import annotations

import subprocess
import sys

PROGRAMS = ("rounds", "lanes", "fc13_convolution_in_scan", "fc14_compilations_and_memory", "growth")

if __name__ == "__main__":
    for program in PROGRAMS:
        print(f"== {program}", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{program}"], check=True)
