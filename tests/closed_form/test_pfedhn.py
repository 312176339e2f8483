"""pFedHN: the pull-back by hand, and what it comes down to where the generator is linear."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_pers as fp
from fedjax_pers.aggregators import aggregate, hypernetwork
from fedjax_pers.generators import Generator, mlp
from tests import toys

TARGETS = {"a": [[[0.0, 1.0]], [[2.0, 3.0]], [[-1.0, 0.5]]], "h": [[[1.0, 1.0]]] * 3}  # f = 1/2 |w - a|^2


def linear(start: np.ndarray) -> Generator:
    """``w = phi v`` without a bias."""
    return Generator(
        lambda key, like, code: jnp.asarray(start, jnp.float32),
        lambda phi, v: {"w": phi @ v},
    )


def fixed(aggregator, embeddings):
    """The aggregator whose embeddings start as they are given."""

    def draw(server, key):
        server = aggregator.draw(server, key)
        return server._replace(aux=server.aux | {"embeddings": jnp.asarray(embeddings, jnp.float32)})

    return aggregator._replace(draw=draw)


def method(generator, embeddings, **options):
    client = fp.train(0.1, batch_size=1, epochs=3)
    aggregator = hypernetwork(client, generator=generator, embedding=np.shape(embeddings)[1], clip=1e9, **options)
    return fp.compose(toys.quadratic((0.0, 0.0)), client=client, aggregator=fixed(aggregator, embeddings))


def test_the_pull_back_is_a_product_with_the_jacobian():
    draw = np.random.default_rng(0)
    phi, v, took = draw.normal(size=(2, 3)), draw.normal(size=(4, 3)), draw.normal(size=(2, 2))
    aggregator = hypernetwork(
        fp.train(), generator=linear(phi), embedding=3, clip=1e9, optimizer=optax.sgd(0.5),
        embedding_optimizer=optax.sgd(0.2),
    )  # fmt: skip
    server = fixed(aggregator, v).draw(aggregator.init({"w": jnp.zeros(2)}, frozenset({"w"}), 4), jax.random.key(0))
    there = [2, 0]
    models = np.stack([phi @ v[client] for client in there])
    after, _ = aggregate(aggregator, server, {"w": (models - took).astype(np.float32)}, ids=there)
    # d (phi v) / d phi applied to d is d v^T, d (phi v) / d v is phi^T d; the generator takes the mean of both clients.
    moved = phi - 0.5 * np.mean([np.outer(took[k], v[client]) for k, client in enumerate(there)], 0)
    own = v.copy()
    for k, client in enumerate(there):
        own[client] -= 0.2 * phi.T @ took[k]
    np.testing.assert_allclose(after.aux["generator"], moved, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after.aux["embeddings"], own, rtol=1e-5, atol=1e-6)
    toys.same_bits(after.aux["embeddings"][1], server.aux["embeddings"][1])
    toys.same_bits(after.aux["embeddings"][3], server.aux["embeddings"][3])


def test_a_network_with_a_hidden_layer_against_its_explicit_jacobian():
    task = toys.classifier()
    algorithm = fp.method("pfedhn").make(
        task, hidden=(4,), embedding=2, momentum=0.0, weight_decay=0.0, server_lr=0.3, embedding_lr=0.2, batch_size=3
    )
    cohort = toys.labelled_clients((7,))
    before = toys.start(algorithm, 1)
    download, upload, _ = algorithm.exchange(before, cohort, 0)
    after, _ = jax.jit(algorithm.step)(before, cohort, jax.random.key(0))
    apply, phi, v = mlp((4,)).apply, before.aux["generator"], before.aux["embeddings"][0]
    jacobian = jax.jacfwd(apply, (0, 1))(phi, v)  # by leaf: of the generator, of the embedding
    took = {name: download[name] - upload[name] for name in jacobian}
    step = sum(jnp.tensordot(took[name], jacobian[name][1], took[name].ndim) for name in took)
    np.testing.assert_allclose(after.aux["embeddings"][0], v - 0.2 * step, rtol=1e-4, atol=1e-6)
    for name, x in took.items():  # the gradient of one weight of the hidden layer, and of all output biases
        moved = after.aux["generator"]["outputs"][name]["bias"] - phi["outputs"][name]["bias"]
        np.testing.assert_allclose(moved, -0.3 * x, rtol=1e-4, atol=1e-6)
    kernel = sum(jnp.tensordot(took[n], jacobian[n][0]["hidden"][0]["kernel"], took[n].ndim) for n in took)
    moved = after.aux["generator"]["hidden"][0]["kernel"] - phi["hidden"][0]["kernel"]
    np.testing.assert_allclose(moved, -0.3 * kernel, rtol=1e-3, atol=1e-6)


def test_columns_of_a_linear_generator_are_independent_local_models():
    """One-hot embeddings that stay; the server's step makes up for the mean over three clients."""
    algorithm = method(
        linear(np.zeros((2, 3))), np.eye(3), optimizer=optax.sgd(3.0), embedding_optimizer=optax.sgd(0.0)
    )
    alone = fp.compose(
        toys.quadratic((0.0, 0.0)), layout=fp.by_role(personal="w"), client=fp.train(0.1, batch_size=1, epochs=3)
    )
    cohort, states = toys.clients(TARGETS), [toys.start(a, 3) for a in (algorithm, alone)]
    for _ in range(4):
        states = [
            jax.jit(a.step)(s, cohort, jax.random.key(0))[0] for a, s in zip((algorithm, alone), states, strict=True)
        ]
    np.testing.assert_allclose(states[0].aux["generator"].T, states[1].rows["w"], rtol=1e-6, atol=1e-7)


