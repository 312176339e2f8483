"""Keys are folded from names and numbers: no two streams share one, and every process finds the same."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pers.keys import as_key, client_key, fold_name, round_key

PURPOSES, ROUNDS, CLIENTS = ("train", "personalize", "evaluate"), range(5), range(7)


def bits(key):
    return tuple(jax.random.key_data(key).ravel().tolist())


# Names


def test_a_name_is_folded_in_by_its_crc32():
    # The check value that defines CRC-32 (ISO-HDLC) is that of the text "123456789".
    seed = jax.random.key(5)
    assert bits(fold_name(seed, "123456789")) == bits(jax.random.fold_in(seed, 0xCBF43926))
    assert bits(fold_name(seed, "")) == bits(jax.random.fold_in(seed, 0))


def test_another_process_finds_the_same_keys():
    program = (
        "import jax; from fedjax_pers.keys import client_key, fold_name\n"
        "for key in (fold_name(jax.random.key(3), 'bätches'), client_key(jax.random.key(3), 'train', 4, 7)):\n"
        "    print(*jax.random.key_data(key).tolist())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1234"}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    here = fold_name(jax.random.key(3), "bätches"), client_key(jax.random.key(3), "train", 4, 7)
    assert [tuple(map(int, line.split())) for line in found.stdout.splitlines()] == [bits(key) for key in here]


# Purposes, rounds and clients


def test_no_purpose_round_or_client_shares_a_key():
    seed = jax.random.key(0)
    of_clients = [client_key(seed, purpose, t, c) for purpose in PURPOSES for t in ROUNDS for c in CLIENTS]
    of_rounds = [round_key(seed, purpose, t) for purpose in PURPOSES for t in ROUNDS]
    of_purposes = [fold_name(seed, purpose) for purpose in PURPOSES]
    found = [bits(key) for key in (seed, *of_purposes, *of_rounds, *of_clients)]
    assert len(set(found)) == len(found) == 1 + 3 + 3 * 5 + 3 * 5 * 7


def test_a_client_key_is_folded_from_purpose_round_and_client_in_this_order():
    fold = jax.random.fold_in
    expected = fold(fold(fold(jax.random.key(9), 0xCBF43926), 4), 7)
    assert bits(client_key(jax.random.key(9), "123456789", 4, 7)) == bits(expected)
    assert bits(round_key(jax.random.key(9), "123456789", 4)) == bits(fold(fold(jax.random.key(9), 0xCBF43926), 4))


def test_seeds_have_keys_of_their_own():
    found = {
        bits(client_key(jax.random.key(seed), "train", t, c)) for seed in range(4) for t in ROUNDS for c in CLIENTS
    }
    assert len(found) == 4 * 5 * 7


def test_a_key_does_not_depend_on_who_else_is_there():
    @jax.jit
    def keys(round, tags):
        return jax.vmap(lambda tag: client_key(jax.random.key(0), "train", round, tag))(tags)

    few, many = keys(4, jnp.uint32([3, 7, 11])), keys(4, jnp.uint32([3, 5, 7, 11, 2**32 - 1]))
    alone = bits(client_key(jax.random.key(0), "train", 4, 7))
    assert bits(few[1]) == bits(many[2]) == alone


# Seeds and keys from outside


@pytest.mark.parametrize(
    "seed",
    [3, np.int64(3), np.uint8(3), jnp.int32(3), jax.random.key(3), jax.random.PRNGKey(3), np.uint32([0, 3])],
    ids=["int", "numpy", "numpy byte", "jax", "typed", "old style", "old style in numpy"],
)
def test_seeds_and_keys_of_every_kind(seed):
    found = as_key(seed)
    assert jax.dtypes.issubdtype(found.dtype, jax.dtypes.prng_key) and found.shape == ()
    assert bits(found) == (0, 3)


def test_a_key_keeps_its_kind_of_generator():
    assert as_key(jax.random.key(3, impl="rbg")).dtype == jax.random.key(3, impl="rbg").dtype


def test_traced_seeds_and_keys():
    found = jax.jit(jax.vmap(as_key))(jnp.arange(2, 4))
    assert [bits(key) for key in found] == [(0, 2), (0, 3)]
    assert bits(jax.jit(as_key)(jax.random.key(3))) == (0, 3)


@pytest.mark.parametrize(
    "value", ["3", 3.0, None, True, np.float32(3), np.int32([1, 2, 3]), jax.random.split(jax.random.key(0)), 2**80]
)
def test_what_is_no_key(value):
    with pytest.raises(
        ValueError, match=r"key: found (.|\n)*; allowed are a seed \(a whole number\) and one key"
    ) as raised:
        as_key(value)
    assert repr(value) in str(raised.value)
