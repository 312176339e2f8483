"""A client's batches: which examples, in which order, and the compiled loop over them.

Clients of any size share one program: the number of steps is a traced number, the order of an epoch is computed example
by example, and a short batch is filled with the client's own examples at weight zero. Nothing is padded to the largest
client.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pers.base import Array, Batch, Context, Part
from fedjax_pers.checks import require, whole_number
from fedjax_pers.keys import fold_name
from fedjax_pers.once import unfused

_ROUNDS = 20
_GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: an odd constant that spreads counters over the 32 bits


def _mix(x: Array) -> Array:
    """The finaliser of MurmurHash3: a bijection of 32-bit words that mixes all bits."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


@jax.jit
def _swap_or_not(x: Array, pivot: Array, salt: Array, size: Array) -> Array:
    partner = jnp.where(x <= pivot, pivot - x, pivot + size - x)
    swap = _mix(_mix(jnp.maximum(x, partner) ^ salt) + salt) & 1
    return jnp.where(swap == 1, partner, x)


def shuffled(words: Array, position: Array, size: Array) -> Array:
    """The element at each position of a pseudo-random permutation of ``0 .. size - 1``.

    The swap-or-not shuffle: in round r, ``x`` and its partner ``K_r - x (mod size)`` change places if a bit hashed from
    the larger of the two says so. It needs neither a sort nor an array of the client's size, so ``size`` may be traced
    and differ between clients; and no random generator runs inside the training loop, only integer arithmetic.

    Example:
      >>> words = jax.random.bits(jax.random.key(0), (2,))
      >>> sorted(shuffled(words, jnp.arange(5), 5).tolist())
      [0, 1, 2, 3, 4]

    Args:
      words: ``uint32 [2]``, which permutation.
      position: ``[...]`` integers in ``0 .. size - 1``.
      size: number of elements, at least 1 (0 is read as 1).

    Source: Hoang, Morris, Rogaway, "An Enciphering Scheme Based on a Card Shuffle", CRYPTO 2012.
    """
    size = jnp.maximum(jnp.asarray(size, jnp.uint32), 1)
    counter = jnp.arange(1, _ROUNDS + 1, dtype=jnp.uint32) * jnp.uint32(_GOLDEN)
    pivots, salts = _mix(_mix(counter ^ words[0]) + words[1]) % size, _mix(_mix(counter + words[1]) ^ words[0])
    x = jnp.asarray(position, jnp.uint32)
    for number in range(_ROUNDS):
        x = _swap_or_not(x, pivots[number], salts[number], size)
    return x.astype(jnp.int32)


def _epoch_words(words: Array, epoch: Array) -> Array:
    step = jnp.asarray(epoch, jnp.uint32) * jnp.uint32(_GOLDEN)
    return jnp.stack([_mix(words[0] + step), _mix(words[1] ^ _mix(step + 1))])


def _order(words: Array, epoch: Array, position: Array, size: Array) -> Array:
    """Which of the client's examples come at these positions of an epoch."""
    return shuffled(_epoch_words(words, epoch), position, size)


def steps_per_epoch(size: Array, batch_size: int, drop_last: bool) -> Array:
    """Batches in one pass over ``size`` examples; 0 for an empty client."""
    return size // batch_size if drop_last else (size + batch_size - 1) // batch_size


