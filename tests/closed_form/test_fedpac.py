"""FedPAC: its quadratic program against SciPy and by hand, its statistics against numpy, and its limits."""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

import fedjax_pers as fp
from fedjax_pers.aggregators import Crowd, aggregate, collaborating_heads, collaboration
from fedjax_pers.aggregators.base import nothing_asked
from tests import toys

HEAD = ("params/head/bias", "params/head/kernel")


def weights_of(means, variances, share=None):
    means, variances = jnp.asarray(means, jnp.float32), jnp.asarray(variances, jnp.float32)
    share = jnp.ones(len(variances)) if share is None else jnp.asarray(share)
    return np.asarray(jax.jit(collaboration)(Crowd({}, {}, share, {"mean": means, "variance": variances})))


def solved_elsewhere(means, variances, client):
    """The paper's quadratic form, in float64: the variances, and products of differences to this client."""
    away = means.reshape(len(variances), -1) - means[client].reshape(1, -1)
    form = np.diag(variances) + away @ away.T
    form /= np.abs(form).max()
    return minimize(
        lambda a: a @ form @ a,
        np.full(len(form), 1 / len(form)),
        jac=lambda a: 2 * form @ a,
        bounds=[(0, 1)] * len(form),
        constraints=[{"type": "eq", "fun": lambda a: a.sum() - 1}],
        options={"ftol": 1e-16, "maxiter": 1000},
    ).x


@pytest.mark.parametrize(("clients", "scale"), [(3, 1.0), (8, 1e-3), (20, 1e2)])
def test_the_quadratic_program_is_solved(clients, scale):
    rng = np.random.default_rng(clients)
    means, variances = scale * rng.normal(size=(clients, 3, 4)), scale**2 * rng.uniform(0.1, 9, clients)
    found = weights_of(means, variances)
    for client in range(clients):
        np.testing.assert_allclose(found[client], solved_elsewhere(means, variances, client), atol=1e-5)


def test_two_clients_by_hand():
    """``V_1 (1 - t)^2 + (V_2 + |h_1 - h_2|^2) t^2`` is least at ``t = V_1 / (V_1 + V_2 + |h_1 - h_2|^2)``."""
    found = weights_of([[[0.0], [5.0]], [[2.0], [5.0]]], [1.0, 3.0])
    np.testing.assert_allclose(found, [[7 / 8, 1 / 8], [3 / 8, 5 / 8]], atol=1e-6)


def test_with_equal_means_weights_go_by_precision():
    found = weights_of(np.full((3, 2, 5), 0.7), [1.0, 2.0, 4.0])
    np.testing.assert_allclose(found, np.tile([4 / 7, 2 / 7, 1 / 7], (3, 1)), atol=1e-6)
    np.testing.assert_allclose(weights_of(np.ones((4, 2, 5)), np.full(4, 0.3)), np.full((4, 4), 0.25), atol=1e-6)


def test_a_client_without_variance_trusts_itself_and_nobody_counts_that_is_not_there():
    means = np.random.default_rng(0).normal(size=(3, 2, 2))
    np.testing.assert_allclose(weights_of(means, [0.0, 1.0, 1.0])[0], [1, 0, 0], atol=1e-6)
    three, two = weights_of(means, [1.0, 9.0, 2.0], [0.5, 0.0, 0.5]), weights_of(means[[0, 2]], [1.0, 2.0])
    assert not three[:, 1].any()
    np.testing.assert_allclose(three[np.ix_([0, 2], [0, 2])], two, atol=1e-6)
    assert np.isfinite(weights_of(np.zeros((3, 2, 2)), np.zeros(3))).all()


