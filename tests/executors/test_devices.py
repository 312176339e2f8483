"""The same rounds on several devices: the same results, nothing compiled twice. In processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedjax_pers as fp
from fedjax_pers.executors import Executor
from fedjax_pers.executors.lanes import devices_of, padding, split
from tests.executors import on_devices

ROOT = Path(__file__).parents[2]
METHODS = ("fedavg", "ditto", "scaffold", "l2gd", "fedamp", "cfl")
OTHERS = tuple(sorted(set(fp.methods()) - set(METHODS)))


def in_a_process(devices: int, *arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )


@pytest.fixture(scope="module", params=[2, 3])  # rows are shared out over 2, not over 3, since there are 8 clients
def spread(request, tmp_path_factory):
    file = tmp_path_factory.mktemp("devices") / "found.npz"
    in_a_process(request.param, "-m", "tests.executors.on_devices", *METHODS, str(file))
    with np.load(file) as found:
        return request.param, dict(found)


@pytest.fixture(scope="module")
def others_spread(tmp_path_factory):
    file = tmp_path_factory.mktemp("devices") / "found.npz"
    in_a_process(2, "-m", "tests.executors.on_devices", *OTHERS, str(file))
    with np.load(file) as found:
        return 2, dict(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_every_other_method_on_two_devices(others_spread, name):
    check_same(*others_spread, name)


@pytest.mark.parametrize("name", METHODS)
def test_several_devices_give_what_one_gives(spread, name):
    check_same(*spread, name)


def check_same(devices, everything, name):
    found = {key.split("|")[1]: x for key, x in everything.items() if key.startswith(f"{name}|")}
    assert found.pop("devices") == devices
    assert found.pop("compiled again") == 0
    expected = on_devices.results(name, fp.looped())
    for path, x in found.items():
        np.testing.assert_allclose(x, expected[path], rtol=2e-5, atol=1e-6, err_msg=path)


def test_devices_lanes_and_padding():
    assert devices_of(Executor(1, devices=None)) >= 1
    assert split(Executor(None, devices=1), 7) == (1, 7)
    assert padding(Executor(4, devices=1), 7) == 1


@pytest.mark.parametrize("devices", [0, -1, 1.5, "2"])
def test_numbers_of_devices_that_make_no_sense(devices):
    with pytest.raises(ValueError, match="devices: found .*; allowed is a whole number of at least 1"):
        devices_of(Executor(1, devices=devices))


def test_more_devices_than_there_are():
    with pytest.raises(ValueError, match=r"devices: found 64; this process has \d"):
        devices_of(Executor(1, devices=64))


def test_a_state_from_several_devices_runs_on_one_where_one_is_asked_for():
    program = """
import fedjax_pers as fp, jax
federation = fp.data.load("vowel_speakers")
algorithm = fp.method("fedavg").make(fp.tasks.from_model(federation, "linear"))
state = fp.start(algorithm, federation, 0)
after, _ = fp.run(fp.with_executor(algorithm, fp.looped()), state, federation, 1, 0)
print(*(max(len(x.devices()) for x in jax.tree.leaves(each)) for each in (state, after)))
"""
    assert in_a_process(2, "-c", program).stdout.split() == ["2", "1"]


def test_cores_are_asked_for_before_jax_starts():
    program = "import fedjax_pers as fp, jax; print(fp.use_cores(3), jax.local_device_count(), fp.use_cores(3))"
    assert in_a_process(1, "-c", program).stdout.split() == ["3", "3", "3"]
    fp.data.load("vowel_speakers").pool("train")  # JAX has started
    with pytest.raises(RuntimeError, match=r"use_cores\(5\): JAX has already started; call it first"):
        fp.use_cores(5)
    with pytest.raises(ValueError, match="count: found 0"):
        fp.use_cores(0)
