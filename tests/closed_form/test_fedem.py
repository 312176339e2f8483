"""FedEM against EM worked out in float64, on densities and on classes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_pers as fp
from tests import toys

GAUSSIANS = {"x": [[-2.0, -1.5, -2.5, 2.0], [2.0, 1.5, 2.5, -2.0]]}
DENSITY = toys.plain_task(lambda v, batch: 0.5 * (batch["x"] - v["mu"]) ** 2, mu=0.0)
"""Normal densities of variance 1, up to a constant that cancels in responsibilities."""


def responsibilities(log_likelihoods, proportions):
    """``[examples, components]`` in float64."""
    odds = np.exp(log_likelihoods) * proportions
    return odds / odds.sum(axis=1, keepdims=True)


def densities(examples, means):
    return -0.5 * (np.asarray(examples)[:, None] - np.asarray(means)) ** 2


def with_means(algorithm, means):
    state = toys.start(algorithm, 2)
    return state._replace(shared={f"experts/{k}/mu": jnp.float32(mean) for k, mean in enumerate(means)})


def test_one_step_to_the_minimum_of_two_gaussians():
    """The server averages the clients' own minimisers, which is not the M-step of all their examples together."""
    algorithm = fp.method("fedem").make(DENSITY, components=2, lr=1.0, steps=400, batch_size=4)
    state, _ = jax.jit(algorithm.step)(with_means(algorithm, [-1, 1]), toys.clients(GAUSSIANS), jax.random.key(0))
    np.testing.assert_allclose(state.rows["gate/weights"][0], [0.7364703, 0.2635297], atol=2e-7)
    np.testing.assert_allclose(state.rows["gate/weights"][1], [0.2635297, 0.7364703], atol=2e-7)
    np.testing.assert_allclose([state.shared[f"experts/{k}/mu"] for k in range(2)], [-1.8641000, 1.8641000], atol=2e-6)


def test_responsibilities_are_those_of_each_example_in_every_epoch_and_order():
    """Two epochs of single examples, whose order is drawn: a mean that is linear in what each example moved."""
    lr = 1e-3
    algorithm = fp.method("fedem").make(DENSITY, components=2, lr=lr, epochs=2, batch_size=1)
    state, _ = jax.jit(algorithm.step)(with_means(algorithm, [-1, 1]), toys.clients(GAUSSIANS), jax.random.key(0))
    moves = []
    for examples in GAUSSIANS["x"]:
        q = responsibilities(densities(examples, [-1, 1]), 0.5)
        moves.append(2 * lr * (q * (np.array(examples)[:, None] - [-1, 1])).sum(axis=0))
    found = [float(state.shared[f"experts/{k}/mu"]) for k in range(2)]
    np.testing.assert_allclose(found, np.array([-1, 1]) + np.mean(moves, axis=0), atol=3e-5)  # up to lr squared


def test_the_likelihood_of_all_examples_never_decreases():
    algorithm = fp.method("fedem").make(DENSITY, components=3, lr=0.2, steps=1, batch_size=4)
    state, cohort, step = with_means(algorithm, [-0.3, 0.1, 0.5]), toys.clients(GAUSSIANS), jax.jit(algorithm.step)
    likelihoods = []
    for _ in range(40):
        means = [float(state.shared[f"experts/{k}/mu"]) for k in range(3)]
        rows = np.asarray(state.rows["gate/weights"], np.float64)
        each = [
            np.log(np.exp(densities(x, means)) @ proportions).sum()
            for x, proportions in zip(GAUSSIANS["x"], rows, strict=True)
        ]
        likelihoods.append(sum(each))
        state, _ = step(state, cohort, jax.random.key(0))
    assert (np.diff(likelihoods) > -1e-6).all()
    assert likelihoods[-1] > likelihoods[0] + 1


@pytest.fixture(scope="module")
def classes():
    """Three components on classes, with proportions of their own for three clients."""
    algorithm = fp.method("fedem").make(toys.softmax_regression(), lr=0.3, steps=1, batch_size=8, newcomer_epochs=4)
    state = toys.start(algorithm, 3)
    rows = jnp.array([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1], [1.0, 0.0, 0.0]], jnp.float32)
    return algorithm, state._replace(rows={"gate/weights": rows}), toys.labelled_clients((8, 5, 6))


def examples_of(cohort, client):
    first, size = int(cohort.start[client]), int(cohort.size[client])
    rows = slice(first, first + size)
    return np.asarray(cohort.data["x"][rows], np.float64), np.asarray(cohort.data["y"][rows])


def probabilities(state, x):
    """``[examples, components, classes]`` in float64."""
    scores = [
        x @ np.asarray(state.shared[f"experts/{k}/kernel"], np.float64)
        + np.asarray(state.shared[f"experts/{k}/bias"], np.float64)
        for k in range(3)
    ]
    odds = np.exp(np.stack(scores, axis=1))
    return odds / odds.sum(axis=2, keepdims=True)


