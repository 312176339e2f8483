"""Clients side by side: each sees its own examples as if alone, and only those. And senseless counts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pers.base import Context, Parts
from fedjax_pers.batches import batch_shapes, loop, stream, sweep

SIZES = np.array([5, 0, 1, 8, 13, 4])
STARTS = np.concatenate([[0], np.cumsum(SIZES)])[:-1]
BATCH = 4


def pool(spoil_all_but=None):
    """Example ``j`` of client ``i`` is ``100 i + j``; those of others are NaN where a client is named."""
    x = np.concatenate([100 * i + np.arange(size) for i, size in enumerate(SIZES)]).astype(np.float32)
    owner = np.repeat(np.arange(len(SIZES)), SIZES)
    if spoil_all_but is not None:
        x[owner != spoil_all_but] = np.nan
    return {"x": jnp.asarray(x), "pair": jnp.asarray(np.stack([x, -x], axis=1)), "owner": jnp.asarray(owner)}


def context(data, start, size, key):
    key = jax.random.fold_in(jax.random.key(0), key)
    return Context(data, start, size, key, key, jnp.array(False), jnp.int32(0), Parts({}, {}, {}))


def remember(carry, batch, key=None, step=None):
    """A number that depends on every example that counts, on its place in the batch and on the order of batches."""
    places = jnp.arange(1, BATCH + 1, dtype=jnp.uint32)
    counted = jnp.where(batch["weight"] > 0, batch["x"].astype(jnp.uint32) + 1, 0)
    noise = 0 if key is None else jax.random.bits(key)
    return carry * 31 + (counted * places).sum() + noise


PASSES = {
    "epochs": lambda c: loop(remember, jnp.uint32(7), c, batch_size=BATCH, epochs=2),
    "steps": lambda c: loop(remember, jnp.uint32(7), c, batch_size=BATCH, steps=5),
    "full batches": lambda c: loop(remember, jnp.uint32(7), c, batch_size=BATCH, epochs=3, drop_last=True),
    "sweep": lambda c: (sweep(remember, jnp.uint32(7), c, batch_size=BATCH), 0),
}
STEPS = {
    "epochs": [4, 0, 2, 4, 8, 2],
    "steps": [5, 0, 5, 5, 5, 5],
    "full batches": [3, 0, 0, 6, 9, 3],
    "sweep": [0] * 6,
}


@functools.cache
def together(name):
    @jax.jit
    def program(data, start, size, key):
        return jax.vmap(lambda *client: PASSES[name](context(data, *client)))(start, size, key)

    return program


@functools.cache
def alone(name):
    return jax.jit(lambda data, *client: PASSES[name](context(data, *client)))


@pytest.mark.parametrize("name", PASSES)
def test_clients_side_by_side_are_as_clients_one_by_one(name):
    clients = jnp.asarray(STARTS), jnp.asarray(SIZES), jnp.arange(len(SIZES))
    memory, steps = together(name)(pool(), *clients)
    one_by_one = [alone(name)(pool(), *client) for client in zip(*clients, strict=True)]
    assert memory.tolist() == [int(each) for each, _ in one_by_one]
    assert steps.tolist() == [int(each) for _, each in one_by_one] == STEPS[name]
    assert (memory.tolist()[1] == 7) and len(set(memory.tolist())) == (5 if name == "full batches" else 6)


@pytest.mark.parametrize("name", PASSES)
def test_nobody_reads_the_examples_of_others(name):
    clients = jnp.asarray(STARTS), jnp.asarray(SIZES), jnp.arange(len(SIZES))
    for i, client in enumerate(zip(*clients, strict=True)):
        clean, spoiled = (alone(name)(data, *client) for data in (pool(), pool(spoil_all_but=i)))
        assert [int(x) for x in clean] == [int(x) for x in spoiled]


@pytest.mark.parametrize("client", [0, 2, 3, 4])
@pytest.mark.parametrize("drop_last", [False, True])
def test_rows_that_fill_a_short_batch_are_the_clients_own(client, drop_last):
    here = context(pool(client), jnp.int32(STARTS[client]), jnp.int32(SIZES[client]), client)
    batches = jax.vmap(stream(here, "batches", batch_size=BATCH, drop_last=drop_last).batch)(jnp.arange(12))
    assert (batches["owner"] == client).all() and jnp.isfinite(batches["x"]).all()
    assert (batches["pair"] == jnp.stack([batches["x"], -batches["x"]], axis=-1)).all()
    if drop_last and SIZES[client] >= BATCH:
        assert (batches["weight"] == 1).all()


@pytest.mark.parametrize("client", [0, 2, 4])
def test_rows_that_fill_the_last_batch_of_a_sweep_are_the_clients_own(client):
    here = context(pool(client), jnp.int32(STARTS[client]), jnp.int32(SIZES[client]), client)
    own = sweep(
        lambda all_own, batch: all_own & (batch["owner"] == client).all(), jnp.array(True), here, batch_size=BATCH
    )
    assert SIZES[client] % BATCH and own


def test_a_batch_has_the_shapes_that_are_announced():
    here = context(pool(), jnp.int32(0), jnp.int32(5), 0)
    found = jax.eval_shape(stream(here, "batches", batch_size=BATCH).batch, jnp.int32(0))
    assert found == batch_shapes(here, BATCH)
    assert found["pair"].shape == (BATCH, 2) and found["weight"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({}, "epochs, steps: found None and None; a loop has one or the other"),
        ({"epochs": 1, "steps": 4}, "epochs, steps: found 1 and 4; a loop has one or the other"),
        ({"epochs": 1.5}, "epochs: found 1.5; allowed is a whole number of at least 0"),
        ({"steps": -1}, "steps: found -1; allowed is a whole number of at least 0"),
    ],
)
def test_counts_that_make_no_sense(schedule, message):
    here = context(pool(), jnp.int32(0), jnp.int32(5), 0)
    with pytest.raises(ValueError, match=message):
        loop(remember, jnp.uint32(0), here, batch_size=BATCH, **schedule)


def test_the_number_of_passes_may_be_traced():
    @jax.jit
    def steps(size, epochs):
        return loop(remember, jnp.uint32(0), context(pool(), 0, size, 0), batch_size=BATCH, epochs=epochs)[1]

    assert [int(steps(size, epochs)) for size, epochs in ((5, 0), (5, 3), (4, 3), (0, 3))] == [0, 6, 3, 0]
    assert steps._cache_size() == 1
