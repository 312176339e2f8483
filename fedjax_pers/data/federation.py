"""A federation: who the clients are, and where the examples of each one lie."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pers.base import Cohort
from fedjax_pers.data.identity import ClientId, generator
from fedjax_pers.data.messages import listed, unknown

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, eq=False, repr=False)
class Split:
    """The rows of one split: client after client, each client's rows in their original order.

    Attributes:
      data: arrays by field, ``[rows, ...]``. They become read-only.
      offsets: ``int64 [clients + 1]``; client i owns the rows ``offsets[i] .. offsets[i + 1] - 1``.
    """

    data: dict[str, np.ndarray]
    offsets: np.ndarray

    def __post_init__(self) -> None:
        lengths = {name: len(values) for name, values in self.data.items()}
        offsets = self.offsets
        if offsets.ndim != 1 or not len(offsets) or offsets[0] != 0 or (np.diff(offsets) < 0).any():
            raise ValueError(f"offsets: found {offsets.tolist()}; expected a list that starts at 0 and never falls")
        if set(lengths.values()) != {int(offsets[-1])}:
            raise ValueError(f"data: found {lengths} rows, expected {offsets[-1]} in every field as the offsets say")
        for values in (offsets, *self.data.values()):
            values.flags.writeable = False

    @property
    def num_rows(self) -> int:
        """Rows of all clients together."""
        return int(self.offsets[-1])

    @property
    def sizes(self) -> np.ndarray:
        """Rows of each client, ``int64 [clients]``."""
        return np.diff(self.offsets)

    @property
    def owners(self) -> np.ndarray:
        """The client that each row belongs to, by index, ``int64 [rows]``."""
        return np.repeat(np.arange(len(self.offsets) - 1), self.sizes)

    def client(self, index: int) -> dict[str, np.ndarray]:
        """The rows of one client by field, as views."""
        return {name: values[self.offsets[index] : self.offsets[index + 1]] for name, values in self.data.items()}

    def of_clients(self, indexes: np.ndarray) -> Split:
        """The split of some clients, in the given order."""
        sizes = self.sizes[indexes]
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        rows = np.arange(offsets[-1]) + np.repeat(self.offsets[indexes] - offsets[:-1], sizes)
        return Split({name: values[rows] for name, values in self.data.items()}, offsets)

    def where(self, kept: np.ndarray) -> Split:
        """The rows at which ``kept`` (``bool [rows]``) is true; clients stay, if need be without rows."""
        before = np.concatenate([[0], np.cumsum(kept)]).astype(np.int64)
        return Split({name: values[kept] for name, values in self.data.items()}, before[self.offsets])


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """The clients of a study and their data. Build one with :func:`from_clients`, :func:`partition` or :func:`load`.

    The order of the clients is canonical (integers numerically, text by code point), whatever order they were read in.

    Example:
      >>> from fedjax_pers.data import load
      >>> federation = load("vowel_speakers")
      >>> federation
      Federation('vowel_speakers', 15 clients, train 525, validation 135, test 330)
      >>> federation.cohort([3, 7]).size.tolist()
      [35, 35]

    Attributes:
      name: of the data set.
      client_ids: in canonical order; all integers or all text.
      tags: ``uint32 [clients]``, unique; what a client's random keys are folded from. Independent of the other clients.
      train: rows to train on.
      validation: rows for choosing settings and rounds; may be empty.
      test: rows for the reported numbers.
      unseen: clients that never take part in training. Their ``train`` is what they personalise on.
      class_names: one for each class; empty where there are none.
      num_classes: labels lie in ``0 .. num_classes - 1``; None where ``y`` is not a class.
      description: one line for people.
      licence: of the data, with the credit that it asks for.
      remarks: what was noticed while the federation was built; see :attr:`notes`.
      first_id: id of the first client in a cohort: 0, or the number of training clients for unseen ones.
    """

    name: str
    client_ids: tuple[ClientId, ...]
    tags: np.ndarray
    train: Split
    validation: Split
    test: Split
    unseen: Federation | None = None
    class_names: tuple[str, ...] = ()
    num_classes: int | None = None
    description: str = ""
    licence: str = ""
    remarks: tuple[str, ...] = ()
    first_id: int = 0
    _pools: dict[str, dict[str, jax.Array]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for name in SPLITS:
            found = len(getattr(self, name).offsets) - 1
            if found != self.num_clients:
                raise ValueError(f"{name}: found {found} clients, expected {self.num_clients}, one for each id")
        if self.tags.shape != (self.num_clients,) or len(np.unique(self.tags)) != self.num_clients:
            raise ValueError(f"tags: found {self.tags.tolist()}; expected one for each client, all different")
        if self.unseen is not None and self.unseen.first_id != self.num_clients:
            object.__setattr__(self, "unseen", replace(self.unseen, first_id=self.num_clients))

    def __repr__(self) -> str:
        rows = ", ".join(f"{name} {getattr(self, name).num_rows}" for name in SPLITS)
        unseen = "" if self.unseen is None else f", {self.unseen.num_clients} unseen clients"
        return f"Federation({self.name!r}, {self.num_clients} clients, {rows}{unseen})"

    @property
    def num_clients(self) -> int:
        """Number of clients, without the unseen ones."""
        return len(self.client_ids)

    @property
    def largest(self) -> int:
        """Training rows of the largest client."""
        return int(self.train.sizes.max())

    @property
    def example(self) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        """Field, shape and dtype of one example, as ``Task.example`` wants them."""
        return tuple((name, values.shape[1:], values.dtype.name) for name, values in self.train.data.items())

    @property
    def notes(self) -> tuple[str, ...]:
        """What should be known about this federation: the remarks, and which clients lack data that others have."""
        trained, tested = self.train.sizes > 0, self.test.sizes > 0
        cases = (
            ("in train only, no test data", trained & ~tested & tested.any()),
            ("in test only, no training data", tested & ~trained),
            ("neither training nor test data", ~trained & ~tested),
        )
        return self.remarks + tuple(
            f"{found.sum()} of {self.num_clients} clients: {what}: "
            + listed(self.client_ids[index] for index in np.flatnonzero(found))
            for what, found in cases
            if found.any()
        )

    @cached_property
    def _index(self) -> dict[ClientId, int]:
        return {client_id: index for index, client_id in enumerate(self.client_ids)}

    def split(self, name: str) -> Split:
        """The split of that name."""
        if name not in SPLITS:
            raise unknown("split", name, SPLITS)
        return getattr(self, name)

    def sizes(self, split: str = "train") -> np.ndarray:
        """Rows of each client in a split, ``int64 [clients]``."""
        return self.split(split).sizes

    def index(self, client_id: ClientId) -> int:
        """The place of a client in the canonical order."""
        if client_id not in self._index:
            raise unknown("client", client_id, self.client_ids)
        return self._index[client_id]

    def pool(self, split: str = "train") -> dict[str, jax.Array]:
        """All rows of a split on the device, ``[rows, ...]`` by field; copied there once.

        A split without rows has a single row of zeros that belongs to nobody, since a program cannot index an empty
        array.
        """
        source = self.split(split)
        if split not in self._pools:
            rows = max(source.num_rows, 1)
            self._pools[split] = {
                name: jnp.asarray(values if len(values) else np.zeros((rows, *values.shape[1:]), values.dtype))
                for name, values in source.data.items()
            }
        return self._pools[split]

    def cohort(self, ids: Iterable[int] | None = None, split: str = "train") -> Cohort:
        """The cohort of some clients, by index in the canonical order; of all of them by default.

        Every cohort of a split refers to the same pool, so the shapes depend on the number of clients alone. Clients of
        an ``unseen`` federation get the ids ``first_id + index``, beyond those of the clients in training.

        Raises:
          ValueError: an index that is not an integer, out of range, or given twice.
        """
        rows = self.split(split)
        index = self._checked(np.arange(self.num_clients) if ids is None else ids)
        return Cohort(
            ids=jnp.asarray(self.first_id + index, jnp.int32),
            tags=jnp.asarray(self.tags[index]),
            start=jnp.asarray(rows.offsets[index], jnp.int32),
            size=jnp.asarray(rows.sizes[index], jnp.int32),
            valid=jnp.ones(len(index), bool),
            data=self.pool(split),
            room=jnp.zeros((int(rows.sizes.max()), 0)),
        )

    def _checked(self, ids: Iterable[int]) -> np.ndarray:
        index = np.asarray(ids if isinstance(ids, np.ndarray | jax.Array) else list(ids))
        if not index.size:
            raise ValueError("ids: found none, expected at least one client")
        if index.ndim != 1 or not np.issubdtype(index.dtype, np.integer):
            raise ValueError(
                f"ids: found {index.tolist()}; expected a list of integers 0 .. {self.num_clients - 1} "
                "(federation.index(client_id) gives the one of a client)"
            )
        outside = index[(index < 0) | (index >= self.num_clients)]
        if outside.size:
            raise ValueError(f"ids: found {outside.tolist()}, allowed are 0 .. {self.num_clients - 1}")
        values, counts = np.unique(index, return_counts=True)
        if (counts > 1).any():
            raise ValueError(f"ids: found {values[counts > 1].tolist()} more than once; a client is in a cohort once")
        return index.astype(np.int64)

    def select(self, client_ids: Iterable[ClientId]) -> Federation:
        """The federation of some clients, by client id; the unseen clients stay.

        Example:
          >>> from fedjax_pers.data import load
          >>> load("vowel_speakers").select(["speaker_04", "speaker_02"]).client_ids
          ('speaker_02', 'speaker_04')
        """
        return self._of(sorted({self.index(client_id) for client_id in client_ids}))

    def _of(self, indexes: Iterable[int]) -> Federation:
        index = np.asarray(list(indexes), np.int64)
        if not index.size:
            raise ValueError(f"clients: found none of {self.name!r}, expected at least one")
        return replace(
            self,
            client_ids=tuple(self.client_ids[i] for i in index),
            tags=self.tags[index],
            **{name: self.split(name).of_clients(index) for name in SPLITS},
        )

    def with_unseen(self, clients: float | Iterable[ClientId], seed: int = 0) -> Federation:
        """Takes clients out of training: their data moves to ``unseen``.

        Example:
          >>> from fedjax_pers.data import load
          >>> federation = load("vowel_speakers").with_unseen(0.2)
          >>> federation.num_clients, federation.unseen.num_clients, federation.unseen.cohort().ids.tolist()
          (12, 3, [12, 13, 14])

        Args:
          clients: a share of the clients between 0 and 1 (rounded to whole clients, at least one), or client ids.
          seed: of the draw, for a share. Each client draws from its own tag.
        """
        if self.unseen is not None:
            raise ValueError(f"{self.name!r}: found {self.unseen.num_clients} unseen clients already, expected none")
        if isinstance(clients, str | bool):
            raise ValueError(f"clients: found {clients!r}, expected a share or a list of client ids")
        if isinstance(clients, float | int):
            moved = self._drawn(clients, seed)
        else:
            moved = {self.index(client_id) for client_id in clients}
        if not 0 < len(moved) < self.num_clients:
            raise ValueError(
                f"unseen: found {len(moved)} of {self.num_clients} clients; at least one must move and one must stay"
            )
        staying = [index for index in range(self.num_clients) if index not in moved]
        unseen = replace(self._of(sorted(moved)), name=f"{self.name}/unseen")
        return replace(self._of(staying), unseen=unseen)

    def _drawn(self, share: float, seed: int) -> set[int]:
        if not 0 < share < 1:
            raise ValueError(f"unseen: found the share {share}, expected one between 0 and 1 (both excluded)")
        luck = [generator(seed, "unseen", tag).random() for tag in self.tags]
        count = max(1, round(share * self.num_clients))
        return set(np.argsort(luck, kind="stable")[:count].tolist())

    def with_validation(self, share: float, seed: int = 0) -> Federation:
        """Moves a share of each client's training rows to its validation split; unseen clients likewise.

        Which rows is drawn from the client's tag, so another client changes nothing. The number is rounded, and a
        client keeps at least one training row.

        Example:
          >>> from fedjax_pers.data import load
          >>> load("vowel_speakers", validation=0.0).with_validation(0.5).sizes("validation").tolist()[:3]
          [22, 22, 22]
        """
        if not 0 < share < 1:
            raise ValueError(f"validation: found the share {share}, expected one between 0 and 1 (both excluded)")
        if self.validation.num_rows:
            raise ValueError(f"{self.name!r}: found {self.validation.num_rows} validation rows already, expected none")
        moved = np.zeros(self.train.num_rows, bool)
        for tag, start, size in zip(self.tags, self.train.offsets, self.train.sizes, strict=False):
            order = np.argsort(generator(seed, "validation", tag).random(size), kind="stable")
            moved[start + order[: max(0, min(round(share * size), size - 1))]] = True
        return replace(
            self,
            train=self.train.where(~moved),
            validation=self.train.where(moved),
            unseen=None if self.unseen is None else self.unseen.with_validation(share, seed),
        )
