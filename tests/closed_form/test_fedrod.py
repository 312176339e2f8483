"""Fed-RoD against its two losses, differentiated by hand in float64."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import fedjax_pers as fp
from tests import toys

LR, EXAMPLES = 0.3, 6
TASK = fp.tasks.from_model(toys.EXAMPLE, "linear", num_classes=toys.CLASSES)


def softmax(scores):
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True)


def cohort(labels):
    """Two clients with these labels each, and random features."""
    draw = np.random.default_rng(5)
    x = draw.normal(size=(2, EXAMPLES, toys.FEATURES)).astype(np.float32)
    return fp.cohort_of({"x": x, "y": np.array(labels, np.int32)})


@pytest.fixture(scope="module")
def algorithm():
    return fp.method("fedrod").make(TASK, lr=LR, steps=1, batch_size=EXAMPLES, newcomer_epochs=0)


@pytest.fixture(scope="module")
def step(algorithm):
    return jax.jit(algorithm.step)


@pytest.fixture(scope="module")
def state(algorithm):
    """A first state whose personal heads are not zero any more."""
    state = toys.start(algorithm, 2)
    draw = np.random.default_rng(1)
    return state._replace(rows={name: 0 * x + draw.normal(size=x.shape) for name, x in state.rows.items()})


def test_one_step_of_both_losses(step, state):
    clients = cohort([[0, 0, 1, 1, 1, 0], [2, 1, 2, 2, 0, 1]])  # client 0 has no example of class 2
    after, _ = step(state, clients, jax.random.key(0))

    generic_steps = []
    for client in range(2):
        rows = slice(client * EXAMPLES, (client + 1) * EXAMPLES)
        x, y = np.asarray(clients.data["x"][rows], np.float64), np.asarray(clients.data["y"][rows])
        truth, counts = np.eye(3)[y], np.bincount(y, minlength=3)
        kernel, bias = (np.asarray(state.shared[f"params/head/{name}"], np.float64) for name in ("kernel", "bias"))
        own_kernel, own_bias = (
            np.asarray(state.rows[f"own/params/head/{name}"][client], np.float64) for name in ("kernel", "bias")
        )
        with np.errstate(divide="ignore"):
            generic = (softmax(x @ kernel + bias + np.log(counts)) - truth) / EXAMPLES
        personal = (softmax(x @ (kernel + own_kernel) + bias + own_bias) - truth) / EXAMPLES
        assert (generic[:, counts == 0] == 0).all()
        generic_steps.append((x.T @ generic, generic.sum(axis=0)))
        np.testing.assert_allclose(
            after.rows["own/params/head/kernel"][client], own_kernel - LR * x.T @ personal, atol=1e-6
        )
        np.testing.assert_allclose(
            after.rows["own/params/head/bias"][client], own_bias - LR * personal.sum(0), atol=1e-6
        )
    for place, name in enumerate(("kernel", "bias")):
        expected = state.shared[f"params/head/{name}"] - LR * np.mean([each[place] for each in generic_steps], axis=0)
        np.testing.assert_allclose(after.shared[f"params/head/{name}"], expected, atol=1e-6)


def test_equal_class_counts_give_cross_entropy(step, algorithm):
    clients, first = cohort([[0, 1, 2, 2, 1, 0]] * 2), toys.start(algorithm, 2)
    fedavg = fp.method("fedavg").make(TASK, lr=LR, steps=1, batch_size=EXAMPLES)
    expected, _ = jax.jit(fedavg.step)(toys.start(fedavg, 2), clients, jax.random.key(0))
    found, _ = step(first, clients, jax.random.key(0))
    for name, x in expected.shared.items():
        np.testing.assert_allclose(found.shared[name], x, rtol=2e-6, atol=1e-7)


def test_the_generic_model_does_not_depend_on_the_personal_heads(step, state, algorithm):
    clients = cohort([[0, 0, 1, 1, 1, 0], [2, 1, 2, 2, 0, 1]])
    plain = toys.start(algorithm, 2)
    assert all((np.asarray(x) == 0).all() for x in plain.rows.values())
    toys.same_bits(step(state, clients, jax.random.key(0))[0].shared, step(plain, clients, jax.random.key(0))[0].shared)


def test_a_personal_head_at_zero_leaves_the_generic_predictions(algorithm):
    first, clients = toys.start(algorithm, 2), cohort([[0] * EXAMPLES] * 2)
    own = jax.jit(algorithm.personalize)(first, clients, jax.random.key(0))
    generic = algorithm.common(first)
    batch = {
        "x": clients.data["x"][:EXAMPLES],
        "y": clients.data["y"][:EXAMPLES],
        "weight": np.ones(EXAMPLES, np.float32),
    }
    one = jax.tree.map(lambda x: x[0], own)
    toys.same_bits(TASK.apply(one, batch, None)[0], TASK.apply(generic, batch, None)[0])
