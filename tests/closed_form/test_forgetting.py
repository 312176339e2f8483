"""Penalties against forgetting and early stopping, against derivatives by hand and recursions in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_pers as fp
from fedjax_pers.base import Context, Parts
from fedjax_pers.batches import split_off, sweep
from fedjax_pers.fisher import fisher_information
from fedjax_pers.keys import fold_name
from fedjax_pers.objectives import distillation, ewc, l2_sp, mean_of_examples
from tests import toys

ALONE = fp.by_role(personal=fp.everything)
KEY = jax.random.key(0)


def softmax(scores):
    odds = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return odds / odds.sum(axis=-1, keepdims=True)


def context_of(cohort, client, received):
    zero = jnp.int32(0)
    return Context(cohort.data, cohort.start[client], cohort.size[client], KEY, KEY, zero, zero, received, cohort.room)


def fisher_of(task, variables, cohort, client=0, **options):
    layout = ALONE(task)
    parts = layout.init(variables)
    return fisher_information(layout, parts, context_of(cohort, client, parts), parts.personal, **options)


# The Fisher information.

SLOPE, XS = 0.7, np.array([[-1.5, 0.3, 2.0, -0.4, 1.1], [0.9, -2.2, 50.0, np.inf, np.nan]])
YS = np.array([[0, 1, 1, 1, 0], [1, 0, 1, 1, 0]])
SIZES = [5, 2]  # what lies behind the second client's two examples are rows of nobody


@pytest.fixture(scope="module")
def logistic():
    """One number ``theta``, and ``p(y = 1 | x) = sigmoid(theta x)``."""
    return fp.tasks.supervised(
        lambda key: {"theta": jnp.float32(SLOPE)},
        lambda variables, batch, key: (variables["theta"] * batch["x"], {}),
        "binary_cross_entropy",
        example=(("x", (), "float32"), ("y", (), "int32")),
    )


@pytest.mark.parametrize("batch_size", [2, 32])
@pytest.mark.parametrize("client", [0, 1])
def test_fisher_information_of_a_logistic_model_of_one_number(logistic, client, batch_size):
    cohort = fp.cohort_of({"x": XS.astype(np.float32), "y": YS.astype(np.int32)}, sizes=SIZES)
    x, y = XS[client, : SIZES[client]], YS[client, : SIZES[client]]
    right = 1 / (1 + np.exp(-SLOPE * x))
    expected = {"predicted": np.mean(x**2 * right * (1 - right)), "observed": np.mean(x**2 * (y - right) ** 2)}
    for labels, value in expected.items():
        found = fisher_of(logistic, logistic.init(KEY), cohort, client, labels=labels, batch_size=batch_size)
        np.testing.assert_allclose(found["theta"], value, rtol=1e-5)


def test_fisher_information_of_a_client_without_examples_is_zero(logistic):
    cohort = fp.cohort_of({"x": XS.astype(np.float32), "y": YS.astype(np.int32)}, sizes=[0, 2])
    assert float(fisher_of(logistic, logistic.init(KEY), cohort)["theta"]) == 0


def test_fisher_information_of_softmax_regression():
    """``F`` of the kernel is ``E x_d^2 p_k (1 - p_k)``, of the bias ``E p_k (1 - p_k)``."""
    task, cohort = toys.softmax_regression(), toys.labelled_clients((7, 4, 10))
    variables = task.init(jax.random.key(3))
    x = np.asarray(cohort.data["x"][20:30], np.float64)
    p = softmax(x @ np.asarray(variables["kernel"], np.float64))
    found = fisher_of(task, variables, cohort, 2, batch_size=4)
    np.testing.assert_allclose(found["bias"], np.mean(p * (1 - p), axis=0), rtol=2e-5)
    np.testing.assert_allclose(found["kernel"], np.einsum("nd,nk->dk", x**2, p * (1 - p)) / 10, rtol=2e-5)


def test_what_has_no_fisher_information():
    sequence = fp.tasks.supervised(
        lambda key: {"w": jnp.zeros((1, 3))},
        lambda variables, batch, key: (batch["x"][..., None] @ variables["w"], {}),
        example=(("x", (5,), "float32"), ("y", (5,), "int32")),
    )
    cohort = fp.cohort_of({"x": np.zeros((1, 2, 5), np.float32), "y": np.zeros((1, 2, 5), np.int32)})
    with pytest.raises(ValueError, match=r"labels of shape \(5,\); the Fisher information needs one label an example"):
        fisher_of(sequence, sequence.init(KEY), cohort)
    with pytest.raises(ValueError, match="EWC needs apply, criterion and num_classes; found none for apply"):
        fp.method("fedavg_ewc").make(toys.quadratic())
    with pytest.raises(ValueError, match="labels: found 'predictd'.* Did you mean 'predicted'"):
        fp.method("fedavg_ewc").make(toys.softmax_regression(), labels="predictd")


# The penalties and their derivatives.


def value_and_slope(objective, task, now, then, batch):
    layout = ALONE(task)
    parts, received = layout.init(now), layout.init(then)

    def value(personal):
        return objective(layout, parts._replace(personal=personal), received, batch, KEY)[0]

    return jax.value_and_grad(value)(parts.personal)


def test_l2_sp_pulls_old_leaves_to_the_start_and_new_ones_to_zero():
    task = toys.softmax_regression()
    now, then = task.init(jax.random.key(1)), task.init(jax.random.key(2))
    now["bias"] = jnp.array([1.0, -2.0, 0.5])
    batch = {"x": jnp.zeros((1, 4)), "y": jnp.zeros(1, jnp.int32), "weight": jnp.ones(1)}
    value, slope = value_and_slope(l2_sp(0.6, 0.4, new="bias"), task, now, then, batch)
    apart = np.asarray(now["kernel"], np.float64) - np.asarray(then["kernel"], np.float64)
    np.testing.assert_allclose(value, 0.3 * (apart**2).sum() + 0.2 * 5.25, rtol=1e-6)
    np.testing.assert_allclose(slope["kernel"], 0.6 * apart, rtol=1e-6)
    np.testing.assert_allclose(slope["bias"], [0.4, -0.8, 0.2], rtol=1e-6)


def test_ewc_weighs_each_number():
    task = toys.softmax_regression()
    now, then = task.init(jax.random.key(1)), task.init(jax.random.key(2))
    batch = {"x": jnp.zeros((1, 4)), "y": jnp.zeros(1, jnp.int32), "weight": jnp.ones(1)}
    weight = np.arange(12, dtype=np.float32).reshape(4, 3)
    value, slope = value_and_slope(ewc(0.6, {"kernel": weight}), task, now, then, batch)
    apart = np.asarray(now["kernel"], np.float64) - np.asarray(then["kernel"], np.float64)
    np.testing.assert_allclose(value, 0.3 * (weight * apart**2).sum(), rtol=1e-6)
    np.testing.assert_allclose(slope["kernel"], 0.6 * weight * apart, rtol=1e-6)
    assert not np.asarray(slope["bias"]).any()


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_distillation_of_outputs(temperature):
    """``d/dz T^2 KL = T (softmax(z / T) - softmax(z^0 / T))``; the last row is padding."""
    task = toys.softmax_regression()
    now, then = task.init(jax.random.key(1)), task.init(jax.random.key(2))
    x = np.random.default_rng(0).normal(size=(4, 4))
    x[3] = 1e30
    batch = {"x": jnp.asarray(x, jnp.float32), "y": jnp.zeros(4, jnp.int32), "weight": jnp.array([1.0, 1.0, 1.0, 0.0])}
    value, slope = value_and_slope(distillation(0.5, temperature), task, now, then, batch)
    scores = [x[:3] @ np.asarray(each["kernel"], np.float64) / temperature for each in (now, then)]
    student, teacher = map(softmax, scores)
    apart = (teacher * np.log(teacher / student)).sum(1)
    np.testing.assert_allclose(value, 0.5 * temperature**2 * apart.mean(), rtol=1e-5)
    rows = 0.5 * temperature * (student - teacher) / 3
    np.testing.assert_allclose(slope["kernel"], x[:3].T @ rows, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(slope["bias"], rows.sum(0), rtol=1e-4, atol=1e-6)


def test_positions_of_an_example_count_together_and_padding_not_at_all():
    batch = {"weight": jnp.array([1.0, 1.0, 0.0])}
    assert float(mean_of_examples(jnp.array([[1.0, 3.0], [5.0, 7.0], [jnp.nan, 9.0]]), batch)) == 4.0
    assert float(mean_of_examples(jnp.array([jnp.nan]), {"weight": jnp.zeros(1)})) == 0.0


def test_distillation_refuses_outputs_that_are_no_scores_of_classes(logistic):
    batch = {"x": jnp.ones(2), "y": jnp.zeros(2, jnp.int32), "weight": jnp.ones(2)}
    with pytest.raises(ValueError, match=r"found outputs \(2,\); distillation needs a score for each of 2 classes"):
        value_and_slope(distillation(1.0), logistic, logistic.init(KEY), logistic.init(KEY), batch)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("fedavg_l2sp", {"strength": -1.0}, "strength: found -1; allowed is at least 0"),
        ("fedavg_l2sp", {"new_strength": 1.0}, "new_strength: found 1.0, but new selects nothing"),
        ("fedavg_ewc", {"strength": -1.0}, "strength: found -1; allowed is at least 0"),
        ("fedavg_kd", {"temperature": 0.0}, "temperature: found 0.0; allowed is a finite number above 0"),
        ("fedavg_ft_early", {"holdout": 1.5}, "holdout: found 1.5; allowed is 0 .. 1"),
        ("fedavg_ft_early", {"tune_epochs": -1}, "epochs: found -1; allowed is a whole number of at least 0"),
    ],
)
def test_settings_that_fine_tuning_cannot_have(name, settings, message):
    with pytest.raises(ValueError, match=message):
        fp.method(name).make(toys.softmax_regression(), **settings)


# Whole fine-tunings.


def tuned(name, task, start, cohort, **settings):
    """The models of all clients after fine-tuning from a start."""
    algorithm = fp.method(name).make(task, **settings)
    count = cohort.ids.shape[0]
    state = algorithm.init(start, KEY, num_clients=count)
    return jax.jit(algorithm.personalize)(state, cohort, KEY)


def test_l2_sp_ends_between_the_start_and_the_clients_own_optimum():
    """The minimum of ``h/2 (x - a)^2 + s/2 (x - w)^2`` is ``(h a + s w) / (h + s)``, here with w = 0.5 and s = 2."""
    start = {"w": jnp.float32(0.5)}
    found = tuned("fedavg_l2sp", toys.quadratic(), start, toys.clients(), tune_epochs=200, strength=2.0)
    np.testing.assert_allclose(found["w"], [(0 + 2 * 0.5) / 3, (4 + 2 * 0.5) / 6], rtol=1e-6)


@pytest.mark.parametrize("labels", ["predicted", "observed"])
def test_steps_of_fine_tuning_with_ewc_and_distillation(labels):
    """Three steps on all of a client's examples, in float64; ``F`` and the teacher are of the start."""
    task, cohort, size, rate = toys.softmax_regression(), toys.labelled_clients((7, 7)), 7, 0.2
    start = task.init(jax.random.key(4))
    settings = {"tune_lr": rate, "tune_epochs": 3, "batch_size": size}
    with_ewc = tuned("fedavg_ewc", task, start, cohort, strength=5.0, labels=labels, **settings)
    with_kd = tuned("fedavg_kd", task, start, cohort, strength=1.5, temperature=2.0, **settings)
    for client in range(2):
        x = np.asarray(cohort.data["x"][client * size : (client + 1) * size], np.float64)
        truth = np.eye(3)[np.asarray(cohort.data["y"][client * size : (client + 1) * size])]
        first = np.asarray(start["kernel"], np.float64)
        p = softmax(x @ first)
        squares = p * (1 - p) if labels == "predicted" else (p - truth) ** 2
        fisher = x.T**2 @ squares / size, squares.mean(0)
        for found, ewc_strength, kd_strength in ((with_ewc, 5.0, 0.0), (with_kd, 0.0, 1.5)):
            kernel, bias = first, np.zeros(3)
            for _ in range(3):
                scores = x @ kernel + bias
                slope = softmax(scores) - truth + kd_strength * 2 * (softmax(scores / 2) - softmax(x @ first / 2))
                pull = ewc_strength * fisher[0] * (kernel - first), ewc_strength * fisher[1] * bias
                kernel, bias = (
                    kernel - rate * (x.T @ slope / size + pull[0]),
                    bias - rate * (slope.mean(0) + pull[1]),
                )
            np.testing.assert_allclose(found["kernel"][client], kernel, rtol=2e-5, atol=2e-6)
            np.testing.assert_allclose(found["bias"][client], bias, rtol=2e-5, atol=2e-6)


