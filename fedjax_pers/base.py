"""The words of the package: named tuples that every other room speaks in.

A federated method is three functions over these tuples::

    init(params, key, *, num_clients)  -> State
    step(state, cohort, key)           -> State, Metrics      (pure; same tree, shapes and dtypes out as in)
    personalize(state, cohort, key)    -> per-client variables (never writes; serves unseen clients too)

Leaves are kept in *flat dicts* from path to array (see :mod:`fedjax_pers.paths`): what is shared is a set of names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pers.paths import Selector, nothing

Array = jax.Array
Leaves = dict[str, Any]
"""Leaves by path, for example ``{"params/dense/kernel": ...}``."""

Batch = dict[str, Any]
"""Arrays ``[batch, ...]`` by field; ``"weight"`` is 1 for an example and 0 for padding."""

Example = tuple[tuple[str, tuple[int, ...], str], ...]
"""Field, shape and dtype of one example: ``(("x", (10,), "float32"), ("y", (), "int32"))``."""


def as_given(variables: Any, *_: Any) -> Any:
    """Most tasks have no variables but those of their model."""
    return variables


class Task(NamedTuple):
    """What the user brings: a model and what it is trained for.

    Attributes:
      init: ``init(key) -> variables``, any pytree of arrays.
      loss: ``loss(variables, batch, key) -> (scalar, tracked)``. The scalar is the mean over examples *weighted by*
        ``batch["weight"]``. ``tracked`` holds the new value of leaves that change without a gradient (running
        statistics), as a nested or flat dict by path; ``{}`` where there are none. ``key`` drives dropout and the like.
      metrics: ``metrics(variables, batch) -> {name: [batch]}``, one number per example (``"loss"``, ``"accuracy"``).
      apply: ``apply(variables, batch, key) -> (outputs, tracked)`` in training mode where ``key`` is given, in
        evaluation mode where it is ``None``. Needed by methods that combine outputs (Fed-RoD, mixtures).
      criterion: ``criterion(outputs, batch) -> [batch]``, the loss of each example from the model's outputs.
      statistics: the leaves of ``tracked``: never given to an optimiser.
      example: shape and dtype of one example by field, ``(("x", (10,), "float32"), ("y", (), "int32"))``.
      kinds: ``(path of a layer, name of its type)`` pairs, ``(("params/norm", "BatchNorm"),)``: lets :func:`norm` and
        :func:`embedding` select by type rather than by name.
      num_classes: labels must lie in ``0 .. num_classes - 1``; ``None`` where ``y`` is not a class.
      adopt: ``adopt(variables, key) -> variables`` of this task from those of the task that it was made from (adapters
        are added), so that a method may change the task it is given.
      plain: ``plain(variables) -> variables`` of the model itself (adapters are merged into its weights).
      private: leaves that are one client's by their nature (a gate, a datastore): a layout that shares them is refused.
    """

    init: Callable[[Array], Any]
    loss: Callable[[Any, Batch, Array], tuple[Array, Any]]
    metrics: Callable[[Any, Batch], Mapping[str, Array]]
    apply: Callable[..., tuple[Any, Any]] | None = None
    criterion: Callable[[Any, Batch], Array] | None = None
    statistics: Selector = nothing
    example: Example | None = None
    kinds: tuple[tuple[str, str], ...] = ()
    num_classes: int | None = None
    adopt: Callable[[Any, Array], Any] = as_given
    plain: Callable[[Any], Any] = as_given
    private: Selector = nothing


class Cohort(NamedTuple):
    """The clients of one round (or of one evaluation): who, and where their examples lie.

    Examples are not padded to the largest client: ``data`` is a *pool* of rows, and client ``i`` owns the rows
    ``start[i] .. start[i] + size[i] - 1``. Everything but ``data`` has the leading axis ``[clients]``.

    Attributes:
      ids: ``int32``; who it is, and its row in ``State.rows``. Unique. ``num_clients`` marks padding (``valid`` false)
        and, with ``valid`` true, a client never seen in training.
      tags: ``uint32``; what a client's random keys are folded from. Independent of who else is there.
      start: ``int32``; first row in the pool.
      size: ``int32``; number of rows, 0 allowed.
      valid: ``bool``; false for padding.
      data: pool by field, ``[rows, ...]``.
      room: ``[examples, 0]``, an array without numbers whose length says how many examples a client has at most, so
        that what is made of each (features of a frozen body) can be stored; ``None`` where nobody knows.
      slots: ``int32``; place of the client's row in ``State.rows`` where that holds the rows of some clients alone;
        ``None`` where it holds those of all, each at its client's id.
    """

    ids: Array
    tags: Array
    start: Array
    size: Array
    valid: Array
    data: dict[str, Array]
    room: Array | None = None
    slots: Array | None = None

    def at(self, places: Array) -> Cohort:
        """The clients at these places of the cohort, with the same pool."""
        by_client = self._replace(data={}, room=None)
        return jax.tree.map(lambda x: x[places], by_client)._replace(data=self.data, room=self.room)


class Parts(NamedTuple):
    """A client's leaves by role. ``shared`` travels, ``personal`` stays, ``frozen`` never changes."""

    shared: Leaves
    personal: Leaves
    frozen: Leaves


