"""Rows of clients in stacked trees: padding writes nothing, unknown clients read a fresh row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pers.trees import all_finite, gather_rows, num_bytes, scatter_rows, stack_rows, where
from tests.toys import same_bits

CLIENTS = 4
FRESH = {"w": np.float32([-1, -2]), "count": np.int32(-3), "half": jnp.bfloat16(-4)}


def table(clients=CLIENTS):
    """Rows ``[10 i, 10 i + 1]``, ``i`` and ``i / 2`` of client i."""
    i = np.arange(clients)
    return {
        "w": jnp.asarray(10 * i[:, None] + np.arange(2), jnp.float32),
        "count": jnp.asarray(i, jnp.int32),
        "half": jnp.asarray(i / 2, jnp.bfloat16),
    }


def gathered(ids, rows=None):
    return gather_rows(table() if rows is None else rows, jnp.asarray(ids, jnp.int32), jax.tree.map(jnp.asarray, FRESH))


def expected(w, count, half):
    return {"w": np.float32(w), "count": np.int32(count), "half": np.asarray(half, jnp.bfloat16)}


# Reading


def test_rows_are_read_in_the_order_of_the_ids():
    same_bits(gathered([2, 0, 2]), expected([[20, 21], [0, 1], [20, 21]], [2, 0, 2], [1, 0, 1]))


@pytest.mark.parametrize("past", [CLIENTS, CLIENTS + 5])
def test_ids_past_the_end_read_the_fresh_row(past):
    same_bits(gathered([past, 3, past]), expected([[-1, -2], [30, 31], [-1, -2]], [-3, 3, -3], [-4, 1.5, -4]))


def test_without_clients_every_id_reads_the_fresh_row():
    same_bits(gathered([0, 7], rows=table(0)), expected([[-1, -2], [-1, -2]], [-3, -3], [-4, -4]))


def test_no_ids_read_no_rows():
    found = gathered([])
    assert {name: x.shape for name, x in found.items()} == {"w": (0, 2), "count": (0,), "half": (0,)}
    same_bits(found, jax.tree.map(lambda x: x[:0], table()))


def test_a_row_that_is_not_finite_stays_with_its_client():
    rows = {"w": jnp.array([[np.nan, np.inf], [1, 2]])}
    found = gather_rows(rows, jnp.array([1, 2]), {"w": jnp.array([5.0, 6.0])})
    assert found["w"].tolist() == [[1, 2], [5, 6]]


# Writing


def test_rows_are_written_where_they_belong_and_nowhere_else():
    new = {"w": jnp.float32([[7, 7], [8, 8]]), "count": jnp.int32([70, 80]), "half": jnp.bfloat16([0.25, -0.25])}
    found = scatter_rows(table(), jnp.array([3, 1]), new)
    same_bits(found, expected([[0, 1], [8, 8], [20, 21], [7, 7]], [0, 80, 2, 70], [0, -0.25, 1, 0.25]))


def test_padding_writes_nothing():
    new = {"w": jnp.full((3, 2), 9.0), "count": jnp.full(3, 9), "half": jnp.full(3, 9, jnp.bfloat16)}
    same_bits(scatter_rows(table(), jnp.array([CLIENTS, CLIENTS, CLIENTS + 3]), new), table())
    found = scatter_rows(table(), jnp.array([1, CLIENTS, CLIENTS]), new)
    same_bits(found, expected([[0, 1], [9, 9], [20, 21], [30, 31]], [0, 9, 2, 3], [0, 9, 1, 1.5]))


def test_without_clients_there_is_nowhere_to_write():
    new = {"w": jnp.ones((1, 2)), "count": jnp.ones(1, jnp.int32), "half": jnp.ones(1, jnp.bfloat16)}
    same_bits(scatter_rows(table(0), jnp.array([0]), new), table(0))


def test_what_is_read_and_written_back_leaves_every_bit():
    ids = jnp.array([2, CLIENTS, 0])
    read_and_write = jax.jit(lambda rows: scatter_rows(rows, ids, gather_rows(rows, ids, FRESH)))
    same_bits(read_and_write(table()), table())


def test_copies_of_one_row():
    found = stack_rows(jax.tree.map(jnp.asarray, FRESH), 3)
    same_bits(found, expected([[-1, -2]] * 3, [-3] * 3, [-4] * 3))
    assert {name: x.shape for name, x in stack_rows(found, 0).items()} == {
        "w": (0, 3, 2),
        "count": (0, 3),
        "half": (0, 3),
    }
    assert stack_rows({}, 3) == {}


# Questions


@pytest.mark.parametrize(
    ("tree", "finite"),
    [
        ({}, True),
        ({"a": np.float32([1, -1]), "b": np.float32(3e38)}, True),
        ({"a": np.float32([1, np.nan])}, False),
        ({"a": np.float32(1), "b": [np.float32([[0, np.inf]])]}, False),
        ({"a": np.float32(-np.inf)}, False),
        ({"a": np.array([np.iinfo(np.int32).max, np.iinfo(np.int32).min])}, True),
        ({"count": np.int32([1]), "flag": np.array([True]), "byte": np.uint8(255)}, True),
        ({"count": np.int32([1]), "w": np.float32(np.nan)}, False),
        ({"half": jnp.bfloat16([1, np.inf])}, False),
        ({"half": jnp.bfloat16(3e38)}, True),
        ({"none": np.zeros((0, 3), np.float32)}, True),
    ],
)
def test_whether_a_tree_is_finite(tree, finite):
    found = all_finite(jax.tree.map(jnp.asarray, tree))
    assert found.shape == () and found.dtype == bool
    assert bool(found) == finite


@pytest.mark.parametrize(
    ("tree", "size"),
    [
        ({}, 0),
        (np.zeros((10, 4), np.float32), 160),
        ([np.zeros(3, np.int8), {"b": np.zeros((), np.float32)}], 3 + 4),
        ({"half": jnp.zeros((2, 5), jnp.bfloat16), "flag": np.zeros(7, bool)}, 20 + 7),
        ({"none": np.zeros((0, 1000), np.float32)}, 0),
        ({"shape": jax.ShapeDtypeStruct((3, 3), jnp.float32)}, 36),
        (jax.ShapeDtypeStruct((50_000, 50_000), jnp.float32), 10_000_000_000),
    ],
)
def test_bytes_of_a_tree(tree, size):
    assert num_bytes(tree) == size
    assert isinstance(num_bytes(tree), int)


@pytest.mark.parametrize("condition", [True, False])
def test_a_choice_of_trees_ignores_what_is_not_chosen(condition):
    good, bad = {"w": jnp.float32([1, 2]), "n": jnp.int32(3)}, {"w": jnp.float32([np.nan, np.inf]), "n": jnp.int32(-9)}
    chosen = where(jnp.array(condition), *((good, bad) if condition else (bad, good)))
    same_bits(chosen, good)


def test_trees_of_different_leaves_cannot_be_chosen_from():
    with pytest.raises(ValueError, match="Dict key mismatch|different pytree metadata"):
        where(jnp.array(True), {"a": jnp.ones(1)}, {"b": jnp.ones(1)})
