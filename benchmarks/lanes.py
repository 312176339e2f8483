"""How many clients to vectorise together on each device: seconds a round, from which the default executor is chosen.

    python -m benchmarks.lanes

Prints a table and writes ``benchmarks/results/lanes.json``. Configurations are interleaved; medians and ratios count.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

import jax
import numpy as np

import fedjax_pers as fp
from benchmarks.machine import RESULTS, machine
from benchmarks.rounds import seconds
from benchmarks.workloads import WORKLOADS, Workload, algorithm_of, federation, task_of
from fedjax_pers.simulate.placement import everywhere, placed
from fedjax_pers.trees import num_bytes

REPEATS = 7
SMALL_CNN = Workload(np.full(10, 40), (28, 28, 1), 10, "cnn", {"channels": (16, 32), "hidden": 32}, 20)
MODELS = {
    "W0, tiny MLP": WORKLOADS["W0"],
    "W2, MLP": WORKLOADS["W2"],
    "small CNN": SMALL_CNN,
    "W1, CNN": WORKLOADS["W1"],
    "W4, ResNet-8": WORKLOADS["W4"],
    "W5, transformer with LoRA": WORKLOADS["W5"],
}


def measure(workload: Workload) -> dict[str, Any]:
    """Median seconds a round by number of lanes."""
    data, devices = federation(workload), jax.local_device_count()
    algorithm = algorithm_of(workload, task_of(workload, data))
    first = fp.start(algorithm, data, 0)
    state, cohort, key = placed(first, devices), everywhere(data.cohort(), devices), jax.random.key(0)
    share = len(workload.sizes) // devices
    calls, times = {}, {}
    for lanes in sorted({1, 2, 4, 8, 32, share} & set(range(1, share + 1))):
        step = jax.jit(fp.with_executor(algorithm, fp.Executor(lanes, devices=devices)).step)
        calls[lanes] = lambda step=step: step(state, cohort, key)
        seconds(calls[lanes])
    for _ in range(REPEATS):
        for lanes, call in calls.items():
            times.setdefault(lanes, []).append(seconds(call))
    found = {str(lanes): statistics.median(each) for lanes, each in times.items()}
    return {"model_bytes": num_bytes(first.shared), "clients": len(workload.sizes), "seconds": found}


def main() -> None:
    """Measures, prints, writes."""
    fp.use_cores()
    found = {"machine": machine(), "workloads": {}}
    for name, workload in MODELS.items():
        row = found["workloads"][name] = measure(workload)
        best = min(row["seconds"].values())
        ratios = ", ".join(f"{lanes}: {s * 1e3:.1f} ms ({s / best:.2f}x)" for lanes, s in row["seconds"].items())
        print(f"{name} ({row['model_bytes']:,} B): {ratios}", flush=True)
        (RESULTS / "lanes.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
