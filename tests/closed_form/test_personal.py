"""Methods with a model of each client's own, on quadratics whose answers are known."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_pers as fp
from tests import toys

H, A = np.array([1.0, 4.0]), np.array([0.0, 1.0])  # the two quadratics of toys.TWO_QUADRATICS
LR = 0.1
CLIENT = {"a": [[1.0]], "h": [[4.0]]}  # one client, f = 2 (w - 1)^2


def predictions(algorithm, state, cohort):
    """The scalar of each client's own model."""
    return np.asarray(jax.jit(algorithm.personalize)(state, cohort, jax.random.key(0))["w"])


# FedAvg and fine-tuning.


def test_fine_tuning_starts_from_the_global_model():
    settings = {"batch_size": 1, "steps": 10, "tune_epochs": 5, "tune_lr": 0.05}
    state, _ = toys.experiment("fedavg_ft", toys.quadratic(), **settings)(toys.clients(), 300)
    algorithm = fp.method("fedavg_ft").make(toys.quadratic(), **settings)
    expected = A + (1 - 0.05 * H) ** 5 * (0.6041260 - A)
    np.testing.assert_allclose(predictions(algorithm, state, toys.clients()), expected, atol=1e-6)


# Ditto.


@pytest.fixture(scope="module")
def ditto():
    return toys.experiment("ditto", toys.quadratic(), batch_size=1, steps=1)


@pytest.mark.parametrize(("lam", "personal"), [(1.0, (0.4, 0.96)), (10.0, (0.7272727, 0.8571429))])
def test_ditto_settles_between_the_clients_and_the_global_optimum(ditto, lam, personal):
    state, _ = ditto(toys.clients(), 300, lam=lam, personal_epochs=100)
    assert float(state.shared["w"]) == pytest.approx(0.8, abs=1e-6)
    np.testing.assert_allclose(state.rows["own/w"], personal, atol=2e-6)


def test_a_personal_step_of_ditto_is_tied_to_the_model_received(ditto):
    # eta lam = 1, so v <- w - eta grad f(v), whatever v was: the round start 0, then 0.2, then 0.35.
    w, v = 0.0, np.zeros(2)
    for rounds in (1, 2, 3):
        state, _ = ditto(toys.clients(), rounds, lam=10.0, personal_epochs=1)
        w, v = w - LR * np.mean(H * (w - A)), w - LR * H * (v - A)
        assert float(state.shared["w"]) == pytest.approx(w, abs=1e-6)
        np.testing.assert_allclose(state.rows["own/w"], v, atol=1e-6)
    assert w == pytest.approx(0.4625) and v == pytest.approx([0.33, 0.574])


# APFL.


def w_stands_still(lr):
    """SGD for a client's own leaves only."""
    hold = optax.stateless(lambda updates, _: {n: u if n.startswith("own/") else 0 * u for n, u in updates.items()})
    return optax.chain(optax.sgd(lr), hold)


@pytest.mark.parametrize(
    ("optimizer", "w", "v"),
    [
        (w_stands_still, 0.0, 0.1),  # v = 0 - 0.1 * 0.25 * 4 (0 - 1); without the chain rule's 0.25 it were 0.4
        (optax.sgd, 0.4, 0.07),  # the mixture is 0.75 * 0.4 after the step on w, so v = 0 - 0.1 * 0.25 * 4 (0.3 - 1)
    ],
)
def test_one_step_of_apfl(optimizer, w, v):
    algorithm = fp.method("apfl").make(toys.quadratic(), alpha=0.25, steps=1, batch_size=1, optimizer=optimizer)
    cohort = toys.clients(CLIENT)
    state, _ = jax.jit(algorithm.step)(toys.start(algorithm, 1), cohort, jax.random.key(0))
    assert float(state.shared["w"]) == pytest.approx(w, abs=1e-7)
    assert float(state.rows["own/w"][0]) == pytest.approx(v, abs=1e-7)
    # The client predicts with mixed parameters: 0.025 where w stands still.
    assert predictions(algorithm, state, cohort) == pytest.approx([0.25 * v + 0.75 * w], abs=1e-7)


