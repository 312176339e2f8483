"""FC-14: compilations with clients of many sizes and with many learning rates, and memory over a long run.

    python -m benchmarks.fc14_compilations_and_memory

Prints a table and writes ``benchmarks/results/fc14.json``.
"""

from __future__ import annotations

import json
import resource
from pathlib import Path

import jax
import numpy as np

import fedjax_pers as fp
from fedjax_pers.simulate.compilations import compilations

RESULTS = Path(__file__).parent / "results" / "fc14.json"


def federation(sizes: np.ndarray, features: int) -> fp.Federation:
    """Clients of these sizes with random examples."""
    rng = np.random.default_rng(0)
    clients = {}
    for client, size in enumerate(sizes):
        x, y = rng.normal(size=(size, features)).astype(np.float32), rng.integers(0, 2, size)
        clients[client] = {"train": {"x": x, "y": y}, "test": {"x": x[:1], "y": y[:1]}}
    return fp.data.from_clients(clients, name="random", num_classes=2)


def resident_megabytes() -> float:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def uneven() -> dict[str, int]:
    """Compilations of three rounds over 60 clients of 5 to 400 examples, and of 19 more learning rates."""
    data = federation(np.random.default_rng(1).integers(5, 401, 60), 20)
    task = fp.tasks.from_model(data, "mlp")
    fedper = fp.method("fedper").make
    compilations()
    rounds, state = [], fp.start(fedper(task), data, 0)
    for done in range(3):
        before = compilations()
        state, _ = fp.run(fedper(task), state, data, done + 1, 0, cohort_size=20, evaluate_every=0)
        rounds.append(compilations() - before)
    before = compilations()
    for lr in np.geomspace(0.001, 0.5, 19):
        fp.run(fedper(task, lr=float(lr)), None, data, 1, 0, cohort_size=20, evaluate_every=0)
    return {
        "round_1": rounds[0],
        "round_2": rounds[1],
        "round_3": rounds[2],
        "19_more_learning_rates": compilations() - before,
    }


def long() -> dict[str, float]:
    """Megabytes gained between rounds 10 and 300, 50 of 2,000 clients a round, 5,000 personal floats each."""
    data = federation(np.full(2000, 4), 2500)
    task = fp.tasks.from_model(data, "linear")
    memory = []
    fp.run(
        fp.method("local_only").make(task, batch_size=4),
        None,
        data,
        300,
        0,
        cohort_size=50,
        evaluate_every=10,
        split="test",
        on_block=lambda block: memory.append(resident_megabytes()),
    )
    return {
        "round_10": memory[0],
        "round_300": memory[-1],
        "gained": memory[-1] - memory[0],
        "gained_after_round_100": memory[-1] - memory[9],
    }


def main() -> None:
    """Measures, prints, writes."""
    memory = long()  # first, while nothing else has been in this process
    found = {"jax": jax.__version__, "compilations": uneven(), "resident_megabytes": memory}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
