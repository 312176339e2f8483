"""Averages of low-rank factors: exact where they say so, against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pers import aggregators as ag
from fedjax_pers.adapters import Slot
from tests import toys

CLIENTS, RANK, SCALE = 3, 2, 1.5
PLAIN, TURNED = Slot("layer/kernel", (4, 5), 1, False, jnp.float32), Slot("weight", (4, 5), 1, True, jnp.float32)
WEIGHTS = np.array([1.0, 2.0, 5.0])
SHARES = WEIGHTS / WEIGHTS.sum()


def factors_of(slot, seed=0):
    draw = np.random.default_rng(seed)
    shapes = jax.tree.map(np.shape, slot.fresh(jax.random.key(0), RANK))
    return {name: draw.normal(size=(CLIENTS, *shape)).astype(np.float32) for name, shape in shapes.items()}


def products(slot, uploads):
    a, b = (uploads[name].astype(np.float64) for name in slot.names)
    return b @ a if slot.outputs_first else a @ b


def without_weight(slot):
    return {**slot.fresh(jax.random.key(1), RANK), "head": jnp.zeros(3)}


def with_weight(slot):
    return {slot.path: jnp.ones((4, 5)), **without_weight(slot)}


def after(aggregator, slot, uploads, start=None, **options):
    trainable = frozenset({*slot.names, "head"})
    server = aggregator.init(with_weight(slot) if start is None else start, trainable, CLIENTS)
    uploads = {**uploads, "head": np.arange(9.0, dtype=np.float32).reshape(3, 3)}
    return ag.aggregate(aggregator, server, uploads, WEIGHTS, trainable=trainable, key=7, **options)


@pytest.mark.parametrize("slot", [PLAIN, TURNED], ids=["inputs first", "outputs first"])
def test_the_residual_makes_the_model_the_mean_of_models(slot):
    uploads = factors_of(slot)
    server, _ = after(ag.residual((slot,), SCALE), slot, uploads)
    exact = 1 + SCALE * np.einsum("i,ikd->kd", SHARES, products(slot, uploads))
    found = server.shared[slot.path] + SCALE * slot.product(server.shared)
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-6)
    for name in slot.names:
        expected = np.einsum("i,ikd->kd", SHARES, uploads[name].astype(np.float64))
        np.testing.assert_allclose(server.shared[name], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(server.shared["head"], SHARES @ np.arange(9.0).reshape(3, 3), rtol=1e-6)
    # The product of the averages alone is another model.
    lacking = 1 + SCALE * np.asarray(slot.product(server.shared))
    assert np.abs(lacking - exact).max() > 0.1


@pytest.mark.parametrize("slot", [PLAIN, TURNED], ids=["inputs first", "outputs first"])
def test_stacked_factors_are_merged_and_start_anew(slot):
    uploads = factors_of(slot)
    server, _ = after(ag.stacking((slot,), SCALE, RANK), slot, uploads)
    a, b = (uploads[name].astype(np.float64) for name in slot.names)
    if slot.outputs_first:
        stacked = np.concatenate(list(b), 1) @ np.concatenate(list(SHARES[:, None, None] * a), 0)
    else:
        stacked = np.concatenate(list(a), 1) @ np.concatenate(list(SHARES[:, None, None] * b), 0)
    np.testing.assert_allclose(server.shared[slot.path], 1 + SCALE * stacked, rtol=1e-5, atol=1e-6)
    new_a, new_b = (server.shared[name] for name in slot.names)
    assert not new_b.any() and new_a.any()
    again, _ = ag.aggregate(
        ag.stacking((slot,), SCALE, RANK),
        server,
        {**uploads, "head": np.zeros((3, 3), np.float32)},
        WEIGHTS,
        trainable=frozenset({*slot.names, "head"}),
        key=8,
    )
    assert (np.asarray(again.shared[slot.names[0]]) != np.asarray(new_a)).all()


def test_factors_that_agree_need_no_residual():
    uploads = factors_of(PLAIN)
    uploads[PLAIN.names[0]] = np.repeat(uploads[PLAIN.names[0]][:1], CLIENTS, 0)
    server, _ = after(ag.residual((PLAIN,), SCALE), PLAIN, uploads)
    np.testing.assert_allclose(server.shared[PLAIN.path], np.ones((4, 5)), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("make", [ag.residual, lambda p, s: ag.stacking(p, s, RANK)], ids=["residual", "stacking"])
def test_nobody_there_changes_nothing(make):
    uploads = {name: np.full_like(x, np.nan) for name, x in factors_of(PLAIN).items()}
    start = with_weight(PLAIN)
    server, info = after(make((PLAIN,), SCALE), PLAIN, uploads, start)
    assert info["rejected"].all()
    toys.same_bits(server.shared, start)


def test_factors_of_different_ranks_are_averaged_by_the_size_of_their_product():
    uploads = factors_of(PLAIN)
    a, b = PLAIN.names
    uploads[a][0, :, 1:] = 0  # the first client has rank 1
    uploads[b][0, 1:] = 0
    server, _ = after(ag.sparsity_weighted((PLAIN,)), PLAIN, uploads, without_weight(PLAIN))
    sizes = np.linalg.norm(products(PLAIN, uploads), axis=(1, 2))
    for name in (a, b):
        expected = np.einsum("i,ikd->kd", sizes / sizes.sum(), uploads[name].astype(np.float64))
        np.testing.assert_allclose(server.shared[name], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(server.shared["head"], SHARES @ np.arange(9.0).reshape(3, 3), rtol=1e-6)


def test_products_that_are_all_zero_leave_the_factors():
    uploads = {PLAIN.names[0]: factors_of(PLAIN)[PLAIN.names[0]], PLAIN.names[1]: np.zeros((3, 2, 5), np.float32)}
    start = without_weight(PLAIN)
    server, _ = after(ag.sparsity_weighted((PLAIN,)), PLAIN, uploads, start)
    toys.same_bits(server.shared[PLAIN.names[0]], start[PLAIN.names[0]])


@pytest.mark.parametrize("slot", [PLAIN, TURNED], ids=["inputs first", "outputs first"])
def test_a_client_receives_factors_of_its_rank(slot):
    aggregator = ag.of_ranks(ag.sparsity_weighted((slot,)), (slot,), (1, 2))
    full = dict(zip(slot.names, (jnp.ones_like(x) for x in slot.fresh(jax.random.key(0), 2).values()), strict=True))
    server = aggregator.init(full, frozenset(full), 3)
    for client, rank in ((0, 1), (1, 2), (2, 1)):
        received = aggregator.render(server, jnp.int32(client))
        assert received["rank"] == rank
        assert np.linalg.matrix_rank(slot.product(received)) == 1  # of ones
        a, b = (received[name] for name in slot.names)
        assert (a.sum(), b.sum()) == ((rank * 5, rank * 4) if slot.outputs_first else (rank * 4, rank * 5))


@pytest.mark.parametrize("ranks", [(), [1, 2], (0, 2), (1.5,)])
def test_ranks_that_cannot_be(ranks):
    with pytest.raises(ValueError, match="ranks: found"):
        ag.of_ranks(ag.mean(), (PLAIN,), ranks)