def test_the_server_alone():
    """Two clients, weights as by hand above; the third sends NaN, and nobody has examples of the second class."""
    aggregator = collaborating_heads(["head"], nothing_asked)
    start = {"body": 0.0, "head": 8.0, "class/centroids": np.full((2, 1), 9.0), "class/counts": np.full(2, 4.0)}
    start = {name: jnp.asarray(x, jnp.float32) for name, x in start.items()}
    server = aggregator.init(start, frozenset({"body", "head"}), 3)
    uploads = {
        "body": [1.0, 3.0, np.nan],
        "head": [0.0, 16.0, 0.0],
        "class/centroids": [[[1.0], [0.0]], [[5.0], [0.0]], [[0.0], [0.0]]],
        "class/counts": [[3.0, 0.0], [1.0, 0.0], [1.0, 1.0]],
    }
    said = {"mean": jnp.array([[[0.0], [5.0]], [[2.0], [5.0]], [[1.0], [5.0]]]), "variance": jnp.array([1.0, 3.0, 1.0])}
    uploads = {name: jnp.asarray(x, jnp.float32) for name, x in uploads.items()}
    trainable = frozenset({"body", "head"})
    server, _ = aggregate(aggregator, server, uploads, [1.0, 3.0, 1.0], said=said, trainable=trainable)
    np.testing.assert_allclose(server.aux["mixed"]["head"], [2.0, 10.0, 8.0], atol=1e-5)
    assert float(server.shared["body"]) == 2.5 and float(server.shared["head"]) == 12.0
    assert server.shared["class/centroids"].ravel().tolist() == [2.0, 9.0]
    assert server.shared["class/counts"].tolist() == [4.0, 4.0]


def features(variables, x):
    hidden = variables["params"]["hidden1"]
    return np.maximum(np.asarray(x, np.float64) @ np.asarray(hidden["kernel"]) + np.asarray(hidden["bias"]), 0)


def test_statistics_of_a_round():
    """With no step, so that features stay: variances, weights and centroids from numpy; class 2 is nobody's."""
    sizes, table = (7, 4, 10), toys.labelled((7, 4, 10))
    table["y"] = table["y"] % 2
    table["y"][1] = 0  # a client of one class
    algorithm = fp.method("fedpac").make(toys.classifier(), lr=0.0, head_lr=0.0)
    state = toys.start(algorithm, 3)
    variables = toys.classifier().init(jax.random.key(0))
    after, metrics = jax.jit(algorithm.step)(state, fp.cohort_of(table, sizes=list(sizes)), jax.random.key(0))
    means, variances, of_class = [], [], [[], []]
    for client, size in enumerate(sizes):
        z, y = features(variables, table["x"][client, :size]), table["y"][client, :size]
        joint = np.einsum("nc,nd->ncd", np.eye(3)[y], z).reshape(size, -1)
        means.append(joint.mean(0))
        variances.append(np.trace(np.cov(joint.T, bias=True)) / size)
        for label in (0, 1):
            of_class[label].append(z[y == label])
    assert set(metrics.said) == {"variance"}
    np.testing.assert_allclose(metrics.said["variance"], variances, rtol=1e-4)
    for client in range(3):
        expected = solved_elsewhere(np.array(means), np.array(variances), client)
        np.testing.assert_allclose(after.aux["weights"][client], expected, atol=1e-4)
    pooled = [np.concatenate(each) for each in of_class]
    np.testing.assert_allclose(after.shared["class/centroids"][:2], [z.mean(0) for z in pooled], rtol=1e-4, atol=1e-6)
    assert after.shared["class/counts"].tolist() == [len(pooled[0]), len(pooled[1]), 0]
    assert not after.shared["class/centroids"][2].any()


def drawn():
    """Features ``body * x`` under a head of zeros, whose loss has no slope below it."""

    def apply(variables, batch, key):
        return (batch["x"] * variables["body"]) @ variables["head"], {}

    def init(key):
        return {"body": jnp.ones(2), "head": jnp.zeros((2, 2))}

    return fp.tasks.supervised(init, apply, example=(("x", (2,), "float32"), ("y", (), "int32")))


@pytest.mark.parametrize("count", [0.0, 6.0])
def test_a_step_towards_the_centroid_by_hand(count):
    """``|z - c|^2 / 2`` of z = (1, 2) and c = (3, 3) has the slope (z - c) x = (-2, -2) in the body; none unknown."""
    algorithm = fp.method("fedpac").make(drawn(), lr=0.1, lam=0.5, head="head", head_epochs=0, batch_size=1)
    state = toys.start(algorithm, 1)
    known = {"class/centroids": jnp.array([[0.0, 0.0], [3.0, 3.0]]), "class/counts": jnp.array([1.0, count])}
    cohort = fp.cohort_of({"x": np.array([[[1.0, 2.0]]], np.float32), "y": np.array([[1]])})
    after, _ = algorithm.step(state._replace(shared=state.shared | known), cohort, 0)
    body = np.array([1.1, 1.1] if count else [1.0, 1.0])
    np.testing.assert_allclose(after.shared["body"], body, rtol=1e-6)
    # What is sent are features after training; nobody has an example of class 0.
    np.testing.assert_allclose(after.shared["class/centroids"], [[0, 0], body * [1, 2]], rtol=1e-6)
    assert after.shared["class/counts"].tolist() == [1, 1]


