"""Methods with one global model, against numbers worked out by hand and recursions of the papers in float64."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import fedjax_pers as fp
from tests import toys

H, A = np.array([1.0, 4.0]), np.array([0.0, 1.0])  # the two quadratics of toys.TWO_QUADRATICS
LR = 0.1


@pytest.fixture(scope="module")
def fedavg():
    return toys.experiment("fedavg", toys.quadratic(), batch_size=3)


@pytest.mark.parametrize(
    ("steps", "fixed_point"), [(1, 0.8), (2, 0.7710843), (5, 0.6925023), (10, 0.6041260), (400, 0.5)]
)
def test_fedavg_drifts_from_the_optimum_as_local_steps_grow(fedavg, steps, fixed_point):
    state, _ = fedavg(toys.copies([1, 1]), 300, steps=steps)
    assert float(state.shared["w"]) == pytest.approx(fixed_point, abs=1e-6)
    rho = (1 - LR * H) ** steps
    assert float(state.shared["w"]) == pytest.approx(((1 - rho) * A).sum() / (1 - rho).sum(), abs=1e-6)


def test_one_round_of_fedavg(fedavg):
    state, metrics = fedavg(toys.copies([1, 1]), 1, steps=10)
    assert float(state.shared["w"]) == pytest.approx(0.4969766912, abs=1e-7)
    assert float(metrics.update_norm) == pytest.approx(0.4969766912, abs=1e-7)
    assert metrics.weight.tolist() == [0.5, 0.5]
    assert metrics.steps.tolist() == [10, 10]
    # Client 1 sees the loss 2 (w_k - 1)^2 before each step, w_k - 1 = -0.6^k.
    expected = np.mean(2 * 0.36 ** np.arange(10))
    np.testing.assert_allclose(metrics.loss, [0, expected], rtol=1e-6)


def test_clients_count_by_their_examples(fedavg):
    state, metrics = fedavg(toys.copies([1, 3]), 300, steps=10)
    assert float(state.shared["w"]) == pytest.approx(0.8207297, abs=1e-6)
    assert metrics.weight.tolist() == [0.25, 0.75]
    assert metrics.examples.tolist() == [1, 3]


def test_uniform_weights_ignore_the_number_of_examples():
    run = toys.experiment("fedavg", toys.quadratic(), batch_size=3, weights="uniform")
    state, metrics = run(toys.copies([1, 3]), 300, steps=10)
    assert float(state.shared["w"]) == pytest.approx(0.6041260, abs=1e-6)
    assert metrics.weight.tolist() == [0.5, 0.5]


@pytest.fixture(scope="module")
def fedprox():
    return toys.experiment("fedprox", toys.quadratic(), batch_size=1)


@pytest.mark.parametrize(("mu", "fixed_point"), [(0.1, 0.5176471), (1.0, 0.6153846), (10.0, 0.7586207)])
def test_fedprox_with_exact_local_solves(fedprox, mu, fixed_point):
    state, _ = fedprox(toys.clients(), 300, steps=300, mu=mu)
    assert float(state.shared["w"]) == pytest.approx(fixed_point, abs=2e-6)


def test_fedprox_with_ten_steps(fedprox):
    one, many = (fedprox(toys.clients(), rounds, steps=10, mu=1.0)[0] for rounds in (1, 300))
    assert float(one.shared["w"]) == pytest.approx(0.3996094, abs=1e-6)
    assert float(many.shared["w"]) == pytest.approx(0.6416688, abs=1e-6)


def test_the_first_step_of_fedprox_is_that_of_fedavg_whatever_the_strength(fedprox, fedavg):
    pulled, _ = fedprox(toys.clients(), 1, steps=1, mu=10.0)
    toys.same_bits(pulled.shared, fedavg(toys.copies([1, 1]), 1, steps=1)[0].shared)


def test_centralised_training_finds_the_optimum_of_the_pooled_data():
    run = toys.experiment("centralised", toys.quadratic(), batch_size=2)
    # The pooled gradient at 0 is (1 * 0 + 4 * (0 - 1)) / 2 = -2.
    assert float(run(toys.clients(), 1, steps=1)[0].shared["w"]) == pytest.approx(0.2, abs=1e-7)
    assert float(run(toys.clients(), 300, steps=10)[0].shared["w"]) == pytest.approx(0.8, abs=1e-6)


def test_local_training_knows_nothing_of_others():
    run = toys.experiment("local_only", toys.quadratic(), batch_size=1)
    state, metrics = run(toys.clients(), 2, steps=5)
    np.testing.assert_allclose(state.rows["w"], [0, 1 - 0.6**10], rtol=1e-6)
    assert state.shared == {} and not metrics.transmitted.any()


# Server optimisers. Three parameters and two clients of weight 1/4 and 3/4; the clients take K = 3 full-batch steps.

START = np.array([0.5, -0.2, 0.0])
VECTOR_A = np.array([[0.0, 1.0, -1.0], [1.0, -0.5, 0.3]])
VECTOR_H = np.array([[1.0, 2.0, 0.5], [4.0, 0.1, 3.0]])
VECTOR = {"a": VECTOR_A[:, None], "h": VECTOR_H[:, None]}
STEPS, ROUNDS = 3, 25


def mean_change(w):
    """``sum p_i (w_i - w)`` after K steps of gradient descent from w."""
    locals_ = VECTOR_A + (1 - LR * VECTOR_H) ** STEPS * (w - VECTOR_A)
    return np.array([0.25, 0.75]) @ (locals_ - w)


def by_reddi(second_moment, server_lr, beta1, tau, rounds):
    w, m, v = START.copy(), np.zeros(3), np.full(3, tau**2)
    for _ in range(rounds):
        change = mean_change(w)
        m = beta1 * m + (1 - beta1) * change
        v = second_moment(v, change**2)
        w = w + server_lr * m / (np.sqrt(v) + tau)
    return w


def adagrad(v, s):
    return v + s


def adam(v, s):
    return 0.9 * v + 0.1 * s


def yogi(v, s):
    return v - 0.1 * s * np.sign(v - s)


ADAPTIVE = [
    ("fedadagrad", adagrad, {"server_lr": 0.2, "beta1": 0.5, "tau": 0.1}),
    ("fedadam", adam, {"server_lr": 0.05, "beta1": 0.8, "beta2": 0.9, "tau": 0.1}),
    ("fedyogi", yogi, {"server_lr": 0.05, "beta1": 0.8, "beta2": 0.9, "tau": 0.1}),
]


def server_optimiser(name):
    return toys.experiment(name, toys.quadratic(tuple(START)), batch_size=3, steps=STEPS)


@pytest.mark.parametrize(("name", "second_moment", "settings"), ADAPTIVE, ids=[each[0] for each in ADAPTIVE])
def test_adaptive_server_optimisers_follow_the_recursion_of_the_paper(name, second_moment, settings):
    run, cohort = server_optimiser(name), toys.copies([1, 3], VECTOR)
    for rounds in (1, 2, ROUNDS):
        state, _ = run(cohort, rounds, **settings)
        expected = by_reddi(second_moment, settings["server_lr"], settings["beta1"], settings["tau"], rounds)
        np.testing.assert_allclose(state.shared["w"], expected, rtol=1e-5, atol=2e-6)

    # Everybody is content: there is no change, and none comes from the second moment or a bias correction.
    content = toys.copies([1, 3], {"a": np.tile(START, (2, 1, 1)), "h": VECTOR["h"]})
    toys.same_bits(run(content, 3, **settings)[0].shared, {"w": START.astype(np.float32)})


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("fedadam", {"tau": 0.0}, "tau: found 0"),
        ("fedyogi", {"beta2": 1.5}, "beta2: found 1.5; allowed is 0 .. 1"),
        ("fedadagrad", {"server_lr": -1.0}, "server_lr: found -1"),
        ("fedavgm", {"beta": float("nan")}, "beta: found nan"),
        ("fedavg", {"lr": float("inf")}, "lr: found inf"),
    ],
)
def test_settings_that_no_optimiser_can_have(name, settings, message):
    with pytest.raises(ValueError, match=message):
        fp.method(name).make(toys.quadratic(), **settings)


def test_the_heavy_ball_of_fedavgm():
    run, w, m = server_optimiser("fedavgm"), START.copy(), np.zeros(3)
    for _ in range(ROUNDS):
        m = 0.7 * m + mean_change(w)
        w = w + 0.3 * m
    state, _ = run(toys.copies([1, 3], VECTOR), ROUNDS, server_lr=0.3, beta=0.7)
    np.testing.assert_allclose(state.shared["w"], w, rtol=1e-5, atol=2e-6)


# SCAFFOLD, on four clients: the two quadratics twice, the second pair with two examples each.

FOUR = {
    "a": [[0.0, 0.0], [1.0, 1.0], [-0.5, 0.5], [0.5, 1.5]],
    "h": [[1.0, 1.0], [4.0, 4.0], [1.0, 1.0], [4.0, 4.0]],
}
SIZES = [1, 1, 2, 2]


@pytest.fixture(scope="module", params=["I", "II"])
def scaffold(request):
    option = request.param
    algorithm = fp.method("scaffold").make(
        toys.quadratic(), batch_size=2, steps=10, option=option, lr=LR, server_lr=0.5
    )
    return option, algorithm, jax.jit(algorithm.step)


def by_karimireddy(option, x, c, controls, members):
    """One round in float64. ``f_i = h/2 (w - a)^2`` in the mean over a client's examples, up to a constant."""
    a, h = np.array([0.0, 1.0, 0.0, 1.0]), np.array([1.0, 4.0, 1.0, 4.0])
    changes, renewed = [], controls.copy()
    for i in members:
        y = x
        for _ in range(10):
            y = y - LR * (h[i] * (y - a[i]) - controls[i] + c)
        renewed[i] = h[i] * (x - a[i]) if option == "I" else controls[i] - c + (x - y) / (10 * LR)
        changes.append(y - x)
    return x + 0.5 * np.mean(changes), c + (renewed - controls).sum() / 4, renewed


