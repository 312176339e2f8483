"""Runs and data that several tests look at."""

from __future__ import annotations

import numpy as np
import pytest

from fedjax_pers.config import Config


def write_clients(path, clients):
    """An npz file of clients ``{name: (training rows, test rows, scale of the features)}``: 3 features, 2 classes."""
    rng = np.random.default_rng(0)
    columns = {"x": [], "y": [], "client": [], "split": []}
    for place, (*sizes, scale) in enumerate(clients.values()):
        for part, size in enumerate(sizes):
            columns["x"].append(rng.normal(size=(size, 3)).astype(np.float32) * np.float32(scale))
            columns["y"].append(rng.integers(0, 2, size))
            columns["client"].append(np.full(size, place))
            columns["split"].append(np.full(size, part))
    arrays = {name: np.concatenate(values) for name, values in columns.items()}
    np.savez(path, client_ids=np.array(list(clients)), **arrays)
    return path


@pytest.fixture(scope="session")
def odd_clients(tmp_path_factory):
    """Five clients: one without training rows, one without test rows, one that overflows, two plain ones."""
    clients = {
        "none_to_train": (0, 4, 1),
        "none_to_test": (5, 0, 1),
        "overflows": (6, 3, 1e30),
        "plain_a": (12, 6, 1),
        "plain_b": (9, 7, 1),
    }
    return write_clients(tmp_path_factory.mktemp("data") / "odd.npz", clients)


@pytest.fixture(scope="session")
def hopeless_clients(tmp_path_factory):
    """Five clients of which none can send anything useful."""
    clients = {f"overflows_{place}": (6, 3, 1e30) for place in range(4)} | {"none_to_train": (0, 4, 1)}
    return write_clients(tmp_path_factory.mktemp("data") / "hopeless.npz", clients)


@pytest.fixture(scope="session")
def small():
    """A run of six rounds that is compiled fast, with sampled cohorts and unseen clients."""
    return Config(model="linear", method="fedavg", rounds=6, evaluate_every=3, cohort_size=5, unseen=0.2)
