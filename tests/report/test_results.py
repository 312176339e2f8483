from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import signal
import subprocess
import sys
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pers.report import files, results
from fedjax_pers.report.strict_json import document, line, plain

CONFIG = {"method": "fedper", "training": {"learning_rate": 0.1, "epochs": 1}, "seed": 0}


class Pair(NamedTuple):
    left: int
    right: float


@dataclasses.dataclass
class Settings:
    rate: float
    name: str


@pytest.fixture
def folder(tmp_path):
    return results.prepare(tmp_path / "run", CONFIG)


# JSON


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b": 1, "a": None}, '{"a": null, "b": 1}'),
        ([math.nan, math.inf, -math.inf, 0.1], "[null, null, null, 0.1]"),
        (np.float32(0.1), "0.1"),
        (np.array([[0.1, np.nan]], np.float32), "[[0.1, null]]"),
        (np.array([1e-7, 1 / 3]), "[1e-07, 0.3333333333333333]"),
        (jnp.asarray([1.5, 2.0], jnp.bfloat16), "[1.5, 2.0]"),
        (jnp.asarray(3), "3"),
        (np.array([], np.float32), "[]"),
        (np.bool_(True), "true"),
        (Pair(1, math.nan), '{"left": 1, "right": null}'),
        (Settings(0.5, "né"), '{"name": "né", "rate": 0.5}'),
        (10**20, "100000000000000000000"),
    ],
)
def test_strict_json_by_hand(value, text):
    assert line(value).decode() == text + "\n"
    assert json.loads(document(value)) == json.loads(text)


def test_a_float32_comes_back_as_it_was():
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    np.testing.assert_array_equal(np.float32(json.loads(line(values))), values)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": {"b": {1, 2}}}, r"config.a.b: found \{1, 2\} of type set"),
        ({"a": [print]}, r"config.a\[0\]: found <built-in function print>"),
        ({3: "x"}, "config: found the key 3"),
        (np.array([1j]), "config: found an array of complex128"),
    ],
)
def test_what_json_cannot_hold_is_named(value, words):
    with pytest.raises(ValueError, match=words):
        plain(value, "config")


# The folder


def test_a_new_folder_holds_the_settings_and_nothing_else(folder):
    assert os.listdir(folder) == ["config.json"]
    assert results.read_config(folder) == CONFIG
    assert (folder / "config.json").read_text().startswith('{\n  "method": "fedper",\n  "seed": 0,\n')


def test_the_same_settings_are_taken_up_again(folder):
    before = (folder / "config.json").stat().st_mtime_ns
    assert results.prepare(folder, json.loads(json.dumps(CONFIG))) == folder
    assert (folder / "config.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (CONFIG | {"seed": 1}, "seed is 0 there and 1 here"),
        (CONFIG | {"training": {"learning_rate": 0.2, "epochs": 2}}, "training.epochs is 1 there and 2 here"),
        (CONFIG | {"momentum": 0.9}, "momentum is absent there and 0.9 here"),
        (CONFIG | {"seed": False}, "seed is 0 there and false here"),
        ({}, "holds another run"),
    ],
)
def test_another_run_is_refused_by_its_first_different_field(folder, config, words):
    with pytest.raises(ValueError, match=words):
        results.prepare(folder, config)
    assert results.read_config(folder) == CONFIG


def test_results_without_settings_are_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="holds metrics.jsonl but no config.json"):
        results.prepare(tmp_path, CONFIG)


def test_broken_settings_are_named(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json: not JSON"):
        results.prepare(folder, CONFIG)


@pytest.mark.parametrize("below", [".", "below", "below/it"])
def test_a_file_in_the_way_is_named(tmp_path, below):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match="run folder cannot be used"):
        results.prepare(tmp_path / "file" / below, CONFIG)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_cannot_be_written_to(small_disk):
    disk, mount = small_disk
    mount("remount,ro")
    with pytest.raises(OSError, match=r"run folder cannot be used: not writable \(Read-only file system\).*disk"):
        results.prepare(disk, CONFIG)
    assert not os.listdir(disk)


