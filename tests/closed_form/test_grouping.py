"""FedGroup on groups that are known, against scikit-learn and numpy in float64 and by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.cluster import KMeans
from sklearn.decomposition import TruncatedSVD
from sklearn.metrics import adjusted_rand_score
from sklearn.metrics.pairwise import cosine_similarity

import fedjax_pers as fp
from fedjax_pers.aggregators import aggregate, decomposed_cosines, fedgroup
from fedjax_pers.aggregators.grouping import k_means
from tests import toys

EAST, WEST, NORTH = np.array([3.0, 0.1]), np.array([-3.0, 0.1]), np.array([0.1, 3.0])
START = np.array([1.0, -2.0])


def first(aggregator, clients, start=START):
    return aggregator.init({"w": jnp.asarray(start, jnp.float32)}, frozenset({"w"}), clients)


def sent(server, differences, aggregator, ids=None, weights=None, key=0):
    """Uploads that differ so much from what each client received."""
    ids = jnp.arange(len(differences)) if ids is None else jnp.asarray(ids)
    received = jnp.stack([aggregator.render(server, client)["w"] for client in ids])
    uploads = {"w": received + jnp.asarray(differences, jnp.float32)}
    return aggregate(aggregator, server, uploads, weights, ids=ids, trainable=frozenset({"w"}), key=key)


def test_the_embedding_is_that_of_the_singular_vectors():
    rows = np.random.default_rng(0).normal(size=(7, 40)) * np.geomspace(1e-3, 1e3, 7)[:, None]
    directions = np.linalg.svd(rows, full_matrices=False)[2][:3]
    expected = rows @ directions.T / np.linalg.norm(rows, axis=1, keepdims=True)
    found = decomposed_cosines(rows, 3)
    signs = np.sign((found * expected).sum(0))  # a singular vector has no sign of its own
    np.testing.assert_allclose(found * signs, expected, atol=1e-9)


def test_nothing_is_found_along_rounding_or_in_zeros():
    line = np.outer([1.0, -2.0, 0.0], [0.6, 0.8, 0.1])
    np.testing.assert_allclose(np.abs(decomposed_cosines(line, 2)), [[1, 0], [1, 0], [0, 0]], atol=1e-12)
    assert decomposed_cosines(np.zeros((3, 2)), 2).tolist() == [[0, 0]] * 3


def test_groups_are_found_by_id_and_go_by_their_own_means():
    """Six of nine clients come, named in any order; weights are theirs."""
    aggregator = fedgroup(3)
    differences = np.array([NORTH, 2 * EAST, 0.5 * WEST, 2 * NORTH, 3 * WEST, EAST])
    ids, weights = [7, 2, 5, 0, 4, 8], [1.0, 2.0, 1.0, 3.0, 1.0, 2.0]
    server, _ = sent(first(aggregator, 9), differences, aggregator, ids, weights)
    # Numbered by their first members in the order in which uploads lie: 7 and 0, 2 and 8, 5 and 4.
    assert server.aux["members"].tolist() == [0, -1, 1, -1, 2, 2, -1, 0, 1]
    means = np.array([(1 + 3 * 2) / 4 * NORTH, (2 * 2 + 2 * 1) / 4 * EAST, (0.5 + 3) / 2 * WEST])
    np.testing.assert_allclose(server.aux["directions"]["w"], means, rtol=1e-6)
    np.testing.assert_allclose(server.shared["w"], START + means, rtol=1e-6)
    assert server.aux["made"].tolist() == [1, 1, 1] and int(server.aux["clusters"]) == 3


def test_groups_are_those_of_the_steps_of_the_paper_by_scikit_learn():
    rng = np.random.default_rng(5)
    truth = rng.permutation(np.repeat(np.arange(4), 5))
    differences = rng.normal(size=(4, 30))[truth] + 0.5 * rng.normal(size=(20, 30))
    differences *= rng.uniform(0.1, 10, (20, 1))
    directions = TruncatedSVD(4, algorithm="arpack").fit(differences).components_
    expected = KMeans(4, n_init=10, random_state=0).fit_predict(cosine_similarity(differences, directions))
    aggregator = fedgroup(4)
    for key in range(3):
        server, _ = sent(first(aggregator, 20, np.zeros(30)), differences, aggregator, key=key)
        assert adjusted_rand_score(expected, server.aux["members"]) == adjusted_rand_score(truth, expected) == 1
        again, _ = sent(first(aggregator, 20, np.zeros(30)), differences, aggregator, key=key)
        toys.same_bits(again, server)


def test_the_seed_decides_where_groups_cannot_be_told_apart():
    points = np.random.default_rng(1).normal(size=(80, 6))
    labels = [k_means(points, 9, seed) for seed in (0, 0, 1, 2)]
    np.testing.assert_array_equal(labels[0], labels[1])
    assert not all(np.array_equal(labels[0], other) for other in labels[2:])


def test_length_counts_only_where_differences_themselves_are_grouped():
    differences = np.array([[1.0, 0.0], [10.0, 0.0], [0.0, 1.0], [10.0, 1.0]])
    for embedding, expected in (("edc", [0, 0, 1, 0]), ("differences", [0, 1, 0, 1])):
        aggregator = fedgroup(2, embedding=embedding)
        assert sent(first(aggregator, 4), differences, aggregator)[0].aux["members"].tolist() == expected


def test_a_later_client_trains_the_first_model_joins_by_direction_and_counts_from_then_on():
    aggregator = fedgroup(2)
    server, _ = sent(first(aggregator, 4), [EAST, WEST], aggregator, ids=[0, 3])
    np.testing.assert_allclose(aggregator.render(server, jnp.int32(1))["w"], START)
    after, info = sent(server, [0.1 * EAST, [-0.01, 0.02]], aggregator, ids=[0, 1])
    assert after.aux["members"].tolist() == [0, 1, -1, 1] and info["weights"].tolist() == [1, 0]
    np.testing.assert_allclose(after.shared["w"], [START + 1.1 * EAST, START + WEST], rtol=1e-6)
    toys.same_bits(after.aux["directions"], server.aux["directions"])
    np.testing.assert_allclose(aggregator.render(after, jnp.int32(1))["w"], START + WEST, rtol=1e-6)
    # Weights that are given do not make it count either.
    given, _ = sent(server, [0.1 * EAST, [-0.01, 0.02]], aggregator, ids=[0, 1], weights=[1.0, 5.0])
    toys.same_bits(given.shared, after.shared)
    last, _ = sent(after, [0.5 * NORTH, -0.5 * NORTH, NORTH], aggregator, ids=[1, 3, 0])
    assert last.aux["members"].tolist() == [0, 1, -1, 1]
    np.testing.assert_allclose(last.shared["w"], [START + 1.1 * EAST + NORTH, START + WEST], rtol=1e-6)


def test_a_long_direction_draws_no_more_than_a_short_one():
    aggregator = fedgroup(2)
    server, _ = sent(first(aggregator, 3), [10 * EAST, NORTH], aggregator, ids=[0, 1])
    assert sent(server, [EAST, [1.0, 1.5]], aggregator, ids=[0, 2])[0].aux["members"].tolist() == [0, 1, 1]


def test_groups_are_drawn_to_each_other():
    aggregator = fedgroup(3, mixing=0.2)
    server, _ = sent(first(aggregator, 3), [EAST, WEST, NORTH], aggregator)
    models = START + np.array([EAST, WEST, NORTH])
    pull = 0.2 / np.linalg.norm(models, axis=1)
    for group in range(3):
        others = [h for h in range(3) if h != group]
        expected = (models[group] + pull[others] @ models[others]) / (1 + pull[others].sum())
        np.testing.assert_allclose(server.shared["w"][group], expected, rtol=1e-6)


def test_the_cold_start_waits_for_as_many_clients_as_groups():
    aggregator = fedgroup(2, mixing=0.1)
    server = first(aggregator, 3)
    waiting, _ = sent(server, [EAST, [np.nan, 0.0]], aggregator, ids=[0, 1])
    toys.same_bits((waiting.shared, waiting.aux["members"]), (server.shared, server.aux["members"]))
    after, _ = sent(waiting, [EAST, WEST], aggregator, ids=[2, 1])
    assert after.aux["members"].tolist() == [-1, 1, 0] and after.aux["made"].tolist() == [2, 2]


def test_as_many_groups_as_there_are_different_updates():
    aggregator = fedgroup(3)
    server, _ = sent(first(aggregator, 4), [EAST, WEST, EAST, WEST], aggregator)
    assert server.aux["members"].tolist() == [0, 1, 0, 1] and server.aux["made"].tolist() == [1, 1, -1]
    server, _ = sent(first(aggregator, 4), np.zeros((4, 2)), aggregator)
    assert server.aux["members"].tolist() == [0] * 4 and int(server.aux["clusters"]) == 1


def test_clients_of_two_kinds_some_of_whom_come_late():
    cohort = toys.clients({"a": [[0.0], [0.2], [4.0], [4.4], [4.2]], "h": [[1.0]] * 5})
    algorithm = fp.method("fedgroup").make(toys.quadratic(2.0), lr=0.5)
    state, step = toys.start(algorithm, 5), jax.jit(algorithm.step)
    for members in ([1, 2], [0, 2], [0, 1, 2, 3], *[[0, 1, 2, 3]] * 20):
        state, metrics = step(state, toys.only(cohort, members), jax.random.key(0))
    assert state.aux["members"].tolist() == [0, 0, 1, 1, -1]
    np.testing.assert_allclose(state.shared["w"], [0.1, 4.2], atol=1e-3)
    assert not metrics.rejected.any() and step._cache_size() == 1
    known = algorithm.personalize(state, cohort, jax.random.key(0))  # the last was never in training
    np.testing.assert_allclose(known["w"], [0.1, 0.1, 4.2, 4.2, 4.2], atol=1e-3)
    strangers = toys.clients({"a": [[4.1], [0.0]], "h": [[1.0]] * 2}, ids=[5, 6])
    own = algorithm.personalize(state, strangers, jax.random.key(0))
    np.testing.assert_allclose(own["w"], [4.2, 0.1], atol=1e-3)


def test_a_cohort_smaller_than_the_groups_is_refused():
    algorithm = fp.method("fedgroup").make(toys.quadratic(), groups=3)
    with pytest.raises(ValueError, match="groups: found 3; the cold start needs as many clients in a round, found 2"):
        algorithm.step(toys.start(algorithm, 5), toys.clients(), jax.random.key(0))


BAD = [
    (lambda: fedgroup(0), "groups: found 0"),
    (lambda: fedgroup(mixing=-0.1), "mixing: found -0.1"),
    (lambda: fedgroup(embedding="cosine"), "embedding: found 'cosine'; allowed are differences, edc"),
    (lambda: toys.start(fp.method("fedgroup").make(toys.quadratic(), groups=5), 4), "groups: found 5; .* 1 .. 4"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_settings_that_make_no_sense(make, message):
    with pytest.raises(ValueError, match=message):
        make()
