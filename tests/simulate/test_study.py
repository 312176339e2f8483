"""Runs in folders: what is refused before any work, what is written down, and where a stopped run goes on."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import replace

import numpy as np
import pytest

from fedjax_pers.config import Config
from fedjax_pers.data import load
from fedjax_pers.executors import Executor
from fedjax_pers.presets import head
from fedjax_pers.report import read_clients, read_rows, read_summary
from fedjax_pers.simulate import RejectedUploads, checkpoint
from fedjax_pers.simulate.settings import OPTIMIZERS, method_settings, plain_settings
from fedjax_pers.simulate.study import (
    last_state,
    run_study,
    state_shapes,
    validate,
    warm_started,
)

LINEAR_BYTES = (10 * 11 + 11) * 4  # kernel and bias of softmax regression on vowel_speakers
SHORT = {"batch_size": 3, "epochs": 5}  # steps enough for the client of odd_clients to overflow
RESULTS = ("metrics.jsonl", "clients.csv", "summary.json", "config.json", "learning_curve.png")


class Killed(BaseException):
    """Ends a run from within, as an interruption does."""


def killed_at(round_):
    """Progress that stops the run once so many rounds are reported."""

    def progress(done, rounds, accuracy):
        if done >= round_:
            raise Killed

    return progress


def bytes_of(folder):
    return {name: (folder / name).read_bytes() for name in RESULTS}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, small):
    folder = tmp_path_factory.mktemp("finished") / "run"
    return run_study(small, folder)


def test_rows_have_each_round_once_and_count_what_was_sent(finished):
    rows = read_rows(finished.folder)
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert row["participants"] == row["communicated"] == len(row["sampled"]) == 5
        assert row["megabytes_down"] == 5 * LINEAR_BYTES / 1e6
        assert row["megabytes_up"] == 5 * (LINEAR_BYTES + 8) / 1e6  # and the number of examples, 64 bits
        assert (row["rejected"], row["empty"], row["skipped"]) == ([], [], None)
        assert row["update_norm"] > 0
    assert rows[-1]["total_megabytes_up"] == 30 * (LINEAR_BYTES + 8) / 1e6
    assert [row["round"] for row in rows if "personal_accuracy_weighted_mean" in row] == [3, 6]


def test_the_table_of_clients_is_that_of_the_model_by_hand(finished):
    study, state = last_state(finished.folder)
    clients = finished.clients
    assert sum(clients["unseen"]) == 3 and clients["unseen"] == sorted(clients["unseen"])
    kernel, bias = (np.asarray(state.shared[f"params/head/{name}"], np.float64) for name in ("kernel", "bias"))
    whole = load("vowel_speakers")
    for place, name in enumerate(clients["client"]):
        rows = whole.test.client(whole.index(name))
        right = np.argmax(rows["x"].astype(np.float64) @ kernel + bias, axis=1) == rows["y"]
        assert clients["accuracy"][place] == pytest.approx(right.mean(), abs=1e-6)
        assert clients["global_accuracy"][place] == clients["accuracy"][place]  # FedAvg: one model for all
        assert (clients["test_examples"][place], clients["train_examples"][place]) == (22, 35)
    sampled = [name for row in finished.rows for name in row["sampled"]]
    assert clients["rounds_taken_part"] == [sampled.count(name) for name in clients["client"]]
    assert finished.summary["clients_that_took_part"] == len(set(sampled))
    assert study.federation.num_clients == finished.summary["clients"] == 12


def test_summary_and_last_row_are_means_over_the_clients_in_training(finished):
    trained = np.array(finished.clients["unseen"]) == 0
    accuracy = np.array(finished.clients["accuracy"])
    summary = finished.summary
    assert summary["personal_accuracy"]["unweighted_mean"] == pytest.approx(accuracy[trained].mean(), abs=1e-6)
    assert summary["unseen"]["personal_accuracy"]["unweighted_mean"] == pytest.approx(
        accuracy[~trained].mean(), abs=1e-6
    )
    assert summary["unseen"]["clients"] == 3
    unadapted = np.array(finished.clients["unadapted_accuracy"])
    assert (unadapted[~trained] == accuracy[~trained]).all() and np.isnan(unadapted[trained]).all()  # FedAvg: one model
    assert summary["unseen"]["unadapted_accuracy"] == summary["unseen"]["global_accuracy"]
    assert finished.rows[-1]["personal_accuracy_unweighted_mean"] == pytest.approx(accuracy[trained].mean(), abs=1e-6)
    assert summary["personal_accuracy"]["hurt"] == 0
    assert summary["traffic"]["megabytes_up_per_client"] == pytest.approx(30 * (LINEAR_BYTES + 8) / 12 / 1e6)


def test_the_same_config_gives_the_same_bytes(finished, small, tmp_path):
    assert bytes_of(run_study(small, tmp_path / "again").folder) == bytes_of(finished.folder)


def test_another_seed_gives_others(finished, small, tmp_path):
    other = run_study(replace(small, seed=1), tmp_path / "other")
    assert other.rows[0]["sampled"] != finished.rows[0]["sampled"]
    assert other.rows[-1]["update_norm"] != finished.rows[-1]["update_norm"]


def test_timings_are_apart_and_count_compilations(finished):
    timings = [json.loads(line) for line in (finished.folder / "timings.jsonl").read_text().splitlines()]
    assert [(row["round"], row["rounds"]) for row in timings] == [(3, 3), (6, 3)]
    assert timings[1]["compilations"] == 0
    assert not any("seconds" in row or "compilations" in row for row in finished.rows)


def test_a_finished_run_does_nothing_and_says_so(finished, small, capsys):
    before = {path: path.stat().st_mtime_ns for path in finished.folder.rglob("*")}
    again = run_study(small, finished.folder)
    assert "is finished (6 rounds); nothing to do" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in finished.folder.rglob("*")} == before
    assert (again.summary, again.rows, again.compilations) == (finished.summary, finished.rows, 0)


def test_a_stopped_run_goes_on_to_the_same_bytes(finished, small, tmp_path, capsys):
    with pytest.raises(Killed):
        run_study(small, tmp_path / "run", killed_at(3))
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:  # rows that no checkpoint holds, the last one cut
        file.write('{"round": 4}\n{"round": 5, "participants": 5')
    with (tmp_path / "run" / "timings.jsonl").open("a") as file:
        file.write('{"round": 6, "seco')
    resumed = run_study(small, tmp_path / "run")
    assert "resumes after round 3 of 6" in capsys.readouterr().out
    assert bytes_of(resumed.folder) == bytes_of(finished.folder)


def test_a_run_stopped_before_its_first_checkpoint_starts_again(finished, small, tmp_path, capsys):
    with pytest.raises(Killed):
        run_study(replace(small, checkpoint_every=5), tmp_path / "run", killed_at(3))
    assert checkpoint.latest(tmp_path / "run" / "checkpoints") is None
    assert len(read_rows(tmp_path / "run")) == 3
    resumed = run_study(replace(small, checkpoint_every=5), tmp_path / "run")
    assert "resumes" not in capsys.readouterr().out
    assert resumed.rows == finished.rows


def test_a_run_stopped_while_it_sums_up_sums_up_again(finished, small, tmp_path):
    result = run_study(small, tmp_path / "run")
    (result.folder / "summary.json").unlink()
    (result.folder / "clients.csv").unlink()
    assert bytes_of(run_study(small, tmp_path / "run").folder) == bytes_of(finished.folder)


def test_two_processes_do_not_write_into_one_folder(small, tmp_path):
    (tmp_path / "run").mkdir()
    descriptor = os.open(tmp_path / "run", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(BlockingIOError, match="another process is running"):
            run_study(small, tmp_path / "run")
    finally:
        os.close(descriptor)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_without_evaluations_on_the_way_there_is_one_at_the_end(small, tmp_path, finished):
    result = run_study(replace(small, evaluate_every=0), tmp_path / "run")
    assert [row["round"] for row in result.rows if "personal_accuracy_weighted_mean" in row] == [6]
    assert result.clients == finished.clients


def test_a_warm_start_is_fedavg_and_is_charged(small, finished, tmp_path):
    warm = replace(small, method="local_only", warm_start=3, rounds=3)
    result = run_study(warm, tmp_path / "warm")
    assert [row["method"] for row in result.rows] == ["fedavg"] * 3 + ["local_only"] * 3
    assert [row["total_megabytes_down"] for row in result.rows[3:]] == [15 * LINEAR_BYTES / 1e6] * 3
    assert [row["sampled"] for row in result.rows] == [row["sampled"] for row in finished.rows]
    assert sum(result.clients["rounds_taken_part"]) == 30
    # Its first three rounds are those of FedAvg, and a client that was never sampled since has FedAvg's model.
    fedavg, study = validate(small), validate(warm)
    expected = checkpoint.restore(finished.folder / "checkpoints", state_shapes(fedavg.algorithm, fedavg.federation), 3)
    fresh = last_state(result.folder)[1].fresh
    assert {name: leaf.tobytes() for name, leaf in fresh.items()} == {
        n: x.tobytes() for n, x in expected.shared.items()
    }
    assert study.rounds == 6


@pytest.mark.parametrize(
    ("method", "settings"), [("local_lora", {"on": "**/kernel", "also": "**/bias"}), ("fedem", {})]
)
def test_a_warm_start_gives_a_changed_task_its_backbone(small, finished, method, settings):
    """Adapters lie beside FedAvg's weights; the first of several models is FedAvg's."""
    study = validate(replace(small, method=method, settings=settings, warm_start=3, rounds=3))
    fedavg = validate(small)
    trained = checkpoint.restore(finished.folder / "checkpoints", state_shapes(fedavg.algorithm, fedavg.federation), 3)
    state = warm_started(study, trained)
    parts = {**state.frozen, **state.shared, **state.fresh}
    for name, leaf in trained.shared.items():
        assert parts["experts/0/" + name if method == "fedem" else name].tobytes() == leaf.tobytes()


def test_a_run_stopped_in_or_after_its_warm_start_goes_on_to_the_same_bytes(small, tmp_path, capsys):
    warm = replace(small, method="local_only", warm_start=6, rounds=3)
    with pytest.raises(Killed):
        run_study(warm, tmp_path / "stopped", killed_at(6))
    with pytest.raises(Killed):
        run_study(warm, tmp_path / "stopped", killed_at(9))
    whole = run_study(warm, tmp_path / "whole")
    assert bytes_of(run_study(warm, tmp_path / "stopped").folder) == bytes_of(whole.folder)
    assert capsys.readouterr().out.count("resumes after round") == 2


def test_a_warm_start_uses_the_method_s_local_training():
    study = validate(
        Config(model="linear", method="fedprox", settings={"lr": 0.3, "mu": 1.0, "epochs": 2}, warm_start=1)
    )
    assert study.warm.recipe.floats == {"lr": pytest.approx(0.3)}
    assert dict(study.warm.recipe.static)["epochs"] == 2


def test_odd_clients_are_named_and_left_out(odd_clients, tmp_path):
    config = Config(data=odd_clients, model="linear", rounds=2, evaluate_every=1, settings=SHORT)
    result = run_study(config, tmp_path / "run")
    for row in result.rows:
        assert row["rejected"] == ["overflows"] and row["empty"] == ["none_to_train"]
        assert row["participants"] == 5 and row["skipped"] is None
        assert np.isfinite(row["update_norm"]) and np.isfinite(row["train_loss_weighted_mean"])
    summary = read_summary(result.folder)
    assert (summary["rejected_uploads"], summary["rejected_clients"]) == (2, ["overflows"])
    assert summary["clients_that_took_part"] == 3
    assert summary["personal_accuracy"]["clients_without_test"] == 1 and summary["personal_accuracy"]["clients"] == 4
    clients = read_clients(result.folder)
    place = clients["client"].index("none_to_test")
    assert np.isnan(clients["accuracy"][place]) and clients["test_examples"][place] == 0
    tested = np.arange(5) != place
    expected = np.average(np.array(clients["accuracy"])[tested], weights=np.array(clients["test_examples"])[tested])
    assert result.rows[-1]["personal_accuracy_weighted_mean"] == pytest.approx(expected, abs=1e-6)


def test_losses_of_rejected_clients_are_left_out_of_the_means(odd_clients, tmp_path):
    import fedjax_pers as fp

    study = validate(Config(data=odd_clients, model="linear", rounds=1, settings=SHORT))
    _, history = fp.run(study.algorithm, None, study.federation, 1, 0)
    result = run_study(study, tmp_path / "run")
    kept = [study.federation.index(name) for name in ("none_to_test", "plain_a", "plain_b")]
    losses = history.metrics.loss[0][kept].astype(float)
    row = result.rows[0]
    assert row["train_loss_unweighted_mean"] == pytest.approx(losses.mean())
    assert row["train_loss_weighted_mean"] == pytest.approx((5 * losses[0] + 12 * losses[1] + 9 * losses[2]) / 26)


def test_a_round_without_any_upload_is_skipped_with_the_reason(hopeless_clients, tmp_path):
    config = Config(data=hopeless_clients, model="linear", rounds=1, settings=SHORT)
    result = run_study(config, tmp_path / "run")
    row = result.rows[0]
    assert row["skipped"] == "no upload was accepted: 4 sent something not finite, 1 had nothing to train on"
    assert row["update_norm"] == 0 and row["train_loss_weighted_mean"] is None
    assert result.summary["skipped_rounds"] == [1] and result.summary["clients_that_took_part"] == 0
    assert np.isfinite(result.clients["accuracy"]).all()


def test_clients_smaller_than_a_batch_are_reported_where_short_batches_are_dropped(odd_clients, tmp_path):
    config = Config(data=odd_clients, model="linear", rounds=1, settings={"batch_size": 10, "drop_last": True})
    row = run_study(config, tmp_path / "run").rows[0]
    assert row["empty"] == ["none_to_test", "none_to_train", "overflows", "plain_b"] and row["skipped"] is None


def test_a_run_that_is_to_stop_at_a_rejected_upload_stops_every_time(odd_clients, tmp_path):
    config = Config(data=odd_clients, model="linear", rounds=1, settings=SHORT, stop_on_rejected=True)
    for _ in range(2):
        with pytest.raises(RejectedUploads, match=r"round 1: uploads of \['overflows'\]"):
            run_study(config, tmp_path / "run")
        assert checkpoint.latest(tmp_path / "run" / "checkpoints") is None


def test_lanes_and_devices_map_the_clients_otherwise():
    config = Config(model="linear", lanes=1)
    assert validate(config).algorithm.recipe.executor == Executor(1, devices=None)
    assert validate(replace(config, warm_start=1)).warm.recipe.executor == Executor(1, devices=None)
    assert validate(replace(config, devices=1)).algorithm.recipe.executor == Executor(1, devices=1)
    assert validate(Config(model="linear", devices=1)).algorithm.recipe.executor == Executor(32, devices=1)
    with pytest.raises(ValueError, match=r"devices: found 64; this process has \d"):
        validate(replace(config, devices=64))


def test_studies_share_data_and_task_where_they_ask_for_the_same():
    first = validate(Config(model="linear"))
    second = validate(Config(model="linear", method="ditto", seed=3), first)
    assert second.task is first.task and second.federation is first.federation
    third = validate(Config(model="mlp"), first)
    assert third.federation is first.federation and third.task is not first.task
    assert validate(Config(model="linear", unseen=0.2), first).federation is not first.federation


def test_settings_in_plain_form():
    found = method_settings("fedper", {"personal": "head(1)", "lr": 1, "optimizer": "momentum", "steps": None})
    assert found == {"personal": head(1), "lr": 1.0, "optimizer": OPTIMIZERS["momentum"], "steps": None}
    assert type(found["lr"]) is float
    assert (
        method_settings("fedper", {"personal": ["hidden1", "head(1)"]})["personal"]
        == method_settings("fedper", {"personal": "hidden1 | head(1)"})["personal"]
    )


@pytest.mark.parametrize("name", ["fedavg", "fedper", "pfedme", "scaffold"])
def test_defaults_as_text_are_read_back(name):
    values = {setting: None if text == "None" else _json(text) for setting, text in plain_settings(name).items()}
    assert validate(Config(model="mlp", method=name, settings=values)).config.settings == values


def _json(text):
    try:
        return json.loads(text.replace("False", "false"))
    except ValueError:
        return text


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"method": "fedpr"}, "method: found 'fedpr'.*Did you mean 'fedper'"),
        ({"model": "mpl"}, "model: found 'mpl'.*Did you mean 'mlp'"),
        ({"model_options": {"hiden": [3]}}, "found 'hiden'.*Did you mean 'hidden'"),
        ({"model_options": {"hidden": "x"}}, "hidden: found 'x'"),
        ({"data": "digit"}, "data set: found 'digit', did you mean 'digits'"),
        ({"data_options": {"validaton": 0.1}}, "found 'validaton', did you mean 'validation'"),
        ({"data_options": {"validation": "x"}}, "data_options: found {'validation': 'x'}"),
        ({"data_options": {"unseen": 0.5}}, "data_options: found 'unseen', which is a field of its own"),
        ({"settings": {"lrs": 0.1}}, "settings of fedper: found 'lrs'.*Did you mean 'lr'"),
        ({"settings": {"lr": "fast"}}, "fedper: lr: found 'fast'; allowed is a number of at least 0"),
        ({"settings": {"lr": -0.1}}, "fedper: lr: found -0.1; allowed is at least 0"),
        (
            {"method": "ditto", "settings": {"personal_lr": -0.1}},
            "personal_lr: found -0.1; allowed is at least 0",
        ),
        ({"method": "fedavg_ft", "settings": {"tune_lr": -1.0}}, "fedavg_ft: tune_lr: found -1; allowed is at least 0"),
        ({"settings": {"lr": True}}, "fedper: lr: found True"),
        ({"settings": {"newcomer_epochs": 1.5}}, "fedper: newcomer_epochs: found 1.5; allowed is a whole number"),
        ({"settings": {"epochs": "2"}}, "fedper: epochs: found '2'"),
        ({"settings": {"drop_last": 0}}, "fedper: drop_last: found 0; allowed are true and false"),
        ({"settings": {"optimizer": "sdg"}}, "fedper: optimizer: found 'sdg'.*Did you mean 'sgd'"),
        ({"settings": {"personal": 3}}, "fedper: personal: found 3; allowed is a selector"),
        ({"settings": {"personal": "haed"}}, "haed"),
        ({"settings": {"personal": "head(9)"}}, r"head\(9\): found 2 layers"),
        ({"settings": {"weights": 1}}, "fedper: weights: found 1; allowed is a word"),
        ({"settings": {"weights": "exmaples"}}, "exmaples"),
        ({"cohort_size": 16}, "cohort_size: found 16; allowed are 1 .. 15"),
        ({"method": "l2gd", "cohort_size": 3}, "cohort_size: found 3; this method needs everyone each round"),
        ({"method": "l2gd", "dropout": 0.1}, "dropout: found 0.1; this method needs everyone each round"),
        ({"dropout": 1.0}, "dropout: found 1.0; allowed is a share"),
        ({"method": "ifca", "settings": {"clusters": 16}}, "clusters: found 16; allowed are 1 .. 15"),
        ({"method": "afl", "settings": {"domains": [0, 1]}}, "domains: found 2; expected one for each of 15 clients"),
        ({"method": "afl", "settings": {"domains": 2}}, "afl: domains: found 2; allowed is a list of whole numbers"),
        ({"split": "valid"}, "split: found 'valid'"),
        ({"split": "validation", "data_options": {"validation": 0}}, "split: found 'validation', which has no rows"),
        ({"method": "fedprox", "warm_start": 2, "settings": {"statistics": "locl"}}, "locl"),
    ],
)
def test_what_cannot_be_run_is_refused_before_any_work(fields, expected):
    with pytest.raises(ValueError, match=expected):
        validate(Config(**{"method": "fedper", **fields}))


def test_clients_that_fail_are_not_there(tmp_path, small):
    result = run_study(replace(small, dropout=0.5), tmp_path / "run")
    counts = [row["participants"] for row in result.rows]
    assert min(counts) < 5 and 5 < sum(counts) < 25
    assert counts == [len(row["sampled"]) for row in result.rows] == [row["communicated"] for row in result.rows]


def test_several_clusters_and_a_number_of_lanes():
    validate(Config(model="linear", method="ifca", settings={"clusters": 3}, lanes=2))


def test_what_clients_say_is_in_the_rows(tmp_path, small):
    settings = {"clusters": 2}
    result = run_study(replace(small, method="ifca", settings=settings), tmp_path / "run")
    for row in read_rows(result.folder):
        assert len(row["clients"]) == len(row["weights"]) == 5 and row["clients"] == row["sampled"]
        assert set(row["said"]) == {"cluster", "loss"} and set(row["said"]["cluster"]) <= {0, 1}
        assert sum(row["weights"]) == pytest.approx(1)
    # All models travel down, one travels up, with the number of the cluster, the loss and the number of examples.
    assert row["megabytes_down"] == 5 * 2 * LINEAR_BYTES / 1e6
    assert row["megabytes_up"] == 5 * (LINEAR_BYTES + 4 + 4 + 8) / 1e6
    last = {}
    for row in result.rows:
        last |= dict(zip(row["clients"], row["said"]["cluster"]))
    sizes = [list(last.values()).count(cluster) for cluster in (0, 1)]
    expected = {"members": sizes, "empty": [c for c in (0, 1) if not sizes[c]], "clients_without": 12 - len(last)}
    assert result.summary["clusters"] == row["clusters"] == expected


def test_data_that_are_not_there():
    with pytest.raises(FileNotFoundError, match="no such file"):
        validate(Config(data="absent/clients.npz"))


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(FileNotFoundError):
        last_state(tmp_path)


def test_a_cohort_in_which_no_groups_can_be_made_is_refused_before_any_work():
    with pytest.raises(ValueError, match=r"cohort_size: found 3; this method needs at least 5 clients in a round"):
        validate(Config(model="linear", method="fedgroup", settings={"groups": 5}, cohort_size=3))
    validate(Config(model="linear", method="fedgroup", settings={"groups": 5}, cohort_size=5))
