"""The command line: what it prints, what it refuses, and that it never ends in a traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from fedjax_pers import cli
from fedjax_pers.algorithms import methods
from fedjax_pers.config import Config

QUICK = ["--model", "linear", "--rounds", "2", "--evaluate-every", "1"]


def fails(capsys, *args):
    """The message of a command that is refused, which must be one line and no traceback."""
    with pytest.raises(SystemExit) as left:
        cli.main(args)
    assert left.value.code == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return message


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished run."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    cli.main(["run", *QUICK, "--set", "lr=0.2", "epochs=2", "--set", "optimizer=momentum", "--folder", str(folder)])
    return folder


def test_a_run_from_start_to_end(folder, capsys):
    config = json.loads((folder / "config.json").read_text())
    assert config["settings"] == {"lr": 0.2, "epochs": 2, "optimizer": "momentum"}
    assert (folder / "summary.json").exists()
    cli.main(["resume", str(folder)])
    said = capsys.readouterr().out
    assert "nothing to do" in said and str(folder) in said.replace("\n", "") and "fedavg" in said


def test_a_file_gives_the_defaults_and_options_come_before_it(folder, tmp_path):
    chosen = []
    for extra in ([], ["--rounds", "1", "--set", "epochs=null"]):
        args = ["run", "--config", str(folder / "config.json"), "--folder", str(tmp_path), *extra]
        command = cli.parse(args)
        chosen.append(command.chosen(command.config))
    assert chosen[0] == Config.from_dict(json.loads((folder / "config.json").read_text()))
    assert (chosen[1].rounds, chosen[1].model) == (1, "linear")
    assert chosen[1].settings == {"lr": 0.2, "epochs": None, "optimizer": "momentum"}


def test_values_are_json_where_they_read_as_such():
    command = cli.parse(["run", "--model-option", "hidden=[8, 4]", "--set", "personal=head(1)", "drop_last=true"])
    config = command.chosen(None)
    assert config.model_options == {"hidden": [8, 4]}
    assert config.settings == {"personal": "head(1)", "drop_last": True}


def test_comparing_prints_the_table_and_can_be_resumed(tmp_path, capsys):
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"local_only": {"lr": 0.3}}))
    where = ["--folder", str(tmp_path / "compared")]
    args = ["compare", *QUICK, "--methods", "local_only", "--seeds", "0", "1", "--settings", str(settings), *where]
    cli.main(args)
    assert "mean ± sample" in " ".join(capsys.readouterr().out.split())
    run = tmp_path / "compared" / "local_only" / "seed_1" / "config.json"
    assert json.loads(run.read_text())["settings"] == {"lr": 0.3}
    (tmp_path / "compared" / "comparison.md").unlink()
    cli.main(["resume", str(tmp_path / "compared")])
    assert "nothing to do" in capsys.readouterr().out
    assert (tmp_path / "compared" / "comparison.md").exists()


def test_lists_have_every_name(capsys):
    cli.main(["list"])
    said = capsys.readouterr().out
    assert all(name in said for name in (*methods(), "mlp_norm", "char_lstm", "vowel_speakers", "shapes_drawers"))
    cli.main(["data", "list"])
    assert "digits_domains" in capsys.readouterr().out


def test_describing_a_method(capsys):
    cli.main(["describe", "fedper"])
    said = " ".join(capsys.readouterr().out.split())
    for words in ("Arivazhagan", "the top layers", "nothing personal: FedAvg", "personal head(1)", "optimizer sgd"):
        assert words in said


def test_describing_a_method_on_data_counts_bytes_by_hand(capsys):
    cli.main(["describe", "fedper", "--data", "vowel_speakers", "--model-option", "hidden=[3]"])
    said = " ".join(capsys.readouterr().out.split())
    body, head = (10 * 3 + 3) * 4, (3 * 11 + 11) * 4
    assert f"shared {body} B, personal {head} B" in said
    assert f"up: {body} B ({100 * body / (body + head):.2f}% of the model), and 8 B for its size" in said


def test_describing_a_mask(capsys):
    cli.main(["describe", "mlp+head(1) | bias()", "--model-option", "hidden=[3]"])
    assert "shared 120 B, personal 188 B" in " ".join(capsys.readouterr().out.split())


def test_describing_data(capsys, tmp_path):
    cli.main(["data", "describe", "vowel_speakers", "--unseen", "0.2", "--out", str(tmp_path / "picture.png")])
    said = capsys.readouterr().out
    assert "3 unseen" in said and "CC BY 4.0" in said
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["run", "--method", "fedpre"], "method: found 'fedpre'"),
        (["run", "--set", "lr"], "--set: found 'lr'; expected NAME=VALUE"),
        (["run", "--set", "lr=1", "--set", "lr=2"], "--set: found 'lr' more than once"),
        (["run", "--set", "lrr=1"], "Did you mean 'lr'?"),
        (["run", "--cohort-size", "99"], "allowed are 1 .. 15"),
        (["run", "--rounds", "0"], "rounds: found 0"),
        (["run", "--rounds", "many"], "--rounds"),
        (["run", "--ronds", "3"], "--rounds"),
        (["run", "--config", "absent.json"], "absent.json: No such file"),
        (["run", "--data", "absent/x.npz"], "absent/x.npz: no such file"),
        (["compare", "--methods", "fedavg", "fedpre"], "method: found 'fedpre'"),
        (["compare", "--settings", "absent.json"], "absent.json: No such file"),
        (["describe", "fedpre"], "method: found 'fedpre'"),
        (["describe", "mlp+hed(1)"], "nearest: head"),
        (["describe", "mlpp+head(1)"], "model: found 'mlpp'"),
        (["data", "describe", "vowels"], "data set: found 'vowels'"),
        (["data", "describe", "digits", "--data-option", "num_clients=x"], "num_clients: found 'x'"),
        (["resume", "absent"], "absent: holds neither a run nor a comparison"),
    ],
)
def test_what_cannot_be_done_is_refused_with_field_value_and_what_is_allowed(
    capsys, args, expected, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    assert expected in fails(capsys, *args)
    assert not list(tmp_path.iterdir())


def test_a_config_with_a_field_that_no_run_has(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"ronds": 3}')
    assert "Did you mean 'rounds'?" in fails(capsys, "run", "--config", str(tmp_path / "config.json"))
    (tmp_path / "config.json").write_text("{")
    assert "config.json: not JSON" in fails(capsys, "run", "--config", str(tmp_path / "config.json"))


def test_a_results_folder_that_cannot_be_written(capsys, tmp_path, folder):
    (tmp_path / "file").write_text("")
    assert "file: the run folder cannot be used" in fails(capsys, "run", *QUICK, "--folder", str(tmp_path / "file"))
    assert "cannot be used" in fails(capsys, "run", *QUICK, "--folder", "/proc/results")
    message = fails(capsys, "run", *QUICK, "--folder", str(folder), "--seed", "5")
    assert "holds another run: seed is 0 there and 5 here" in message


def test_an_upload_that_is_not_finite_can_stop_the_run(capsys, tmp_path):
    overflow = ["--set", "lr=3e38", "epochs=9", "--data-option", "validation=0", "--stop-on-rejected"]
    with pytest.raises(SystemExit) as left:
        cli.main(["run", *QUICK, "--model", "mlp", *overflow, "--folder", str(tmp_path / "run")])
    assert left.value.code == 1
    assert "stopped: round 1: uploads of" in capsys.readouterr().err


def test_an_interrupted_run_says_how_it_goes_on(tmp_path):
    command = [sys.executable, "-m", "fedjax_pers", "run", "--model", "linear", "--rounds", "1000000"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [*command, "--folder", str(tmp_path / "run")], env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    while not (tmp_path / "run" / "metrics.jsonl").exists() and process.poll() is None:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said.decode()
    assert "interrupted; the same command goes on from the last checkpoint" in said.decode()
    assert "Traceback" not in said.decode()


def test_devices_are_made_before_jax_starts(tmp_path):
    command = [sys.executable, "-m", "fedjax_pers", "run", "--model", "linear", "--rounds", "2", "--devices", "2"]
    for _ in range(2):  # the second finds a finished run
        subprocess.run([*command, "--folder", str(tmp_path)], check=True, capture_output=True)
    assert json.loads((tmp_path / "config.json").read_text())["devices"] == 2
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