def test_equal_embeddings_that_stay_are_fedavg():
    v = np.array([[0.6, 0.8]] * 3)
    algorithm = method(linear(np.zeros((2, 2))), v, optimizer=optax.sgd(0.7), embedding_optimizer=optax.sgd(0.0))
    fedavg = fp.compose(
        toys.quadratic((0.0, 0.0)),
        client=fp.train(0.1, batch_size=1, epochs=3),
        aggregator=fp.mean(optax.sgd(0.7), weights="uniform"),
    )
    cohort, state, other = toys.clients(TARGETS), toys.start(algorithm, 3), toys.start(fedavg, 3)
    for _ in range(4):
        state, other = (
            jax.jit(a.step)(s, cohort, jax.random.key(0))[0] for a, s in ((algorithm, state), (fedavg, other))
        )
        np.testing.assert_allclose(state.aux["generator"] @ v[0], other.shared["w"], rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def trained():
    """pFedHN on the toy classifier, its federation, a first state and one after a round of two of three clients."""
    algorithm = fp.method("pfedhn").make(
        toys.classifier(norm=True), hidden=(8,), embedding=3, batch_size=3, server_lr=0.1, embedding_lr=0.1
    )
    cohort, before = toys.labelled_clients(), toys.start(algorithm, 3)
    step = jax.jit(algorithm.step)
    after, _ = step(before, cohort, jax.random.key(0))
    later, _ = step(after, toys.only(cohort, [0, 2]), jax.random.key(0))
    return algorithm, cohort, before, after, later


def test_embeddings_of_absent_clients_and_their_momentum_stay(trained):
    _, _, _, after, later = trained
    for tree in ("embeddings", "embedding_opt"):
        rows = [jax.tree.map(lambda x: x[1], state.aux[tree]) for state in (after, later)]
        toys.same_bits(rows[1], rows[0])
    assert (np.asarray(later.aux["embeddings"])[[0, 2]] != np.asarray(after.aux["embeddings"])[[0, 2]]).all()


def test_models_travel_and_nothing_else(trained):
    algorithm, cohort, before, _, _ = trained
    download, upload, row = algorithm.exchange(before, cohort.at(jnp.array([1])), 0)
    model = set(fp.flatten(algorithm.task.init(jax.random.key(0))))
    assert set(download) == set(upload) == model and not row


def test_clients_that_take_no_step_move_nothing():
    algorithm = method(linear(np.ones((2, 2))), np.ones((3, 2)))
    before = toys.start(algorithm, 3)
    after, _ = algorithm.step(before, toys.clients(TARGETS, sizes=[0, 0, 0]), 0)
    toys.same_bits((after.shared, after.aux, after.opt), (before.shared, before.aux, before.opt))


def test_a_small_step_lowers_the_loss():
    """Which a pull-back of new minus old would raise."""
    algorithm = method(
        linear(np.array([[1.0, 2.0], [0.5, -1.0]])), np.array([[1.0, 0.5], [0.3, -1.0], [1.0, 1.0]]),
        optimizer=optax.sgd(0.05), embedding_optimizer=optax.sgd(0.05),
    )  # fmt: skip
    cohort, state = toys.clients(TARGETS), toys.start(algorithm, 3)

    def loss(state):
        models = algorithm.personalize(state, cohort, 0)["w"]
        return 0.5 * ((np.asarray(models) - np.array(TARGETS["a"])[:, 0]) ** 2).sum()

    losses = [loss(state)]
    for _ in range(5):
        state, _ = algorithm.step(state, cohort, 0)
        losses.append(loss(state))
    assert np.all(np.diff(losses) < 0)


def test_an_unseen_client_fits_its_embedding_alone():
    """f = 1/2 |phi v - a|^2, three local steps of 0.1 take (1 - 0.9^3) of the way; from the mean embedding, by hand."""
    phi, v = np.array([[1.0, 0.0], [0.0, 2.0]]), np.array([[1.0, 1.0], [3.0, 0.0], [2.0, 2.0]])
    algorithm = method(linear(phi), v, embedding_optimizer=optax.sgd(0.1), newcomer_rounds=2)
    state = toys.start(algorithm, 3)
    stranger = toys.clients({"a": [[[5.0, 6.0]]], "h": [[[1.0, 1.0]]]}, ids=[3])
    found = algorithm.personalize(state, stranger, 0)["w"][0]
    own = v.mean(0)
    for _ in range(2):
        took = (1 - 0.9**3) * (phi @ own - np.array([5.0, 6.0]))
        own = own - 0.1 * phi.T @ took
    np.testing.assert_allclose(found, phi @ own, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden": (0,)}, "hidden: found 0"),
        ({"embedding": -1}, "embedding: found -1"),
        ({"momentum": 1.5}, "momentum: found 1.5"),
        ({"weight_decay": -0.1}, "weight_decay: found -0.1"),
        ({"personal": fp.everything}, "nothing is left to be shared"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        fp.method("pfedhn").make(toys.classifier(), **settings)


def test_all_gradients_of_a_round_are_clipped_together():
    """theta = phi v with one number each: d = 3 and -1 give the mean gradient 3 / 2 - 2 / 2, embeddings 2 d each."""
    generator = Generator(lambda key, like, code: jnp.float32(2.0), lambda phi, v: {"w": phi * v[0]})
    aggregator = fixed(
        hypernetwork(
            fp.train(), generator=generator, embedding=1, clip=0.5, optimizer=optax.sgd(1.0),
            embedding_optimizer=optax.sgd(1.0),
        ),
        [[1.0], [2.0]],
    )  # fmt: skip
    server = aggregator.draw(aggregator.init({"w": jnp.float32(0)}, frozenset({"w"}), 2), jax.random.key(0))
    after, _ = aggregate(aggregator, server, {"w": jnp.float32([2.0 - 3.0, 4.0 + 1.0])})
    gradients = np.array([(3 * 1 - 1 * 2) / 2, 2 * 3, 2 * -1])
    scaled = gradients * 0.5 / np.linalg.norm(gradients)
    np.testing.assert_allclose(after.aux["generator"], 2 - scaled[0], rtol=1e-6)
    np.testing.assert_allclose(after.aux["embeddings"][:, 0], [1 - scaled[1], 2 - scaled[2]], rtol=1e-6)


def test_momentum_and_decay_rest_while_a_client_is_away():
    """theta = phi v, uploads 1 below what was sent: v's gradient is phi, phi's is v; a heavy ball each, by hand."""
    rule = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.1, momentum=0.5))
    generator = Generator(lambda key, like, code: jnp.float32(2.0), lambda phi, v: {"w": phi * v[0]})
    aggregator = fixed(
        hypernetwork(fp.train(), generator=generator, embedding=1, optimizer=rule, embedding_optimizer=rule),
        [[1.0], [-1.0]],
    )
    server = aggregator.draw(aggregator.init({"w": jnp.float32(0)}, frozenset({"w"}), 2), jax.random.key(0))
    phi, v, pace, own_pace = 2.0, [1.0, -1.0], 0.0, [0.0, 0.0]
    for client in (0, 1, 1, 0):
        server, _ = aggregate(aggregator, server, {"w": jnp.float32([phi * v[client] - 1])}, ids=[client])
        pace = 0.5 * pace + v[client] + 0.5 * phi
        own_pace[client] = 0.5 * own_pace[client] + phi + 0.5 * v[client]
        phi -= 0.1 * pace
        v[client] -= 0.1 * own_pace[client]
        np.testing.assert_allclose(server.aux["generator"], phi, rtol=1e-5)
        np.testing.assert_allclose(server.aux["embeddings"][:, 0], v, rtol=1e-5)


def test_running_statistics_are_the_mean_of_the_cohorts(trained):
    algorithm, cohort, before, after, _ = trained
    uploads = [algorithm.exchange(before, cohort.at(jnp.array([i])), jax.random.key(0))[1] for i in range(3)]
    still = [name for name in before.shared if name.startswith("batch_stats")]
    assert still and not set(still) & set(after.aux["generator"]["outputs"])
    for name in still:
        expected = np.mean([np.asarray(upload[name], np.float64) for upload in uploads], axis=0)
        np.testing.assert_allclose(after.shared[name], expected, rtol=1e-5, atol=1e-6)


def test_where_models_stay_nothing_moves():
    algorithm = fp.method("pfedhn").make(toys.classifier(), lr=0.0, weight_decay=0.0, hidden=(4,), batch_size=3)
    before = toys.start(algorithm, 3)
    after, _ = jax.jit(algorithm.step)(before, toys.labelled_clients(), jax.random.key(0))
    toys.same_bits((after.shared, after.aux, after.opt), (before.shared, before.aux, before.opt))


def test_a_round_reports_how_far_models_moved():
    algorithm = fp.method("pfedhn").make(toys.classifier(), hidden=(4,), batch_size=3)
    _, metrics = jax.jit(algorithm.step)(toys.start(algorithm, 3), toys.labelled_clients(), jax.random.key(0))
    assert metrics.update_norm > 0
