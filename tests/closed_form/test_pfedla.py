"""pFedLA: mixtures by layer, and what weights learn, by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_pers as fp
from fedjax_pers.aggregators import aggregate, layer_weights
from fedjax_pers.generators import Generator
from tests import toys

# Logits themselves are the network: [layers and one more, clients].
LOGITS = Generator(lambda key, like, code: jnp.zeros(like["weights"].shape), lambda phi, v: {"weights": phi})
START = {"a": jnp.zeros(()), "b": jnp.zeros(())}


def server_with(aggregator, models):
    server = aggregator.init(START, frozenset(START), len(models["a"]))
    return server._replace(aux=server.aux | {"models": {name: jnp.array(x) for name, x in models.items()}})


@pytest.fixture
def aggregator():
    return layer_weights([["a"], ["b"]], generator=LOGITS, optimizer=optax.sgd(0.5))


def test_every_layer_has_its_own_mixture(aggregator):
    server = server_with(aggregator, {"a": [1.0, 3.0], "b": [10.0, -10.0]})
    logits = np.zeros((2, 3, 2))
    logits[0, 0] = [np.log(3.0), 0.0]  # of client 0, layer a: 3/4 and 1/4
    learnt = (jnp.float32(logits), server.aux["learnt"][1])
    server = server._replace(aux=server.aux | {"learnt": learnt})
    own, other = (aggregator.render(server, jnp.int32(client)) for client in (0, 1))
    assert (float(own["a"]), float(own["b"])) == pytest.approx((1.5, 0.0))
    assert (float(other["a"]), float(other["b"])) == pytest.approx((2.0, 0.0))


def test_weights_move_along_the_pull_back(aggregator):
    """d received / d logit_j = alpha_j (w_j - received): from 2 the client went to 1.2, so d = 0.8 on layer a."""
    server = server_with(aggregator, {"a": [1.0, 3.0], "b": [10.0, -10.0]})
    uploads = {"a": jnp.array([1.2]), "b": jnp.array([0.0])}
    after, _ = aggregate(aggregator, server, uploads, ids=[0])
    logits = np.asarray(after.aux["learnt"][0])
    np.testing.assert_allclose(logits[0, 0], [-0.5 * 0.5 * (1 - 2) * 0.8, -0.5 * 0.5 * (3 - 2) * 0.8], rtol=1e-6)
    assert not logits[0, 1].any() and not logits[1].any()  # nothing was taken from layer b; client 1 was not there
    assert after.aux["models"]["a"].tolist() == pytest.approx([1.2, 3.0])
    assert float(after.shared["a"]) == pytest.approx(2.1)
    # It leans towards what it went to.
    assert float(aggregator.render(after, jnp.int32(0))["a"]) < 2.1


def test_equal_weights_are_the_mean_of_the_last_models():
    task, cohort = toys.classifier(), toys.labelled_clients()
    algorithm = fp.method("pfedla").make(task, weights_lr=0.0, batch_size=4)
    state = toys.start(algorithm, 3)
    learnt = jax.tree.map(jnp.zeros_like, state.aux["learnt"])
    state, _ = algorithm.step(state._replace(aux=state.aux | {"learnt": learnt}), cohort, 0)
    download, _, _ = algorithm.exchange(state, cohort, 0)
    for name, x in download.items():
        expected = np.asarray(state.aux["models"][name], np.float64).mean(0)
        np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-6)


def test_layers_are_those_of_the_model():
    algorithm = fp.method("pfedla").make(toys.classifier(norm=True), batch_size=4)
    weights = toys.start(algorithm, 3).aux["learnt"][0]["outputs"]["weights"]["bias"]
    assert weights.shape == (3, 2 + 1, 3)  # clients; two layers and the statistics; clients
    with pytest.raises(ValueError, match="groups: found none"):
        layer_weights([])
    with pytest.raises(ValueError, match="nothing is left to be shared"):
        fp.method("pfedla").make(toys.classifier(), personal=fp.everything)


def test_counters_on_which_clients_agree_stay(aggregator):
    """Equal weights of some numbers of clients add up to a little less than 1: cut off, 7 would be 6."""
    for clients in range(2, 60):
        server = aggregator.init({**START, "n": jnp.int32(7)}, frozenset(START), clients)
        assert int(aggregator.render(server, jnp.int32(0))["n"]) == 7


def test_counters_teach_the_weights_nothing(aggregator):
    server = aggregator.init({**START, "n": jnp.int32(7)}, frozenset(START), 2)
    sent = {"a": jnp.zeros(2), "b": jnp.zeros(2), "n": jnp.array([9, 11])}
    after, _ = aggregate(aggregator, server, sent, trainable=frozenset(START))
    assert not np.asarray(after.aux["learnt"][0]).any()
    assert int(after.shared["n"]) == 10 and after.aux["models"]["n"].tolist() == [9, 11]


MODELS = {"a": np.array([[1.0, -1.0], [0.5, 2.0], [-2.0, 0.0]]), "b": np.array([3.0, 1.0, -1.0])}
MOVED = {"a": np.array([[0.5, -0.2], [0.3, 0.1]]), "b": np.array([-0.7, 0.4])}
"""By what clients 0 and 2 move."""


def softmax(x):
    return np.exp(x - x.max()) / np.exp(x - x.max()).sum()


def test_networks_and_embeddings_move_by_the_jacobian():
    """Logits of a layer are a matrix times the embedding, ``[layers, clients, size] . [size]``."""

    def init(key, like, size):
        return jax.random.normal(key, (*like["weights"].shape, size))

    linear = Generator(init, lambda phi, v: {"weights": phi @ v})
    aggregator = layer_weights([["a"], ["b"]], generator=linear, embedding=2, optimizer=optax.sgd(0.2))
    first = {"a": jnp.zeros(2), "b": jnp.zeros(())}
    server = aggregator.init(first, frozenset(first), 3)
    server = server._replace(aux=server.aux | {"models": {name: jnp.float32(x) for name, x in MODELS.items()}})
    phi, v = (np.asarray(x, np.float64) for x in server.aux["learnt"])
    sent = [{n: softmax(phi[i, k] @ v[i]) @ MODELS[n] for k, n in enumerate(MODELS)} for i in (0, 2)]
    uploads = {name: jnp.float32(np.stack([each[name] for each in sent]) + MOVED[name]) for name in MODELS}
    after, _ = aggregate(aggregator, server, uploads, ids=[0, 2])
    for place, i in enumerate((0, 2)):
        of_phi, of_v = np.zeros_like(phi[i]), np.zeros(2)
        for layer, name in enumerate(MODELS):
            # How far each client's model lies along the pseudo-gradient, received minus trained.
            along = -(MODELS[name].reshape(3, -1) @ np.atleast_1d(MOVED[name][place]))
            weights = softmax(phi[i, layer] @ v[i])
            slope = weights * (along - weights @ along)
            of_phi[layer], of_v = np.outer(slope, v[i]), of_v + phi[i, layer].T @ slope
        np.testing.assert_allclose(after.aux["learnt"][0][i], phi[i] - 0.2 * of_phi, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(after.aux["learnt"][1][i], v[i] - 0.2 * of_v, rtol=1e-5, atol=1e-6)
    absent = [jax.tree.map(lambda x: x[1], (s.aux["learnt"], s.aux["opt"], s.aux["models"])) for s in (server, after)]
    toys.same_bits(*absent)


def resting(scores, rounds):
    """Models after rounds with networks that rest and give client i these logits of all, in every layer."""
    network = Generator(lambda key, like, size: jnp.zeros(like["weights"].shape), lambda phi, v: {"weights": phi})
    names = fp.flatten(toys.classifier().init(jax.random.key(0)))
    aggregator = layer_weights([sorted(names)], generator=network, optimizer=optax.sgd(0.0))
    algorithm = fp.compose(toys.classifier(), client=fp.train(0.1, batch_size=3), aggregator=aggregator)
    state, step = toys.start(algorithm, 3), jax.jit(algorithm.step)
    logits = jnp.repeat(jnp.float32(scores)[:, None], 2, axis=1)  # [clients, layers, clients]
    state = state._replace(aux=state.aux | {"learnt": (logits, state.aux["learnt"][1])})
    for members in rounds:
        state, _ = step(state, toys.only(toys.labelled_clients(), list(members)), jax.random.key(0))
    return state


def test_everybodys_own_model_alone_is_local_training_to_the_bit():
    rounds = ((0, 2), (1,), (0, 1, 2))
    state = resting(np.where(np.eye(3), 0, -1e6), rounds)
    local = toys.trajectory("local_only", toys.classifier(), toys.labelled_clients(), rounds, lr=0.1, batch_size=3)
    toys.same_bits(state.aux["models"], local[-1].rows)


def test_equal_weights_with_everyone_there_are_fedavg():
    rounds = ((0, 1, 2),) * 3
    state, settings = resting(np.zeros((3, 3)), rounds), {"lr": 0.1, "batch_size": 3, "weights": "uniform"}
    expected = toys.trajectory("fedavg", toys.classifier(), toys.labelled_clients(), rounds, **settings)[-1]
    for name, x in expected.shared.items():
        np.testing.assert_allclose(state.shared[name], x, rtol=2e-6, atol=5e-7)
