"""What is refused, and what the message says."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pers.checks import number, one_of, positive_int, require, whole_number


def message_of(check, *arguments):
    with pytest.raises(ValueError) as raised:
        check(*arguments)
    return str(raised.value)


def test_a_condition_that_holds_says_nothing():
    require(True, "never seen")
    assert message_of(require, False, "size: found 3; allowed is 4") == "size: found 3; allowed is 4"


@pytest.mark.parametrize("value", [1, 7, np.int32(1), np.int64(10**12)])
def test_positive_whole_numbers(value):
    positive_int("batch_size", value)


@pytest.mark.parametrize("value", [0, -1, 1.0, 2.5, True, "3", None, [1], np.int64(0), np.float32(1), float("nan")])
def test_what_is_no_positive_whole_number(value):
    expected = f"batch_size: found {value!r}; allowed is a whole number of at least 1"
    assert message_of(positive_int, "batch_size", value) == expected


@pytest.mark.parametrize("value", [0, 3, np.int64(3), jnp.int32(3), np.uint8(0)])
def test_whole_numbers(value):
    whole_number("epochs", value)


@pytest.mark.parametrize(
    "value", [-1, 1.5, 2.0, True, "3", None, np.float32(1), jnp.float32(1), np.int32([1, 2]), jnp.int32(-1)]
)
def test_what_is_no_whole_number(value):
    expected = f"epochs: found {value!r}; allowed is a whole number of at least 0"
    assert message_of(whole_number, "epochs", value) == expected


def test_the_least_whole_number_can_be_set():
    whole_number("rounds", 2, 2)
    assert message_of(whole_number, "rounds", 1, 2) == "rounds: found 1; allowed is a whole number of at least 2"


@pytest.mark.parametrize(
    ("value", "bounds"),
    [
        (0, (0,)),
        (-1e30, ()),
        (0.5, (0, 1)),
        (1, (0, 1)),
        (0.0, (0, 1)),
        (np.float32(0.1), (0,)),
        (np.int64(3), (3, 3)),
        (np.array(0.5), (0, 1)),
        (jnp.float32(0.1), (0, 1)),
        (jnp.bfloat16(2), (0,)),
    ],
)
def test_numbers_within_bounds(value, bounds):
    number("lr", value, *bounds)


@pytest.mark.parametrize(
    ("value", "bounds", "expected"),
    [
        (-0.1, (0,), "lr: found -0.1; allowed is at least 0"),
        (1.5, (0, 1), "lr: found 1.5; allowed is 0 .. 1"),
        (-1e-9, (0, 1), "lr: found -1e-09; allowed is 0 .. 1"),
        (jnp.float32(-2), (0,), "lr: found -2; allowed is at least 0"),
        (float("nan"), (), "lr: found nan; allowed is any finite number"),
        (float("nan"), (0, 1), "lr: found nan; allowed is 0 .. 1"),
        (float("inf"), (0,), "lr: found inf; allowed is at least 0"),
        (-float("inf"), (), "lr: found -inf; allowed is any finite number"),
        ("0.1", (), "lr: found '0.1'; allowed is a number"),
        (None, (), "lr: found None; allowed is a number"),
        (True, (), "lr: found True; allowed is a number"),
        (1j, (), "lr: found 1j; allowed is a number"),
        ([0.1], (), "lr: found [0.1]; allowed is a number"),
        (np.ones(1), (), "lr: found array([1.]); allowed is a number"),
        ({"shared": 0.1}, (), "lr: found {'shared': 0.1}; allowed is a number"),
    ],
)
def test_numbers_that_are_refused(value, bounds, expected):
    assert message_of(number, "lr", value, *bounds) == expected


def test_traced_numbers_pass_whatever_their_value():
    def check(value):
        number("lr", value, 0, 1)
        whole_number("steps", value.astype(int), 5)
        return value

    assert jax.jit(check)(-7.0) == -7
    assert jax.vmap(check)(jnp.array([-1.0, 2.0])).tolist() == [-1, 2]


def test_traced_numbers_that_are_not_whole_are_refused():
    with pytest.raises(ValueError, match=r"epochs: found .*float32.*; allowed is a whole number of at least 0"):
        jax.jit(functools.partial(whole_number, "epochs"))(1.5)


WORDS = ("examples", "uniform")


def test_one_of_some_words():
    for word in WORDS:
        one_of("weights", word, WORDS)
        one_of("weights", word, iter(WORDS))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("unifrom", "weights: found 'unifrom'; allowed are examples, uniform. Did you mean 'uniform'?"),
        ("Uniform", "weights: found 'Uniform'; allowed are examples, uniform. Did you mean 'uniform'?"),
        ("size", "weights: found 'size'; allowed are examples, uniform."),
        (None, "weights: found None; allowed are examples, uniform."),
        (1, "weights: found 1; allowed are examples, uniform."),
        (["uniform"], "weights: found ['uniform']; allowed are examples, uniform. Did you mean 'uniform'?"),
    ],
)
def test_other_words(value, expected):
    assert message_of(one_of, "weights", value, WORDS) == expected
