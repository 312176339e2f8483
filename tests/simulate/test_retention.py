"""What clients' models have kept and gained, counted by hand."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_pers as fp
from fedjax_pers.config import Config
from fedjax_pers.simulate.compare import alone
from fedjax_pers.simulate.study import run_study
from tests import toys

TEST_SIZES = (3, 8, 0, 4)
CLASSES, FEATURES = len(TEST_SIZES), 2


@pytest.fixture(scope="module")
def federation():
    draw = np.random.default_rng(0)

    def rows(count):
        return {"x": draw.normal(size=(count, FEATURES)).astype(np.float32), "y": draw.integers(0, CLASSES, count)}

    clients = {k: {"train": rows(5), "test": rows(count)} for k, count in enumerate(TEST_SIZES)}
    return fp.data.from_clients(clients, num_classes=CLASSES)


@pytest.fixture(scope="module")
def task(federation):
    def init(key):
        return {"kernel": jnp.zeros((FEATURES, CLASSES)), "bias": jnp.zeros(CLASSES)}

    def apply(variables, batch, key):
        return batch["x"] @ variables["kernel"] + variables["bias"], {}

    return fp.tasks.supervised(init, apply, example=federation.example)


@pytest.fixture(scope="module")
def opinionated(federation, task):
    """Ditto whose client k always says class k, and whose global model always says class 1."""
    algorithm = fp.method("ditto").make(task)
    state = fp.start(algorithm, federation, 0)
    state = state._replace(
        rows={**state.rows, "own/bias": 100.0 * jnp.eye(CLASSES)},
        shared={**state.shared, "bias": 100.0 * jnp.eye(CLASSES)[1]},
    )
    return algorithm, state


def test_models_are_judged_on_everybodys_examples_and_on_their_own(federation, opinionated):
    found = fp.retention(*opinionated, federation)
    everybody = federation.test.data["y"]
    pooled = np.array([np.mean(everybody == k) for k in range(CLASSES)])
    assert (found.examples, found.client_ids, found.against) == (15, (0, 1, 2, 3), "the global model")
    np.testing.assert_allclose(found.pooled["accuracy"], pooled, atol=1e-6)
    np.testing.assert_allclose(found.retained["accuracy"], pooled - pooled[1], atol=1e-6)
    assert found.retained["accuracy"][1] == 0 and len(set(pooled)) > 2
    for k in (0, 1, 3):
        own = federation.test.client(k)["y"]
        assert found.gain["accuracy"][k] == pytest.approx(np.mean(own == k) - np.mean(own == 1), abs=1e-6)
    assert np.isnan(found.gain["accuracy"][2])  # it has no examples of its own to judge on, and is judged on the others


def test_more_examples_than_asked_for_are_drawn_without_replacement(federation, opinionated):
    found = fp.retention(*opinionated, federation, most=6)
    # Each example is one of four classes, of which each model always says one.
    assert found.examples == 6
    assert found.pooled["accuracy"].sum() == pytest.approx(1, abs=1e-6)
    counts = np.round(found.pooled["accuracy"] * 6)
    np.testing.assert_allclose(found.pooled["accuracy"] * 6, counts, atol=1e-5)
    assert (counts <= np.bincount(federation.test.data["y"], minlength=CLASSES)).all()
    again, other = (fp.retention(*opinionated, federation, key=key, most=6) for key in (0, 3))
    assert again.pooled["accuracy"].tolist() == found.pooled["accuracy"].tolist()
    assert other.pooled["accuracy"].tolist() != found.pooled["accuracy"].tolist()


def test_what_fine_tuning_forgets_and_gains(federation, task):
    """Three steps on all of a client's examples, in float64."""
    algorithm = fp.method("fedavg_ft").make(task, tune_lr=2.0, tune_epochs=3, batch_size=5)
    kernel = np.random.default_rng(3).normal(size=(FEATURES, CLASSES))
    state = fp.start(algorithm, federation, 0)
    state = state._replace(shared={**state.shared, "kernel": jnp.asarray(kernel, jnp.float32)})
    found = fp.retention(algorithm, state, federation)

    def accuracy(model, rows):
        return np.mean((rows["x"] @ model[0] + model[1]).argmax(1) == rows["y"])

    before, everybody = (kernel, np.zeros(CLASSES)), federation.test.data
    for k in range(CLASSES):
        rows, (w, b) = federation.train.client(k), before
        for _ in range(3):
            odds = np.exp(rows["x"] @ w + b)
            slope = (odds / odds.sum(1, keepdims=True) - np.eye(CLASSES)[rows["y"]]) / 5
            w, b = w - 2.0 * rows["x"].T @ slope, b - 2.0 * slope.sum(0)
        assert found.pooled["accuracy"][k] == pytest.approx(accuracy((w, b), everybody), abs=1e-6)
        expected = accuracy((w, b), everybody) - accuracy(before, everybody)
        assert found.retained["accuracy"][k] == pytest.approx(expected, abs=1e-6)
        if TEST_SIZES[k]:
            own = federation.test.client(k)
            expected = accuracy((w, b), own) - accuracy(before, own)
            assert found.gain["accuracy"][k] == pytest.approx(expected, abs=1e-6)


