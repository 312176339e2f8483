"""A killed run resumes one round off: repeats a round, skips one, logs one twice, or mixes states of two rounds."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from fedjax_pers.report import read_rows
from fedjax_pers.simulate.study import last_state
from fedjax_pers.testing import assert_bitwise

ROUNDS, INTERVAL = 20, 2
RESULTS = ("config.json", "metrics.jsonl", "clients.csv", "summary.json", "learning_curve.png")

# One process imports everything, then forks a child for each start of the run. A child is killed at a random file
# operation in the run's folder (saving, logging, summing up), or some time after a block (training, evaluating).
DRIVER = f"""
import os, random, signal, sys, threading
from pathlib import Path

import matplotlib.figure, orbax.checkpoint
from fedjax_pers.config import Config
from fedjax_pers.simulate.study import run_study

CONFIG = Config(
    model="linear",
    method="fedper",
    settings={{"personal": "bias"}},
    cohort_size=4,
    rounds={ROUNDS},
    evaluate_every={INTERVAL},
)
OPERATIONS = {{"open", "os.rename", "os.mkdir", "os.remove", "os.truncate", "shutil.rmtree"}}

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def die_at_operation(folder, number):
    operations = 0
    def count(event, args):
        nonlocal operations
        if event in OPERATIONS and any(str(folder) in str(arg) for arg in args[:2]):
            operations += 1
            if operations == number:
                die()
    sys.addaudithook(count)

def run(folder, moment):
    sys.stdout.reconfigure(line_buffering=True)
    started = []
    def progress(done, rounds, accuracy):
        if accuracy is None:  # nothing is compiled yet
            return
        print(f"reached round {{done}}")
        if isinstance(moment, float) and not started:
            started.append(threading.Timer(moment, die).start())
    if isinstance(moment, int):
        die_at_operation(folder, moment)
    run_study(CONFIG, folder, progress)

def finishes(folder, moment=None):
    child = os.fork()
    if child == 0:
        log = os.open(f"{{folder}}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1), os.dup2(log, 2)
        run(folder, moment)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), Path(f"{{folder}}.log").read_text()[-3000:]
    return status == 0

place, wanted, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
assert finishes(place / "whole")
draw, kills, folders = random.Random(seed), 0, 0
while kills < wanted:
    folder = place / f"killed_{{folders}}"
    moments = lambda: draw.choice([draw.randint(1, 120), draw.uniform(0, 1)]) if kills < wanted else None
    while not finishes(folder, moments()):
        kills += 1
    assert finishes(folder)
    folders += 1
"""


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])  # a start takes seconds, to trace
def test_whatever_moment_it_is_killed_at(tmp_path, kills):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    command = [sys.executable, "-c", DRIVER, str(tmp_path), str(kills), "0"]
    driven = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert driven.returncode == 0, driven.stderr[-3000:]
    whole, expected = tmp_path / "whole", last_state(tmp_path / "whole")[1]
    folders = [path for path in tmp_path.glob("killed_*") if path.is_dir()]
    assert folders
    for folder in folders:
        for name in RESULTS:
            assert (folder / name).read_bytes() == (whole / name).read_bytes(), f"{folder}: {name}"
        assert [row["round"] for row in read_rows(folder)] == list(range(1, ROUNDS + 1))
        assert_bitwise(last_state(folder)[1], expected, f"{folder}")
        log = (tmp_path / f"{folder.name}.log").read_text()
        log, said_at_last, _ = log.partition("is finished (20 rounds); nothing to do")
        assert said_at_last
        reached = 0
        for said, found in re.findall(r"(reached|resumes after) round (\d+)", log):
            if said == "reached":
                assert reached < int(found)  # no block twice, once its checkpoint was there
            assert reached <= int(found) <= reached + INTERVAL
            reached = int(found)
