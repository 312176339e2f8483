"""What fine-tuning gains and what it forgets, with and without a penalty: python experiments/forgetting/compare.py.

FedAvg for 80 rounds on the speakers, then 20 epochs of fine-tuning, three seeds. Prints the table of
``docs/fine_tuning.md`` and writes ``experiments/forgetting/compare.json``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

import fedjax_pers as fp

ROUNDS, SEEDS = 80, (0, 1, 2)
WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fedavg_ft", {}),
    ("fedavg_ft_early", {}),
    ("fedavg_l2sp", {"strength": 0.1}),
    ("fedavg_l2sp", {"strength": 1.0}),
    ("fedavg_ewc", {"strength": 1.0}),
    ("fedavg_ewc", {"strength": 10.0}),
    ("fedavg_kd", {"strength": 0.3}),
    ("fedavg_kd", {"strength": 1.0}),
)


def main() -> None:
    """Measures, prints, writes."""
    federation = fp.data.load("vowel_speakers")
    task = fp.tasks.from_model(federation, "mlp")
    fedavg = fp.method("fedavg").make(task)
    runs = [
        (fp.run(fedavg, None, federation, ROUNDS, seed, evaluate_every=0)[0], federation, "test", seed)
        for seed in SEEDS
    ]
    print("| method | strength | local gain | retention |\n|---|---:|---:|---:|")
    rows = []
    for name, settings in WAYS:
        algorithm = fp.method(name).make(task, tune_epochs=20, **settings)
        found = [fp.retention(algorithm, *run) for run in runs]
        changes = {
            part: [float(getattr(each, part)["accuracy"].mean()) for each in found] for part in ("gain", "retained")
        }
        rows.append({"method": name, **settings, **changes})
        cells = [f"{100 * np.mean(x):.1f} ± {100 * np.std(x, ddof=1):.1f}" for x in changes.values()]
        print(f"| `{name}` | {settings.get('strength', ''):g} | " if settings else f"| `{name}` | | ", end="")
        print(" | ".join(cells) + " |", flush=True)
    Path(__file__).with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
