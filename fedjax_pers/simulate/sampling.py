"""Which clients take part in a round."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_pers.base import Array
from fedjax_pers.batches import shuffled
from fedjax_pers.checks import positive_int, require
from fedjax_pers.keys import round_key

Sampler = Callable[[Array, Array, int], Array]
"""``sampler(key, round, num_clients) -> ids [cohort]``, a pure function: a round's clients depend on nothing else."""


@functools.cache  # one sampler for one size, so that compiled programs are found again
def uniform(cohort_size: int) -> Sampler:
    """That many clients, uniformly without replacement, in ascending order.

    Example:
      >>> import jax
      >>> uniform(3)(jax.random.key(0), 4, 10).shape
      (3,)
    """
    positive_int("cohort_size", cohort_size)

    def sample(key: Array, round: Array, num_clients: int) -> Array:
        require(
            cohort_size <= num_clients,
            f"cohort_size: found {cohort_size}; allowed are 1 .. {num_clients}, the clients of the federation",
        )
        # The first places of a permutation that is computed place by place: clients that stay out cost nothing.
        words = jax.random.bits(round_key(key, "sample", round), (2,), jnp.uint32)
        return jnp.sort(shuffled(words, jnp.arange(cohort_size), num_clients))

    return sample


def everyone(key: Array, round: Array, num_clients: int) -> Array:
    """All clients in every round."""
    return jnp.arange(num_clients, dtype=jnp.int32)