def test_a_method_without_a_global_model_is_compared_with_its_models_before_they_adapt(federation, task):
    layout = fp.by_role(personal="bias")
    plain = fp.compose(task, layout=layout)
    state, _ = fp.run(plain, None, federation, 2)
    with pytest.raises(ValueError, match="neither a global model nor a model before a client adapts"):
        fp.retention(plain, state, federation)
    found = fp.retention(fp.with_adaptation(plain, fp.train(0.5, epochs=0)), state, federation)
    assert found.against == "the client's model before it adapted"
    assert not found.retained["loss"].any() and np.nansum(np.abs(found.gain["loss"])) == 0
    tuned = fp.retention(fp.compose(task, layout=layout, adapt=fp.train(0.5, epochs=5)), state, federation)
    np.testing.assert_allclose(tuned.retained["loss"], tuned.pooled["loss"] - found.pooled["loss"], atol=1e-6)
    assert (tuned.retained["loss"] != 0).all()


def test_a_cluster_is_chosen_before_there_is_anything_to_forget(federation, task):
    """IFCA's clients choose by their training examples: what fine-tuning is compared with is that choice."""
    ifca = fp.method("ifca").make(task, clusters=2)
    state = fp.start(ifca, federation, 0)
    model = {"kernel": np.zeros((2, FEATURES, CLASSES)), "bias": np.array([[9.0, 0, 0, 0], [0, 0, 0.1, 0]])}
    state = state._replace(shared={name: jnp.asarray(x, jnp.float32) for name, x in model.items()})
    for plain in (ifca, fp.compose(task, aggregator=fp.aggregators.hypotheses(2))):
        found = fp.retention(fp.with_adaptation(plain, fp.train(0.1, epochs=0)), state, federation)
        assert not found.retained["loss"].any() and np.nansum(np.abs(found.gain["loss"])) == 0
        everybody = np.mean(federation.test.data["y"] == 2)  # nobody takes the first cluster, which is sure of itself
        np.testing.assert_allclose(found.pooled["accuracy"], everybody, atol=1e-6)
    moved = fp.retention(fp.with_adaptation(ifca, fp.train(0.5, epochs=3)), state, federation)
    assert (moved.retained["loss"] != 0).all()


def test_examples_and_rows_on_the_host_give_the_same_numbers(federation, opinionated):
    algorithm, state = opinionated
    expected = fp.retention(algorithm, state, federation)
    found = fp.retention(algorithm, state, federation, group=3, data_on="host")
    for table in ("pooled", "retained", "gain"):
        np.testing.assert_allclose(getattr(found, table)["loss"], getattr(expected, table)["loss"], rtol=1e-6)


def test_what_cannot_be_judged(federation, opinionated):
    algorithm, state = opinionated
    with pytest.raises(ValueError, match="split: found 'validation', which has no rows in .*; retention is judged"):
        fp.retention(algorithm, state, federation, "validation")
    with pytest.raises(ValueError, match="most: found 0; allowed is a whole number of at least 1"):
        fp.retention(algorithm, state, federation, most=0)
    untested = toys.federation((4, 3))
    with pytest.raises(ValueError, match="split: found 'test', which has no rows"):
        fp.retention(algorithm, state, untested)


def test_a_study_writes_them_down_where_they_are_asked_for(tmp_path):
    config = Config(model="linear", method="fedavg_ft", rounds=1, unseen=0.2, settings={"tune_lr": 1.0})
    plain = run_study(config, tmp_path / "plain")
    assert plain.summary["retention"] is None
    asked = Config(**{**config.to_dict(), "retention": 100})
    result = run_study(asked, tmp_path / "asked")
    added = [name for name in result.clients if name not in plain.clients]
    assert added == [f"{what}_{name}" for what in ("pooled", "retention", "gain") for name in ("accuracy", "loss")]
    assert {name: result.clients[name] for name in plain.clients}.__repr__() == plain.clients.__repr__()
    trained = np.array(result.clients["unseen"]) == 0
    for name in added:
        assert np.isfinite(np.array(result.clients[name])[trained]).all()
        assert np.isnan(np.array(result.clients[name])[~trained]).all()
    kept = result.summary["retention"]
    assert (kept["against"], kept["pooled_examples"]) == ("the global model", 100)
    for what, column in (("accuracy", "retention_accuracy"), ("local_gain", "gain_accuracy")):
        values = np.array(result.clients[column])[trained]
        assert kept[what]["unweighted_mean"] == pytest.approx(values.mean())
        assert (kept[what]["worst"], kept[what]["clients"]) == (pytest.approx(values.min()), trained.sum())
    gain, accuracy = (np.array(result.clients[name])[trained] for name in ("gain_accuracy", "accuracy"))
    np.testing.assert_allclose(gain, accuracy - np.array(result.clients["global_accuracy"])[trained], atol=1e-7)
    row = alone("fedavg_ft", result).rows[0]
    assert row["retention"][0] == kept["accuracy"]["unweighted_mean"]
    assert row["local_gain"][0] == kept["local_gain"]["unweighted_mean"]
    assert "retention" not in alone("fedavg_ft", plain).rows[0]
