"""How many clients to vectorise together: seconds a round by lanes, from which the default executor is chosen.

    python -m benchmarks.lanes

Prints a table and writes ``benchmarks/results/lanes.json``. Configurations are interleaved; medians and ratios count.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path

import jax
import numpy as np

import fedjax_pers as fp
from fedjax_pers.trees import num_bytes

RESULTS = Path(__file__).parent / "results" / "lanes.json"
REPEATS = 7
WORKLOADS = {
    # clients, examples each, shape, classes, model, settings of the model, batch
    "W0 tiny": (256, 20, (64,), 10, "mlp", {"hidden": (32,)}, 10),
    "W2 mlp": (64, 60, (784,), 10, "mlp", {"hidden": (200, 200)}, 10),
    "small cnn": (10, 40, (28, 28, 1), 10, "cnn", {"channels": (16, 32), "hidden": 32}, 20),
    "W1 cnn": (10, 100, (28, 28, 1), 62, "cnn", {}, 20),
}


def federation(clients: int, examples: int, shape: tuple[int, ...], classes: int) -> fp.Federation:
    """Clients of equal size with random examples."""
    rng = np.random.default_rng(0)
    made = {}
    for client in range(clients):
        x = rng.normal(size=(examples, *shape)).astype(np.float32)
        made[client] = {"train": {"x": x, "y": rng.integers(0, classes, examples)}}
    return fp.data.from_clients(made, name="random", num_classes=classes)


def measure(name: str) -> dict[str, float]:
    """Median seconds a round by number of lanes."""
    clients, examples, shape, classes, model, settings, batch = WORKLOADS[name]
    data = federation(clients, examples, shape, classes)
    task = fp.tasks.from_model(data, model, **settings)
    algorithm = fp.method("fedavg").make(task, batch_size=batch)
    state, cohort = fp.start(algorithm, data, 0), data.cohort()
    steps, seconds = {}, {}
    for lanes in sorted({1, 2, 4, 8, 32, clients} & set(range(1, clients + 1))):
        steps[lanes] = jax.jit(fp.with_executor(algorithm, fp.Executor(lanes)).step)
        jax.block_until_ready(steps[lanes](state, cohort, jax.random.key(0)))
    for _ in range(REPEATS):
        for lanes, step in steps.items():
            begun = time.perf_counter()
            jax.block_until_ready(step(state, cohort, jax.random.key(0)))
            seconds.setdefault(lanes, []).append(time.perf_counter() - begun)
    found = {str(lanes): statistics.median(times) for lanes, times in seconds.items()}
    return {"model_bytes": num_bytes(state.shared), "seconds": found}


def main() -> None:
    """Measures, prints, writes."""
    found = {"jax": jax.__version__, "device": jax.devices()[0].device_kind, "cores": os.cpu_count()}
    found["workloads"] = {name: measure(name) for name in WORKLOADS}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")
    for name, row in found["workloads"].items():
        best = min(row["seconds"].values())
        ratios = ", ".join(f"{lanes}: {s * 1e3:.1f} ms ({s / best:.2f}x)" for lanes, s in row["seconds"].items())
        print(f"{name} ({row['model_bytes']:,} B): {ratios}")


if __name__ == "__main__":
    main()
