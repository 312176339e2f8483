"""The weighted mean on stacked uploads, by hand: weights, broken uploads, dtypes, the server's optimiser."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_pers.aggregators import Sender, aggregate, mean
from tests.toys import same_bits

BROKEN = [np.nan, np.inf, -np.inf]


def server_of(aggregator, trainable=None, **shared):
    """The server of these leaves; all of them are trained unless names are given."""
    shared = {name: jnp.asarray(x) for name, x in shared.items()}
    return aggregator.init(shared, frozenset(shared if trainable is None else trainable), 2)


def uploads(**leaves):
    return {name: jnp.asarray(x) for name, x in leaves.items()}


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


# Numbers


def test_weights_are_shares_of_their_sum():
    server = server_of(mean(), w=np.float32([1, 1]), b=np.float32(10))
    sent = uploads(w=np.float32([[1, 2], [3, 4], [5, 0]]), b=np.float32([0, 4, 20]))
    server, info = aggregate(mean(), server, sent, [1, 3, 4])
    # (1*1 + 3*3 + 4*5) / 8, (1*2 + 3*4 + 4*0) / 8 and (1*0 + 3*4 + 4*20) / 8
    np.testing.assert_allclose(server.shared["w"], [3.75, 1.75], rtol=1e-6)
    np.testing.assert_allclose(server.shared["b"], 11.5, rtol=1e-6)
    assert info["rejected"].tolist() == [False, False, False]
    assert not info["skipped"]


def test_only_the_ratio_of_weights_matters():
    sent = uploads(w=np.float32([[1, 2], [3, 4]]))
    few, many = (aggregate(mean(), server_of(mean(), w=np.float32([9, 9])), sent, w)[0] for w in ([1, 3], [64, 192]))
    same_bits(few, many)


def test_a_client_of_weight_zero_does_not_count():
    sent = uploads(w=np.float32([[1, 2], [1e30, -1e30]]))
    server, info = aggregate(mean(), server_of(mean(), w=np.float32([9, 9])), sent, [2, 0])
    assert server.shared["w"].tolist() == [1, 2]
    assert info["rejected"].tolist() == [False, False]


def test_the_servers_step_goes_along_the_mean_difference():
    # w + lr sum p (w_i - w) = 10 + 0.5 (1/4 (2 - 10) + 3/4 (6 - 10)) = 7.5
    aggregator = mean(optax.sgd(0.5))
    server, _ = aggregate(aggregator, server_of(aggregator, w=np.float32(10)), uploads(w=np.float32([2, 6])), [1, 3])
    assert server.shared["w"] == 7.5


def test_clients_that_send_what_they_received_leave_every_bit():
    w = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    server, _ = aggregate(mean(), server_of(mean(), w=w), uploads(w=np.stack([w, w, w])), [0.1, 0.7, 13])
    same_bits(server.shared["w"], w)


def test_server_momentum_over_three_rounds():
    # The clients' means are 1, 2 and 0, the learning rate 0.5: g = w - mean, m <- 0.9 m + g, w <- w - 0.5 m.
    # g = -1, m = -1, w = 0.5; g = -1.5, m = -2.4, w = 1.7; g = 1.7, m = -0.46, w = 1.93
    aggregator = mean(optax.sgd(0.5, momentum=0.9))
    server = server_of(aggregator, w=np.float32(0))
    for target, expected in ((1, 0.5), (2, 1.7), (0, 1.93)):
        server, _ = aggregate(aggregator, server, uploads(w=np.float32([target - 1, target + 1])), [1, 1])
        np.testing.assert_allclose(server.shared["w"], expected, rtol=1e-6)


@pytest.mark.parametrize(("weights", "expected"), [("examples", 7), ("uniform", 1)])
def test_how_much_a_client_counts(weights, expected):
    weight = mean(weights=weights).weigh(None, Sender(jnp.int32(3), jnp.int32(7), None, {}, None, None))
    assert weight == expected and weight.dtype == jnp.float32


# Leaves that are not trained


def test_leaves_that_are_not_trained_bypass_the_servers_optimiser():
    aggregator, trainable = mean(optax.sgd(0.5, momentum=0.9)), frozenset({"w"})
    server = server_of(aggregator, trainable, w=np.float32(0), running=np.float32(8))
    assert {leaf.shape for leaf in jax.tree.leaves(server.opt)} == {()} and len(jax.tree.leaves(server.opt)) == 1
    sent = uploads(w=np.float32([2, 2]), running=np.float32([0, 4]))
    server, _ = aggregate(aggregator, server, sent, [1, 3], trainable=trainable)
    assert server.shared["w"] == 1  # half of the way
    assert server.shared["running"] == 3  # the plain mean
    server, _ = aggregate(aggregator, server, sent, [1, 3], trainable=trainable)
    np.testing.assert_allclose(server.shared["w"], 1 + 0.5 * (1 + 0.9 * 2), rtol=1e-6)
    assert server.shared["running"] == 3


@pytest.mark.parametrize(
    ("sent", "weights", "expected"),
    [
        ([4, 5], [1, 1], 5),  # 3 + round(1.5), and 1.5 is as near to 2 as to 1: the even one
        ([4, 5], [2, 1], 4),  # 3 + round(4/3)
        ([4, 5], [1, 2], 5),  # 3 + round(5/3)
        ([7, 7], [0.1, 0.7], 7),  # clients that agree are met exactly
        ([1, -3], [1, 2], -2),  # 3 + round(-14/3): not towards zero
    ],
)
def test_an_integer_leaf_moves_by_the_nearest_whole_number(sent, weights, expected):
    server = server_of(mean(), (), count=np.int32(3))
    server, _ = aggregate(mean(), server, uploads(count=np.int32(sent)), weights, trainable=frozenset())
    assert server.shared["count"].dtype == jnp.int32
    assert server.shared["count"] == expected


# Weights and uploads that cannot be used


def momentum_server():
    """A server after one round, so that its optimiser remembers something."""
    aggregator = mean(optax.sgd(1.0, momentum=0.9))
    server = server_of(aggregator, w=np.float32([0, 0]))
    return aggregator, aggregate(aggregator, server, uploads(w=np.float32([[1, 2]])), [1])[0]


def test_weights_that_are_all_zero_skip_the_round():
    aggregator, before = momentum_server()
    after, info = aggregate(aggregator, before, uploads(w=np.float32([[1, 2], [3, 4]])), [0, 0])
    assert info["skipped"] and info["rejected"].tolist() == [False, False]
    same_bits(after, before)


def test_no_uploads_skip_the_round():
    aggregator, before = momentum_server()
    after, info = aggregate(aggregator, before, uploads(w=np.zeros((0, 2), np.float32)), [])
    assert info["skipped"] and info["rejected"].shape == (0,)
    same_bits(after, before)


@pytest.mark.parametrize("value", BROKEN)
@pytest.mark.parametrize("weight", [0.0, 5.0])
def test_an_upload_that_is_not_finite_is_left_out_and_named(value, weight):
    draw = np.random.default_rng(17)
    w, b = draw.normal(size=(100, 3)).astype(np.float32), draw.normal(size=100).astype(np.float32)
    weights = draw.uniform(1, 50, 100)
    b[17], weights[17] = value, weight
    server = server_of(mean(), w=np.float32([1, 0, -1]), b=np.float32(0))
    server, info = aggregate(mean(), server, uploads(w=w, b=b), weights)
    others = np.arange(100) != 17
    np.testing.assert_allclose(server.shared["w"], np.average(w[others], 0, weights[others]), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(server.shared["b"], np.average(b[others], 0, weights[others]), rtol=1e-6, atol=1e-6)
    assert np.flatnonzero(info["rejected"]).tolist() == [17]
    assert not info["skipped"]


@pytest.mark.parametrize("value", BROKEN)
def test_uploads_that_are_all_broken_change_neither_leaves_nor_optimiser(value):
    aggregator, before = momentum_server()
    after, info = aggregate(aggregator, before, uploads(w=np.float32([[1, value], [value, 4]])), [1, 3])
    assert info["rejected"].tolist() == [True, True] and info["skipped"]
    same_bits(after, before)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, -1], r"weights: client 1 has -1\.0; allowed are finite numbers of at least 0"),
        ([np.nan, 1], "weights: client 0 has nan"),
        ([1, np.inf], "weights: client 1 has inf"),
        ([[1, 1]], r"weights: found shape \(1, 2\); expected \[clients\]"),
        ([1, 1, 1], r"uploads\['w'\]: found shape \(2, 2\); expected \[clients, \.\.\.\] = \(3, 2\)"),
        (1.0, r"weights: found shape \(\); expected \[clients\]"),
    ],
)
def test_weights_that_make_no_sense(weights, message):
    server = server_of(mean(), w=np.float32([0, 0]))
    with pytest.raises(ValueError, match=message):
        aggregate(mean(), server, uploads(w=np.float32([[1, 2], [3, 4]])), weights)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"v": (2, 2)}, r"uploads: found leaves \['v'\]; the server has \['w'\]"),
        ({"w": (2, 2), "head": (2, 2)}, r"uploads: found leaves \['head', 'w'\]"),
        ({}, r"uploads: found leaves \[\]"),
        ({"w": (2, 3)}, r"uploads\['w'\]: found shape \(2, 3\); .* \(2, 2\)"),
        ({"w": (2,)}, r"uploads\['w'\]: found shape \(2,\)"),
    ],
)
def test_uploads_that_do_not_fit_the_server(sent, message):
    server = server_of(mean(), w=np.float32([0, 0]))
    with pytest.raises(ValueError, match=message):
        aggregate(mean(), server, {name: jnp.ones(shape) for name, shape in sent.items()}, [1, 1])


def test_other_words():
    with pytest.raises(
        ValueError, match="weights: found 'example'; allowed are examples, uniform. Did you mean 'examples'"
    ):
        mean(weights="example")
    server = server_of(mean(), w=np.float32([0, 0]))
    with pytest.raises(ValueError, match=r"trainable: found \['v'\]; the server has \['w'\]"):
        aggregate(mean(), server, uploads(w=np.float32([[1, 2]])), [1], trainable=frozenset({"v"}))


# Precision and compilation


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_summed_in_float32(dtype):
    # 2048 clients at +1 and 2048 at +3: in half precision the sum would stop growing at 256 or 2048.
    sent = jnp.concatenate([jnp.full((2048, 1), 1, dtype), jnp.full((2048, 1), 3, dtype)])
    server, _ = aggregate(mean(), server_of(mean(), w=jnp.zeros(1, dtype)), {"w": sent}, np.ones(4096))
    assert server.shared["w"].dtype == dtype
    assert server.shared["w"].tolist() == [2]


def test_double_precision_is_summed_in_double_precision(x64):
    sent = np.array([[1.0], [1.0 + 2.0**-40]])
    server, _ = aggregate(mean(), server_of(mean(), w=np.zeros(1)), uploads(w=sent), [1, 3])
    assert server.shared["w"].dtype == jnp.float64
    np.testing.assert_allclose(server.shared["w"] - 1, 0.75 * 2.0**-40, rtol=1e-3)


def test_compiled_it_gives_the_same_for_all_weights_in_one_program():
    aggregator = mean(optax.sgd(0.5, momentum=0.9))
    step = jax.jit(lambda server, sent, weights: aggregate(aggregator, server, sent, weights))
    server = server_of(aggregator, w=np.float32(0))
    for sent, weights, expected in (([2, 6], [1, 3], 2.5), ([2, np.nan], [1, 3], 4.5), ([2, 6], [0, 0], 4.5)):
        # g = -5, m = -5, w = 2.5; the mean is 2: g = 0.5, m = -4, w = 4.5; nothing counts: no step
        server, info = step(server, uploads(w=np.float32(sent)), jnp.float32(weights))
        np.testing.assert_allclose(server.shared["w"], expected, rtol=1e-6)
        assert bool(info["skipped"]) == (sum(weights) == 0)
        assert info["rejected"].tolist() == [False, bool(np.isnan(sent[1]))]
    assert step._cache_size() == 1


def test_arguments_are_left_as_they_are():
    server, sent = server_of(mean(), w=np.float32([1, 1])), uploads(w=np.float32([[1, 2], [3, 4]]))
    before = jax.tree.map(np.array, (server, sent))
    aggregate(mean(), server, sent, [1, 3])
    same_bits((server, sent), before)
