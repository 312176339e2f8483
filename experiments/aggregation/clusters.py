"""IFCA on digits turned by 0, 90, 180 and 270 degrees: does it find the four groups, and is it worth it?

    python experiments/aggregation/clusters.py

IFCA starts from the best of five random starts by training loss after ten rounds (``fp.best_start``).
scikit-learn's 1,797 digits, dealt evenly to 20 clients, client i turned by 90 (i mod 4) degrees. Prints a table over
five seeds, writes ``clusters.json`` and a picture of how choices settle from one start.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from sklearn.metrics import adjusted_rand_score

import fedjax_pers as fp
from fedjax_pers.report import relations

HERE = Path(__file__).parent
SEEDS, ROUNDS, GROUPS, RESTARTS = range(5), 100, 4, 5
LOCAL = {"lr": 0.1, "batch_size": 10, "epochs": 2}
METHODS = {"local_only": "local_only", "fedavg": "fedavg", "ifca, one start": "ifca", "ifca": "ifca"}


def federation(seed: int) -> fp.Federation:
    """Twenty clients with about 67 digits each, in four rotations."""
    digits = fp.data.digits(partitioner=fp.data.iid(), num_clients=20, seed=seed)
    return fp.data.rotate(digits, [0, 90, 180, 270])


def draw() -> None:
    """How choices settle in the first rounds from one random start."""
    data = federation(0)
    algorithm = fp.method("ifca").make(fp.tasks.from_model(data, "mlp", hidden=(64,)), **LOCAL, clusters=GROUPS)
    _, history = fp.run(algorithm, None, data, 30, 0, evaluate_every=0)
    title = "IFCA: cluster of each client, from one random start"
    relations.members_over_rounds(history.metrics.said["cluster"], HERE / "clusters.png", title=title)


def main() -> None:
    """Runs, prints, writes."""
    accuracies: dict[str, list[float]] = {name: [] for name in METHODS}
    indexes: dict[str, list[float]] = {"ifca, one start": [], "ifca": []}
    for seed in SEEDS:
        data = federation(seed)
        task = fp.tasks.from_model(data, "mlp", hidden=(64,))
        for name, method in METHODS.items():
            settings = {"clusters": GROUPS} if method == "ifca" else {}
            algorithm = fp.method(method).make(task, **LOCAL, **settings)
            start = fp.best_start(algorithm, data, seed, restarts=RESTARTS) if name == "ifca" else None
            state, history = fp.run(algorithm, start, data, ROUNDS, seed)
            accuracies[name].append(float(np.nanmean(history.evaluations[-1][1].personal["accuracy"])))
            if name in indexes:
                indexes[name].append(float(adjusted_rand_score(np.arange(20) % GROUPS, state.aux["members"])))
        print(seed, {name: round(found[-1], 3) for name, found in accuracies.items()}, flush=True)
    found = {"accuracy": accuracies, "adjusted_rand_index": indexes}
    (HERE / "clusters.json").write_text(json.dumps(found, indent=2) + "\n")
    for name, values in accuracies.items():
        print(f"{name:16} {np.mean(values):.3f} ({min(values):.3f} .. {max(values):.3f})")
    draw()
    for name, values in indexes.items():
        print(f"{name:16} adjusted Rand index {np.round(values, 2).tolist()}")


if __name__ == "__main__":
    main()
