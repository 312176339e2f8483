"""CFL and FL+HC on groups that are known, against SciPy in float64 and by hand."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.cluster.hierarchy import linkage

import fedjax_pers as fp
from fedjax_pers.aggregators import aggregate, cfl, hierarchical
from tests import toys


def first(aggregator, clients, **leaves):
    leaves = {name: jnp.asarray(x, jnp.float32) for name, x in leaves.items()} or {"w": jnp.zeros(2)}
    return aggregator.init(leaves, frozenset(leaves), clients)


def sent(server, differences, aggregator, ids=None):
    """Uploads that differ so much from what each client received."""
    differences = jnp.asarray(differences, jnp.float32)
    ids = jnp.arange(len(differences)) if ids is None else jnp.asarray(ids)
    received = jnp.stack([aggregator.render(server, client)["w"] for client in ids])
    return aggregate(aggregator, server, {"w": received + differences}, ids=ids, trainable=frozenset({"w"}))[0]


EAST, WEST, NORTH = np.array([3.0, 0.1]), np.array([-3.0, 0.1]), np.array([0.1, 3.0])


def test_a_cluster_at_rest_with_restless_members_is_split_along_similarity():
    aggregator = cfl(0.5, 2.0, warm_up=0)
    server = sent(first(aggregator, 4), [EAST, WEST, EAST, WEST], aggregator)
    assert server.aux["members"].tolist() == [0, 1, 0, 1] and int(server.aux["clusters"]) == 2
    assert server.aux["made"].tolist()[:3] == [0, 1, -1]
    np.testing.assert_allclose(server.shared["w"][0], [0, 0.1], atol=1e-6)  # the mean of all four
    toys.same_bits(server.shared["w"][0], server.shared["w"][1])  # both go on from the same model


@pytest.mark.parametrize(
    ("eps1", "eps2", "warm_up", "most"), [(0.0, 2.0, 0, 8), (0.5, 3.5, 0, 8), (0.5, 2.0, 1, 8), (0.5, 2.0, 0, 1)]
)
def test_what_keeps_a_cluster_together(eps1, eps2, warm_up, most):
    """Not at rest, no member restless, still warming up, no place left."""
    aggregator = cfl(eps1, eps2, warm_up, most)
    server = sent(first(aggregator, 4), [EAST, WEST, EAST, WEST], aggregator)
    assert server.aux["members"].tolist() == [0] * 4 and int(server.aux["clusters"]) == 1


def test_two_clients_are_not_split_nor_a_cluster_with_absent_members():
    aggregator = cfl(0.5, 2.0, warm_up=0)
    assert int(sent(first(aggregator, 2), [EAST, WEST], aggregator).aux["clusters"]) == 1
    server = sent(first(aggregator, 5), [EAST, WEST, EAST, WEST], aggregator, ids=[0, 1, 2, 4])
    assert int(server.aux["clusters"]) == 1


def test_a_second_split_is_of_clients_not_of_places_in_the_cluster():
    """Clients 0, 2, 4 stay, 1, 3, 5, 6 leave; then the leavers split into 3, 6 and 1, 5 by their ids."""
    aggregator = cfl(0.7, 2.0, warm_up=0)
    server = sent(first(aggregator, 7), [EAST, WEST, EAST, WEST, EAST, WEST, 0.75 * WEST], aggregator)
    assert server.aux["members"].tolist() == [0, 1, 0, 1, 0, 1, 1]
    small = np.array([0.01, 0.0])
    server = sent(server, [small, NORTH, small, -NORTH, small, NORTH, -NORTH], aggregator)
    assert server.aux["members"].tolist() == [0, 1, 0, 2, 0, 1, 2]
    assert int(server.aux["clusters"]) == 3 and server.aux["made"].tolist()[:4] == [0, 1, 2, -1]
    assert server.aux["parent"].tolist()[:4] == [-1, 0, 1, -1]
    toys.same_bits(server.shared["w"][1], server.shared["w"][2])


def test_the_bipartition_of_two_groups_is_the_best_of_all():
    """Against brute force over all bipartitions: the largest similarity across is smallest."""
    rng = np.random.default_rng(3)
    centres = np.array([[1.0, 0.2, 0.0], [-1.0, 0.3, 0.2]])
    group = np.array([0, 1, 1, 0, 0, 1, 0])
    x = 3 * (centres[group] + 0.3 * rng.normal(size=(7, 3)))
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    alike = unit @ unit.T

    def across(second):
        return max(alike[i, j] for i in range(7) for j in second if i not in second)

    every = [set(s) for k in range(1, 7) for s in itertools.combinations(range(1, 7), k)]
    best = min(every, key=across)
    aggregator = cfl(100.0, 0.0, warm_up=0)
    server = first(aggregator, 7, w=np.zeros(3))
    server = sent(server, x, aggregator)
    assert set(np.flatnonzero(server.aux["members"])) == best


def test_members_are_always_a_partition_and_clusters_move_apart():
    cohort = toys.clients({"a": [[0.0], [0.2], [4.0], [4.4]], "h": [[1.0]] * 4})
    algorithm = fp.method("cfl").make(toys.quadratic(), lr=0.5, eps1=0.05, eps2=0.5, warm_up=3)
    state, step = toys.start(algorithm, 4), jax.jit(algorithm.step)
    for _ in range(40):
        state, metrics = step(state, cohort, jax.random.key(0))
    assert state.aux["members"].tolist() == [0, 0, 1, 1]
    np.testing.assert_allclose(state.shared["w"][:2], [0.1, 4.2], atol=1e-3)
    assert not metrics.rejected.any() and step._cache_size() == 1
    strangers = toys.clients({"a": [[4.1], [0.0]], "h": [[1.0]] * 2}, ids=[4, 5])
    own = algorithm.personalize(state, strangers, jax.random.key(0))
    np.testing.assert_allclose(own["w"], [4.2, 0.1], atol=1e-3)
    known = algorithm.personalize(state, cohort, jax.random.key(0))
    np.testing.assert_allclose(known["w"], [0.1, 0.1, 4.2, 4.2], atol=1e-3)
    assert algorithm.common is None


def test_clients_alike_are_never_split():
    algorithm = fp.method("cfl").make(toys.quadratic(), lr=0.5, eps1=10.0, eps2=0.3, warm_up=2)
    cohort = toys.clients({"a": [[1.0], [1.02], [0.98], [1.01]], "h": [[1.0]] * 4})
    state, _ = toys.experiment("cfl", toys.quadratic(), num_clients=4, warm_up=2)(
        cohort, 30, lr=0.5, eps1=10.0, eps2=0.3
    )
    assert int(state.aux["clusters"]) == 1
    assert algorithm.participation == "any"


def test_a_cut_makes_two_parts_where_similarities_are_all_alike():
    """Four updates at right angles: whatever the parts, none is empty."""
    aggregator = cfl(10.0, 0.1, warm_up=0, most=3)
    server = first(aggregator, 4, w=jnp.zeros(4))
    server = sent(server, np.eye(4), aggregator)
    assert int(server.aux["clusters"]) == 2
    assert sorted(np.bincount(server.aux["members"]))[0] > 0


def test_runs_side_by_side_are_split_as_each_alone():
    """Under vmap the host is asked for clusters that are not due, and for those of one member."""
    aggregator = cfl(0.5, 2.0, warm_up=0, most=3)
    start = first(aggregator, 4)

    def run(scale):
        differences = scale * jnp.array([EAST, WEST, EAST, WEST])
        server = start
        for _ in range(2):
            server = sent(server, differences, aggregator)
        return server.aux["members"]

    together = jax.vmap(run)(jnp.array([1.0, 0.01]))
    assert together.tolist() == [run(1.0).tolist(), run(0.01).tolist()] == [[0, 1, 0, 1], [0, 0, 0, 0]]


# FL+HC


POINTS = np.array([[0.0, 0.0], [5.0, 5.0], [0.1, 0.0], [5.0, 5.2], [-4.0, 0.0], [0.0, 0.2]])


def clustered(aggregator, differences, rounds=1):
    server = first(aggregator, len(differences))
    for _ in range(rounds):
        server = sent(server, differences, aggregator)
    return server


@pytest.mark.parametrize(
    ("metric", "method", "distance"),
    [
        ("euclidean", "ward", 1.0),
        ("euclidean", "average", 1.0),
        ("cityblock", "single", 1.0),
        ("euclidean", "complete", 1.0),
    ],
)
def test_three_groups_are_found_and_go_by_their_own_means(metric, method, distance):
    server = clustered(hierarchical(0, distance, metric, method), POINTS)
    assert server.aux["members"].tolist() == [0, 1, 0, 1, 2, 0] and int(server.aux["clusters"]) == 3
    expected = [POINTS[[0, 2, 5]].mean(0), POINTS[[1, 3]].mean(0), POINTS[4]]
    np.testing.assert_allclose(server.shared["w"][:3], expected, rtol=1e-6)


def test_cosine_looks_at_directions():
    points = np.array([[1.0, 0.0], [0.0, 2.0], [7.0, 0.1], [0.1, 9.0]])
    server = clustered(hierarchical(0, 0.5, "cosine", "average"), points)
    assert server.aux["members"].tolist() == [0, 1, 0, 1]


def test_by_cosine_an_update_of_zero_is_like_nobody():
    points = np.array([[1.0, 0.0], [0.0, 0.0], [7.0, 0.1], [0.0, 0.0]])
    server = clustered(hierarchical(0, 0.5, "cosine", "average"), points)
    assert server.aux["members"].tolist() == [0, 1, 0, 2]


def test_clusters_are_made_in_their_round_and_never_again():
    aggregator = hierarchical(2, 1.0)
    server = clustered(aggregator, POINTS, rounds=2)
    assert int(server.aux["clusters"]) == 1
    server = sent(server, POINTS, aggregator)
    assert int(server.aux["clusters"]) == 3
    after = sent(server, POINTS[::-1], aggregator)
    assert after.aux["members"].tolist() == server.aux["members"].tolist()


def test_a_large_distance_is_one_cluster_and_none_is_everybody_alone():
    assert int(clustered(hierarchical(0, 1e6), POINTS).aux["clusters"]) == 1
    alone = clustered(hierarchical(0, 0.0), POINTS)
    assert alone.aux["members"].tolist() == list(range(6))
    np.testing.assert_allclose(alone.shared["w"][:6], POINTS, atol=1e-6)


def test_no_more_clusters_than_there_are_places_for():
    assert int(clustered(hierarchical(0, 0.0, most=2), POINTS).aux["clusters"]) == 2


def test_an_absent_client_stays_in_the_first_cluster():
    aggregator = hierarchical(0, 1.0)
    server = sent(first(aggregator, 7), POINTS, aggregator, ids=[0, 1, 2, 3, 4, 6])
    assert server.aux["members"].tolist() == [0, 1, 0, 1, 2, 0, 0]
    assert server.aux["leaves"].tolist() == [0, 1, 2, 3, 4, 6, -1]
    expected = np.concatenate([linkage(POINTS, "ward"), np.zeros((2, 4))])
    np.testing.assert_allclose(server.aux["tree"], expected, rtol=1e-5)


BAD = [
    (lambda: cfl(-1.0), "eps1: found -1"),
    (lambda: cfl(most=0), "most: found 0"),
    (lambda: cfl(warm_up=-1), "warm_up: found -1"),
    (lambda: hierarchical(metric="l2"), "metric: found 'l2'"),
    (lambda: hierarchical(metric="cosine"), r"metric \(of ward\): found 'cosine'; allowed are euclidean"),
    (lambda: hierarchical(method="wards"), "method: found 'wards'.* Did you mean 'ward'"),
    (lambda: fp.method("cfl").make(toys.quadratic(), personal=fp.everything), "personal: nothing is left to be shared"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_settings_that_make_no_sense(make, message):
    with pytest.raises(ValueError, match=message):
        make()
