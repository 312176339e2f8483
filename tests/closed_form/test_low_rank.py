"""LoRA in federations: averaging factors is not averaging products, and which methods are exact."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_pers as fp
from fedjax_pers.adapters import lora, starting_from
from tests import toys

SIZES = (7, 4, 10)
SHARES = np.array(SIZES) / sum(SIZES)
RANK, ALPHA = 2, 3.0
BASE = "params/hidden1/"
W, A, B = BASE + "kernel", BASE + "lora_a/kernel", BASE + "lora_b/kernel"
LOCAL = {"lr": 0.3, "batch_size": 4, "epochs": 2, "alpha": ALPHA}


@functools.cache
def task():
    """The toy classifier; B does not start at zero, so that one round shows everything."""
    return toys.classifier()


def moved_start(algorithm):
    """A first state whose second factors are not zero."""
    state = toys.start(algorithm, 3)
    return state._replace(shared={**state.shared, B: 0.5 * jax.random.normal(jax.random.key(5), (RANK, 5))})


def round_of(name, **settings):
    """Uploads of the three clients, and the states before and after their round."""
    algorithm = fp.method(name).make(task(), **LOCAL, **settings)
    cohort, before = toys.labelled_clients(SIZES), moved_start(algorithm)
    exchange = jax.jit(lambda state, one: algorithm.exchange(state, one, jax.random.key(0)))
    uploads = [exchange(before, cohort.at(jnp.array([client])))[1] for client in range(3)]
    after, _ = jax.jit(algorithm.step)(before, cohort, jax.random.key(0))
    return algorithm, uploads, before, after


def mean_of_models(uploads, base, scale=ALPHA / RANK):
    products = [np.asarray(up[A], np.float64) @ np.asarray(up.get(B), np.float64) for up in uploads]
    return np.asarray(base, np.float64) + scale * np.einsum("i,ikd->kd", SHARES, products)


def model(algorithm, state):
    return np.asarray(fp.flatten(algorithm.task.plain(algorithm.common(state)))[W])


def test_fedit_averages_factors_which_is_another_model():
    algorithm, uploads, before, after = round_of("fedit", rank=RANK)
    for name in (A, B):
        expected = np.einsum("i,ikd->kd", SHARES, [np.asarray(up[name], np.float64) for up in uploads])
        np.testing.assert_allclose(after.shared[name], expected, rtol=1e-5, atol=1e-6)
    exact = mean_of_models(uploads, before.frozen[W])
    assert np.abs(model(algorithm, after) - exact).max() > 1e-3


@pytest.mark.parametrize(
    ("name", "settings"), [("fedex_lora", {"rank": RANK}), ("flora", {"ranks": (RANK,)})], ids=["FedEx-LoRA", "FLoRA"]
)
def test_the_model_is_the_mean_of_models(name, settings):
    algorithm, uploads, before, after = round_of(name, **settings)
    exact = mean_of_models(uploads, before.shared[W])
    np.testing.assert_allclose(model(algorithm, after), exact, rtol=1e-5, atol=1e-6)
    assert W not in uploads[0] and sorted(uploads[0]) == sorted(set(after.shared) - {W})


def test_ffa_is_exact_with_one_frozen_factor():
    algorithm = fp.method("ffa_lora").make(task(), rank=RANK, **LOCAL)
    states = [toys.start(algorithm, 3)]
    cohort = toys.labelled_clients(SIZES)
    uploads = [algorithm.exchange(states[0], cohort.at(jnp.array([i])), 0)[1] for i in range(3)]
    after, _ = algorithm.step(states[0], cohort, 0)
    assert A not in after.shared and A in after.frozen
    with_a = [{**up, A: after.frozen[A]} for up in uploads]
    np.testing.assert_allclose(model(algorithm, after), mean_of_models(with_a, after.frozen[W]), rtol=1e-5, atol=1e-6)


def test_one_client_makes_them_all_exact():
    cohort, found = toys.labelled_clients((7,)), {}
    for name, settings in (("fedit", {"rank": 2}), ("fedex_lora", {"rank": 2}), ("flora", {"ranks": (2,)})):
        algorithm = fp.method(name).make(task(), **LOCAL, **settings)
        after, _ = jax.jit(algorithm.step)(toys.start(algorithm, 1), cohort, jax.random.key(0))
        found[name] = model(algorithm, after)
    np.testing.assert_allclose(found["fedex_lora"], found["fedit"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["flora"], found["fedit"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("frozen", [A, B])
def test_a_factor_of_full_rank_beside_the_identity_is_fedavg(frozen):
    """W = 0, B = I frozen, s = 1: A learns as the weights of FedAvg do; the mirror with A = I as well."""
    trains = A if frozen == B else B
    start = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    base = fp.tasks.from_model(toys.EXAMPLE, "mlp", num_classes=3, hidden=(4,))
    adapted = starting_from(
        lora(starting_from(base, {W: np.zeros((4, 4))}), "**/hidden1/kernel", rank=4, alpha=4.0),
        {frozen: np.eye(4), trains: start},
    )
    client = fp.train(0.3, batch_size=4, epochs=2)
    low_rank = fp.compose(adapted, layout=fp.by_role(frozen=[frozen, W]), client=client)
    fedavg = fp.compose(starting_from(base, {W: start}), client=client)
    cohort, ends = toys.labelled_clients(SIZES), []
    for algorithm in (low_rank, fedavg):
        state, step = toys.start(algorithm, 3), jax.jit(algorithm.step)
        for _ in range(3):
            state, _ = step(state, cohort, jax.random.key(0))
        ends.append(state.shared)
    np.testing.assert_allclose(ends[0][trains], ends[1][W], rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(ends[0]["params/head/kernel"], ends[1]["params/head/kernel"], rtol=2e-5, atol=1e-6)


def test_the_second_factor_at_zero_and_frozen_trains_nothing():
    adapted = lora(task(), "**/hidden1/kernel", rank=RANK)
    frozen = [B, W, BASE + "bias", "params/head/*"]
    algorithm = fp.compose(adapted, layout=fp.by_role(frozen=frozen), client=fp.train(0.3, batch_size=4))
    before = toys.start(algorithm, 3)
    after, _ = algorithm.step(before, toys.labelled_clients(SIZES), 0)
    toys.same_bits(after.shared, before.shared)


def test_fedsa_shares_first_factors_alone():
    algorithm = fp.method("fedsa_lora").make(task(), rank=RANK, **LOCAL)
    assert sorted(toys.start(algorithm, 3).shared) == [A]
    assert sorted(toys.start(algorithm, 3).rows) == sorted([B, "params/head/kernel", "params/head/bias"])


def test_clients_of_lower_rank_send_zeros_beyond_it():
    algorithm = fp.method("hetlora").make(task(), ranks=(1, 3), **LOCAL)
    state = toys.start(algorithm, 3)
    state, _ = algorithm.step(state, toys.labelled_clients(SIZES), 0)  # after which B is not zero
    cohort = toys.labelled_clients(SIZES)
    for client, rank in enumerate((1, 3, 1)):
        _, upload, _ = algorithm.exchange(state, cohort.at(jnp.array([client])), 0)
        assert [bool(x.any()) for x in np.asarray(upload[B])] == [True] * rank + [False] * (3 - rank)
        assert [bool(x.any()) for x in np.asarray(upload[A]).T] == [True] * rank + [False] * (3 - rank)


@pytest.mark.parametrize("name", ["hetlora", "flora"])
def test_zeros_beyond_a_rank_are_not_charged(name):
    """Beside 4 x 5 weights rank r has (4 + 5) r numbers of 4 bytes; the largest rank is 3."""
    algorithm = fp.method(name).make(task(), ranks=(1, 3), **LOCAL)
    _, metrics = algorithm.step(toys.start(algorithm, 3), toys.labelled_clients(SIZES), 0)
    assert metrics.spared_up.tolist() == metrics.spared_down.tolist() == [4 * 9 * 2, 0, 4 * 9 * 2]


def test_pfedlora_shares_the_adapters_and_keeps_the_model():
    algorithm = fp.method("pfedlora").make(task(), rank=RANK, lr=0.3, batch_size=4)
    state = toys.start(algorithm, 3)
    assert all("lora_" in name for name in state.shared) and not any("lora_" in name for name in state.rows)
    after, _ = algorithm.step(state, toys.labelled_clients(SIZES), 0)
    assert all((np.asarray(after.rows[name]) != np.asarray(x)).any() for name, x in state.rows.items())
    assert all((np.asarray(after.shared[name]) != np.asarray(x)).any() for name, x in state.shared.items())


def test_the_backbone_is_held_once_and_is_not_in_any_row():
    algorithm = fp.method("fedsa_lora").make(task(), rank=RANK)
    state = toys.start(algorithm, 3)
    assert state.frozen[W].shape == (4, 5) and W not in state.rows


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("fedit", {"rank": 5}, "rank: found 5; params/hidden1/kernel"),
        ("fedit", {"on": "**/nowhere"}, "nowhere"),
        ("fedit", {"on": "**/head/kernel"}, "on: .* selects no floating weight"),
        ("flora", {"ranks": (2, 0)}, "ranks: found 0"),
        ("hetlora", {"ranks": (2, 9)}, "rank: found 9; params/hidden1/kernel"),
        ("fed_adapter", {"size": 6}, "size: found 6; params/hidden1/kernel has 5 features"),
        ("fedsa_lora", {"scaling": "rank"}, "scaling: found 'rank'"),
    ],
)
def test_settings_that_cannot_be(name, settings, message):
    with pytest.raises(ValueError, match=message):
        fp.method(name).make(task(), **settings)


def test_what_trains_in_full_may_be_all_or_nothing():
    whole = fp.method("bitfit").make(task(), also=fp.everything)
    assert not toys.start(whole, 2).frozen
    factors_alone = fp.method("fedsa_lora").make(task(), rank=RANK, on="**/hidden1/kernel", also=fp.nothing)
    assert sorted(toys.start(factors_alone, 2).rows) == [B]
