"""Every method of the registry on bundled sets: six trials each on validation data, then three seeds on test data.

python experiments/families/compare.py [SET ...] [--methods METHOD ...]

Writes ``experiments/families/SET.json`` after every method; what is there already is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fedjax_pers as fp
from fedjax_pers.simulate.pools import pool_of

HERE = Path(__file__).parent
ROUNDS = 40
SETS: dict[str, dict[str, Any]] = {
    # Speakers, who differ in their features; every one has all vowels.
    "vowel_speakers": {"data": {}, "epochs": 5},
    # Clients that have few of the ten digits each.
    "digits": {"data": {"partitioner": "dirichlet(0.3)", "num_clients": 20}, "epochs": 2},
    # Groups of clients whose images are changed in one way each.
    "digits_domains": {"data": {}, "epochs": 2},
}
MODEL = {"hidden": (64, 32)}  # of mlp_norm: batch normalisation, so that there is something to keep at home
SEEDS, TUNING_SEED = (0, 1, 2), 3
FACTORS = (0.1, 0.3, 0.6, 1.0, 2.0, 4.0)  # times the method's own step sizes
FEW = (0.3, 1.0, 3.0)
# Methods whose second setting decides: three step sizes and two values of it, which are six trials again.
SECOND = {
    "ditto": ("lam", (0.1, 1.0)),
    "apfl": ("alpha", (0.25, 0.75)),
    "pfedme": ("lam", (5.0, 15.0)),
    "fedprox": ("mu", (0.01, 0.1)),
    "l2gd": ("lam", (0.1, 1.0)),
    "fedavg_ewc": ("strength", (1.0, 100.0)),
    "fedavg_l2sp": ("strength", (0.01, 0.1)),
}
# What a method is given besides. Running statistics stay at home wherever a method personalises anything.
GLOBAL = ("fedavg", "fedprox", "scaffold", "fedavgm", "fedadagrad", "fedadam", "fedyogi")
FIXED: dict[str, dict[str, Any]] = {"fedavg_ft": {"tune_epochs": 20}, "ifca": {"clusters": 4}, "drfa": {"clients": 5}}
LEFT_OUT = {"centralised": "no federated method", "fl_hc": "its distance has to be known beforehand"}
RATES = ("lr", "personal_lr", "tune_lr", "inner_lr", "own_lr", "head_lr")
"""Step sizes that are multiplied by the same factor."""


def trials_of(name: str) -> list[dict[str, float]]:
    """Six points: values of the float settings that are tried."""
    known = fp.method(name).settings
    rates = {setting: known[setting] for setting in RATES if setting in known}
    setting, values = SECOND.get(name, ("", (None,)))
    points = []
    for value, factor in itertools.product(values, FEW if setting else FACTORS):
        point = {rate: round(default * factor, 6) for rate, default in rates.items()}
        points.append(point | ({setting: value} if setting else {}))
    return points


def made(name: str, task: fp.Task, epochs: int) -> fp.Algorithm:
    """The method with its fixed settings."""
    known, settings = fp.method(name).settings, dict(FIXED.get(name, {}))
    if "statistics" in known and name not in GLOBAL:
        settings["statistics"] = "local"
    if "backbone_statistics" in known:
        settings["backbone_statistics"] = "local"
    if "epochs" in known:
        settings["epochs"] = epochs
    return fp.method(name).make(task, **settings)


def judged(algorithm: fp.Algorithm, federation: fp.Federation, rounds: int, point: dict, seed: int, split: str) -> Any:
    """Accuracy of each client's model after the last round."""
    grid = {setting: [value] for setting, value in point.items()}
    found = fp.sweep_runs(algorithm, federation, rounds, grid, [seed], split=split)
    return found.evaluations[-1][1][0][0].personal["accuracy"]


def one_method(algorithm: fp.Algorithm, name: str, federation: fp.Federation, rounds: int) -> dict[str, Any]:
    """Trials on validation data, and the best of them on test data."""
    trials = []
    for point in trials_of(name):
        accuracy = judged(algorithm, federation, rounds, point, TUNING_SEED, "validation")
        trials.append({**point, "validation": round(float(np.nanmean(accuracy)), 4)})
    best = max(trials, key=lambda trial: np.nan_to_num(trial["validation"], nan=-1))
    point = {setting: value for setting, value in best.items() if setting != "validation"}
    accuracy = np.array([judged(algorithm, federation, rounds, point, seed, "test") for seed in SEEDS])
    costs = fp.traffic(algorithm, fp.start(algorithm, federation, 0), pool_of(federation, "train"))
    return {
        "rounds": rounds,
        "trials": trials,
        "chosen": best,
        "mean": np.nanmean(accuracy, 1).round(5).tolist(),
        "worst_tenth": worst_tenth(accuracy),
        "clients": accuracy.round(4).tolist(),
        "bytes": [costs.up, costs.down],
    }


def worst_tenth(accuracy: np.ndarray) -> list[float]:
    """Mean of the lowest tenth of the clients, by seed."""
    count = -(-accuracy.shape[1] // 10)
    return np.sort(accuracy, 1)[:, :count].mean(1).round(5).tolist()


def pretrained(task: fp.Task, federation: fp.Federation, epochs: int) -> fp.Task:
    """The task from where FedAvg is after half of the rounds: adapters need a backbone."""
    state, _ = fp.run(fp.method("fedavg").make(task, epochs=epochs), None, federation, ROUNDS // 2, evaluate_every=0)
    return fp.adapters.starting_from(task, state.shared)


def compare(name: str, methods: list[str]) -> None:
    """All methods on one set."""
    plan, path = SETS[name], HERE / f"{name}.json"
    federation = fp.data.load(name, **plan["data"])
    task = fp.tasks.from_model(federation, "mlp_norm", **MODEL)
    on_backbone = pretrained(task, federation, plan["epochs"])
    found = json.loads(path.read_text()) if path.exists() else {}
    for method in methods:
        if method in found:
            continue
        begun, adapters = time.perf_counter(), fp.method(method).family == "adapters"
        algorithm = made(method, on_backbone if adapters else task, plan["epochs"])
        found[method] = one_method(algorithm, method, federation, ROUNDS // 2 if adapters else ROUNDS)
        path.write_text(json.dumps(found, indent=1) + "\n")
        took = time.perf_counter() - begun
        print(f"{name:16}{method:22}{np.mean(found[method]['mean']):.4f}  {took:.0f} s", flush=True)
        jax.clear_caches()


def main() -> None:
    """Runs what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sets", nargs="*", default=list(SETS))
    parser.add_argument("--methods", nargs="*", default=[name for name in fp.methods() if name not in LEFT_OUT])
    chosen = parser.parse_args()
    for name in chosen.sets:
        compare(name, chosen.methods)


if __name__ == "__main__":
    main()