def test_a_full_disk_is_found_before_any_work(small_disk):
    disk, _ = small_disk
    with pytest.raises(OSError, match="run folder cannot be used: no space left on its disk") as caught:
        results.prepare(disk / "run", CONFIG)
    assert caught.value.errno == errno.ENOSPC
    assert not os.listdir(disk / "run")


# Rows


def rows(*rounds):
    return [{"round": each, "loss": 1 / (each + 1), "weights": np.float32([0.1, np.nan])} for each in rounds]


def test_rows_come_back_in_order(folder):
    results.append_rows(folder, rows(1, 2))
    results.append_rows(folder, rows(3))
    results.sync(folder)
    assert (folder / "metrics.jsonl").read_text().splitlines()[0] == '{"loss": 0.5, "round": 1, "weights": [0.1, null]}'
    assert [row["round"] for row in results.read_rows(folder)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (rows(2, 2), "round 2 follows round 2"),
        (rows(2, 1), "round 1 follows round 2"),
        ([{"loss": 1.0}], "round None"),
        ([{"round": 1.0}], "round 1.0"),
        ([{"round": True}], "round True"),
        ([{"round": 1, "loss": {1}}], "row of round 1.loss: found"),
    ],
)
def test_bad_rows_are_named_and_not_written(folder, bad, words):
    with pytest.raises(ValueError, match=words):
        results.append_rows(folder, bad)
    assert not (folder / "metrics.jsonl").exists()


def test_a_resumed_run_has_every_round_once(folder):
    results.append_rows(folder, rows(*range(1, 8)))
    whole = (folder / "metrics.jsonl").read_bytes()
    results.truncate_after(folder, 5)
    assert [row["round"] for row in results.read_rows(folder)] == [1, 2, 3, 4, 5]
    results.append_rows(folder, rows(6, 7))
    assert (folder / "metrics.jsonl").read_bytes() == whole
    results.truncate_after(folder, 0)
    assert results.read_rows(folder) == []


def test_a_torn_last_line_is_not_a_row(folder):
    results.append_rows(folder, rows(1, 2))
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"loss": 0.3, "rou')
    assert [row["round"] for row in results.read_rows(folder)] == [1, 2]
    with pytest.raises(ValueError, match="ends in an incomplete line"):
        results.append_rows(folder, rows(3))
    results.truncate_after(folder, 2)
    results.append_rows(folder, rows(3))
    assert [row["round"] for row in results.read_rows(folder)] == [1, 2, 3]


def test_a_log_that_ends_before_the_checkpoint_is_refused(folder):
    results.truncate_after(folder, 0)
    results.append_rows(folder, rows(1, 2))
    with pytest.raises(ValueError, match="asked for round 4, the last row up to there is of round 2"):
        results.truncate_after(folder, 4)
    assert len(results.read_rows(folder)) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"round": 1}\nnonsense\n', "line 2: not JSON"),
        ('{"round": 1}\n{"round": 1}\n', "round 1 follows round 1"),
        ("[1]\n", "line 1: found"),
    ],
)
def test_a_broken_log_is_named(folder, text, words):
    (folder / "metrics.jsonl").write_text(text)
    with pytest.raises(ValueError, match=words):
        results.read_rows(folder)


def test_reading_where_nothing_ran(tmp_path):
    with pytest.raises(FileNotFoundError, match="metrics.jsonl"):
        results.read_rows(tmp_path)


