"""Many runs in one program against the same runs one after another: W7, ``python -m benchmarks.sweeps``.

W0 for 4 learning rates and 8 seeds, 20 rounds each: swept; by 32 calls of ``fp.run``, which share a compiled program;
and by 32 calls in which each run's learning rate and seed are constants of a program of its own, as in a script that is
started again and again. Writes ``benchmarks/results/sweeps.json``.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import fedjax_pers as fp
from benchmarks.machine import RESULTS, machine
from benchmarks.workloads import WORKLOADS, algorithm_of, federation, task_of

RATES, SEEDS, ROUNDS, REPEATS = (0.03, 0.1, 0.3, 1.0), range(8), 20, 3


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call, and what it returned."""
    begun = time.perf_counter()
    found = jax.block_until_ready(call())
    return time.perf_counter() - begun, found


def main() -> None:
    """Measures, prints, writes."""
    fp.use_cores()
    workload = WORKLOADS["W0"]
    data = federation(workload)
    task = task_of(workload, data)
    algorithm = algorithm_of(workload, task)
    grid = list(itertools.product(RATES, SEEDS))

    def swept() -> Any:
        return fp.sweep_runs(algorithm, data, ROUNDS, {"lr": RATES}, SEEDS, evaluate_every=0).metrics.loss

    def one(rate: float, seed: int) -> Any:
        chosen = fp.method("fedavg").make(task, lr=rate, batch_size=workload.batch)
        return fp.run(chosen, None, data, ROUNDS, seed, evaluate_every=0)[1].metrics.loss

    def one_after_another() -> Any:
        return np.stack([one(*point) for point in grid])

    def alone(rate: float, seed: int) -> Any:
        own = fp.compose(task, client=fp.train(rate, batch_size=workload.batch))
        return fp.run(own, None, data, ROUNDS, seed, evaluate_every=0)[1].metrics.loss

    first = {"swept": timed(swept)[0], "one after another": timed(one_after_another)[0]}
    times: dict[str, list[float]] = {"swept": [], "one after another": []}
    for _ in range(REPEATS):
        seconds, losses = timed(swept)
        times["swept"].append(seconds)
        seconds, expected = timed(one_after_another)
        times["one after another"].append(seconds)
    np.testing.assert_allclose(losses.reshape(expected.shape), expected, 1e-2)  # ReLUs flip on the way
    some = grid[:: len(grid) // 4]
    apart = statistics.median(timed(lambda point=point: alone(*point))[0] for point in some)
    rows = {
        name: {"seconds": statistics.median(found), "lowest": min(found), "highest": max(found), "first": first[name]}
        for name, found in times.items()
    }
    rows["a program each"] = {"seconds": apart * len(grid), "measured_runs": len(some)}
    print(json.dumps(rows, indent=2))
    (RESULTS / "sweeps.json").write_text(
        json.dumps({"machine": machine(), "runs": len(grid), "ways": rows}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
