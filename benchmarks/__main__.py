"""All benchmarks, one after another: ``python -m benchmarks`` (the machine should have nothing else to do).

With ``BENCH_PEERS=1`` other simulators too, which takes about an hour more and installs each of them. At the end
``docs/benchmarks.md`` is written from what was found.
"""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAMS = (
    "rounds",
    "profile_rounds",
    "sweeps",
    "growth",
    "lanes",
    "fc13_convolution_in_scan",
    "fc14_compilations_and_memory",
    "footprint",
    "aggregators",
)
PEERS = ("peers.run",) if os.environ.get("BENCH_PEERS") == "1" else ()

if __name__ == "__main__":
    quiet = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}  # the compiler warns of every program that it finds again
    for program in (*PROGRAMS, *PEERS, "report"):
        print(f"== {program}", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{program}"], check=True, env=quiet)
