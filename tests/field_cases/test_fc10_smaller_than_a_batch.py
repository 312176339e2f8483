"""FC-10: clients smaller than a batch, and clients without test examples."""

from __future__ import annotations

import numpy as np
import pytest

import fedjax_pers as fp
from fedjax_pers.evaluation import summarize
from tests import toys

TRAIN, TEST = (0, 1, 3, 32, 33), (0, 1, 1, 8, 8)


@pytest.mark.parametrize(
    ("drop_last", "steps"), [(False, [0, 1, 1, 1, 2]), (True, [0, 0, 0, 1, 1])], ids=["short batches", "dropped"]
)
def test_the_run_completes_and_counts_them(drop_last, steps):
    federation = toys.federation(TRAIN, TEST)
    task = toys.softmax_regression()
    algorithm = fp.method("fedper").make(task, personal="bias", batch_size=32, drop_last=drop_last)
    first = fp.start(algorithm, federation, 0)
    state, history, rows = toys.recorded(algorithm, federation, 2, evaluate_every=2)
    assert history.metrics.steps.tolist() == [steps] * 2
    assert all(np.isfinite(x).all() for x in (state.shared["kernel"], state.rows["bias"]))

    trained = np.array(steps) > 0
    weights = np.where(trained, TRAIN, 0)
    np.testing.assert_allclose(history.metrics.weight, np.tile(weights / weights.sum(), (2, 1)), rtol=1e-6)
    assert history.metrics.empty.tolist() == [(~trained).tolist()] * 2
    assert state.seen.tolist() == np.where(trained, 2, 0).tolist()
    assert rows[0]["empty"] == np.flatnonzero(~trained).tolist() and rows[0]["rejected"] == []
    assert np.isfinite(rows[0]["train_loss_weighted_mean"]) and np.isfinite(rows[0]["train_loss_unweighted_mean"])
    kept = (np.asarray(state.rows["bias"]) == np.asarray(first.rows["bias"])).all(axis=1)
    assert kept.tolist() == (~trained).tolist()

    _, table = history.evaluations[-1]
    assert np.isnan(table.personal["accuracy"]).tolist() == [True, False, False, False, False]
    numbers = summarize(table.personal["accuracy"], table.examples)
    assert (numbers["clients"], numbers["clients_without_test"]) == (4, 1)
    scores = table.personal["accuracy"][1:]
    assert numbers["unweighted_mean"] == pytest.approx(scores.mean())
    assert numbers["weighted_mean"] == pytest.approx((scores * TEST[1:]).sum() / sum(TEST))
    assert rows[-1]["personal_accuracy_weighted_mean"] == pytest.approx(numbers["weighted_mean"])


def test_a_short_batch_is_the_mean_over_the_examples_there_are():
    """Client 2 has three examples: its step of the personal bias is that of three examples, not of 32."""
    federation = toys.federation(TRAIN)
    algorithm = fp.method("fedper").make(toys.softmax_regression(), personal="bias", batch_size=32, drop_last=False)
    first = fp.start(algorithm, federation, 0)
    state, _ = fp.run(algorithm, None, federation, 1, evaluate_every=0)
    rows = federation.train.client(2)
    scores = rows["x"] @ np.asarray(first.shared["kernel"], np.float64)
    odds = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    expected = -0.1 * (odds - np.eye(toys.CLASSES)[rows["y"]]).mean(axis=0)
    np.testing.assert_allclose(state.rows["bias"][2], expected, atol=1e-6)
