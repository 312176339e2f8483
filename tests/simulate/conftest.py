"""Runs that several tests look at."""

from __future__ import annotations

import numpy as np
import pytest

from fedjax_pers.config import Config


@pytest.fixture(scope="session")
def odd_clients(tmp_path_factory):
    """Five clients: one without training rows, one without test rows, one that overflows in two steps, two plain ones."""
    rng = np.random.default_rng(0)
    rows = {"none_to_train": (0, 4), "none_to_test": (5, 0), "overflows": (6, 3), "plain_a": (12, 6), "plain_b": (9, 7)}
    x, y, client, split = [], [], [], []
    for place, (name, sizes) in enumerate(rows.items()):
        for part, size in enumerate(sizes):
            features = rng.normal(size=(size, 3)).astype(np.float32)
            x.append(features * np.float32(1e30) if name == "overflows" else features)
            y.append(rng.integers(0, 2, size))
            client += [place] * size
            split += [part] * size
    path = tmp_path_factory.mktemp("data") / "odd.npz"
    arrays = {"x": np.concatenate(x), "y": np.concatenate(y), "client": np.array(client), "split": np.array(split)}
    np.savez(path, client_ids=np.array(list(rows)), **arrays)
    return path


@pytest.fixture(scope="session")
def small():
    """A run of six rounds that is compiled fast, with sampled cohorts and unseen clients."""
    return Config(model="linear", method="fedavg", rounds=6, evaluate_every=3, cohort_size=5, unseen=0.2)
