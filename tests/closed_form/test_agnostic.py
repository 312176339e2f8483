"""AFL, q-FFL and TERM, against numbers worked out by hand and equations solved in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.optimize import brentq

import fedjax_pers as fp
from fedjax_pers.aggregators import aggregate, fair, minimax, tilted
from tests import toys

# f_1 = w^2 / 2 and f_2 = 2 (1 - w)^2
H, A = np.array([1.0, 4.0]), np.array([0.0, 1.0])


def losses(w):
    return 0.5 * H * (w - A) ** 2


def slopes(w):
    return H * (w - A)


@pytest.fixture(scope="module")
def afl():
    return toys.experiment("afl", toys.quadratic())


def test_two_projected_rounds_of_afl(afl):
    for rounds, w, weights, mean in ((1, 0.2, (0.4, 0.6), 0.2), (2, 0.384, (0.337, 0.663), 0.292)):
        state, metrics = afl(toys.copies([1, 1]), rounds, lr=0.1, ascent_lr=0.1)
        assert float(state.shared["w"]) == pytest.approx(w, abs=1e-6)
        np.testing.assert_allclose(state.aux["weights"], weights, atol=1e-6)
        assert float(state.aux["average"]["w"]) == pytest.approx(mean, abs=1e-6)
    np.testing.assert_allclose(metrics.weight, [0.4, 0.6], atol=1e-6)  # those of the round, before they rose
    np.testing.assert_allclose(metrics.said["loss"], losses(0.2), atol=1e-6)


def test_two_exponentiated_rounds_of_afl():
    run = toys.experiment("afl", toys.quadratic(), ascent="exponentiated")
    state, _ = run(toys.copies([1, 1]), 1, lr=0.1, ascent_lr=0.1)
    np.testing.assert_allclose(state.aux["weights"], [0.4501660, 0.5498340], atol=1e-6)
    state, _ = run(toys.copies([1, 1]), 2, lr=0.1, ascent_lr=0.1)
    assert float(state.shared["w"]) == pytest.approx(0.3669436, abs=1e-6)


def test_afl_finds_the_minimax_point(afl):
    state, _ = afl(toys.copies([1, 1]), 3000, lr=0.05, ascent_lr=0.05)
    assert float(state.aux["average"]["w"]) == pytest.approx(2 / 3, abs=2e-3)
    assert float(state.shared["w"]) == pytest.approx(2 / 3, abs=1e-3)
    np.testing.assert_allclose(state.aux["weights"], [2 / 3, 1 / 3], atol=1e-3)


def test_examples_of_a_client_do_not_change_its_weight(afl):
    one, _ = afl(toys.copies([1, 3]), 2, lr=0.1, ascent_lr=0.1)
    assert float(one.shared["w"]) == pytest.approx(0.384, abs=1e-6)


def test_afl_estimates_the_mean_of_two_gaussians():
    # Means 0 and 1, variances 1/2 and 0, loss E(x - w)^2 / 2: the value is 9/32 at w = 1/4 with weights (3/4, 1/4).
    spread = np.sqrt(0.5)
    cohort = toys.clients({"a": [[-spread, spread], [1.0, 1.0]], "h": [[1.0, 1.0], [1.0, 1.0]]})
    run = toys.experiment("afl", toys.quadratic())
    state, metrics = run(cohort, 3000, lr=0.02, ascent_lr=0.05)
    assert float(state.shared["w"]) == pytest.approx(0.25, abs=1e-3)
    np.testing.assert_allclose(state.aux["weights"], [0.75, 0.25], atol=1e-3)
    np.testing.assert_allclose(metrics.said["loss"], [0.28125, 0.28125], atol=1e-3)


def test_the_mean_of_the_iterates_predicts(afl):
    algorithm = fp.method("afl").make(toys.quadratic(), lr=0.1, ascent_lr=0.1)
    state, _ = afl(toys.copies([1, 1]), 2, lr=0.1, ascent_lr=0.1)
    assert float(algorithm.common(state)["w"]) == pytest.approx(0.292, abs=1e-6)
    own = algorithm.personalize(state, toys.copies([1, 1]), jax.random.key(0))
    np.testing.assert_allclose(own["w"], [0.292, 0.292], atol=1e-6)


def test_clients_of_a_domain_share_its_weight():
    """Domain 0 is two clients of 1 and 3 examples, domain 1 is one: by hand, from w = 0 and weights of 1/2."""
    fields = {"a": [[0.5], [1.0], [2.0]], "h": [[1.0], [1.0], [1.0]]}
    run = toys.experiment("afl", toys.quadratic(), num_clients=3, domains=(0, 0, 1))
    cohort = toys.copies([1, 3, 2], fields)
    state, metrics = run(cohort, 1, lr=0.1, ascent_lr=0.1)
    np.testing.assert_allclose(metrics.weight, [1 / 8, 3 / 8, 1 / 2], atol=1e-7)
    # The gradients are -0.5, -1 and -2: w = 0.1 (0.5 / 8 + 3 / 8 + 1)
    assert float(state.shared["w"]) == pytest.approx(0.1 * (0.0625 + 0.375 + 1), abs=1e-6)
    # f = (1/4 1/8 + 3/4 1/2, 2) = (0.40625, 2): the sum rises by 0.240625, of which each gives back a half.
    np.testing.assert_allclose(state.aux["weights"], [0.5 + 0.040625 - 0.1203125, 0.5 + 0.2 - 0.1203125], atol=1e-6)


def test_a_domain_whose_clients_are_absent_keeps_its_share():
    run = toys.experiment("agnostic_fedavg", toys.quadratic(), num_clients=3, domains=(0, 1, 2))
    fields = {"a": [[0.5], [1.0], [2.0]], "h": [[1.0], [1.0], [1.0]]}
    there = toys.only(toys.copies([1, 1, 1], fields), [0, 2])
    state, _ = run(there, 1, lr=0.1, ascent_lr=1.0)
    f = np.array([0.125, (0.125 + 2) / 2, 2])  # of the absent one, the weighted mean of the others
    np.testing.assert_allclose(state.aux["weights"], np.exp(f) / np.exp(f).sum(), rtol=1e-6)


def test_without_ascent_afl_is_uniform_gradient_descent(afl):
    state, _ = afl(toys.copies([1, 3]), 1, lr=0.1, ascent_lr=0.0)
    assert float(state.shared["w"]) == pytest.approx(0.2, abs=1e-7)
    np.testing.assert_allclose(state.aux["weights"], [0.5, 0.5], atol=1e-7)


def test_minimax_in_a_notebook_on_losses_beside_uploads():
    server = minimax(0.1).init({"w": jnp.zeros(())}, frozenset({"w"}), 2)
    sent = {"w": jnp.array([0.0, 0.4])}  # one step of 0.1 each
    server, info = aggregate(minimax(0.1), server, sent, said={"loss": jnp.array([0.0, 2.0])})
    assert float(server.shared["w"]) == pytest.approx(0.2, abs=1e-7)
    np.testing.assert_allclose(server.aux["weights"], [0.4, 0.6], atol=1e-7)
    np.testing.assert_allclose(info["weights"] / info["weights"].sum(), [0.5, 0.5])


def test_a_client_whose_weight_has_fallen_to_0_is_still_heard():
    aggregator = minimax(1.0)
    server = aggregator.init({"w": jnp.zeros(())}, frozenset({"w"}), 2)
    server = server._replace(aux=server.aux | {"weights": jnp.array([0.0, 1.0])})
    server, _ = aggregate(aggregator, server, {"w": jnp.array([5.0, 1.0])}, said={"loss": jnp.array([0.5, 0.0])})
    assert float(server.shared["w"]) == 1.0
    np.testing.assert_allclose(server.aux["weights"], [0.25, 0.75])


@pytest.mark.parametrize(("v", "expected"), [((0.9, 0.6, -0.2), (0.65, 0.35, 0)), ((2, 0, 0), (1, 0, 0))])
def test_the_projection_onto_the_simplex(v, expected):
    np.testing.assert_allclose(optax.projections.projection_simplex(jnp.array(v, jnp.float32)), expected, atol=1e-6)


# Agnostic over personalised losses


def test_with_nothing_shared_the_weights_change_no_model():
    cohort = toys.labelled_clients((6, 3))
    runs = [
        toys.experiment("agnostic_fedavg", toys.classifier(), personal=fp.everything)(cohort, 3, ascent_lr=lr)[0]
        for lr in (0.0, 5.0)
    ]
    toys.same_bits(runs[0].rows, runs[1].rows)
    assert not np.array_equal(runs[0].aux["weights"], runs[1].aux["weights"])


def test_losses_are_those_of_personalised_models():
    """Each client keeps v in w + v; with v fitted, both have no loss although w alone has."""
    task = toys.plain_task(lambda x, batch: 0.5 * (x["w"] + x["v"] - batch["a"]) ** 2, w=0.0, v=0.0)
    run = toys.experiment("afl", task, personal="v")
    cohort = toys.clients({"a": [[-1.0], [3.0]]})
    _, metrics = run(cohort, 400, lr=0.2, ascent_lr=0.01)
    np.testing.assert_allclose(metrics.said["loss"], [0, 0], atol=1e-9)


# q-FFL


def test_one_round_of_q_fedavg_by_hand():
    # From 0.5, F = (1/8, 1/2); the steps lead to 0.45 and 0.7, so that D = (0.5, -2) with L = 10.
    # h = |D|^2 + 10 F = (1.5, 9), and w = 0.5 - (0.0625 - 1) / 10.5.
    run = toys.experiment("qffl", toys.quadratic(0.5), batch_size=3)
    state, _ = run(toys.copies([1, 1]), 1, q=1.0, lr=0.1)
    assert float(state.shared["w"]) == pytest.approx(0.5 + 0.9375 / 10.5, abs=1e-6)


def test_larger_q_moves_the_fixed_point_from_the_mean_to_the_minimax_point():
    run, found = toys.experiment("qffl", toys.quadratic(), batch_size=3, steps=1), []
    for q in (0.0, 1.0, 5.0):
        state, _ = run(toys.copies([1, 1]), 3000, q=q, lr=0.1)
        found.append(float(state.shared["w"]))
        expected = brentq(lambda w, q=q: (losses(w) ** q * slopes(w)).sum(), 0.5, 0.9)
        assert found[-1] == pytest.approx(expected, abs=1e-4)
    assert 0.8 == pytest.approx(found[0]) and found[0] > found[1] > found[2] > 2 / 3


def test_q_fedavg_without_a_loss_stays_finite():
    aggregator = fair(0.5, 0.1)
    server = aggregator.init({"w": jnp.ones(())}, frozenset({"w"}), 2)
    server, _ = aggregate(aggregator, server, {"w": jnp.array([1.0, 1.0])}, said={"loss": jnp.zeros(2)})
    assert float(server.shared["w"]) == 1.0


def test_q_fedavg_moves_statistics_by_their_mean():
    """Running statistics take no step of a size that losses decide."""
    aggregator = fair(0.0, 0.1)
    server = aggregator.init({"w": jnp.zeros(()), "mean": jnp.zeros(())}, frozenset({"w"}), 2)
    sent = {"w": jnp.array([1.0, 3.0]), "mean": jnp.array([4.0, 8.0])}
    server, _ = aggregate(aggregator, server, sent, said={"loss": jnp.array([0.3, 7.0])}, trainable=frozenset({"w"}))
    assert float(server.shared["mean"]) == pytest.approx(6, rel=1e-6)
    assert float(server.shared["w"]) == pytest.approx(2, rel=1e-6)


# TERM


@pytest.mark.parametrize(("t", "fixed_point"), [(0.0, 0.8), (1.0, 0.7682706), (10.0, 0.6953381)])
def test_the_fixed_points_of_the_tilted_risk(t, fixed_point):
    run = toys.experiment("term", toys.quadratic(), batch_size=3, steps=1)
    state, _ = run(toys.copies([1, 1]), 2000, t=t, lr=0.02)
    assert float(state.shared["w"]) == pytest.approx(fixed_point, abs=1e-5)
    f = losses(fixed_point)
    expected = np.log(np.exp(t * f).mean()) / t if t else f.mean()
    assert float(state.aux["level"]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("t", [-2.0, 0.5, 3.0])
def test_weights_of_term_are_a_softmax(t):
    server = tilted(t).init({"w": jnp.zeros(())}, frozenset({"w"}), 3)
    f, p, w = np.array([0.2, 1.5, 0.9]), np.array([1.0, 2.0, 5.0]), np.array([1.0, 2.0, 4.0])
    said = {"loss": jnp.asarray(f, jnp.float32)}
    share = p * np.exp(t * f) / (p * np.exp(t * f)).sum()
    server, info = aggregate(tilted(t), server, {"w": jnp.asarray(w, jnp.float32)}, p * np.exp(t * f), said=said)
    assert float(server.shared["w"]) == pytest.approx((share * w).sum(), rel=1e-5)
    server = tilted(t, weights="uniform").init({"w": jnp.zeros(())}, frozenset({"w"}), 3)
    _, info = aggregate(tilted(t, weights="uniform"), server, {"w": jnp.asarray(w, jnp.float32)}, said=said)
    found = np.asarray(info["weights"]) / np.asarray(info["weights"]).sum()
    np.testing.assert_allclose(found, np.exp(t * f) / np.exp(t * f).sum(), rtol=1e-5)


@pytest.mark.parametrize("t", [1e4, -1e4])
def test_a_tilt_beyond_float32_overflows_nothing(t):
    run = toys.experiment("term", toys.quadratic(), batch_size=3, steps=1)
    state, metrics = run(toys.copies([1, 1]), 50, t=t, lr=0.1)
    assert np.isfinite(float(state.shared["w"])) and np.isfinite(metrics.weight).all()


@pytest.mark.parametrize("name", ["afl", "agnostic_fedavg", "qffl", "term"])
def test_a_client_whose_loss_is_not_finite_is_left_out(name):
    broken = toys.clients({"a": [[0.0], [np.nan]], "h": [[1.0], [1.0]]})
    algorithm = fp.method(name).make(toys.quadratic(1.0))
    state, metrics = algorithm.step(toys.start(algorithm, 2), broken, 0)
    assert metrics.rejected.tolist() == [False, True]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state.shared, state.aux)))


BAD = [
    (lambda: minimax(-0.1), "ascent_lr: found -0.1"),
    (lambda: minimax(ascent="project"), "ascent: found 'project'.* Did you mean 'projected'"),
    (lambda: minimax(domains=(0, 2)), r"domains: nobody is in \[1\]"),
    (lambda: minimax(domains=(0.5, 1)), "domains: found .* expected a whole number"),
    (lambda: minimax(domains=()), "domains: found"),
    (lambda: fair(-1.0, 0.1), "q: found -1"),
    (lambda: fair(1.0, 0.0), "lr: found 0.0; allowed is a finite number above 0"),
    (lambda: tilted(float("nan")), "t: found nan"),
    (lambda: fp.method("afl").make(toys.quadratic(), personal="v"), "the pattern v matches no leaf"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_settings_that_make_no_sense(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_domains_of_another_federation_are_refused():
    algorithm = fp.method("afl").make(toys.quadratic(), domains=(0, 0, 1))
    with pytest.raises(ValueError, match="domains: found 3; expected one for each of 2 clients"):
        toys.start(algorithm, 2)


def test_what_clients_should_have_said_is_named():
    server = fair(1.0, 0.1).init({"w": jnp.zeros(())}, frozenset({"w"}), 2)
    with pytest.raises(ValueError, match=r"said: found \[\]; clients of this aggregator say \['loss'\]"):
        aggregate(fair(1.0, 0.1), server, {"w": jnp.zeros(2)}, [1, 1])
