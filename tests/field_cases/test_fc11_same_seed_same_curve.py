"""Same seed, different curve: a sampler with a generator of its own, or an order of clients that leaks into results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest

from fedjax_pers.config import Config
from fedjax_pers.simulate.study import last_state, run_study, validate

CONFIG = {"model": "linear", "method": "fedper", "settings": {"personal": "bias"}, "rounds": 4, "cohort_size": 3}
SIZES = {"ann": (12, 5), "bob": (7, 4), "cay": (20, 6), "dan": (1, 3), "eve": (15, 5)}


def write(path, names):
    """The same clients in the given order, each with its rows in the same order."""
    blocks = {name: [] for name in ("x", "y", "client", "split")}
    for place, name in enumerate(names):
        rng = np.random.default_rng(sorted(SIZES).index(name))
        for part, size in enumerate(SIZES[name]):
            blocks["x"].append(rng.normal(size=(size, 3)).astype(np.float32))
            blocks["y"].append(rng.integers(0, 3, size))
            blocks["client"].append(np.full(size, place))
            blocks["split"].append(np.full(size, part))
    np.savez(path, client_ids=np.array(names), **{name: np.concatenate(parts) for name, parts in blocks.items()})
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The run in another process, the run in this one, another seed, and the clients in reversed order."""
    folder = tmp_path_factory.mktemp("fc11")
    data = str(write(folder / "clients.npz", sorted(SIZES)))
    backwards = str(write(folder / "backwards.npz", sorted(SIZES, reverse=True)))
    config = folder / "config.json"
    config.write_text(json.dumps({**CONFIG, "data": data}))
    command = [sys.executable, "-m", "fedjax_pers", "run", "--config", str(config), "--folder", str(folder / "one")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "1"}
    subprocess.run(command, check=True, env=environment, capture_output=True)
    here = validate(Config.from_dict({**CONFIG, "data": data}))
    run_study(here, folder / "two")
    run_study(validate(replace(here.config, seed=1), here), folder / "seed")
    run_study(replace(here.config, data=backwards), folder / "backwards")
    return folder


def same_bits(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all((a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()) for a, b in pairs)


def sampled(folder):
    return [json.loads(line)["sampled"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_two_processes_give_the_same_bytes(runs):
    for name in ("config.json", "metrics.jsonl", "clients.csv", "summary.json"):
        assert (runs / "one" / name).read_bytes() == (runs / "two" / name).read_bytes(), name
    assert same_bits(last_state(runs / "one")[1], last_state(runs / "two")[1])


def test_another_seed_gives_another_run(runs):
    assert sampled(runs / "seed") != sampled(runs / "one")
    one, other = last_state(runs / "one")[1], last_state(runs / "seed")[1]
    assert not same_bits(one.shared, other.shared) and not same_bits(one.rows, other.rows)


def test_the_order_in_which_clients_are_given_does_not_matter(runs):
    assert sampled(runs / "backwards") == sampled(runs / "one")
    one, other = last_state(runs / "one")[1], last_state(runs / "backwards")[1]
    assert one.rows and same_bits(one.rows, other.rows)
    for name, leaf in one.shared.items():
        np.testing.assert_allclose(leaf, other.shared[name], rtol=1e-6, err_msg=name)


def test_the_configuration_in_the_folder_is_enough_to_repeat_the_run(runs, tmp_path):
    repeated = run_study(Config.from_dict(json.loads((runs / "one" / "config.json").read_text())), tmp_path / "again")
    assert (repeated.folder / "metrics.jsonl").read_bytes() == (runs / "one" / "metrics.jsonl").read_bytes()