# Early stopping.

EPOCHS, RATE, SHARE = 6, 0.15, 0.4


def held_back(cohort, client):
    """Which examples a client trains on, and which it holds back, ``bool [examples]`` each."""
    first, size = int(cohort.start[client]), int(cohort.size[client])
    numbered = context_of(cohort, client, Parts({}, {}, {}))._replace(
        data={"number": jnp.arange(len(cohort.data["a"])) - first}, common=fold_name(KEY, "common")
    )

    def mark(marks, batch):
        return marks.at[batch["number"]].add(batch["weight"])

    return tuple(
        np.asarray(sweep(mark, jnp.zeros(size), part, batch_size=4)) == 1 for part in split_off(numbered, SHARE)
    )


@pytest.fixture(scope="module")
def values():
    """Ten clients of 1 to 10 examples: somewhere the held back ones lie behind the start, near it, and far ahead."""
    return np.random.default_rng(2).normal(1.0, 1.5, (10, 10)), np.arange(1, 11)


def test_a_client_keeps_its_best_epoch(values):
    a, sizes = values
    cohort = toys.clients({"a": a, "h": np.ones_like(a)}, sizes=sizes.tolist())
    start = {"w": jnp.float32(0.25)}
    settings = {"tune_lr": RATE, "tune_epochs": EPOCHS, "holdout": SHARE, "batch_size": 10}
    found = np.asarray(tuned("fedavg_ft_early", toys.quadratic(), start, cohort, **settings)["w"])
    kept = []
    for client, size in enumerate(sizes):
        rest, back = held_back(cohort, client)
        assert (rest ^ back).all()
        assert back.sum() == (0 if size == 1 else max(1, int(np.floor(np.float32(SHARE) * size))))
        models = 0.25 + (1 - (1 - RATE) ** np.arange(EPOCHS + 1)) * (a[client, :size][rest].mean() - 0.25)
        losses = [0.5 * np.mean((model - a[client, :size][back]) ** 2) if back.any() else 0 for model in models]
        kept.append(int(np.argmin(losses)))
        np.testing.assert_allclose(found[client], models[kept[-1]], rtol=1e-5)
    assert kept[0] == 0 and {0, EPOCHS} < set(kept), f"the examples show nothing: epochs kept are {kept}"
    assert (found[np.array(kept) == 0] == np.float32(0.25)).all()  # to the bit


def test_an_epoch_whose_loss_is_not_finite_is_not_kept():
    cohort = toys.clients({"a": [[1.0] * 5], "h": [[1.0] * 5]})
    start = {"w": jnp.float32(0.25)}
    found = tuned("fedavg_ft_early", toys.quadratic(), start, cohort, tune_lr=1e30, tune_epochs=4, batch_size=5)
    assert np.asarray(found["w"]).tolist() == [0.25]
