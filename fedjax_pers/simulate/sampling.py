"""Which clients take part in a round."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pers.base import Array
from fedjax_pers.batches import shuffled
from fedjax_pers.checks import number, positive_int, require
from fedjax_pers.keys import round_key

Sampler = Callable[[Array, Array, int], Array]
"""``sampler(key, round, num_clients) -> ids [cohort]``, a pure function: a round's clients depend on nothing else.

Ids are unique; ``num_clients`` at a place stands for nobody.
"""


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


@functools.cache
def poisson(rate: float) -> Sampler:
    """Every client takes part with this probability, independently; a round may have nobody.

    There are places for the expected number and 7 standard deviations more. With more clients than that, which has a
    probability below 1e-9, those with the highest ids stay out.

    Example:
      >>> import jax
      >>> poisson(0.5)(jax.random.key(0), 4, 6).tolist()  # 6 stands for nobody
      [0, 2, 6, 6, 6, 6]

    Args:
      rate: in 0 .. 1.
    """
    number("rate", rate, 0, 1)

    def sample(key: Array, round: Array, num_clients: int) -> Array:
        spread = 7 * math.sqrt(num_clients * rate * (1 - rate)) + 7
        places = max(min(num_clients, math.ceil(num_clients * rate + spread)), 1)
        taken = jax.random.bernoulli(round_key(key, "sample", round), rate, (num_clients,))
        return jnp.nonzero(taken, size=places, fill_value=num_clients)[0].astype(jnp.int32)

    return sample


def weighted(cohort_size: int, weights: Any) -> Sampler:
    """That many clients without replacement, each drawn in proportion to its weight among those that are left.

    Example:
      >>> import jax
      >>> weighted(2, [5.0, 0.0, 1.0])(jax.random.key(0), 4, 3).tolist()
      [0, 2]

    Args:
      cohort_size: at most the number of clients with a weight above 0.
      weights: one for each client, finite and not negative: numbers of examples, for instance
        (``federation.train.sizes``).

    Source: Yellott, "The relationship between Luce's choice axiom, Thurstone's theory of comparative judgment, and the
    double exponential distribution", Journal of Mathematical Psychology, 1977 (the largest of Gumbel-perturbed logs).
    """
    positive_int("cohort_size", cohort_size)
    weights = np.asarray(weights, np.float32)
    require(weights.ndim == 1, f"weights: found shape {weights.shape}; expected [clients]")
    bad = np.flatnonzero(~np.isfinite(weights) | (weights < 0))
    require(not bad.size, f"weights: client {bad[:1]} has {weights[bad[:1]]}; allowed are finite numbers of at least 0")
    possible = int((weights > 0).sum())
    require(
        cohort_size <= possible, f"cohort_size: found {cohort_size}; allowed are 1 .. {possible}, those of a weight"
    )

    def sample(key: Array, round: Array, num_clients: int) -> Array:
        require(
            len(weights) == num_clients,
            f"weights: found {len(weights)}; expected one for each of {num_clients} clients",
        )
        noise = jax.random.gumbel(round_key(key, "sample", round), (num_clients,))
        return jnp.sort(jax.lax.top_k(jnp.log(weights) + noise, cohort_size)[1]).astype(jnp.int32)

    return sample


@functools.cache  # as for uniform ones: one sampler for equal arguments
def by_examples(cohort_size: int, sizes: tuple[int, ...]) -> Sampler:
    """That many clients without replacement, in proportion to their training examples."""
    return weighted(cohort_size, sizes)


@functools.cache
def dropouts(sampler: Sampler, rate: float) -> Sampler:
    """The sampler's clients, of which each fails with this probability: it is not there in that round.

    Example:
      >>> sampler = dropouts(uniform(10), 0.1)

    Args:
      sampler: whose clients.
      rate: in 0 .. 1.
    """
    number("rate", rate, 0, 1)

    def sample(key: Array, round: Array, num_clients: int) -> Array:
        ids = sampler(key, round, num_clients)
        fails = jax.random.bernoulli(round_key(key, "dropout", round), rate, ids.shape)
        return jnp.sort(jnp.where(fails, num_clients, ids))

    return sample


def everyone(key: Array, round: Array, num_clients: int) -> Array:
    """All clients in every round."""
    return jnp.arange(num_clients, dtype=jnp.int32)
