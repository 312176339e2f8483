"""What a process costs before and beside its rounds: seconds to import, and memory by stage.

    python -m benchmarks.footprint

Every figure is of a new process. Writes ``benchmarks/results/footprint.json``.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.machine import RESULTS, machine

WORKLOADS = ("W1", "W2", "W3")
REPEATS = 5
IMPORTS = """
import time
begun = time.perf_counter()
import jax, flax
others = time.perf_counter()
import fedjax_pers
print(others - begun, time.perf_counter() - others)
"""
STAGES = """
import json, sys
from pathlib import Path

def peak():
    status = Path("/proc/self/status").read_text()
    found.append(int(status.partition("VmHWM:")[2].split()[0]) / 1024)

found = []
import jax, flax, optax
peak()
import fedjax_pers as fp
fp.use_cores()
from benchmarks.workloads import WORKLOADS, algorithm_of, federation, task_of
from fedjax_pers.simulate.placement import devices_for, everywhere, placed
jax.block_until_ready(jax.jit(lambda x: x @ x)(jax.numpy.ones((64, 64))))
peak()
workload = WORKLOADS[sys.argv[1]]
data = federation(workload)
algorithm = algorithm_of(workload, task_of(workload, data))
state = fp.start(algorithm, data, 0)
devices = devices_for(algorithm)
arguments = placed(state, devices), everywhere(data.cohort(), devices), jax.random.key(0)
peak()
step = jax.jit(algorithm.step).lower(*arguments).compile()
peak()
for _ in range(3):
    jax.block_until_ready(step(*arguments))
peak()
print(json.dumps(found))
"""
NAMES = ("jax, flax and optax", "a first product", "model, state and data", "the round compiled", "rounds")


def printed(program: str, *arguments: str) -> str:
    """What a new process prints last."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    return done.stdout.splitlines()[-1]


def main() -> None:
    """Measures, prints, writes."""
    pairs = [tuple(map(float, printed(IMPORTS).split())) for _ in range(REPEATS)]
    imports = {
        name: statistics.median(times) for name, times in zip(("jax_and_flax", "more"), zip(*pairs), strict=True)
    }
    peaks = {name: dict(zip(NAMES, json.loads(printed(STAGES, name)), strict=True)) for name in WORKLOADS}
    found = {"machine": machine(), "import_seconds": imports, "peak_mb": peaks}
    (RESULTS / "footprint.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
