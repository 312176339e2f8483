"""Runs: blocks, resuming, sampling, evaluation of seen and unseen clients, compilations, and what is refused."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import fedjax_pers as fp
from fedjax_pers.simulate.compilations import compilations
from fedjax_pers.simulate.run import blocks
from fedjax_pers.testing import assert_bitwise


@pytest.fixture(scope="module")
def federation():
    rng = np.random.default_rng(0)

    def split(rows):
        return {"x": rng.normal(size=(rows, 3)).astype(np.float32), "y": rng.integers(0, 2, rows)}

    clients = {f"c{i}": {"train": split(n), "test": split(4)} for i, n in enumerate([5, 0, 12, 7, 1, 9, 6, 8])}
    return fp.data.from_clients(clients, name="random", num_classes=2)


@pytest.fixture(scope="module")
def task(federation):
    return fp.tasks.from_model(federation, "linear")


@pytest.fixture(scope="module")
def fedper(task):
    return fp.method("fedper").make(task, personal=fp.parse("bias"), batch_size=4)


@pytest.fixture(scope="module")
def finished(fedper, federation):
    return fp.run(fedper, None, federation, 6, key=3, cohort_size=3, evaluate_every=2)


def test_a_run_goes_on_from_any_state_to_the_same_bytes(fedper, federation, finished):
    state, first = fp.run(fedper, None, federation, 3, key=3, cohort_size=3, evaluate_every=2)
    kept = jax.tree.map(np.array, state)
    after, second = fp.run(fedper, state, federation, 6, key=3, cohort_size=3, evaluate_every=2)
    assert_bitwise(after, finished[0], "six rounds, interrupted after three")
    together = jax.tree.map(lambda *x: np.concatenate(x), first.metrics, second.metrics)
    assert_bitwise(together, finished[1].metrics, "their metrics")
    assert_bitwise(jax.tree.map(np.array, state), kept, "the state that was passed in")


def test_the_length_of_blocks_does_not_matter(fedper, federation, finished):
    state, history = fp.run(fedper, None, federation, 6, key=3, cohort_size=3, evaluate_every=0)
    assert_bitwise(state, finished[0], "evaluated never against every second round")
    assert history.evaluations == ()


def test_blocks_are_cut_at_whole_multiples():
    assert list(blocks(0, 7, 3, 3)) == [(0, 3, True), (3, 3, True), (6, 1, True)]
    assert list(blocks(4, 7, 3, 3)) == [(4, 2, True), (6, 1, True)]
    assert list(blocks(0, 4, 10, None)) == [(0, 4, True)]
    assert list(blocks(0, 4, 10, 0)) == [(0, 4, False)]
    assert list(blocks(5, 5, 10, 0)) == []


def test_evaluations_and_metrics_have_the_right_shape(federation, finished):
    _, history = finished
    assert [done for done, _ in history.evaluations] == [2, 4, 6]
    assert history.metrics.loss.shape == (6, 3)
    for _, table in history.evaluations:
        assert table.client_ids == federation.client_ids and (table.examples == 4).all()
        assert all(np.isfinite(values).all() for values in table.personal.values())
        assert table.common == {}  # FedPer has no global model


def test_samples_are_distinct_vary_and_depend_on_the_seed(fedper, federation, finished):
    ids = finished[1].metrics.ids
    assert all(len(set(row)) == 3 and (row == np.sort(row)).all() for row in ids)
    assert len({tuple(row) for row in ids}) > 1
    _, other = fp.run(fedper, None, federation, 6, key=4, cohort_size=3, evaluate_every=0)
    assert not np.array_equal(other.metrics.ids, ids)


def test_each_client_is_sampled_equally_often():
    sample = jax.jit(jax.vmap(lambda round: fp.uniform(3)(jax.random.key(0), round, 8)))
    counts = np.bincount(np.asarray(sample(np.arange(4000))).ravel(), minlength=8)
    # 1500 expected each; a count is hypergeometric per round, standard deviation sqrt(4000 * 3/8 * 5/8) = 31
    assert (abs(counts - 1500) < 4 * 31).all()


def test_a_second_value_seed_and_run_compile_nothing(task, federation):
    make = fp.method("fedper").make
    fp.run(make(task, lr=0.1, batch_size=4), None, federation, 2, key=0, cohort_size=3)
    before = compilations()
    for lr, seed in ((0.2, 0), (0.05, 1), (0.1, 2)):
        fp.run(make(task, lr=lr, batch_size=4), None, federation, 2, key=seed, cohort_size=3)
    assert compilations() == before


def test_unseen_clients_before_and_after_they_adapt(task, federation):
    whole = federation.with_unseen(["c2", "c5"])
    fedper = fp.method("fedper").make(task, personal=fp.parse("bias"), batch_size=4)
    state, _ = fp.run(fedper, None, whole, 4, key=0, evaluate_every=0)
    before, after = (fp.evaluate_clients(fedper, state, whole.unseen, adapt=adapt) for adapt in (False, True))
    assert before.client_ids == ("c2", "c5") and before.rounds_taken_part.tolist() == [0, 0]
    kernel, bias = (np.asarray(x, np.float64) for x in (*state.shared.values(), *state.fresh.values()))
    for place, rows in enumerate((whole.unseen.test.client(0), whole.unseen.test.client(1))):
        right = np.argmax(rows["x"] @ kernel + bias, axis=1) == rows["y"]
        assert before.personal["accuracy"][place] == pytest.approx(right.mean())
    assert not np.array_equal(before.personal["loss"], after.personal["loss"])


def test_fine_tuning_is_for_everyone_and_is_not_written_back(task, federation):
    tuned = fp.method("fedavg_ft").make(task, batch_size=4)
    state, history = fp.run(tuned, None, federation, 2, key=0)
    table = history.evaluations[-1][1]
    trained = np.asarray(federation.sizes("train")) > 0
    assert (table.personal["loss"] != table.common["loss"])[trained].all()
    assert (table.personal["loss"] == table.common["loss"])[~trained].all()  # nothing to tune on: the global model
    plain, _ = fp.run(fp.method("fedavg").make(task, batch_size=4), None, federation, 2, key=0)
    assert_bitwise(state.shared, plain.shared, "FedAvg with and without fine-tuning")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"cohort_size": 9}, r"cohort_size: found 9; allowed are 1 \.\. 8"),
        ({"cohort_size": 0}, "cohort_size: found 0"),
        ({"evaluate_every": -1}, "evaluate_every: found -1"),
        ({"split": "tset"}, "tset.*test"),
        ({"cohort_size": 3, "sampler": fp.everyone}, "both were given"),
    ],
)
def test_impossible_runs_are_refused(fedper, federation, arguments, words):
    done = []
    with pytest.raises(ValueError, match=words):
        fp.run(fedper, None, federation, 2, key=0, on_block=done.append, **arguments)
    assert not done  # before any training


def test_a_method_that_needs_everyone_says_so(task, federation):
    with pytest.raises(ValueError, match="cohort_size: found 3; this method needs everyone"):
        fp.run(fp.method("l2gd").make(task), None, federation, 2, key=0, cohort_size=3)


def test_a_task_and_a_federation_that_do_not_fit(federation):
    other = fp.tasks.from_model((("x", (4,), "float32"), ("y", (), "int32")), "linear", num_classes=2)
    with pytest.raises(ValueError, match=r"field 'x': an example of random is \(\(3,\), .* made for \(\(4,\)"):
        fp.start(fp.method("fedavg").make(other), federation)
    few = fp.tasks.from_model((("x", (3,), "float32"), ("y", (), "int32")), "linear", num_classes=1)
    with pytest.raises(ValueError, match="num_classes: random has 2 classes; the task has 1"):
        fp.start(fp.method("fedavg").make(few), federation)


def test_a_state_of_another_federation_is_refused(fedper, federation, finished):
    with pytest.raises(ValueError, match="state: it has rows for 8 clients, the federation has 6"):
        fp.run(fedper, finished[0], federation.with_unseen(["c2", "c5"]), 7, key=3)
