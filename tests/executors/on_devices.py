"""Runs methods on the devices that this process has and saves what comes out: ``python on_devices.py METHODS FILE``."""

from __future__ import annotations

import sys

import jax
import numpy as np

import fedjax_pers as fp
from fedjax_pers.simulate.compilations import compilations
from tests import toys

SIZES, ROUNDS = (7, 4, 10, 1, 0, 3, 25, 6), 3


def results(name: str, executor: fp.Executor | None = None) -> dict[str, np.ndarray]:
    """State and scores after some rounds, by path; and what a second run compiled."""
    federation = toys.federation(SIZES)
    algorithm = toys.every_method(name)
    algorithm = algorithm if executor is None else fp.with_executor(algorithm, executor)
    cohort = None if algorithm.participation == "everyone" else 5
    arguments = {"cohort_size": cohort, "evaluate_every": 2}
    state, history = fp.run(algorithm, None, federation, ROUNDS, 0, **arguments)
    before = compilations()
    again, _ = fp.run(algorithm, None, federation, ROUNDS, 0, **arguments)
    toys.same_bits(again, state)
    tree = {"state": state, "metrics": history.metrics, "scores": history.evaluations[-1][1].personal}
    flat = {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}
    return {**flat, "compiled again": np.array(compilations() - before), "devices": np.array(jax.local_device_count())}


if __name__ == "__main__":
    *names, file = sys.argv[1:]
    np.savez(file, **{f"{name}|{path}": x for name in names for path, x in results(name).items()})
