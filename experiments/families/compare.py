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
SETS: dict[str, dict[str, Any]] = {
    # Speakers, who differ in their features; classes are balanced.
    "vowel_speakers": {"data": {}, "model": {"hidden": (64, 32)}, "rounds": 40, "local": {"epochs": 5}},
    # Clients that have few of the ten digits each.
    "digits": {
        "data": {"partitioner": "dirichlet(0.3)", "num_clients": 20},
        "model": {"hidden": (64, 32)},
        "rounds": 40,
        "local": {"epochs": 2},
    },
    # Groups of clients whose images are changed in one way each.
    "digits_domains": {"data": {}, "model": {"hidden": (64, 32)}, "rounds": 40, "local": {"epochs": 2}},
}
TUNING, SEEDS, RATES = (0,), (0, 1, 2), (0.03, 0.1, 0.3)
LOCAL_STATISTICS = {"statistics": ("average", "local")}
# Six trials a method: three step sizes, and two values of one other setting.
SECOND: dict[str, dict[str, tuple[Any, ...]]] = json.loads((HERE / "second_settings.json").read_text())
DEFAULT = {"optimizer": ("sgd", "momentum")}
# Methods that need more than a name: what a set's model cannot have by default.
LEFT_OUT = {"centralised": "is no federated method", "fl_hc": "has to know its rounds"}


def rates_of(name: str) -> list[str]:
    """The step sizes of a method that are set like its first."""
    return [setting for setting in fp.method(name).settings if setting == "lr" or setting.endswith("_lr")]


def second_of(name: str) -> tuple[str, tuple[Any, ...]]:
    """The setting that is tried besides the step size, and two values of it."""
    settings = fp.method(name).settings
    for found in (SECOND.get(name), LOCAL_STATISTICS, DEFAULT):
        if found and (setting := next(iter(found))) in settings:
            return setting, tuple(found[setting])
    return "lr", ()


def made(name: str, task: fp.Task, local: dict[str, Any], setting: str, value: Any) -> fp.Algorithm:
    """The method with one more setting, selectors and optimisers as text."""
    from fedjax_pers.simulate.study import method_settings

    known = fp.method(name).settings
    settings = {key: x for key, x in local.items() if key in known}
    if setting != "lr":
        settings[setting] = value
    return fp.method(name).make(task, **method_settings(name, settings))


def scores(algorithm: fp.Algorithm, federation: fp.Federation, rounds: int, floats: dict[str, float], **options: Any):
    """Tables of the last evaluation, one a seed."""
    found = fp.sweep_runs(algorithm, federation, rounds, {n: [x] for n, x in floats.items()}, **options)
    return found.evaluations[-1][1][0]


def one_method(name: str, task: fp.Task, federation: fp.Federation, rounds: int, local: dict[str, Any]) -> dict:
    """Trials on validation data, and the best of them on test data."""
    setting, values = second_of(name)
    trials = []
    for value, rate in itertools.product(values or (None,), RATES):
        algorithm = made(name, task, local, setting, value)
        floats = dict.fromkeys(rates_of(name), rate)
        table = scores(algorithm, federation, rounds, floats, seeds=TUNING, split="validation")[0]
        trials.append({"rate": rate, setting: value, "score": float(np.nanmean(table.personal["accuracy"]))})
    best = max(trials, key=lambda trial: np.nan_to_num(trial["score"], nan=-1))
    algorithm = made(name, task, local, setting, best[setting])
    floats = dict.fromkeys(rates_of(name), best["rate"])
    tables = scores(algorithm, federation, rounds, floats, seeds=SEEDS)
    costs = fp.traffic(algorithm, fp.start(algorithm, federation, 0), pool_of(federation, "train"))
    accuracy = np.array([table.personal["accuracy"] for table in tables])
    tenth = max(1, -(-accuracy.shape[1] // 10))
    return {
        "trials": trials,
        "chosen": best,
        "mean": [float(x) for x in np.nanmean(accuracy, 1)],
        "worst_tenth": [float(np.sort(row)[:tenth].mean()) for row in accuracy],
        "clients": accuracy.round(4).tolist(),
        "bytes_up": costs.up,
        "bytes_down": costs.down,
    }


def main() -> None:
    """Runs what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sets", nargs="*", default=list(SETS))
    parser.add_argument("--methods", nargs="*", default=[name for name in fp.methods() if name not in LEFT_OUT])
    chosen = parser.parse_args()
    for name in chosen.sets:
        compare(name, chosen.methods)


def compare(name: str, methods: list[str]) -> None:
    """All methods on one set."""
    plan, path = SETS[name], HERE / f"{name}.json"
    federation = fp.data.load(name, **plan["data"])
    task = fp.tasks.from_model(federation, "mlp_norm", **plan["model"])
    found = json.loads(path.read_text()) if path.exists() else {}
    for method in methods:
        if method in found:
            continue
        begun = time.perf_counter()
        adapters = fp.method(method).family == "adapters"
        rounds = plan["rounds"] // 2 if adapters else plan["rounds"]
        start = pretrained(task, federation, plan) if adapters else task
        found[method] = one_method(method, start, federation, rounds, plan["local"])
        if adapters:
            found[method]["rounds"] = rounds
        path.write_text(json.dumps(found, indent=1) + "\n")
        took = time.perf_counter() - begun
        print(f"{name:16}{method:22}{np.mean(found[method]['mean']):.4f}  {took:.0f} s", flush=True)
        jax.clear_caches()


def pretrained(task: fp.Task, federation: fp.Federation, plan: dict[str, Any]) -> fp.Task:
    """The task from where FedAvg is after half of the rounds: adapters need a backbone."""
    fedavg = fp.method("fedavg").make(task, lr=0.1, **plan["local"])
    state, _ = fp.run(fedavg, None, federation, plan["rounds"] // 2, evaluate_every=0)
    return fp.adapters.starting_from(task, state.shared)


if __name__ == "__main__":
    main()
