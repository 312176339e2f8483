"""FedAMP, pFedGraph and kin, against numbers of the papers, quadratic programs solved elsewhere, and limits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

import fedjax_pers as fp
from fedjax_pers.aggregators import (
    aggregate,
    by_similarity,
    fedamp,
    heurfedamp,
    mixing,
    mixing_all,
    of_leaves,
    pfedgraph,
)
from fedjax_pers.aggregators.pairwise import cosines, inner_products, squared_distances
from fedjax_pers.aggregators.similarity import mean_of_models
from tests import toys


def mixed(aggregator, uploads, weights=None, ids=None, clients=3, start=None):
    """The server after one round of these uploads."""
    uploads = {name: jnp.asarray(x, jnp.float32) for name, x in uploads.items()}
    first = {name: jnp.zeros(x.shape[1:]) if start is None else jnp.asarray(start) for name, x in uploads.items()}
    server = aggregator.init(first, frozenset(first), clients)
    return aggregate(aggregator, server, uploads, weights, ids=ids)[0]


def test_the_messages_of_fedamp():
    server = mixed(mixing_all(fedamp(0.5, 2.0)), {"w": [0.0, 1.0, 3.0]})
    np.testing.assert_allclose(server.aux["mixed"]["w"], [0.1599644, 0.9160350, 2.9240006], atol=1e-6)
    np.testing.assert_allclose(server.aux["weights"].sum(1), 1, atol=1e-6)
    # Of the first row, for example, exp(-1/2) / 4 and exp(-9/2) / 4.
    np.testing.assert_allclose(server.aux["weights"][0, 1:], [np.exp(-0.5) / 4, np.exp(-4.5) / 4], rtol=1e-5)
    assert server.aux["trained"]["w"].tolist() == [0, 1, 3]


def test_without_message_passing_fedamp_leaves_models_alone():
    server = mixed(mixing_all(fedamp(0.0, 2.0)), {"w": [0.0, 1.0, 3.0]})
    assert server.aux["mixed"]["w"].tolist() == [0, 1, 3]


def test_equal_models_stay_equal_under_fedamp():
    server = mixed(mixing_all(fedamp(0.3, 1.0)), {"w": np.full((3, 7), 1 / 3)})
    np.testing.assert_allclose(server.aux["mixed"]["w"], np.full((3, 7), 1 / 3), rtol=1e-6)


def test_the_own_share_of_fedamp_is_never_negative():
    """alpha (clients - 1) = 6 is far above sigma."""
    server = mixed(mixing_all(fedamp(3.0, 1.0)), {"w": [0.0, 0.1, 0.2]})
    assert (np.asarray(server.aux["weights"]) >= 0).all()
    np.testing.assert_allclose(server.aux["weights"].sum(1), 1, atol=1e-6)


def test_fedamp_tells_near_models_far_from_the_origin_apart():
    near = 1000 + np.array([[0.0, 0.0], [0.01, 0.0], [0.0, 0.02]])
    server = mixed(mixing_all(fedamp(1e-4, 1e-4)), {"w": near})
    distance = ((near.astype(np.float32)[:, None] - near.astype(np.float32)[None]) ** 2).sum(-1)
    expected = np.exp(-distance / 1e-4)
    np.testing.assert_allclose(server.aux["weights"][0, 1], expected[0, 1] / max(expected[0, 1:].sum(), 1), rtol=1e-3)


def test_absent_clients_send_messages_with_their_last_models():
    aggregator = mixing_all(fedamp(0.5, 2.0))
    server = aggregator.init({"w": jnp.zeros(())}, frozenset({"w"}), 3)
    server, _ = aggregate(aggregator, server, {"w": jnp.array([1.0, 3.0])}, ids=[1, 2])
    np.testing.assert_allclose(server.aux["mixed"]["w"], [0.1599644, 0.9160350, 2.9240006], atol=1e-6)


def test_shares_of_heurfedamp():
    models = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]])
    server = mixed(mixing_all(heurfedamp(0.4, 3.0)), {"w": models})
    cos = np.sqrt(0.5)
    first = 0.6 * np.exp(3 * np.array([cos, 0])) / np.exp(3 * np.array([cos, 0])).sum()
    np.testing.assert_allclose(server.aux["weights"][0], [0.4, *first], rtol=1e-5)


def test_one_client_alone_keeps_its_model():
    for aggregator in (mixing_all(heurfedamp(0.4)), mixing_all(fedamp()), mixing(pfedgraph()), mixing(by_similarity())):
        server = mixed(aggregator, {"w": [[1.0, 2.0]]}, clients=1)
        np.testing.assert_allclose(server.aux["mixed"]["w"], [[1.0, 2.0]])


@pytest.mark.parametrize("lam", [0.05, 0.5, 3.0])
def test_pfedgraph_solves_its_quadratic_program(lam):
    rng = np.random.default_rng(0)
    differences, p = rng.normal(size=(5, 7)), rng.dirichlet(np.ones(5))
    server = mixed(mixing(pfedgraph(lam)), {"w": differences}, p, clients=5)
    unit = differences / np.linalg.norm(differences, axis=1, keepdims=True)
    for i in range(5):
        d = -unit @ unit[i]
        simplex = {"type": "eq", "fun": lambda a: a.sum() - 1}
        found = minimize(
            lambda a, d=d: lam * a @ a + (d - 2 * lam * p) @ a,
            np.full(5, 0.2),
            bounds=[(0, 1)] * 5,
            constraints=[simplex],
            options={"ftol": 1e-14, "maxiter": 500},
        ).x
        np.testing.assert_allclose(server.aux["weights"][i], found, atol=1e-5)
    np.testing.assert_allclose(server.aux["mixed"]["w"], np.asarray(server.aux["weights"]) @ differences, rtol=1e-4)


UPLOADS = np.random.default_rng(1).normal(size=(4, 6))
P = np.array([1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize("rule", [pfedgraph(1e7), by_similarity(temperature=1e7)])
def test_with_no_regard_to_similarity_everybody_gets_the_mean(rule):
    server = mixed(mixing(rule), {"w": UPLOADS}, P, clients=4)
    mean = P @ UPLOADS / P.sum()
    np.testing.assert_allclose(server.aux["mixed"]["w"], np.tile(mean, (4, 1)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(server.shared["w"], mean, rtol=1e-5)


@pytest.mark.parametrize("rule", [pfedgraph(1e-6), by_similarity(temperature=1e-3)])
def test_with_all_regard_to_similarity_everybody_gets_their_own(rule):
    server = mixed(mixing(rule), {"w": UPLOADS}, P, clients=4)
    np.testing.assert_allclose(server.aux["mixed"]["w"], UPLOADS, rtol=1e-6)


def test_weights_by_similarity_are_a_softmax_with_shares():
    server = mixed(mixing(by_similarity(temperature=0.5)), {"w": UPLOADS}, P, clients=4)
    unit = UPLOADS / np.linalg.norm(UPLOADS, axis=1, keepdims=True)
    expected = P * np.exp(unit @ unit.T / 0.5)
    np.testing.assert_allclose(server.aux["weights"], expected / expected.sum(1, keepdims=True), rtol=1e-5)


def test_a_measure_of_ones_own():
    def of_heads(crowd):
        return cosines({"head": crowd.differences["head"]})

    body, head = np.random.default_rng(2).normal(size=(2, 3, 4))
    server = mixed(mixing(by_similarity(of_heads, 0.3), weights="uniform"), {"body": body, "head": head})
    unit = head / np.linalg.norm(head, axis=1, keepdims=True)
    expected = np.exp(unit @ unit.T / 0.3)
    np.testing.assert_allclose(server.aux["weights"], expected / expected.sum(1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("rule", [pfedgraph(0.5), by_similarity()])
def test_a_broken_upload_is_in_no_mixture_and_its_client_keeps_its_own(rule):
    sent = UPLOADS.copy()
    sent[2, 3] = np.nan
    broken = mixed(mixing(rule), {"w": sent}, P, clients=4, start=np.full(6, 9.0))
    without = mixed(mixing(rule), {"w": sent[[0, 1, 3]]}, P[[0, 1, 3]], ids=[0, 1, 3], clients=4, start=np.full(6, 9.0))
    np.testing.assert_allclose(broken.aux["mixed"]["w"], without.aux["mixed"]["w"], rtol=1e-6)
    assert broken.aux["mixed"]["w"][2].tolist() == [9.0] * 6
    assert (np.asarray(broken.aux["weights"])[:, 2] == 0).all()


def test_absent_clients_keep_what_they_had():
    aggregator = mixing(pfedgraph(0.5))
    server = aggregator.init({"w": jnp.zeros(6)}, frozenset({"w"}), 4)
    sent = {"w": jnp.asarray(UPLOADS, jnp.float32)}
    server, _ = aggregate(aggregator, server, sent)
    later, _ = aggregate(aggregator, server, {"w": sent["w"][:2] + 1}, ids=[1, 3])
    toys.same_bits(later.aux["mixed"]["w"][jnp.array([0, 2])], server.aux["mixed"]["w"][jnp.array([0, 2])])
    assert not np.array_equal(later.aux["mixed"]["w"][1], server.aux["mixed"]["w"][1])


def test_weights_stand_in_the_columns_of_those_that_came():
    sent = {"w": jnp.asarray(UPLOADS[:2], jnp.float32)}
    aggregator = mixing(lambda crowd: jnp.array([[0.75, 0.25], [0.5, 0.5]]))
    server = aggregator.init({"w": jnp.zeros(6)}, frozenset({"w"}), 4)
    server, _ = aggregate(aggregator, server, sent, ids=[3, 1])
    expected = [[0, 0, 0, 0], [0, 0.5, 0, 0.5], [0, 0, 0, 0], [0, 0.25, 0, 0.75]]
    np.testing.assert_array_equal(server.aux["weights"], expected)


def test_counters_are_not_mixed():
    aggregator = mixing(pfedgraph(1e7))
    server = aggregator.init({"w": jnp.zeros(()), "n": jnp.int32(0)}, frozenset({"w"}), 2)
    server, _ = aggregate(
        aggregator, server, {"w": jnp.array([1.0, 3.0]), "n": jnp.array([4, 7])}, trainable=frozenset({"w"})
    )
    assert server.aux["mixed"]["n"].tolist() == [4, 7]


def test_the_mean_of_equal_counters_is_that_counter():
    """For 15 of these numbers of clients, shares in float32 add up to a little less than 1."""
    for clients in range(2, 60):
        weight, sevens = jnp.arange(1.0, clients + 1), jnp.full(clients, 7, jnp.int32)
        assert int(mean_of_models(weight, {"n": sevens}, {"n": jnp.int32(0)})["n"]) == 7


def test_only_shared_leaves_are_compared():
    """Personal leaves that differ wildly change nothing: the firewall of similarity."""
    cohort = toys.labelled_clients((6, 3, 4))
    algorithm = fp.method("pfedgraph").make(toys.classifier(), personal=fp.head(1))
    state = toys.start(algorithm, 3)
    assert set(state.aux["mixed"]) == set(state.shared) and not set(state.shared) & set(state.rows)
    after, _ = jax.jit(algorithm.step)(state, cohort, jax.random.key(0))
    np.testing.assert_allclose(after.aux["weights"].sum(1), 1, atol=1e-5)


def test_unseen_clients_start_from_the_mean_and_train():
    algorithm = fp.method("pfedgraph").make(toys.quadratic(), lr=0.5, newcomer_epochs=1)
    state = toys.start(algorithm, 2)._replace(shared={"w": jnp.float32(2.0)})
    stranger = toys.clients({"a": [[4.0]], "h": [[1.0]]}, ids=[2])
    assert float(algorithm.personalize(state, stranger, 0)["w"][0]) == pytest.approx(3.0)


def test_fedamp_trains_near_its_message_and_predicts_with_what_it_trained():
    """One step of size 0.1 on (w - a)^2 / 2 + lam / (2 alpha) (w - u)^2 from w = u: the tie has no slope there."""
    algorithm = fp.method("fedamp").make(toys.quadratic(1.0), lr=0.1, lam=0.5, alpha=0.25, sigma=2.0)
    cohort = toys.clients({"a": [[0.0], [3.0]], "h": [[1.0], [1.0]]})
    state, _ = algorithm.step(toys.start(algorithm, 2), cohort, 0)
    np.testing.assert_allclose(state.aux["trained"]["w"], [0.9, 1.2], rtol=1e-6)
    own = algorithm.personalize(state, cohort, 0)
    np.testing.assert_allclose(own["w"], [0.9, 1.2], rtol=1e-6)
    two = fp.method("fedamp").make(toys.quadratic(1.0), lr=0.1, lam=0.5, alpha=0.25, sigma=2.0, epochs=2)
    state, _ = two.step(toys.start(two, 2), cohort, 0)
    # The second step from 0.9 has the slope 0.9 + 2 (0.9 - 1).
    assert float(state.aux["trained"]["w"][0]) == pytest.approx(0.9 - 0.1 * (0.9 - 0.2), rel=1e-6)


@pytest.mark.parametrize("clients", [1, 2, 9])
def test_pairs_against_float64(clients):
    rng = np.random.default_rng(clients)
    a, b = rng.normal(size=(clients, 3, 4)), rng.normal(size=(clients, 5))
    flat = np.concatenate([a.reshape(clients, -1), b], axis=1)
    each = {"a": jnp.asarray(a, jnp.float32), "b": jnp.asarray(b, jnp.float32), "n": jnp.arange(clients)}
    unit = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    np.testing.assert_allclose(cosines(each), unit @ unit.T, atol=1e-6)
    np.testing.assert_allclose(squared_distances(each), ((flat[:, None] - flat[None]) ** 2).sum(-1), atol=1e-4)


def test_pairs_of_so_many_that_half_of_them_are_mirrored():
    x = np.random.default_rng(0).normal(size=(4013, 3))
    found = np.asarray(inner_products({"w": jnp.asarray(x, jnp.float32)}))
    np.testing.assert_allclose(found, x @ x.T, atol=1e-5)


def test_a_difference_of_zero_is_like_nobody():
    np.testing.assert_array_equal(cosines({"w": jnp.array([[0.0, 0.0], [1.0, 0.0]])}), np.eye(2))


def test_a_rule_of_another_shape_is_named():
    with pytest.raises(ValueError, match=r"rule: found shape \(2, 3\); expected \[clients, clients\] = \(4, 4\)"):
        mixed(mixing(lambda crowd: jnp.ones((2, 3))), {"w": UPLOADS}, P, clients=4)


similar = fp.method("similarity").make


def one_round(cohort, **settings):
    """The state and the metrics after a round of the method "similarity"."""
    algorithm = similar(toys.classifier(), batch_size=4, **settings)
    clients = cohort.ids.shape[0]
    return jax.jit(algorithm.step)(toys.start(algorithm, clients), cohort, jax.random.key(0))


def test_moments_are_of_inputs_alone_and_like_inputs_attract():
    """Clients 0 and 2 have inputs around 2, clients 1 and 3 around -2; none has all of its row."""
    sizes = [70, 3, 5, 9]
    fields = toys.labelled((70, 70, 70, 70))
    fields["x"] = fields["x"] + np.array([2, -2, 2, -2], np.float32)[:, None, None]
    algorithm = similar(toys.classifier(), batch_size=4, measure="moments", temperature=0.1)
    said = jax.jit(lambda cohort: algorithm.exchange(toys.start(algorithm, 4), cohort, 0)[1]["said/moments"])
    cohort = fp.cohort_of(fields, sizes=sizes)
    relabelled = fp.cohort_of({**fields, "y": 2 - fields["y"]}, sizes=sizes)
    for client, size in enumerate(sizes):
        x = fields["x"][client, :size].astype(float)
        found = said(cohort.at(jnp.array([client])))
        np.testing.assert_allclose(found, np.concatenate([x.mean(0), x.std(0)]), rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(said(relabelled.at(jnp.array([client]))), found)
    state, _ = one_round(cohort, measure="moments", temperature=0.1)
    weights = np.asarray(state.aux["weights"])
    assert (weights[[0, 2]][:, [1, 3]] < 1e-3).all() and (weights[[1, 3]][:, [0, 2]] < 1e-3).all()


def test_moments_of_inputs_far_from_zero():
    """1000 give or take 0.1: in float32 a mean of squares would know nothing of the spread."""
    fields = toys.labelled((50, 20))
    fields["x"] = (1000 + 0.1 * fields["x"]).astype(np.float32)
    algorithm = similar(toys.classifier(), batch_size=4, measure="moments")
    _, upload, _ = algorithm.exchange(toys.start(algorithm, 2), fp.cohort_of(fields, sizes=[50, 20]), 0)
    x = fields["x"][0].astype(float)
    np.testing.assert_allclose(upload["said/moments"], np.concatenate([x.mean(0), x.std(0)]), rtol=1e-3)


def test_heads_alone_are_compared():
    state, _ = one_round(toys.labelled_clients((6, 6, 6)), measure="heads", temperature=0.2, weights="uniform")
    trained, _ = one_round(toys.labelled_clients((6, 6, 6)), measure=lambda crowd: jnp.eye(3), temperature=1e-3)
    models = {name: np.asarray(x, float) for name, x in trained.aux["mixed"].items()}
    head = np.concatenate([models[f"params/head/{name}"].reshape(3, -1) for name in ("kernel", "bias")], axis=1)
    unit = head / np.linalg.norm(head, axis=1, keepdims=True)
    expected = np.exp(unit @ unit.T / 0.2)
    np.testing.assert_allclose(state.aux["weights"], expected / expected.sum(1, keepdims=True), rtol=1e-4)


def test_leaves_that_are_not_shared_are_named():
    with pytest.raises(ValueError, match=r"names: found \['v'\], which are not shared; allowed are \['w'\]"):
        mixed(mixing(by_similarity(of_leaves(["v"]))), {"w": UPLOADS}, P, clients=4)


BAD = [
    (lambda: fedamp(sigma=0.0), "sigma: found 0.0; allowed is a finite number above 0"),
    (lambda: fedamp(alpha=-1.0), "alpha: found -1"),
    (lambda: heurfedamp(own=1.5), "own: found 1.5; allowed is 0 .. 1"),
    (lambda: pfedgraph(0.0), "lam: found 0.0"),
    (lambda: similar(toys.classifier(), measure="update"), "measure: found 'update'.* Did you mean 'updates'"),
    (lambda: similar(toys.quadratic(), measure="moments"), "measure: found 'moments', which needs a floating input"),
    (
        lambda: similar(toys.classifier(), measure="heads", personal=fp.head(1)),
        "measure: .* no leaf of the head is shared",
    ),
    (lambda: by_similarity(temperature=float("inf")), "temperature: found inf"),
    (lambda: fp.method("fedamp").make(toys.quadratic(), alpha=0.0), "alpha: found 0.0"),
    (
        lambda: fp.method("pfedgraph").make(toys.quadratic(), personal=fp.everything),
        "personal: nothing is left to be shared",
    ),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_settings_that_make_no_sense(make, message):
    with pytest.raises(ValueError, match=message):
        make()
