"""AFL at four hospitals: what the worst hospital gains over FedAvg, and what the average pays.

    FEDJAX_PERS_DATA=FOLDER python experiments/aggregation/hospitals.py

Heart disease (UCI), a hospital is a client; FOLDER holds ``heart_hospitals.npz``, which is not part of the package.
Five seeds; settings are chosen on validation data by the score that each method is for. Prints a table and writes
``hospitals.json`` and a picture of the weights of the first seed.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

import fedjax_pers as fp
from fedjax_pers.report import relations

HERE = Path(__file__).parent
SEEDS, ROUNDS = range(5), 300
GRID = {
    "fedavg": [{"lr": lr, "batch_size": 1000} for lr in (0.03, 0.1, 0.3, 1.0)],
    "afl": [{"lr": lr, "ascent_lr": up} for lr, up in itertools.product((0.03, 0.1, 0.3, 1.0), (0.01, 0.03, 0.1, 0.3))],
    "agnostic_fedavg": [
        {"lr": lr, "ascent_lr": up, "batch_size": 1000} for lr, up in itertools.product((0.1, 0.3), (0.01, 0.03, 0.1))
    ],
    "qffl": [{"lr": lr, "q": q, "batch_size": 1000} for lr, q in itertools.product((0.1, 0.3, 1.0), (0.5, 1.0, 5.0))],
    "term": [{"lr": lr, "t": t, "batch_size": 1000} for lr, t in itertools.product((0.1, 0.3, 1.0), (1.0, 5.0, 20.0))],
}


def scores(data: fp.Federation, name: str, settings: dict[str, Any], split: str, seed: int) -> tuple[np.ndarray, Any]:
    """Accuracy of the global model at each hospital, and the run's history."""
    task = fp.tasks.from_model(data, "linear")
    algorithm = fp.method(name).make(task, **settings)
    _, history = fp.run(algorithm, None, data, ROUNDS, seed, evaluate_every=None, split=split)
    return history.evaluations[-1][1].personal["accuracy"], history


def main() -> None:
    """Chooses, runs, prints, writes."""
    rows: dict[str, list[list[float]]] = {name: [] for name in GRID}
    chosen: dict[str, list[dict[str, Any]]] = {name: [] for name in GRID}
    for seed in SEEDS:
        data = fp.data.heart_hospitals(seed=seed)
        for name, grid in GRID.items():
            tried = [scores(data, name, settings, "validation", seed)[0] for settings in grid]
            wanted = [np.mean(found) if name == "fedavg" else found.min() for found in tried]
            best = grid[int(np.argmax(wanted))]
            found, history = scores(data, name, best, "test", seed)
            rows[name].append(found.tolist())
            chosen[name].append(best)
            if name == "afl" and seed == 0:
                title = "AFL: weight of each hospital"
                names = data.client_ids
                relations.weights_over_rounds(history.metrics.weight, HERE / "hospitals.png", names=names, title=title)
        print(seed, {name: np.round(found[-1], 3).tolist() for name, found in rows.items()}, flush=True)
    found = {"hospitals": list(map(str, data.client_ids)), "accuracy": rows, "settings": chosen}
    (HERE / "hospitals.json").write_text(json.dumps(found, indent=2) + "\n")
    print(f"{'':16} worst hospital   mean of hospitals   {data.client_ids}")
    for name, values in rows.items():
        table = np.array(values)
        print(
            f"{name:16} {table.min(1).mean():.3f}            {table.mean():.3f}               {table.mean(0).round(3)}"
        )


if __name__ == "__main__":
    main()
