"""FC-02: a headline that is not the accuracy of everybody's personal model."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_pers as fp
from fedjax_pers.simulate import records

CLIENTS = 10
TEST_SIZES = (3, 8, 5, 4, 9, 6, 7, 3, 5, 4)


@pytest.fixture(scope="module")
def federation():
    draw = np.random.default_rng(0)

    def rows(k, count):
        labels = np.where(draw.random(count) < 0.5, k, draw.integers(0, CLIENTS, count))
        return {"x": draw.normal(size=(count, 4)).astype(np.float32), "y": labels}

    return fp.data.from_clients(
        {k: {"train": rows(k, 4), "test": rows(k, count)} for k, count in enumerate(TEST_SIZES)}, num_classes=CLIENTS
    )


def linear(federation):
    def init(key):
        return {"body": jnp.zeros((4, CLIENTS)), "head": jnp.zeros(CLIENTS)}

    def apply(variables, batch, key):
        return batch["x"] @ variables["body"] + variables["head"], {}

    return fp.tasks.supervised(init, apply, example=federation.example)


@pytest.fixture(scope="module")
def evaluated(federation):
    algorithm = fp.method("fedper").make(linear(federation), personal="head", lr=0.0)
    first = fp.start(algorithm, federation, 0)
    first = first._replace(rows={"head": 100.0 * jnp.eye(CLIENTS)})  # client k always says class k
    return fp.run(algorithm, first, federation, 2, cohort_size=2)


def test_every_client_is_judged_by_its_own_model(federation, evaluated):
    _, history = evaluated
    _, table = history.evaluations[-1]
    expected = [np.mean(federation.test.client(k)["y"] == k) for k in range(CLIENTS)]
    np.testing.assert_allclose(table.personal["accuracy"], expected, atol=1e-6)
    assert len(set(np.round(expected, 6))) > 3
    assert table.client_ids == tuple(range(CLIENTS))
    assert table.examples.tolist() == list(TEST_SIZES)


def test_the_report_says_how_many_clients_have_taken_part(federation, evaluated):
    state, history = evaluated
    _, table = history.evaluations[-1]
    sampled = {int(k) for k in history.metrics.ids.ravel()}
    assert np.flatnonzero(table.rounds_taken_part).tolist() == sorted(sampled)
    assert 2 <= len(sampled) <= 4
    rows = [{"round": 2, "rejected": [], "skipped": None, "total_megabytes_up": 0.0, "total_megabytes_down": 0.0}]
    config = fp.config.Config(method="fedper", rounds=2)
    summary = records.summary(config, rows, history.traffic, table, None)
    assert (summary["clients"], summary["clients_that_took_part"]) == (CLIENTS, len(sampled))
    assert summary["personal_accuracy"]["clients"] == CLIENTS
    # There is no shared model without a head, so it has no score.
    assert table.common == {} and summary["global_accuracy"] is None


def test_the_score_of_the_shared_model_has_a_name_of_its_own(federation):
    algorithm = fp.method("ditto").make(linear(federation), lr=0.0, personal_lr=0.0)
    first = fp.start(algorithm, federation, 0)
    first = first._replace(
        rows={**first.rows, "own/head": 100.0 * jnp.eye(CLIENTS)},
        shared={**first.shared, "head": 100.0 * jnp.eye(CLIENTS)[7]},
    )
    _, history = fp.run(algorithm, first, federation, 1, cohort_size=2)
    _, table = history.evaluations[-1]
    labels = [federation.test.client(k)["y"] for k in range(CLIENTS)]
    np.testing.assert_allclose(table.personal["accuracy"], [np.mean(y == k) for k, y in enumerate(labels)], atol=1e-6)
    np.testing.assert_allclose(table.common["accuracy"], [np.mean(y == 7) for y in labels], atol=1e-6)
    columns = records.client_columns(federation, table, None)
    assert columns["accuracy"] == table.personal["accuracy"].tolist()
    assert columns["global_accuracy"] == table.common["accuracy"].tolist()
