"""FedFomo against the example of the algorithms page, and against rounds worked out by hand."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_pers as fp
from fedjax_pers.aggregators import aggregate, first_order
from fedjax_pers.aggregators.peers import shares_of
from tests import toys

CLIENTS = 6


def test_the_example_of_the_page():
    """From theta = 0 with loss 1/2 (theta - 1)^2 and candidates 0.5, 2, -1 and 0 itself."""
    candidates = jnp.array([0.0, 0.5, 2.0, -1.0, 0.0])
    found = shares_of(0.5 * (candidates - 1) ** 2, candidates**2)
    assert found.tolist() == [0, 1, 0, 0, 0]
    assert float((found * candidates).sum()) == 0.5


def test_shares_against_float64():
    draw = np.random.default_rng(0)
    losses, distances = draw.uniform(0, 2, 7), draw.uniform(0.1, 3, 7)
    distances[0] = 0
    expected = np.maximum(losses[0] - losses, 0)[1:] / np.sqrt(distances[1:])
    found = shares_of(jnp.asarray(losses, jnp.float32), jnp.asarray(distances, jnp.float32))
    np.testing.assert_allclose(found, [0, *expected / expected.sum()], rtol=1e-5)


def test_a_model_of_nan_loss_or_at_no_distance_has_no_share():
    found = shares_of(jnp.array([1.0, jnp.nan, 0.5, 0.5]), jnp.array([0.0, 1.0, 0.0, 4.0]))
    assert found.tolist() == [0, 0, 0, 1]


def test_a_client_with_an_infinite_loss_is_helped_by_the_nearest_most():
    """Distances 1 and 2: shares of 2 : 1."""
    found = shares_of(jnp.array([jnp.inf, 1.0, 2.0, jnp.inf]), jnp.array([0.0, 1.0, 4.0, 1.0]))
    np.testing.assert_allclose(found, [0, 2 / 3, 1 / 3, 0], rtol=1e-6)


def test_rounds_by_hand():
    """f_0 = 1/2 (w - 1)^2 and f_1 = 2 (w - 1)^2 from 0: client 0 takes over the model of client 1, which is ahead."""
    run = toys.experiment("fedfomo", toys.quadratic(), lr=0.1, models=2, explore=0.0, steps=1)
    cohort = toys.copies([4, 4], {"a": [[1.0], [1.0]], "h": [[1.0], [4.0]]})
    first, _ = run(cohort, 1)
    np.testing.assert_allclose(first.aux["models"]["w"], [0.1, 0.4], rtol=1e-6)
    second, _ = run(cohort, 2)
    np.testing.assert_allclose(second.aux["models"]["w"], [0.4 + 0.1 * 0.6, 0.4 + 0.4 * 0.6], rtol=1e-6)
    assert second.aux["affinity"].tolist() == [[0, 1], [0, 0]]
    assert second.aux["weights"].tolist() == [[0, 1], [0, 1]]  # client 1 stays with its own
    np.testing.assert_allclose(second.shared["w"], (0.46 + 0.64) / 2, rtol=1e-6)


def sent_to(client, server, key, **options):
    """The clients whose models are sent, the first being the client itself; models are numbered from 0."""
    return first_order(4, **options).render(server._replace(key=key), jnp.int32(client))["w"].astype(int).tolist()


@pytest.fixture
def server():
    """Six clients that have come, but for the last; client 1 has been helped by 4, 0 and 2, in this order."""
    server = first_order(4).init({"w": jnp.zeros(())}, frozenset({"w"}), CLIENTS)
    affinity = jnp.zeros((CLIENTS, CLIENTS)).at[1].set(jnp.array([0.5, 0, 0.25, 0, 2.0, 9.0]))
    came = jnp.ones(CLIENTS, jnp.int32).at[5].set(0)
    return server._replace(aux=server.aux | {"models": {"w": jnp.arange(6.0)}, "affinity": affinity, "came": came})


def test_the_models_that_helped_most_are_sent(server):
    assert sent_to(1, server, fp.keys.as_key(0), explore=0.0) == [1, 4, 0, 2]


def test_exploration_draws_any_three_others_that_have_come(server):
    counts = np.zeros(CLIENTS)
    for seed in range(200):
        own, *others = sent_to(1, server, fp.keys.as_key(seed), explore=1.0, decay=0.0)
        assert own == 1 and len(set(others)) == 3
        counts[others] += 1
    assert counts[1] == counts[5] == 0
    # Three of the four others, each in 150 of 200 draws, give or take four standard deviations of 6.1.
    assert (abs(counts[[0, 2, 3, 4]] - 150) < 25).all()


def test_exploration_ends(server):
    late = server._replace(aux=server.aux | {"rounds": jnp.int32(10)})
    for seed in range(20):
        assert sent_to(1, late, fp.keys.as_key(seed), explore=1.0, decay=0.1) == [1, 4, 0, 2]


def test_where_too_few_have_come_the_own_model_fills_the_places(server):
    alone = server._replace(aux=server.aux | {"came": jnp.zeros(CLIENTS, jnp.int32).at[2].set(1)})
    assert sent_to(1, alone, fp.keys.as_key(0)) == [1, 2, 1, 1]


def test_it_is_kept_by_id_who_came_and_who_helped_whom():
    aggregator = first_order(2, explore=0.0)
    server = aggregator.init({"w": jnp.zeros(2)}, frozenset({"w"}), CLIENTS)
    nothing = {"shares": jnp.zeros((2, 2))}
    server, _ = aggregate(aggregator, server, {"w": jnp.array([[1.0, 2], [3, 4]])}, ids=[5, 2], said=nothing, key=0)
    assert server.aux["came"].tolist() == [0, 0, 1, 0, 0, 1]
    assert server.aux["models"]["w"][jnp.array([5, 2])].tolist() == [[1, 2], [3, 4]]
    said = {"shares": jnp.array([[0.0, 1.0], [0.0, 0.0]])}
    server, info = aggregate(
        aggregator, server, {"w": jnp.array([[5.0, 6], [jnp.nan, 0]])}, ids=[2, 5], said=said, key=1
    )
    assert info["rejected"].tolist() == [False, True]
    assert server.aux["weights"][2].tolist() == [0, 0, 0, 0, 0, 1]
    assert server.aux["models"]["w"][jnp.array([5, 2])].tolist() == [[1, 2], [5, 6]]


@pytest.mark.parametrize(("setting", "value"), [("models", 1), ("explore", 1.5), ("decay", -0.1), ("kept_back", 2.0)])
def test_settings_that_cannot_be(setting, value):
    with pytest.raises(ValueError, match=setting):
        first_order(**{setting: value})