@pytest.mark.parametrize("participation", ["full", "partial"])
def test_scaffold_follows_the_paper_and_finds_the_optimum(scaffold, participation):
    option, algorithm, step = scaffold
    everyone = toys.clients(FOUR, sizes=SIZES)
    state, x, c, controls = toys.start(algorithm, 4), 0.0, 0.0, np.zeros(4)
    for number in range(60):
        members = [0, 1, 2, 3] if participation == "full" else [number % 4, (number + 1 + number // 4 % 3) % 4]
        state, _ = step(state, toys.only(everyone, members), jax.random.key(0))
        x, c, controls = by_karimireddy(option, x, c, controls, members)
        np.testing.assert_allclose(state.shared["w"], x, atol=2e-6)
        np.testing.assert_allclose(state.shared["control/w"], c, atol=5e-6)
        np.testing.assert_allclose(state.rows["client_control/w"], controls, atol=1e-5)
        np.testing.assert_allclose(np.mean(state.rows["client_control/w"]), state.shared["control/w"], atol=2e-6)
    if participation == "full":
        assert float(state.shared["w"]) == pytest.approx(0.8, abs=1e-5)


def test_scaffold_refuses_the_step_of_zero_that_option_ii_would_divide_by():
    with pytest.raises(ValueError, match="lr: found 0"):
        fp.method("scaffold").make(toys.quadratic(), lr=0.0)
    fp.method("scaffold").make(toys.quadratic(), lr=0.0, option="I")
