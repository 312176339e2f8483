"""Random keys: every stream is folded from (seed, purpose, round, client), none is drawn from a sequence.

So a client's batches do not change when the cohort grows, when a method adds a second model, or with the executor.
"""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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


def as_key(key: Any) -> Array:
    """A typed key from a seed (a whole number) or a key (old-style ``uint32[2]`` keys are wrapped).

    Raises:
      ValueError: it is neither.
    """
    shape, dtype = np.shape(key), key.dtype if hasattr(key, "dtype") else np.asarray(key).dtype
    if shape == () and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return key
    if shape == () and jnp.issubdtype(dtype, jnp.integer):
        if not isinstance(key, jax.core.Tracer) and not 0 <= int(key) < 2**32:
            raise ValueError(f"key: found the seed {key}; allowed are 0 .. 2^32 - 1 (JAX would cut others)")
        return jax.random.key(key)
    if shape == jax.random.PRNGKey(0).shape and dtype == jnp.uint32:
        return jax.random.wrap_key_data(key)
    raise ValueError(f"key: found {key!r}; allowed are a seed (a whole number) and one key of jax.random")
