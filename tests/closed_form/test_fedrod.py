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


# The personal head made of the class distribution: here by a linear network, p = a K + B.

LABELS = [[0, 0, 1, 1, 1, 0], [2, 1, 2, 2, 0, 1]]
SHARES = np.array([[3, 3, 0], [1, 2, 3]]) / EXAMPLES
NETWORK = "generator/outputs/personal/params/head"


@pytest.fixture(scope="module")
def hyper():
    return fp.method("fedrod_hyper").make(TASK, lr=LR, steps=1, batch_size=EXAMPLES, hidden=())


@pytest.fixture(scope="module")
def hyper_step(hyper):
    return jax.jit(hyper.step)


@pytest.fixture(scope="module")
def drawn(hyper):
    """A first state whose network does not make zeros."""
    state, draw = toys.start(hyper, 2), np.random.default_rng(2)
    network = {n: 0 * x + draw.normal(size=x.shape) for n, x in state.shared.items() if n.startswith("generator/")}
    return state._replace(shared=state.shared | network)


def leaves_of(state):
    """The generic head, and K and B of the network for its kernel and bias, in float64."""
    generic = [np.asarray(state.shared[f"params/head/{n}"], np.float64) for n in ("kernel", "bias")]
    network = [
        [np.asarray(state.shared[f"{NETWORK}/{leaf}/{part}"], np.float64) for part in ("kernel", "bias")]
        for leaf in ("kernel", "bias")
    ]
    return generic, network


def test_one_step_of_the_network(hyper_step, drawn):
    clients = cohort(LABELS)
    after, _ = hyper_step(drawn, clients, jax.random.key(0))
    (kernel, bias), ((k_kernel, b_kernel), (k_bias, b_bias)) = leaves_of(drawn)
    slopes = []
    for client, shares in enumerate(SHARES):
        rows = slice(client * EXAMPLES, (client + 1) * EXAMPLES)
        x, y = np.asarray(clients.data["x"][rows], np.float64), np.asarray(clients.data["y"][rows])
        own_kernel, own_bias = np.tensordot(shares, k_kernel, 1) + b_kernel, shares @ k_bias + b_bias
        missed = (softmax(x @ (kernel + own_kernel) + bias + own_bias) - np.eye(3)[y]) / EXAMPLES
        of_kernel, of_bias = x.T @ missed, missed.sum(0)
        slopes.append((np.tensordot(shares, of_kernel, 0), of_kernel, np.outer(shares, of_bias), of_bias))
    for place, name in enumerate(("kernel/kernel", "kernel/bias", "bias/kernel", "bias/bias")):
        expected = drawn.shared[f"{NETWORK}/{name}"] - LR * np.mean([each[place] for each in slopes], axis=0)
        np.testing.assert_allclose(after.shared[f"{NETWORK}/{name}"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after.rows["code"], SHARES, rtol=1e-7)


def test_the_generic_model_is_that_of_fedrod_to_the_bit(hyper_step, hyper, drawn, step, algorithm):
    clients, ours, theirs = cohort(LABELS), drawn, toys.start(algorithm, 2)
    for _ in range(2):
        ours, _ = hyper_step(ours, clients, jax.random.key(0))
        theirs, _ = step(theirs, clients, jax.random.key(0))
    toys.same_bits({name: ours.shared[name] for name in theirs.shared}, theirs.shared)
    batch = {"x": clients.data["x"], "weight": np.ones(2 * EXAMPLES, np.float32)}
    scores = (a.task.apply(a.common(s), batch, None)[0] for a, s in ((hyper, ours), (algorithm, theirs)))
    toys.same_bits(*scores)


def test_an_unseen_client_is_served_by_its_counts(hyper, drawn):
    """Clients 2 and 3 were never there, and the latter has no example; client 0 has not trained yet."""
    x = np.random.default_rng(5).normal(size=(3, EXAMPLES, toys.FEATURES)).astype(np.float32)
    data = {"x": x, "y": np.array([LABELS[1], LABELS[0], LABELS[1]], np.int32)}
    clients = fp.cohort_of(data, ids=[0, 2, 3], sizes=[EXAMPLES, EXAMPLES, 0])
    models = jax.jit(hyper.personalize)(drawn, clients, jax.random.key(0))
    (kernel, bias), ((k_kernel, b_kernel), (k_bias, b_bias)) = leaves_of(drawn)
    for place, shares in enumerate((np.full(3, 1 / 3), SHARES[0], np.full(3, 1 / 3))):
        plain = hyper.task.plain(jax.tree.map(lambda x, place=place: x[place], models))["params"]["head"]
        own = np.tensordot(shares, k_kernel, 1) + b_kernel, shares @ k_bias + b_bias
        np.testing.assert_allclose(plain["kernel"], kernel + own[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(plain["bias"], bias + own[1], rtol=1e-5, atol=1e-6)


def test_shares_of_classes_do_not_leave(hyper, drawn):
    _, upload, row = hyper.exchange(drawn, cohort(LABELS), jax.random.key(0))
    assert set(row) == {"code"} and "code" not in upload
    assert {name for name in upload if "generator/" not in name} == {"params/head/kernel", "params/head/bias"}
    first = toys.start(hyper, 2)
    made = hyper.task.plain({**first.shared, **first.fresh})["params"]["head"]["kernel"]
    # Generated heads start near zero: a spread of a tenth of the usual one.
    assert 0 < np.abs(made - first.shared["params/head/kernel"]).max() < 0.3


@pytest.mark.parametrize(("setting", "value"), [("hidden", (0,)), ("head", fp.nothing), ("lr", -0.1)])
def test_settings_that_cannot_be(setting, value):
    with pytest.raises(ValueError, match=f"{setting}: "):
        fp.method("fedrod_hyper").make(TASK, **{setting: value})
