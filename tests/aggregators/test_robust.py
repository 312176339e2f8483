"""Robust aggregators against NumPy in float64, alone and with uploads that are left out."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_pers as fp
from fedjax_pers.aggregators import aggregate
from fedjax_pers.aggregators.robust import geometric_median, krum, median, norm_clipping, trimmed_mean
from tests import toys

CLIENTS = 7


def uploads(clients: int = CLIENTS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(clients, *shape)).astype(np.float32) for name, shape in (("a", (3, 2)), ("b", (4,)))}


def server_step(aggregator: Any, sent: dict[str, np.ndarray], weights: Any) -> tuple[dict[str, np.ndarray], Any]:
    shared = {name: jnp.full(x.shape[1:], 0.5) for name, x in sent.items()}
    server = aggregator.init(shared, frozenset(shared), CLIENTS)
    after, info = jax.jit(lambda s, u, w: aggregate(aggregator, s, u, w))(
        server, sent, jnp.asarray(weights, jnp.float32)
    )
    return jax.tree.map(np.asarray, after.shared), info


def flat(sent: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([x.reshape(len(x), -1) for _, x in sorted(sent.items())], 1).astype(np.float64)


def expected_krum(sent: dict[str, np.ndarray], byzantine: int, chosen: int) -> np.ndarray:
    rows = flat(sent)
    distances = ((rows[:, None] - rows[None]) ** 2).sum(-1)
    near = max(len(rows) - byzantine - 2, 1)
    scores = [np.sort(np.delete(distances[i], i))[:near].sum() for i in range(len(rows))]
    return rows[np.argsort(scores, kind="stable")[:chosen]].mean(0)


CASES = {
    "median": (median(), lambda sent: np.median(flat(sent), 0)),
    "nothing trimmed": (trimmed_mean(0.0), lambda sent: flat(sent).mean(0)),
    "trimmed": (
        trimmed_mean(0.3),
        lambda sent: np.sort(flat(sent), 0)[(k := int(0.3 * len(flat(sent)))) : len(flat(sent)) - k].mean(0),
    ),
    "krum": (krum(1), lambda sent: expected_krum(sent, 1, 1)),
    "multi-krum": (krum(1, chosen=3), lambda sent: expected_krum(sent, 1, 3)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("lost", [(), (2,), (0, 5, 6)])
def test_against_numpy_with_uploads_that_are_left_out(name: str, lost: tuple[int, ...]) -> None:
    aggregator, expected = CASES[name]
    sent = uploads()
    for client in lost:
        sent["b"][client, 1] = np.nan
    found, info = server_step(aggregator, sent, np.ones(CLIENTS))
    assert np.flatnonzero(info["rejected"]).tolist() == list(lost)
    kept = {key: np.delete(x, lost, 0) for key, x in sent.items()}
    np.testing.assert_allclose(np.concatenate([found["a"].ravel(), found["b"]]), expected(kept), 1e-5, 1e-6)


@pytest.mark.parametrize("name", CASES)
def test_one_upload_and_none(name: str) -> None:
    aggregator, _ = CASES[name]
    sent, weights = uploads(), np.zeros(CLIENTS)
    found, _ = server_step(aggregator, sent, weights)
    assert all((x == 0.5).all() for x in found.values())
    weights[4] = 1
    found, _ = server_step(aggregator, sent, weights)
    for key, x in found.items():
        np.testing.assert_allclose(x, sent[key][4], 1e-6)


def test_the_geometric_median_has_the_least_sum_of_distances() -> None:
    sent, weights = uploads(), np.arange(1.0, CLIENTS + 1)
    found, _ = server_step(geometric_median(steps=200), sent, weights)
    rows, centre = flat(sent), np.concatenate([found["a"].ravel(), found["b"]]).astype(np.float64)

    def cost(point: np.ndarray) -> float:
        return float((weights * np.linalg.norm(rows - point, axis=1)).sum())

    nearby = np.random.default_rng(1).normal(size=(300, rows.shape[1])) * 0.01
    assert all(cost(centre) <= cost(centre + step) + 1e-6 for step in nearby)
    outlier = {key: x.copy() for key, x in sent.items()}
    outlier["a"][0] = 1e6
    moved, _ = server_step(geometric_median(steps=200), outlier, np.ones(CLIENTS))
    assert all(np.abs(x).max() < 5 for x in moved.values())


def test_norm_clipping_by_hand() -> None:
    sent = {"w": np.array([[3.5, 4.5], [0.5, 0.8]], np.float32)}  # differences (3, 4) of norm 5, (0, 0.3) of norm 0.3
    found, _ = server_step(norm_clipping(1.0), sent, [1.0, 3.0])
    np.testing.assert_allclose(found["w"], 0.5 + np.array([0.25 * 0.6, 0.25 * 0.8 + 0.75 * 0.3]), 1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: trimmed_mean(0.5), "share: found 0.5; allowed is 0 .. 0.49999"),
        (lambda: trimmed_mean(-0.1), "share: found -0.1"),
        (lambda: krum(-1), "byzantine: found -1"),
        (lambda: krum(1, chosen=0), "chosen: found 0"),
        (lambda: geometric_median(steps=0), "steps: found 0"),
        (lambda: geometric_median(smoothing=0.0), "smoothing: found 0.0"),
        (lambda: norm_clipping(0.0), "bound: found 0.0"),
        (lambda: norm_clipping(float("inf")), "bound: found inf"),
    ],
)
def test_settings_that_make_no_sense(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_minority_that_sends_the_opposite() -> None:
    """Twenty honest clients near 1, five that send -10: the mean is dragged below 0, the others stay near 1."""
    honest = 1 + 0.1 * np.random.default_rng(0).normal(size=(20, 6))
    sent = {"w": np.concatenate([honest, np.full((5, 6), -10.0)]).astype(np.float32)}
    for aggregator in (median(), trimmed_mean(0.25), krum(5), krum(5, chosen=10), geometric_median(50)):
        found, _ = server_step(aggregator, sent, np.ones(25))
        assert np.abs(found["w"] - 1).max() < 0.3
    assert sent["w"].mean(0).max() < 0


@pytest.mark.parametrize("huge", [1e10, 1e19, 1e25, 3e38])
def test_uploads_whose_distances_overflow_are_the_farthest(huge: float) -> None:
    honest = 1 + 0.1 * np.random.default_rng(0).normal(size=(8, 6))
    sent = {"w": np.concatenate([[np.full(6, -huge), np.full(6, huge)], honest]).astype(np.float32)}
    for aggregator in (
        median(),
        trimmed_mean(0.25),
        krum(2),
        krum(2, chosen=6),
        geometric_median(50),
        norm_clipping(1.0),
    ):
        found, _ = server_step(aggregator, sent, np.ones(10))
        assert np.abs(found["w"] - 1).max() < 0.6  # the server is at 0.5, and steps of norm 1 are allowed


def test_the_order_of_clients_changes_nothing() -> None:
    sent = uploads(4)
    for aggregator in (median(), trimmed_mean(0.3), krum(0)):
        first, _ = server_step(aggregator, sent, np.ones(4))
        for order in itertools.islice(itertools.permutations(range(4)), 1, 24, 7):
            again, _ = server_step(aggregator, {key: x[list(order)] for key, x in sent.items()}, np.ones(4))
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), first, again)


@pytest.mark.parametrize("executor", [fp.looped(), fp.chunked(2), fp.vectorised()])
def test_in_a_round_every_client_is_seen_and_padding_is_not(executor: Any) -> None:
    federation = toys.federation((3, 5, 2, 4, 1))
    task = toys.every_method("fedavg").task
    plain = fp.compose(task, client=fp.train(0.1))
    state, key, cohort = (
        plain.init(task.init(jax.random.key(0)), 0, num_clients=5),
        jax.random.key(1),
        federation.cohort(),
    )
    middle = fp.compose(task, client=fp.train(0.1), aggregator=median(), executor=executor)
    after, _ = jax.jit(middle.step)(state, cohort, key)
    alone = [jax.jit(plain.step)(state, federation.cohort([i]), key)[0].shared for i in range(5)]
    for name, x in after.shared.items():
        np.testing.assert_allclose(x, np.median([np.asarray(each[name]) for each in alone], 0), 1e-5, 1e-6)
