"""Chooses the settings of the demo on validation data: the same number of trials for every method.

python experiments/demo/tune.py [METHOD ...]
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedjax_pers.config import Config
from fedjax_pers.simulate import run
from fedjax_pers.simulate.study import Study, validate

HERE = Path(__file__).parent
SEEDS = (0, 1)
RATES = (0.03, 0.1, 0.3)
OPTIMIZER = {"optimizer": ("sgd", "momentum")}
# Six trials a method: three step sizes, and two values of the setting that matters most to it.
SECOND = {
    "local_only": OPTIMIZER,
    "fedavg": OPTIMIZER,
    "fedavg_ft": {"tune_epochs": (5, 20)},
    "fedper": {"statistics": ("average", "local")},
    "fedrep": {"statistics": ("average", "local")},
    "fedbn": OPTIMIZER,
    "ditto": {"lam": (0.1, 1.0)},
}
ALSO_A_RATE = {"fedavg_ft": "tune_lr", "ditto": "personal_lr"}
"""Second step sizes, which are set like the first."""


def main(methods: list[str]) -> None:
    """Prints the score of every trial, and the best settings of each method."""
    base = replace(Config.from_dict(json.loads((HERE / "config.json").read_text())), split="validation")
    chosen, first = {}, validate(base)
    for method in methods or SECOND:
        scores = {}
        ((second, values),) = SECOND[method].items()
        for value, rate in itertools.product(values, RATES):
            settings = {"lr": rate, second: value}
            if method in ALSO_A_RATE:
                settings[ALSO_A_RATE[method]] = rate
            trial = json.dumps(settings)
            config = replace(base, method=method, settings={**base.settings, **settings})
            scores[trial] = score(validate(config, first))  # with the same task, so that step sizes compile nothing
            print(f"{method:12}{scores[trial]:.4f}  {trial}", flush=True)
        chosen[method] = {**base.settings, **json.loads(max(scores, key=scores.__getitem__))}
    print(json.dumps(chosen, indent=2))


def score(study: Study) -> float:
    """Mean accuracy over clients and seeds on the validation examples after the last round."""
    rounds, split = study.config.rounds, study.config.split
    histories = [run(study.algorithm, None, study.federation, rounds, seed, split=split)[1] for seed in SEEDS]
    tables = [history.evaluations[-1][1] for history in histories]
    return float(np.mean([table.personal["accuracy"].mean() for table in tables]))


if __name__ == "__main__":
    main(sys.argv[1:])
