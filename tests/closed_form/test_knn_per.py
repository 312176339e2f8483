"""kNN-Per against scikit-learn's neighbours and the formula of its votes in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax
from sklearn.neighbors import NearestNeighbors

import fedjax_pers as fp
from tests import toys

SIZES = (9, 2, 0)
TASK = toys.classifier()


@pytest.fixture(scope="module")
def clients():
    return toys.labelled_clients(SIZES)


@pytest.fixture(scope="module")
def state():
    return toys.start(fp.method("knn_per").make(TASK), 3)


def table(state, train, judged, **settings):
    """Metrics of each judged example, ``[clients, examples]``: all of one pool, whoever owns them."""
    algorithm = fp.method("knn_per").make(TASK, **settings)
    models = jax.jit(algorithm.personalize)(state, train, jax.random.key(0))
    return jax.jit(jax.vmap(algorithm.task.metrics, (0, None)))(models, judged)


def judged_examples(seed=7, count=5):
    data = toys.labelled((count,), seed)
    return {name: jnp.asarray(x[0]) for name, x in data.items()} | {"weight": jnp.ones(count)}


def rows_of(cohort, client):
    first, size = int(cohort.start[client]), int(cohort.size[client])
    return {name: np.asarray(x[first : first + size]) for name, x in cohort.data.items()}


def features_and_outputs(state, x):
    leaves = {name: np.asarray(value, np.float64) for name, value in state.shared.items()}
    kernel, bias, head, head_bias = (
        leaves[f"model/params/{name}"] for name in ("hidden1/kernel", "hidden1/bias", "head/kernel", "head/bias")
    )
    features = np.maximum(np.asarray(x, np.float64) @ kernel + bias, 0)
    return features, features @ head + head_bias


@pytest.mark.parametrize("standardise", [False, True])
@pytest.mark.parametrize("distance", ["squared", "euclidean"])
def test_predictions(state, clients, distance, standardise):
    lam, scale, neighbours, judged = 0.7, 0.4, 4, judged_examples()
    settings = {"lam": lam, "scale": scale, "neighbours": neighbours, "distance": distance, "standardise": standardise}
    found = table(state, clients, judged, **settings)
    z, outputs = features_and_outputs(state, judged["x"])
    for client in range(2):
        rows = rows_of(clients, client)
        stored, _ = features_and_outputs(state, rows["x"])
        deviations = stored.std(axis=0) if standardise else np.ones(5)
        deviations = np.where(deviations > 0, deviations, 1)
        nearest = NearestNeighbors(n_neighbors=min(neighbours, len(stored))).fit(stored / deviations)
        d, places = nearest.kneighbors(z / deviations)
        closeness = np.exp(-(d**2) / (scale * 5) if distance == "squared" else -d / scale)
        votes = np.einsum("nk,nkc->nc", closeness, np.eye(3)[rows["y"][places]]) / closeness.sum(axis=1, keepdims=True)
        mixed = lam * votes + (1 - lam) * softmax(outputs, axis=1)
        right = mixed[np.arange(5), np.asarray(judged["y"])]
        np.testing.assert_allclose(found["loss"][client], -np.log(right), rtol=1e-4)
        np.testing.assert_array_equal(found["accuracy"][client], mixed.argmax(axis=1) == judged["y"])
    empty = softmax(outputs, axis=1)[np.arange(5), np.asarray(judged["y"])]
    np.testing.assert_allclose(found["loss"][2], -np.log(empty), rtol=1e-5)  # it has no example: the global model


def test_without_neighbours_it_is_the_global_model(state, clients):
    judged = judged_examples()
    found = table(state, clients, judged, lam=0.0)
    model = fp.method("knn_per").make(TASK).common(state)["model"]
    expected = TASK.metrics(model, judged)
    for client in range(3):
        np.testing.assert_allclose(found["loss"][client], expected["loss"], rtol=1e-6)
        np.testing.assert_array_equal(found["accuracy"][client], expected["accuracy"])


def test_the_nearest_neighbour_of_a_training_example_is_itself(clients):
    """With labels that nothing could learn, and features that are all different."""
    task = fp.tasks.from_model(toys.EXAMPLE, "mlp", num_classes=3, hidden=(64,))
    algorithm = fp.method("knn_per").make(task, lam=1.0, neighbours=1)
    models = jax.jit(algorithm.personalize)(toys.start(algorithm, 3), clients, jax.random.key(0))
    found = fp.evaluate(algorithm.task, models, clients)
    assert found["accuracy"][:2].tolist() == [1, 1] and found["loss"][:2].tolist() == [0, 0]


def test_training_is_that_of_fedavg_to_the_bit(clients):
    rounds, settings = ((0, 1), (0, 1, 2)), {"lr": 0.1, "batch_size": 3}
    found = toys.trajectory("knn_per", toys.classifier(norm=True), clients, rounds, **settings)[-1]
    expected = toys.trajectory("fedavg", toys.classifier(norm=True), clients, rounds, **settings)[-1]
    toys.same_bits({name.removeprefix("model/"): x for name, x in found.shared.items()}, expected.shared)
    assert found.rows == found.frozen == {}


BAD = [
    ({"lam": 1.5}, "lam: found 1.5; allowed is 0 .. 1"),
    ({"scale": 0.0}, "scale: found 0"),
    ({"neighbours": 0}, "neighbours: found 0"),
    ({"distance": "cosine"}, "distance: found 'cosine'; allowed are euclidean, squared"),
    ({"standardise": 1}, "standardise: found 1"),
    ({"head": fp.everything}, "head: found all leaves .* a body below the head is needed"),
]


@pytest.mark.parametrize(("settings", "message"), BAD)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        fp.method("knn_per").make(TASK, **settings)


def test_a_cohort_that_does_not_say_how_many_examples_there_are(state, clients):
    algorithm = fp.method("knn_per").make(TASK)
    with pytest.raises(ValueError, match="cohort.room: found None"):
        algorithm.personalize(state, clients._replace(room=None), jax.random.key(0))
