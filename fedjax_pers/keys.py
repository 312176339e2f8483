"""Random keys: every stream is folded from (seed, purpose, round, client), none is drawn from a sequence.

So a client's batches do not change when the cohort grows, when a method adds a second model, or when the executor differs.
"""

from __future__ import annotations

import zlib

import jax

from fedjax_pers.base import Array


def fold_name(key: Array, name: str) -> Array:
    """The stream of ``key`` called ``name``; equal in every process (CRC-32, not Python's salted hash).

    Example:
      >>> import jax
      >>> bool((fold_name(jax.random.key(0), "batches") == fold_name(jax.random.key(0), "batches")).all())
      True
    """
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def round_key(key: Array, purpose: str, round: Array) -> Array:
    """The key of a purpose in a round, the same for all clients."""
    return jax.random.fold_in(fold_name(key, purpose), round)


def client_key(key: Array, purpose: str, round: Array, tag: Array) -> Array:
    """The key of one client in one round: ``fold_in(fold_in(fold_in(seed, purpose), round), client)``."""
    return jax.random.fold_in(round_key(key, purpose, round), tag)


def as_key(key: Array | int) -> Array:
    """A typed key from a seed or a key (old-style ``uint32[2]`` keys are wrapped)."""
    if isinstance(key, int):
        return jax.random.key(key)
    if jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    return jax.random.wrap_key_data(key)
