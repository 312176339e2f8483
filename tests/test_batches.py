"""Which examples a client sees, in which order: permutations, epochs, short batches."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedjax_pers.base import Context, Parts
from fedjax_pers.batches import loop, shuffled, split_off, steps_per_epoch, stream, sweep
from fedjax_pers.keys import client_key

LARGEST, MOST_STEPS = 700, 24
positions = jnp.arange(LARGEST)
permuted = jax.jit(lambda words, size: shuffled(words, positions, size))
word = st.integers(0, 2**32 - 1)


@settings(deadline=None, max_examples=300)
@given(st.integers(1, LARGEST), word, word)
@example(LARGEST, 0, 0)
@example(1, 0, 0)
@example(2**9, 2**32 - 1, 2**32 - 1)
def test_every_order_is_a_permutation_whatever_the_size(size, first, second):
    found = np.asarray(permuted(jnp.array([first, second], jnp.uint32), size))[:size]
    assert sorted(found.tolist()) == list(range(size))


def orders(size, count, seed):
    words = jax.random.bits(jax.random.key(seed), (count, 2))
    return np.asarray(jax.jit(jax.vmap(lambda words: shuffled(words, jnp.arange(size), size)))(words))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_permutations_are_equally_likely(size):
    every = list(itertools.permutations(range(size)))
    found = [tuple(order) for order in orders(size, 400 * len(every), seed=size).tolist()]
    counts = np.array([found.count(each) for each in every])
    statistic = ((counts - 400) ** 2 / 400).sum()
    assert statistic < scipy.stats.chi2.ppf(0.999, len(every) - 1)


def test_every_example_is_equally_likely_at_every_place_of_a_larger_client():
    found = orders(11, 5000, seed=0)
    counts = np.stack([np.bincount(found[:, place], minlength=11) for place in range(11)])
    expected = 5000 / 11
    # For permutations this statistic is 11/10 of a chi-square with 10 * 10 degrees: rows and columns have fixed sums.
    assert ((counts - expected) ** 2 / expected).sum() < 1.1 * scipy.stats.chi2.ppf(0.999, 100)


ROWS = 40
ZEROS = jnp.zeros(ROWS)


def context(start, size, tag=0, round=0):
    data = {"x": jnp.arange(ROWS)}
    key = client_key(jax.random.key(0), "train", round, tag)
    nobody = jnp.zeros((), bool)
    return Context(data, jnp.int32(start), jnp.int32(size), key, key, nobody, jnp.int32(round), Parts({}, {}, {}))


def seen(context, **schedule):
    """``(rows, weights)`` ``[steps, batch]`` of the batches that a loop goes through."""
    width = schedule["batch_size"]

    def body(carry, batch, key, step):
        rows, weights = carry
        return rows.at[step].set(batch["x"]), weights.at[step].set(batch["weight"])

    start = jnp.full((MOST_STEPS, width), -1), jnp.full((MOST_STEPS, width), -1.0)
    (rows, weights), steps = jax.jit(lambda context: loop(body, start, context, **schedule))(context)
    taken = int(steps)
    assert (np.asarray(rows)[taken:] == -1).all() and (np.asarray(rows)[:taken] >= 0).all()
    return np.asarray(rows)[:taken], np.asarray(weights)[:taken]


def test_an_epoch_is_every_example_of_the_client_once_and_epochs_differ():
    rows, weights = seen(context(5, 12), batch_size=4, epochs=3)
    assert rows.shape == (9, 4) and (weights == 1).all()
    epochs = rows.reshape(3, 12)
    assert (np.sort(epochs, axis=1) == np.arange(5, 17)).all()
    assert len({tuple(each) for each in epochs.tolist()}) == 3


def test_a_short_batch_is_filled_with_the_clients_own_examples_at_weight_zero():
    rows, weights = seen(context(5, 7), batch_size=3, epochs=2)
    assert weights.tolist() == 2 * [[1, 1, 1], [1, 1, 1], [1, 0, 0]]
    for epoch in (0, 1):
        epoch_rows, counted = rows[3 * epoch : 3 * epoch + 3].ravel(), weights[3 * epoch : 3 * epoch + 3].ravel() == 1
        assert sorted(epoch_rows[counted].tolist()) == list(range(5, 12))
        assert set(epoch_rows[~counted].tolist()) <= set(range(5, 12))


def test_a_client_smaller_than_a_batch_takes_one_short_step():
    rows, weights = seen(context(30, 2), batch_size=5, epochs=1)
    assert weights.tolist() == [[1, 1, 0, 0, 0]]
    assert sorted(rows[0, :2].tolist()) == [30, 31] and set(rows.ravel().tolist()) == {30, 31}


def test_dropping_the_last_batch():
    rows, weights = seen(context(5, 11), batch_size=3, epochs=4, drop_last=True)
    assert rows.shape == (12, 3) and (weights == 1).all()
    epochs = rows.reshape(4, 9)
    assert all(len(set(each)) == 9 for each in epochs.tolist())
    # What is left out is not the same in every epoch.
    assert len({frozenset(range(5, 16)) - set(each) for each in epochs.tolist()}) > 1
    assert seen(context(5, 2), batch_size=3, epochs=4, drop_last=True)[0].shape == (0, 3)


def test_steps_go_on_into_the_next_epoch():
    by_steps, _ = seen(context(5, 7), batch_size=3, steps=8)
    by_epochs, _ = seen(context(5, 7), batch_size=3, epochs=3)
    assert np.array_equal(by_steps, by_epochs[:8])
    short, _ = seen(context(5, 2), batch_size=3, steps=4)  # one batch an epoch
    assert short.shape == (4, 3) and set(short.ravel().tolist()) == {5, 6}


def test_an_empty_client_takes_no_step():
    assert seen(context(5, 0), batch_size=3, epochs=2)[0].shape == (0, 3)
    assert seen(context(5, 0), batch_size=3, steps=4)[0].shape == (0, 3)


@pytest.mark.parametrize(
    ("size", "drop_last", "expected"),
    [(0, False, 0), (1, False, 1), (32, False, 1), (33, False, 2), (1, True, 0), (32, True, 1), (63, True, 1)],
)
def test_steps_per_epoch(size, drop_last, expected):
    assert int(steps_per_epoch(jnp.int32(size), 32, drop_last)) == expected


def test_an_order_belongs_to_client_round_and_purpose_alone():
    def order(context, name="batches"):
        return np.asarray(stream(context, name, batch_size=20).batch(jnp.int32(0))["x"])

    first = order(context(0, 20, tag=7, round=4))
    assert np.array_equal(order(context(0, 20, tag=7, round=4)), first)
    # The place in the pool, which is where others before it would push the client, moves its rows and not their order.
    assert np.array_equal(order(context(13, 20, tag=7, round=4)), first + 13)
    others = context(0, 20, tag=8, round=4), context(0, 20, tag=7, round=5)
    assert all(not np.array_equal(order(other), first) for other in others)
    assert not np.array_equal(order(context(0, 20, tag=7, round=4), "head"), first)


def test_clients_of_any_size_share_one_program():
    program = jax.jit(
        lambda context: loop(lambda total, b, k, s: total + b["weight"].sum(), 0.0, context, batch_size=3, epochs=2)
    )
    for size in (0, 1, 3, 17, 40):
        total, steps = program(context(0, size))
        assert float(total) == 2 * size and int(steps) == 2 * -(-size // 3)
    assert program._cache_size() == 1


def test_an_order_is_computed_apart_from_what_reads_it():
    # Else jaxlib 0.12 takes minutes to compile a loop whose body reads one field only, as reestimate() does.
    program = jax.make_jaxpr(lambda step: stream(context(0, 7), "batches", batch_size=2).batch(step)["x"])(jnp.int32(0))
    assert "optimization_barrier" in str(program)


def test_a_sweep_visits_every_example_once_in_its_own_order():
    def body(carry, batch):
        place, rows = carry
        kept = jnp.where(batch["weight"] > 0, batch["x"], 0)
        return place + 1, rows.at[place].set(kept)

    for size, expected in ((7, [[5, 6, 7], [8, 9, 10], [11, 0, 0]]), (0, [[0, 0, 0]] * 3)):
        start = jnp.int32(0), jnp.zeros((3, 3), jnp.int32)
        assert sweep(body, start, context(5, size), batch_size=3)[1].tolist() == expected


def test_every_step_has_a_key_of_its_own():
    def body(keys, batch, key, step):
        return keys.at[step].set(jax.random.key_data(key))

    keys, _ = loop(body, jnp.zeros((6, 2), jnp.uint32), context(0, 4), batch_size=3, steps=6)
    assert len({tuple(each) for each in keys.tolist()}) == 6


@pytest.mark.parametrize(
    ("size", "share", "back"), [(10, 0.2, 2), (10, 0.0, 1), (10, 1.0, 9), (2, 0.1, 1), (1, 0.5, 0), (0, 0.5, 0)]
)
def test_examples_that_are_kept_back_are_not_trained_on(size, share, back):
    """The same ones in every round, and the rest are all others."""
    parts = []
    for round in (0, 3):
        client = context(20, size, round=round)._replace(common=jax.random.key(5))
        rest, kept = split_off(client, share)
        assert (int(rest.size), int(kept.size)) == (size - back, back)
        judged = sweep(lambda seen, batch: seen.at[batch["x"]].add(batch["weight"]), ZEROS, kept, batch_size=3)
        trained, _ = loop(
            lambda seen, batch, key, step: seen.at[batch["x"]].add(batch["weight"]), ZEROS, rest, batch_size=4, epochs=1
        )
        expected = np.zeros(len(ZEROS))
        expected[20 : 20 + size] = 1
        np.testing.assert_array_equal(judged + trained, expected)
        parts.append(np.asarray(judged))
    np.testing.assert_array_equal(*parts)


def test_any_example_may_be_kept_back():
    def kept_of(seed):
        _, kept = split_off(context(0, 5)._replace(common=jax.random.key(seed)), 0.2)
        return sweep(lambda seen, batch: seen.at[batch["x"]].add(batch["weight"]), ZEROS, kept, batch_size=1)

    counts = np.asarray(jax.jit(jax.vmap(kept_of))(jnp.arange(300)).sum(0))[:5]
    assert counts.sum() == 300
    assert scipy.stats.chisquare(counts).pvalue > 1e-3
