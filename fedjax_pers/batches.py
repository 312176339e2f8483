"""A client's batches: which examples, in which order, and the compiled loop over them.

Clients of any size share one program: the number of steps is a traced number, the order of an epoch is computed example
by example, and a short batch is filled with the client's own examples at weight zero. Nothing is padded to the largest
client.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pers.base import Array, Batch, Context
from fedjax_pers.keys import fold_name

_ROUNDS = 24


def _mix(x: Array) -> Array:
    """The finaliser of MurmurHash3: a bijection of 32-bit words that mixes all bits."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def shuffled(key: Array, position: Array, size: Array) -> Array:
    """The element at each position of a pseudo-random permutation of ``0 .. size - 1``.

    The swap-or-not shuffle: in round r, ``x`` and its partner ``K_r - x (mod size)`` change places if a bit hashed from
    the larger of the two says so. It needs neither a sort nor an array of the client's size, so ``size`` may be traced
    and differ between clients.

    Example:
      >>> sorted(shuffled(jax.random.key(0), jnp.arange(5), 5).tolist())
      [0, 1, 2, 3, 4]

    Args:
      key: which permutation.
      position: ``[...]`` integers in ``0 .. size - 1``.
      size: number of elements, at least 1 (0 is read as 1).

    Source: Hoang, Morris, Rogaway, "An Enciphering Scheme Based on a Card Shuffle", CRYPTO 2012.
    """
    size = jnp.maximum(jnp.asarray(size, jnp.uint32), 1)
    pivots, salts = jax.random.bits(key, (2, _ROUNDS), jnp.uint32)
    x = jnp.asarray(position, jnp.uint32)
    for pivot, salt in zip(pivots % size, salts, strict=True):
        partner = jnp.where(x <= pivot, pivot - x, pivot + size - x)
        swap = _mix(_mix(jnp.maximum(x, partner) ^ salt) + salt) & 1
        x = jnp.where(swap == 1, partner, x)
    return x.astype(jnp.int32)


def steps_per_epoch(size: Array, batch_size: int, drop_last: bool) -> Array:
    """Batches in one pass over ``size`` examples; 0 for an empty client."""
    return size // batch_size if drop_last else (size + batch_size - 1) // batch_size


def _rows(context: Context, index: Array, weight: Array) -> Batch:
    taken = {name: values[context.start + index] for name, values in context.data.items()}
    return {**taken, "weight": weight.astype(jnp.float32)}


def batch_shapes(context: Context, batch_size: int) -> Batch:
    """Shapes and dtypes of a batch, for tracing."""
    shapes = {name: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype) for name, x in context.data.items()}
    return {**shapes, "weight": jax.ShapeDtypeStruct((batch_size,), jnp.float32)}


def draw(context: Context, step: Array, *, batch_size: int, stream: str, drop_last: bool = False) -> Batch:
    """The batch of a step: every epoch is a new permutation of the client's examples, cut into batches."""
    epoch, place = jnp.divmod(step, jnp.maximum(steps_per_epoch(context.size, batch_size, drop_last), 1))
    position = place * batch_size + jnp.arange(batch_size)
    key = jax.random.fold_in(fold_name(context.key, stream), epoch)
    index = shuffled(key, position % jnp.maximum(context.size, 1), context.size)
    return _rows(context, index, position < context.size)


def loop(
    body: Callable[[Any, Batch, Array, Array], Any],
    carry: Any,
    context: Context,
    *,
    batch_size: int,
    epochs: int | Array | None = None,
    steps: int | Array | None = None,
    stream: str = "batches",
    drop_last: bool = False,
) -> tuple[Any, Array]:
    """``carry = body(carry, batch, key, step)`` over a client's batches; returns the carry and the steps taken.

    Args:
      body: one step. ``batch`` has ``batch_size`` rows and ``"weight"``; ``key`` is for dropout and the like.
      epochs: passes over the client's examples, or
      steps: number of batches, whatever the client's size (an empty client takes none).
      stream: name of the random stream that orders the examples; phases of equal stream see equal batches.
      drop_last: leave out the last, short batch of an epoch. A client smaller than a batch then takes no step.
    """
    per_epoch = steps_per_epoch(context.size, batch_size, drop_last)
    wanted = per_epoch * epochs if steps is None else steps
    total = jnp.where(per_epoch > 0, wanted, 0).astype(jnp.int32)
    noise = fold_name(context.key, "noise")

    def one(step_and_carry):
        step, carry = step_and_carry
        batch = draw(context, step, batch_size=batch_size, stream=stream, drop_last=drop_last)
        return step + 1, body(carry, batch, jax.random.fold_in(noise, step), step)

    _, carry = jax.lax.while_loop(lambda s: s[0] < total, one, (jnp.int32(0), carry))
    return carry, total


def sweep(body: Callable[[Any, Batch], Any], carry: Any, context: Context, *, batch_size: int) -> Any:
    """``carry = body(carry, batch)`` once over a client's examples in their own order (evaluation, counts)."""

    def one(step_and_carry):
        step, carry = step_and_carry
        position = step * batch_size + jnp.arange(batch_size)
        batch = _rows(context, position % jnp.maximum(context.size, 1), position < context.size)
        return step + 1, body(carry, batch)

    total = steps_per_epoch(context.size, batch_size, drop_last=False)
    return jax.lax.while_loop(lambda s: s[0] < total, one, (jnp.int32(0), carry))[1]