def split_off(context: Context, share: Any) -> tuple[Context, Context]:
    """A client that keeps some of its examples back: what it trains on, and what it kept.

    The same examples in every round, drawn at random: ``floor(share * size)``, at least one where there are two.

    Args:
      context: of a client.
      share: in 0 .. 1; a float or a traced scalar.
    """
    words, size = jax.random.bits(fold_name(context.common, "kept back"), (2,), jnp.uint32), context.size
    back = jnp.clip(jnp.floor(share * size).astype(jnp.int32), jnp.minimum(size // 2, 1), jnp.maximum(size - 1, 0))
    rest = size - back
    return (
        context._replace(size=rest, part=Part(words, jnp.zeros_like(size), size)),
        context._replace(size=back, part=Part(words, rest, size)),
    )


def _rows(context: Context, index: Array, weight: Array) -> Batch:
    place = index
    if context.part is not None:
        place = unfused(shuffled, context.part.words, context.part.first + index, context.part.total)
    taken = {name: values[context.start + place] for name, values in context.data.items()}
    stored = {name: values[index] for name, values in (context.features or {}).items()}
    return {**taken, **stored, "weight": weight.astype(jnp.float32)}


def batch_shapes(context: Context, batch_size: int) -> Batch:
    """Shapes and dtypes of a batch, for tracing."""
    shapes = {name: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype) for name, x in context.data.items()}
    return {**shapes, "weight": jax.ShapeDtypeStruct((batch_size,), jnp.float32)}


class Stream(NamedTuple):
    """One of a client's random orders: every epoch is a new permutation of its examples, cut into batches."""

    context: Context
    words: Array
    batch_size: int
    drop_last: bool

    def batch(self, step: Array) -> Batch:
        """The batch of a step, ``batch_size`` rows."""
        size = self.context.size
        per_epoch = steps_per_epoch(size, self.batch_size, self.drop_last)
        epoch, place = jnp.divmod(step, jnp.maximum(per_epoch, 1))
        position = place * self.batch_size + jnp.arange(self.batch_size)
        index = unfused(_order, self.words, epoch, position % jnp.maximum(size, 1), size)
        return _rows(self.context, index, position < size)


def stream(context: Context, name: str, *, batch_size: int, drop_last: bool = False) -> Stream:
    """The client's stream of that name in this round; streams of equal name are equal."""
    words = jax.random.bits(fold_name(context.key, name), (2,), jnp.uint32)
    return Stream(context, words, batch_size, drop_last)


def loop(
    body: Callable[[Any, Batch, Array, Array], Any],
    carry: Any,
    context: Context,
    *,
    batch_size: int,
    epochs: int | Array | None = None,
    steps: int | Array | None = None,
    order: str = "batches",
    drop_last: bool = False,
    done: int | Array = 0,
) -> tuple[Any, Array]:
    """``carry = body(carry, batch, key, step)`` over a client's batches; returns the carry and the steps taken.

    Args:
      body: one step. ``batch`` has ``batch_size`` rows and ``"weight"``; ``key`` is for dropout and the like.
      epochs: passes over the client's examples, or
      steps: number of batches, whatever the client's size (an empty client takes none).
      order: name of the stream that orders the examples; phases of equal order see equal batches.
      drop_last: leave out the last, short batch of an epoch. A client smaller than a batch then takes no step.
      done: epochs before these: the loop goes on with their orders and keys, as one longer loop does.
    """
    require(
        (epochs is None) != (steps is None), f"epochs, steps: found {epochs} and {steps}; a loop has one or the other"
    )
    name, count = ("epochs", epochs) if steps is None else ("steps", steps)
    whole_number(name, count)
    per_epoch = steps_per_epoch(context.size, batch_size, drop_last)
    wanted = per_epoch * count if steps is None else count
    total = jnp.where(per_epoch > 0, wanted, 0).astype(jnp.int32)
    noise = fold_name(context.key, f"noise of {order}")
    batches = stream(context, order, batch_size=batch_size, drop_last=drop_last)

    def one(step_and_carry: tuple[Array, Any]) -> tuple[Array, Any]:
        step, carry = step_and_carry
        return step + 1, body(carry, batches.batch(step), jax.random.fold_in(noise, step), step)

    first = (per_epoch * done).astype(jnp.int32)
    _, carry = jax.lax.while_loop(lambda s: s[0] < first + total, one, (first, carry))
    return carry, total


def sweep(body: Callable[[Any, Batch], Any], carry: Any, context: Context, *, batch_size: int) -> Any:
    """``carry = body(carry, batch)`` once over a client's examples in their own order (evaluation, counts)."""

    def one(step_and_carry: tuple[Array, Any]) -> tuple[Array, Any]:
        step, carry = step_and_carry
        position = step * batch_size + jnp.arange(batch_size)
        batch = _rows(context, position % jnp.maximum(context.size, 1), position < context.size)
        return step + 1, body(carry, batch)

    total = steps_per_epoch(context.size, batch_size, drop_last=False)
    return jax.lax.while_loop(lambda s: s[0] < total, one, (jnp.int32(0), carry))[1]
