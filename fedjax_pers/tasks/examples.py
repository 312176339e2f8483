"""What one example looks like, and batches of that look: what adapters trace a model with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pers.base import Array, Batch, Example
from fedjax_pers.checks import one_of, require

ROWS = 13
"""Rows of the batch with which a model is tried out: hardly anybody's width, so that a confusion of axes comes out."""


def as_example(example: Iterable[Any]) -> Example:
    """The example in its hashable form, with dtypes as JAX will hold them.

    Example:
      >>> as_example([["x", [10], "float32"], ["y", [], "int64"]])
      (('x', (10,), 'float32'), ('y', (), 'int32'))

    Raises:
      ValueError: something else than (field, shape, dtype), a field twice, or a field called ``weight``.
    """
    try:
        fields = tuple(
            (str(name), tuple(int(n) for n in shape), jax.dtypes.canonicalize_dtype(dtype).name)
            for name, shape, dtype in example
        )
    except (TypeError, ValueError):
        raise ValueError(
            f"example: found {example!r}; expected (field, shape, dtype) for each field, "
            "such as (('x', (10,), 'float32'), ('y', (), 'int32')); Federation.example has that form"
        ) from None
    names = [name for name, _, _ in fields]
    require(len(set(names)) == len(names) > 0, f"example: found the fields {names}; expected each once")
    require("weight" not in names, "example: the field name 'weight' is taken, it marks padding; rename the field")
    return fields


def described(example: Example) -> str:
    """The example in words, for messages.

    Example:
      >>> described((("x", (10,), "float32"), ("y", (), "int32")))
      'x float32[10], y int32[]'
    """
    return ", ".join(f"{name} {dtype}[{','.join(map(str, shape))}]" for name, shape, dtype in example)


def shapes(example: Example) -> Batch:
    """A batch of such examples, with their weight, as shapes alone."""
    fields = {name: jax.ShapeDtypeStruct((ROWS, *shape), dtype) for name, shape, dtype in example}
    return {**fields, "weight": jax.ShapeDtypeStruct((ROWS,), "float32")}


def zeros(example: Example) -> Batch:
    """A batch of such examples with zeros in every field, to initialise a model with."""
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes(example))


def reader(inputs: str | Iterable[str], example: Example) -> Callable[[Batch], tuple[Array, ...]]:
    """The function that takes a model's arguments out of a batch.

    Args:
      inputs: name of a field, or several in the order of the model's arguments.
      example: says which fields there are.

    Raises:
      ValueError: no field of that name.
    """
    names = (inputs,) if isinstance(inputs, str) else tuple(inputs)
    require(bool(names), "inputs: found none; expected the name of at least one field")
    for name in names:
        one_of("inputs", name, [field for field, _, _ in example])
    return lambda batch: tuple(batch[name] for name in names)


@contextmanager
def explained(doing: str, example: Example) -> Iterator[None]:
    """Turns whatever a model raises into a ValueError that says on which examples it was tried."""
    try:
        yield
    except Exception as error:
        found = f"{doing} fails on a batch of {ROWS} examples of {described(example)}"
        raise ValueError(f"{found}: {type(error).__name__}: {error}") from error
