"""The weighted mean on stacked uploads, by hand: weights, broken uploads, dtypes, the server's optimiser."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_pers.aggregators import aggregate, mean
from tests.toys import same_bits

BROKEN = [np.nan, np.inf, -np.inf]


def server_of(aggregator, shared, trainable=None):
    """The server of these leaves; all of them may be trained unless names are given."""
    shared = {name: jnp.asarray(x) for name, x in shared.items()}
    return aggregator.init(shared, frozenset(shared if trainable is None else trainable), 2)


def stacked(**leaves):
    return {name: jnp.asarray(x) for name, x in leaves.items()}


# Numbers


def test_weights_are_shares_of_their_sum():
    server = server_of(mean(), {"w": np.float32([1, 1]), "b": np.float32(10)})
    uploads = stacked(w=np.float32([[1, 2], [3, 4], [5, 0]]), b=np.float32([0, 4, 20]))
    server, info = aggregate(mean(), server, uploads, [1, 3, 4])
    # (1*1 + 3*3 + 4*5) / 8, (1*2 + 3*4 + 4*0) / 8 and (1*0 + 3*4 + 4*20) / 8
    np.testing.assert_allclose(server.shared["w"], [3.75, 1.75], rtol=1e-6)
    np.testing.assert_allclose(server.shared["b"], 11.5, rtol=1e-6)
    assert info["rejected"].tolist() == [False, False, False]
    assert not info["skipped"]


def test_only_the_ratio_of_weights_matters():
    uploads = stacked(w=np.float32([[1, 2], [3, 4]]))
    shares = [aggregate(mean(), server_of(mean(), {"w": np.float32([9, 9])}), uploads, w)[0] for w in ([1, 3], [50, 150])]
    same_bits(shares[0], shares[1])


def test_a_client_of_weight_zero_does_not_count():
    uploads = stacked(w=np.float32([[1, 2], [1e30, 1e30]]))
    server, info = aggregate(mean(), server_of(mean(), {"w": np.float32([9, 9])}), uploads, [2, 0])
    assert server.shared["w"].tolist() == [1, 2]
    assert not info["rejected"].any()


def test_a_server_step_is_a_step_along_the_mean_difference():
    # w + lr sum p (w_i - w) = 10 + 0.5 (1/4 (2 - 10) + 3/4 (6 - 10)) = 7.5
    aggregator = mean(optax.sgd(0.5))
    server, _ = aggregate(aggregator, server_of(aggregator, {"w": np.float32(10)}), stacked(w=np.float32([2, 6])), [1, 3])
    assert server.shared["w"] == 7.5


def test_clients_that_agree_with_the_server_leave_it_as_it_is():
    w = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    server, _ = aggregate(mean(), server_of(mean(), {"w": w}), stacked(w=np.stack([w, w, w])), [0.1, 0.7, 13])
    same_bits(server.shared["w"], w)


def test_server_momentum_over_three_rounds():
    # g = -(mean - w), m <- 0.9 m + g, w <- w - 0.5 m; the clients' mean is 1, 2 and 0.
    aggregator = mean(optax.sgd(0.5, momentum=0.9))
    server, w, m = server_of(aggregator, {"w": np.float32(0)}), 0.0, 0.0
    for target in (1.0, 2.0, 0.0):
        server, _ = aggregate(aggregator, server, stacked(w=np.float32([target - 1, target + 1])), [1, 1])
        m = 0.9 * m - (target - w)
        w = w - 0.5 * m
        np.testing.assert_allclose(server.shared["w"], w, rtol=1e-6)
    assert w == pytest.approx(1.45125)  # 0.5, 1.7, 1.93 ... see below: each round is checked against the recursion


def test_weigh():
    context = lambda size: type("Context", (), {"size": jnp.int32(size)})  # noqa: E731
    assert mean(weights="examples").weigh(context(7), None) == 7
    assert mean(weights="uniform").weigh(context(7), None) == 1
