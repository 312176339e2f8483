"""FC-09: one broken client poisons everyone."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_pers as fp
from fedjax_pers.layouts import replace
from fedjax_pers.simulate import RejectedUploads
from tests import toys

CLIENTS, BROKEN = 100, 17


def break_upload(layout, parts, context):
    """After training: one entry of one leaf becomes the client's first feature, if that is marked as broken."""
    mark = context.data["mark"][context.start]
    kernel = parts.shared["kernel"]
    moved = replace(parts, {"kernel": kernel.at[0, 1].add(jnp.where(mark > 0, jnp.log(1 - mark), 0.0))})
    return moved, fp.Report(jnp.float32(0), jnp.int32(1), jnp.array(True))


def federation_of(marks):
    """``mark`` 0: fine, 1: log(0), which is -inf, 2: log(-1), which is NaN."""
    data = toys.labelled((3,) * CLIENTS)
    rows = {
        k: {"train": {"x": data["x"][k], "y": data["y"][k], "mark": np.full(3, marks.get(k, 0), np.float32)}}
        for k in range(CLIENTS)
    }
    return fp.data.from_clients(rows, num_classes=toys.CLASSES)


def init(key):
    return {"kernel": jnp.zeros((toys.FEATURES, toys.CLASSES)), "bias": jnp.zeros(toys.CLASSES)}


def apply(variables, batch, key):
    return batch["x"] @ variables["kernel"] + variables["bias"], {}


@pytest.fixture(scope="module")
def algorithm():
    task = fp.tasks.supervised(init, apply, example=federation_of({}).example)
    client = fp.phases(fp.train(0.1, batch_size=3), break_upload)
    return fp.compose(task, layout=fp.by_role(personal="bias"), client=client)


@pytest.fixture(scope="module")
def healthy(algorithm):
    """The state after a round without client 17."""
    state = fp.start(algorithm, federation_of({}), 0)
    cohort = toys.only(federation_of({}).cohort(), [k for k in range(CLIENTS) if k != BROKEN])
    return algorithm.step(state, cohort, 0)[0]


@pytest.mark.parametrize("mark", [1, 2], ids=["infinite", "nan"])
def test_the_others_are_aggregated_and_the_broken_one_is_named(algorithm, healthy, mark):
    state, history, rows = toys.recorded(algorithm, federation_of({BROKEN: mark}), 1, evaluate_every=0)
    assert np.isfinite(state.shared["kernel"]).all()
    np.testing.assert_allclose(state.shared["kernel"], healthy.shared["kernel"], atol=1e-6)
    np.testing.assert_allclose(state.rows["bias"], healthy.rows["bias"], atol=1e-6)
    assert np.array_equal(state.rows["bias"][BROKEN], np.zeros(toys.CLASSES))  # as before the round
    assert (np.asarray(state.rows["bias"])[[k for k in range(CLIENTS) if k != BROKEN]] != 0).any(axis=1).all()
    assert state.seen[BROKEN] == 0

    assert np.flatnonzero(history.metrics.rejected[0]).tolist() == [BROKEN]
    assert history.metrics.weight[0, BROKEN] == 0 and np.isnan(history.metrics.loss[0, BROKEN])
    row = rows[0]
    assert row["rejected"] == [BROKEN] and row["skipped"] is None
    others = np.delete(history.metrics.loss[0], BROKEN)
    assert row["train_loss_unweighted_mean"] == pytest.approx(others.mean(), rel=1e-6)


def test_all_broken(algorithm):
    federation = federation_of({k: 1 + k % 2 for k in range(CLIENTS)})
    first = fp.start(algorithm, federation, 0)
    state, history, rows = toys.recorded(algorithm, federation, 1, evaluate_every=0)
    toys.same_bits((state.shared, state.rows), (first.shared, first.rows))
    assert history.metrics.rejected.all() and int(state.round) == 1
    assert rows[0]["skipped"] == "no upload was accepted: 100 sent something not finite"


def test_a_run_can_be_told_to_stop(algorithm):
    with pytest.raises(RejectedUploads, match=r"round 1: uploads of \[17\] were not finite"):
        fp.run(algorithm, None, federation_of({BROKEN: 2}), 1, evaluate_every=0, stop_on_rejected=True)


def test_weight_zero_does_not_multiply_a_nan():
    server = fp.mean().init({"w": jnp.zeros(2)}, frozenset({"w"}), 3)
    uploads = {"w": jnp.array([[1.0, 2.0], [jnp.nan, 0.0], [3.0, 6.0]])}
    for weights in ([1.0, 0.0, 1.0], [1.0, 5.0, 1.0]):
        after, info = fp.aggregate(fp.mean(), server, uploads, weights)
        assert after.shared["w"].tolist() == [2.0, 4.0]
        assert info["rejected"].tolist() == [False, True, False]