def test_one_round_on_classes(classes):
    algorithm, state, cohort = classes
    after, _ = jax.jit(algorithm.step)(state, cohort, jax.random.key(0))
    moves, total = {(k, name): 0 for k in range(3) for name in ("kernel", "bias")}, float(cohort.size.sum())
    for client in range(3):
        x, y = examples_of(cohort, client)
        p = probabilities(state, x)
        right = p[np.arange(len(y)), :, y]
        q = responsibilities(np.log(right), np.asarray(state.rows["gate/weights"][client], np.float64))
        np.testing.assert_allclose(after.rows["gate/weights"][client], q.mean(axis=0), atol=1e-6)
        for k in range(3):
            slope = q[:, k, None] * (p[:, k] - np.eye(3)[y]) / len(y)
            moves[k, "kernel"] -= 0.3 * len(y) / total * x.T @ slope
            moves[k, "bias"] -= 0.3 * len(y) / total * slope.sum(axis=0)
    for (k, name), move in moves.items():
        leaf = f"experts/{k}/{name}"
        np.testing.assert_allclose(after.shared[leaf], state.shared[leaf] + move, atol=1e-6)


def test_predictions_mix_probabilities(classes):
    algorithm, state, cohort = classes
    models = jax.jit(algorithm.personalize)(state, cohort, jax.random.key(0))
    table = fp.evaluate(algorithm.task, models, cohort)
    for client in range(3):
        x, y = examples_of(cohort, client)
        proportions = np.asarray(state.rows["gate/weights"][client], np.float64)
        mixed = np.einsum("k,nkc->nc", proportions, probabilities(state, x))
        assert table["loss"][client] == pytest.approx(-np.log(mixed[np.arange(len(y)), y]).mean(), abs=1e-6)
        assert table["accuracy"][client] == pytest.approx(np.mean(mixed.argmax(axis=1) == y))
        shares = [table[f"usage_{k}"][client] for k in range(3)]
        np.testing.assert_allclose(shares, proportions, atol=1e-6)
        entropy = -sum(share * np.log(share) for share in proportions if share > 0)
        assert table["routing_entropy"][client] == pytest.approx(entropy, abs=1e-6)


def test_an_unseen_client_takes_e_steps_alone(classes):
    algorithm, state, cohort = classes
    stranger = toys.only(cohort, [0])._replace(ids=jnp.array([3, 1, 2], jnp.int32), valid=jnp.array([True] * 3))
    models = jax.jit(algorithm.personalize)(state, stranger, jax.random.key(0))
    x, y = examples_of(cohort, 0)
    right, proportions = probabilities(state, x)[np.arange(len(y)), :, y], np.full(3, 1 / 3)
    for _ in range(4):
        proportions = responsibilities(np.log(right), proportions).mean(axis=0)
    np.testing.assert_allclose(models["gate"]["weights"][0], proportions, atol=1e-6)
    toys.same_bits(models["gate"]["weights"][1:], state.rows["gate/weights"][1:])
    for k in range(3):
        toys.same_bits(models["experts"][k]["kernel"][0], state.shared[f"experts/{k}/kernel"])


def test_likelihoods_that_underflow_are_no_trouble():
    """Losses near 5000: exp would be 0 for every component."""
    algorithm = fp.method("fedem").make(DENSITY, components=2, lr=0.1, steps=1, batch_size=4)
    state, metrics = jax.jit(algorithm.step)(
        with_means(algorithm, [100, 101]), toys.clients(GAUSSIANS), jax.random.key(0)
    )
    assert not metrics.rejected.any()
    np.testing.assert_allclose(state.rows["gate/weights"], [[1, 0]] * 2, atol=1e-6)
    q_x = np.mean(GAUSSIANS["x"])
    assert float(state.shared["experts/0/mu"]) == pytest.approx(100 + 0.1 * (q_x - 100), rel=1e-6)


def test_two_labellings_that_clients_have_in_proportions_of_their_own_are_found():
    """No single model can be right; with one for each labelling a client is as right as its larger share allows."""
    draw, shares = np.random.default_rng(0), (0.05, 0.95, 0.2, 0.8)
    weights, data = draw.normal(size=(6, 3)), {}
    for client, share in enumerate(shares):
        tables = {}
        for split in ("train", "test"):
            x = draw.normal(size=(120, 6)).astype(np.float32)
            y = (x @ weights).argmax(axis=1)
            tables[split] = {"x": x, "y": np.where(draw.random(120) < share, (y + 1) % 3, y)}
        data[client] = tables
    federation = fp.data.from_clients(data, num_classes=3)
    task = fp.tasks.from_model(federation, "linear")
    algorithm = fp.method("fedem").make(task, components=2, lr=0.5)
    state, history = fp.run(algorithm, None, federation, 40)
    found = np.asarray(state.rows["gate/weights"])
    order = found[0].argsort()[::-1]  # which component is the first labelling's
    np.testing.assert_allclose(found[:, order[1]], shares, atol=0.1)
    accuracy = history.evaluations[-1][1].personal["accuracy"]
    assert (accuracy > np.maximum(shares, 1 - np.array(shares)) - 0.12).all()


BAD = [
    ({"components": 0}, "components: found 0"),
    ({"newcomer_epochs": -1}, "newcomer_epochs: found -1"),
]


@pytest.mark.parametrize(("settings", "message"), BAD)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        fp.method("fedem").make(DENSITY, **settings)