def test_apfl_adapts_its_mixing_weight_once_a_round_and_clips_it():
    def program(alpha_lr):
        algorithm = fp.method("apfl").make(toys.quadratic(), alpha=0.25, alpha_lr=alpha_lr, steps=2, batch_size=1)
        state = toys.start(algorithm, 1)
        state = state._replace(
            shared={"w": jnp.float32(0.2)}, rows={**state.rows, "own/w": jnp.array([0.6], jnp.float32)}
        )
        return algorithm.step(state, toys.clients(CLIENT), jax.random.key(0))[0]

    # <v - w, grad f> = 0.4 * 4 (0.25 * 0.6 + 0.75 * 0.2 - 1) = -1.12.
    alphas = jax.jit(jax.vmap(program))(jnp.array([0.0, 0.1, 10.0])).rows["alpha"][:, 0]
    np.testing.assert_allclose(alphas, [0.25, 0.362, 1.0], atol=1e-6)


# pFedMe.


def test_two_local_rounds_of_pfedme():
    run = toys.experiment("pfedme", toys.quadratic(), num_clients=1, batch_size=1, steps=2, inner_steps=2)
    settings = {"lr": 0.5, "lam": 1.0, "inner_lr": 0.1}
    # theta: 0, 0.4, 0.6; w_i = 0.5 * 0.6. Again from there: 0.3, 0.58, 0.72; w_i = 0.3 + 0.5 * 0.42 = 0.51.
    plain, far = (run(toys.clients(CLIENT), 1, beta=beta, **settings)[0] for beta in (1.0, 2.0))
    assert float(plain.shared["w"]) == pytest.approx(0.51, abs=1e-6)
    assert float(far.shared["w"]) == pytest.approx(1.02, abs=1e-6)
    assert float(plain.rows["own/w"][0]) == pytest.approx(0.72, abs=1e-6)


# FedProx, pFedMe and L2GD look for the same centre.


def centre(lam):
    """The solution of ``sum h / (h + lam) (a - c) = 0``."""
    return (H * A / (H + lam)).sum() / (H / (H + lam)).sum()


def tied(lam):
    """Each client's minimiser of ``h/2 (x - a)^2 + lam/2 (x - centre)^2``."""
    return (H * A + lam * centre(lam)) / (H + lam)


@pytest.fixture(scope="module")
def fedprox():
    return toys.experiment("fedprox", toys.quadratic(), batch_size=1, steps=300)


@pytest.fixture(scope="module")
def pfedme():
    return toys.experiment("pfedme", toys.quadratic(), batch_size=1, steps=1, inner_steps=200, inner_lr=0.1)


@pytest.fixture(scope="module")
def l2gd():
    """The mean over coins: updates are affine on quadratics, so the mean over runs descends like the gradient."""

    @jax.jit
    def runs(lam):
        def one(seed):
            algorithm = fp.method("l2gd").make(toys.quadratic(), batch_size=1, lr=0.02, p=0.4, lam=lam)
            state = toys.start(algorithm, 2)
            step = algorithm.step
            return jax.lax.fori_loop(0, 600, lambda _, s: step(s, toys.clients(), jax.random.key(seed))[0], state)

        return jax.vmap(one)(jnp.arange(400))

    return runs


@pytest.mark.parametrize("lam", [0.5, 1.0, 2.0])
def test_fedprox_pfedme_and_l2gd_share_a_centre(fedprox, pfedme, l2gd, lam):
    if lam == 1.0:
        assert centre(lam) == pytest.approx(0.6153846, abs=1e-7)
        np.testing.assert_allclose(tied(lam), [0.3076923, 0.9230769], atol=1e-7)
    # With one local round and eta lam = 1 even their rounds are the same.
    one = fedprox(toys.clients(), 1, mu=lam)[0], pfedme(toys.clients(), 1, lam=lam, lr=1 / lam)[0]
    assert float(one[1].shared["w"]) == pytest.approx(float(one[0].shared["w"]), abs=1e-6)

    assert float(fedprox(toys.clients(), 300, mu=lam)[0].shared["w"]) == pytest.approx(centre(lam), abs=2e-6)

    state, _ = pfedme(toys.clients(), 300, lam=lam, lr=1 / lam)
    assert float(state.shared["w"]) == pytest.approx(centre(lam), abs=2e-6)
    np.testing.assert_allclose(state.rows["own/w"], tied(lam), atol=2e-6)

    after = l2gd(lam)
    own = np.asarray(after.rows["own/w"])
    error = own.std(axis=0) / np.sqrt(len(own))
    assert (error < 0.01).all()
    assert (np.abs(own.mean(axis=0) - tied(lam)) < 4 * error).all()
    np.testing.assert_allclose(after.shared["w"], own.mean(axis=1), atol=1e-6)


