"""Where the time of a round goes: ``python -m benchmarks.profile_rounds [W1 W2 ...]``, on one core.

On one core each operation ends before the next begins, so that the profiler's times add up. Operations are told apart
by what they are in the compiled program. Writes ``benchmarks/results/profile.json``.
"""

from __future__ import annotations

import collections
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

import fedjax_pers as fp
from benchmarks.machine import RESULTS, machine
from benchmarks.operations import operations
from benchmarks.rounds import seconds
from benchmarks.workloads import WORKLOADS, algorithm_of, federation, task_of

CHOSEN = ("W1", "W2", "W3", "W4", "W5")
KINDS = {
    "convolutions": r"convolution",
    "products of matrices": r"dot",
    "batches": r"gather|dynamic-slice",
    "copies and transposes": r"copy|transpose",
    "element by element": r"fusion|reduce|broadcast|select|add|multiply|compare|is-finite",
}
BETWEEN = "between operations"


def kinds_of(program: str) -> dict[str, str]:
    """What each instruction of a compiled program is. The name of a fusion lists what was fused."""
    found = {}
    for name, opcode in re.findall(r"%([\w.\-]+) = \S+ ([\w\-]+)\(", program):
        what = name if opcode == "fusion" else opcode
        found[name] = next((kind for kind, pattern in KINDS.items() if re.search(pattern, what)), None)
    return found


def profiled(step: Any, arguments: tuple[Any, ...]) -> tuple[dict[str, float], float]:
    """Seconds by kind, and of the whole round, in one profiled call."""
    kinds = kinds_of(step.lower(*arguments).compile().as_text())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(step(*arguments))
        file = next(Path(folder).rglob("*.xplane.pb"))
        planes = jax.profiler.ProfileData.from_file(str(file)).planes
        events = [event for plane in planes for line in plane.lines for event in line.events]
    times: dict[str, float] = collections.defaultdict(float)
    for event in events:
        if kind := kinds.get(event.name):
            times[kind] += event.duration_ns / 1e9
    whole = max(event.duration_ns for event in events if event.name.startswith("ThunkExecutor")) / 1e9
    return times | {BETWEEN: whole - sum(times.values())}, whole


def measure(name: str) -> dict[str, Any]:
    """Shares of a round by kind, and how fast its products are."""
    workload = WORKLOADS[name]
    data = federation(workload)
    task = task_of(workload, data)
    algorithm = algorithm_of(workload, task)
    step = jax.jit(algorithm.step)
    arguments = fp.start(algorithm, data, 0), data.cohort(), jax.random.key(0)
    seconds(lambda: step(*arguments))
    alone = min(seconds(lambda: step(*arguments)) for _ in range(5))
    times, whole = min((profiled(step, arguments) for _ in range(3)), key=lambda found: found[1])
    work = operations(task, workload, algorithm)
    heavy = sum(times.get(kind, 0) for kind in ("convolutions", "products of matrices"))
    return {
        "seconds": alone,
        "profiled_seconds": whole,
        "shares": {kind: times.get(kind, 0) / whole for kind in (*KINDS, BETWEEN)},
        "gflops": work / alone / 1e9,
        "gflops_of_products": work / heavy / 1e9,
    }


def main() -> None:
    """Measures, prints, writes."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before JAX makes its threads
    found = {"machine": machine(), "workloads": {}}
    for name in sys.argv[1:] or CHOSEN:
        row = found["workloads"][name] = measure(name)
        shares = ", ".join(f"{kind} {share:.0%}" for kind, share in row["shares"].items())
        print(f"{name}: {row['seconds'] * 1e3:.0f} ms on one core: {shares}", flush=True)
        (RESULTS / "profile.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
