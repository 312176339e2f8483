"""Next-character prediction by role: which layers of a transformer should belong to the role?

python experiments/text/roles.py [--tune]

Writes ``experiments/text/roles.json`` after every run; what is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import optax

import fedjax_pers as fp

HERE = Path(__file__).parent
ROLES, COHORT, TUNING, ROUNDS, SEEDS = 20, 8, 12, 30, (0, 1, 2)
MODEL = {"width": 32, "heads": 2, "blocks": 2, "hidden": 64}
LOCAL = {"batch_size": 10, "epochs": 1, "optimizer": optax.adam}
# name, method, settings; step sizes are tuned on validation data, the same three for each.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "local only": ("local_only", {}),
    "FedAvg": ("fedavg", {}),
    "FedAvg + fine-tuning": ("fedavg_ft", {"tune_epochs": 3}),
    "later block personal": ("fedper", {"personal": "**/block2/**"}),
    "later attention personal": ("fedper", {"personal": "**/block2/attention/**"}),
    "later feed-forward personal": ("fedper", {"personal": "**/block2/feed_forward/**"}),
    "embedding and first block personal": (
        "fedper",
        {"personal": ["**/embedding/**", "**/position/**", "**/block1/**"]},
    ),
}
RATES = (0.003, 0.01, 0.03)


def federation_of_roles() -> fp.Federation:
    """The roles with the most text."""
    whole = fp.data.load("shakespeare_roles")
    largest = np.argsort(-whole.sizes("train"), kind="stable")[:ROLES]
    return whole.select([whole.client_ids[place] for place in sorted(largest)])


def accuracy(
    name: str, federation: fp.Federation, task: fp.Task, rate: float, seed: int, split: str, rounds: int
) -> Any:
    """Share of the next characters that are right, by role."""
    method, settings = WAYS[name]
    rates = {"lr": rate} | ({"tune_lr": rate} if method == "fedavg_ft" else {})
    algorithm = fp.method(method).make(task, **rates, **LOCAL, **settings)
    cohort = None if method == "local_only" else COHORT
    rounds = rounds * COHORT // ROLES if method == "local_only" else rounds  # as many passes over a role's text
    _, history = fp.run(
        algorithm, None, federation, rounds, seed, cohort_size=cohort, evaluate_every=rounds, split=split
    )
    return history.evaluations[-1][1].personal["accuracy"]


def main() -> None:
    """Tunes, runs and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true", help="choose step sizes again")
    federation = federation_of_roles()
    task = fp.tasks.from_model(federation, "char_transformer", **MODEL)
    path = HERE / "roles.json"
    found = json.loads(path.read_text()) if path.exists() else {"roles": list(map(str, federation.client_ids))}
    for name in WAYS:
        if parser.parse_args().tune or "rate" not in found.get(name, {}):
            scores = {rate: accuracy(name, federation, task, rate, 3, "validation", TUNING).mean() for rate in RATES}
            found[name] = {"validation": {str(r): round(float(s), 4) for r, s in scores.items()}}
            found[name]["rate"] = max(scores, key=lambda rate: np.nan_to_num(scores[rate], nan=-1))
            print(name, found[name], flush=True)
            path.write_text(json.dumps(found, indent=1) + "\n")
    for name, seed in ((name, seed) for seed in SEEDS for name in WAYS):
        if str(seed) not in found[name].setdefault("test", {}):
            begun = time.perf_counter()
            scores = accuracy(name, federation, task, found[name]["rate"], seed, "test", ROUNDS)
            found[name]["test"][str(seed)] = np.round(scores, 4).tolist()
            print(f"{name:36}{seed} {scores.mean():.4f} {time.perf_counter() - begun:.0f} s", flush=True)
            path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