def test_every_round_of_l2gd_is_a_local_or_an_averaging_step():
    lr, lam, p = 0.05, 2.0, 0.25
    algorithm = fp.method("l2gd").make(toys.quadratic(), batch_size=1, lr=lr, p=p, lam=lam)
    step, state, coins = jax.jit(algorithm.step), toys.start(algorithm, 2), []
    for _ in range(60):
        x = np.asarray(state.rows["own/w"], np.float64)
        local, averaged = x - lr / (1 - p) * H * (x - A), x - lr * lam / p * (x - x.mean())
        state, metrics = step(state, toys.clients(), jax.random.key(3))
        found = np.asarray(state.rows["own/w"])
        same = [np.allclose(found, each, atol=1e-6) for each in (local, averaged)]
        assert any(same)
        assert float(state.shared["w"]) == pytest.approx(found.mean(), abs=1e-6)
        coins.append(same[1])
        # The mean is needed when clients have moved since they last met, and nothing crosses otherwise.
        assert metrics.transmitted.tolist() == [len(coins) > 1 and coins[-1] and not coins[-2]] * 2
    # 60 tosses at 1/4: 15 with a standard deviation of 3.4.
    assert 4 <= sum(coins) <= 28


def test_l2gd_jumps_to_the_mean_where_the_step_is_whole():
    lr, lam, p = 0.125, 2.0, 0.25  # lr lam / p = 1
    algorithm = fp.method("l2gd").make(toys.quadratic(), batch_size=1, lr=lr, p=p, lam=lam)
    step, state = jax.jit(algorithm.step), toys.start(algorithm, 2)
    rows = []
    for _ in range(30):
        state, metrics = step(state, toys.clients(), jax.random.key(3))
        rows.append((bool(metrics.transmitted[0]), np.asarray(state.rows["own/w"])))
    met = [own for sent, own in rows if sent]
    assert len(met) > 2
    np.testing.assert_allclose([own[0] for own in met], [own[1] for own in met], atol=1e-6)


# FedSim and FedAlt.


@pytest.mark.parametrize(
    ("name", "settings", "w", "v"),
    [
        ("fedsim", {}, 0.1, 0.1),
        ("fedalt", {"personal_epochs": 1}, 0.09, 0.1),  # v first: then the residual seen by w is 0.9
    ],
)
def test_simultaneous_and_alternating_steps(name, settings, w, v):
    algorithm = fp.method(name).make(toys.two_leaves(), personal="v", steps=1, batch_size=1, **settings)
    cohort = toys.clients({"a": [[0.0]]})
    state, _ = jax.jit(algorithm.step)(toys.start(algorithm, 1), cohort, jax.random.key(0))
    assert float(state.shared["w"]) == pytest.approx(w, abs=1e-7)
    assert float(state.rows["v"][0]) == pytest.approx(v, abs=1e-7)


def test_an_apfl_newcomer_trains_its_own_model_on_the_shared_one_as_it_is():
    # f = 2 (x - 1)^2, w = 0, alpha = 1/4, one step of 0.1 on v from v = w: the gradient at the mixture 0 is -4, times
    # alpha, so v = 0.1 and the mixture is 0.025. Training w too would move it to 0.325.
    task = toys.quadratic()
    algorithm = fp.method("apfl").make(task, lr=0.1, alpha=0.25, newcomer_epochs=1, batch_size=1)
    state = algorithm.init(task.init(jax.random.key(0)), jax.random.key(0), num_clients=1)
    newcomer = toys.clients({"a": [[1.0]], "h": [[4.0]]}, ids=[1])
    model = algorithm.personalize(state, newcomer, jax.random.key(0))
    np.testing.assert_allclose(jax.tree.leaves(model)[0], [0.025], rtol=1e-6)