def test_a_kill_leaves_whole_rows(folder):
    program = (
        "import sys, itertools\nfrom fedjax_pers.report import results\n"
        "for round in itertools.count(1):\n"
        "    results.append_rows(sys.argv[1], [{'round': round, 'loss': [0.5] * 2000}])\n"
        "    print(round, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True)
    last = [process.stdout.readline() for _ in range(50)][-1]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    kept = [row["round"] for row in results.read_rows(folder)]
    assert kept[: int(last)] == list(range(1, int(last) + 1))
    results.truncate_after(folder, kept[-1])


# A full disk in the middle


def fill(folder):
    """Takes all the space that is left."""
    with pytest.raises(OSError, match="No space"), open(folder / "ballast", "wb", buffering=0) as file:
        while True:
            file.write(bytes(512))


def test_rows_on_a_full_disk_are_whole_or_absent(small_disk):
    disk, _ = small_disk
    with pytest.raises(OSError, match="no space left to write this file.*metrics.jsonl") as caught:
        for round in range(1, 10_000):
            results.append_rows(disk, rows(round))
    assert caught.value.errno == errno.ENOSPC
    kept = [row["round"] for row in results.read_rows(disk)]
    assert kept == list(range(1, round))
    fill(disk)
    results.truncate_after(disk, kept[-2])  # needs no space
    assert len(results.read_rows(disk)) == len(kept) - 1


def test_a_row_that_only_half_fits_is_taken_back(folder):
    results.append_rows(folder, rows(1))
    before = (folder / "metrics.jsonl").read_bytes()
    program = (  # a limit on the size of a file: the first write is cut short, the next one fails
        "import resource, sys\nfrom fedjax_pers.report import results\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "results.append_rows(sys.argv[1], [{'round': 2, 'loss': [0.5] * 1000}])\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "OSError: [Errno 27] no space left to write this file" in done.stderr
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_a_summary_on_a_full_disk_keeps_the_old_one(small_disk):
    disk, _ = small_disk
    results.write_summary(disk, {"worst": 0.5})
    fill(disk)
    with pytest.raises(OSError, match="no space left to write this file.*summary.json"):
        results.write_summary(disk, {"worst": [0.25] * 5000})
    assert results.read_summary(disk) == {"worst": 0.5}
    assert sorted(os.listdir(disk)) == ["ballast", "summary.json"]


def test_a_device_that_is_full_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="no space left to write this file.*metrics.jsonl"):
        files.append(tmp_path / "metrics.jsonl", b"row\n")


# The other files


def test_clients_by_hand(folder):
    results.write_clients(
        folder,
        {
            "client": ["007", 'a, "b"', "1e5"],
            "test_examples": [20, 0, 3],
            "accuracy": np.float32([0.95, np.nan, 1 / 3]),
            "group": ["1_0", "x", ""],
        },
    )
    assert (folder / "clients.csv").read_text() == (
        'client,test_examples,accuracy,group\n007,20,0.95,1_0\n"a, ""b""",0,,x\n1e5,3,0.33333334,\n'
    )
    columns = results.read_clients(folder)
    assert columns["client"] == ["007", 'a, "b"', "1e5"]
    assert columns["test_examples"] == [20, 0, 3]
    np.testing.assert_array_equal(np.float32(columns["accuracy"]), np.float32([0.95, np.nan, 1 / 3]))
    assert columns["group"] == ["1_0", "x", ""]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"client": ["a"]}, "'test_examples' is missing"),
        ({"client": ["a"], "test_examples": [1, 2]}, "found lengths"),
        ({"client": ["1", 1], "test_examples": [1, 2]}, "found '1' more than once"),
    ],
)
def test_bad_columns_are_named(folder, columns, words):
    with pytest.raises(ValueError, match=words):
        results.write_clients(folder, columns)
    assert not (folder / "clients.csv").exists()


def test_a_summary_has_null_for_nan_and_the_same_bytes_each_time(folder):
    results.write_summary(folder, {"worst": math.nan, "best": np.float64(0.1)})
    first = (folder / "summary.json").read_bytes()
    assert first == b'{\n  "best": 0.1,\n  "worst": null\n}\n'
    results.write_summary(folder, {"best": 0.1, "worst": math.nan})
    assert (folder / "summary.json").read_bytes() == first


def test_timings_are_kept_apart(folder):
    results.append_rows(folder, rows(1))
    log = (folder / "metrics.jsonl").read_bytes()
    results.append_timings(folder, {"round": 1, "seconds": 0.25})
    assert (folder / "metrics.jsonl").read_bytes() == log
    assert (folder / "timings.jsonl").read_text() == '{"round": 1, "seconds": 0.25}\n'


def test_the_environment_and_its_change(folder):
    results.write_environment(folder)
    found = json.loads((folder / "environment.json").read_text())
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["packages"]["jax"] == __import__("jax").__version__
    assert found["devices"]
    results.write_environment(folder)  # the same again: nothing to say
    found["packages"]["jax"] = "0.0.1"
    (folder / "environment.json").write_text(json.dumps(found))
    with pytest.warns(UserWarning, match='began with packages.jax "0.0.1" and goes on with'):
        results.write_environment(folder)