class State(NamedTuple):
    """Everything a method remembers between rounds.

    Attributes:
      shared: the server's leaves, without a client axis.
      rows: the personal leaves of all clients, ``[num_clients, ...]``.
      fresh: one row: the personal leaves of a client that has never been seen.
      frozen: kept once.
      opt: the server optimiser's state.
      aux: whatever else the aggregator keeps (assignments, weights); a pytree.
      seen: ``int32 [num_clients]``: rounds in which each client took part.
      round: ``int32`` scalar: rounds done.
    """

    shared: Leaves
    rows: Leaves
    fresh: Leaves
    frozen: Leaves
    opt: Any
    aux: Any
    seen: Array
    round: Array


class Metrics(NamedTuple):
    """What one round reports; per-client arrays are ``[clients]`` in ascending order of id.

    Attributes:
      ids: the clients, padding last (``num_clients``).
      loss: mean training loss over the client's steps; NaN where it took none.
      steps: optimiser steps taken.
      examples: training examples of the client.
      weight: share of the aggregate.
      rejected: the client's upload was not finite: left out, and its row kept as it was.
      empty: the client took part and had nothing to train on.
      transmitted: the client sent and received its payload this round (false when a method skips communication).
      update_norm: scalar, L2 norm of the change of the shared leaves.
      said: ``{name: [clients]}``, single numbers that clients sent beside their leaves (losses, choices); ``{}`` in
        most methods.
      spared_up: bytes of the upload that did not cross, as the client reported.
      spared_down: bytes of the download that did not cross.
    """

    ids: Array
    loss: Array
    steps: Array
    examples: Array
    weight: Array
    rejected: Array
    empty: Array
    transmitted: Array
    update_norm: Array
    said: dict[str, Array]
    spared_up: Array | int = 0
    spared_down: Array | int = 0


class Report(NamedTuple):
    """What a client says of its round (scalars).

    Attributes:
      loss: mean loss over its steps.
      steps: optimiser steps taken.
      transmitted: whether it communicated.
      spared_up: bytes of its upload that did not cross, ``int32``: trees have one shape in every round, what a mask
        leaves out of them is not sent. 0 in most methods.
      spared_down: bytes of its download that did not cross.
    """

    loss: Array
    steps: Array
    transmitted: Array
    spared_up: Array | int = 0
    spared_down: Array | int = 0


class Part(NamedTuple):
    """Places ``first, first + 1, ...`` in a random order of all ``total`` examples of a client; ``words`` say which."""

    words: Array
    first: Array
    total: Array


class Context(NamedTuple):
    """What a client knows besides its leaves, in training and in personalisation.

    Attributes:
      data: the pool of examples by field ``[rows, ...]``.
      start: first row of the client.
      size: its number of examples.
      key: the client's key of this round.
      common: a key that all clients of the run share (for decisions taken together, such as L2GD's coin).
      unseen: true for a client that never was in training.
      round: the round, ``int32``.
      received: the client's parts at the start of the round, the anchor of every penalty.
      room: as in the cohort.
      features: what is stored of each of the client's examples, ``[examples, ...]``; batches have these fields too.
      download: what the client was sent, of which ``received.shared`` is what it picked.
      part: which of the client's examples there are, where it is not all of them; ``size`` counts these alone.
    """

    data: dict[str, Array]
    start: Array
    size: Array
    key: Array
    common: Array
    unseen: Array
    round: Array
    received: Parts
    room: Array | None = None
    features: dict[str, Array] | None = None
    download: Leaves | None = None
    part: Part | None = None


def cohort_of(data: Mapping[str, Any], *, ids: Any = None, sizes: Any = None) -> Cohort:
    """A cohort from stacked arrays ``[clients, examples, ...]``, for use without a federation.

    Example:
      >>> import numpy as np
      >>> cohort = cohort_of({"x": np.zeros((3, 5, 2)), "y": np.zeros((3, 5), int)}, sizes=[5, 2, 4])
      >>> cohort.start.tolist()
      [0, 5, 10]

    Args:
      data: fields of equal leading shape ``[clients, examples]``.
      ids: rows of the clients in the state; ``0 .. clients - 1`` by default.
      sizes: examples that count for each client; all by default.
    """
    shapes = {name: np.shape(value)[:2] for name, value in data.items()}
    if not shapes or len(set(shapes.values())) != 1 or len(next(iter(shapes.values()))) != 2:
        raise ValueError(f"data: every field needs the same leading [clients, examples]; found {shapes}")
    clients, examples = next(iter(shapes.values()))
    if examples == 0:  # not even the shapes of a row
        raise ValueError(f"data: found no example in {shapes}; an empty client is sizes=0, a row is needed")
    ids = np.arange(clients) if ids is None else np.asarray(ids)
    sizes = np.full(clients, examples) if sizes is None else np.asarray(sizes)
    for name, value in (("ids", ids), ("sizes", sizes)):
        if value.shape != (clients,):
            raise ValueError(f"{name}: found shape {value.shape}, expected ({clients},), one for each client")
    if len(np.unique(ids)) != clients or ids.min(initial=0) < 0:
        raise ValueError(f"ids: found {ids.tolist()}; they must be unique and not negative")
    if sizes.min(initial=0) < 0 or sizes.max(initial=0) > examples:
        raise ValueError(f"sizes: found {sizes.tolist()}; allowed are 0 .. {examples}")
    return Cohort(
        ids=jnp.asarray(ids, jnp.int32),
        tags=jnp.asarray(ids, jnp.uint32),
        start=jnp.arange(clients, dtype=jnp.int32) * examples,
        size=jnp.asarray(sizes, jnp.int32),
        valid=jnp.ones(clients, bool),
        data={name: jnp.reshape(jnp.asarray(v), (clients * examples, *np.shape(v)[2:])) for name, v in data.items()},
        room=jnp.zeros((examples, 0)),
    )