LOCAL = {"lr": 0.1, "batch_size": 3, "epochs": 2}


def near(found, expected):
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [(7,), (1, 1, 1)], ids=["one client", "clients of one example"])
def test_heads_that_are_nobody_elses_are_those_of_fedrep(sizes):
    """Alone, or without variance, a client keeps its head; without alignment that is FedRep."""
    clients, rounds = toys.labelled_clients(sizes), (tuple(range(len(sizes))),) * 2
    rep = toys.trajectory("fedrep", toys.classifier(), clients, rounds, **LOCAL, head_epochs=2)
    pac = toys.trajectory("fedpac", toys.classifier(), clients, rounds, **LOCAL, head_epochs=2, lam=0.0)
    near(pac[-1].shared, rep[-1].shared)
    near(pac[-1].aux["mixed"], rep[-1].rows)


def test_with_heads_at_rest_it_is_fedbabu():
    clients, rounds = toys.labelled_clients(), ((0, 2), (1, 2), (0, 1, 2))
    babu = toys.trajectory("fedbabu", toys.classifier(), clients, rounds, **LOCAL, weights="uniform")
    pac = toys.trajectory(
        "fedpac", toys.classifier(), clients, rounds, **LOCAL, head_epochs=0, lam=0.0, weights="uniform"
    )
    near(pac[-1].shared, babu[-1].shared)


def test_with_shares_for_weights_it_is_fedavg_with_its_schedule(monkeypatch):
    clients, key = toys.labelled_clients(), jax.random.key(0)
    first, second = fp.train(0.1, batch_size=3, leaves=fp.head(1), order="head"), fp.train(leaves=~fp.head(1), **LOCAL)
    plain = fp.compose(toys.classifier(), client=fp.phases(first, second))
    module = importlib.import_module("fedjax_pers.aggregators.collaboration")
    monkeypatch.setattr(module, "collaboration", lambda crowd: jnp.tile(crowd.share, (3, 1)))
    pac = fp.method("fedpac").make(toys.classifier(), **LOCAL, lam=0.0)
    expected, found = toys.start(plain, 3), toys.start(pac, 3)
    for _ in range(2):
        expected, found = jax.jit(plain.step)(expected, clients, key)[0], jax.jit(pac.step)(found, clients, key)[0]
    near(found.shared, expected.shared)
    near(found.aux["mixed"], {name: np.stack([expected.shared[name]] * 3) for name in HEAD})


def test_absent_clients_keep_their_heads_and_newcomers_train_the_mean_one():
    clients = toys.labelled_clients()
    states = toys.trajectory("fedpac", toys.classifier(), clients, ((0, 1, 2), (0, 2)), **LOCAL)
    kept = [{name: x[1] for name, x in state.aux["mixed"].items()} for state in states[1:]]
    toys.same_bits(kept[1], kept[0])
    stranger = fp.cohort_of(toys.labelled((5,)), ids=[3])
    unchanged = fp.method("fedpac").make(toys.classifier(), newcomer_epochs=0)
    model = fp.flatten(unchanged.personalize(states[-1], stranger, 0))
    toys.same_bits({name: x[0] for name, x in model.items()}, {name: states[-1].shared[name] for name in model})
    trained = fp.flatten(fp.method("fedpac").make(toys.classifier()).personalize(states[-1], stranger, 0))
    assert [name for name in model if not np.array_equal(trained[name], model[name])] == sorted(HEAD)


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        (toys.classifier, {"lam": -1.0}, "lam: found -1; allowed is at least 0"),
        (toys.classifier, {"head": fp.everything}, "head: found all leaves .* a body below the head is needed"),
        (toys.classifier, {"head": "params/head/bias"}, "head: its first operation is add"),
        (toys.quadratic, {}, r"task: found num_classes None, labels y of shape None"),
    ],
)
def test_what_makes_no_sense_is_refused(task, settings, message):
    with pytest.raises(ValueError, match=message):
        fp.method("fedpac").make(task(), **settings)
