"""Partitioners: how the rows of one table are dealt to clients, train and test in one draw.

Every deal depends on the *content* of the rows and the seed, never on their order: the rows are shuffled by a digest of
their bytes, classes are taken in the order of their labels, and what is drawn for a client holds for both splits.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedjax_pers.checks import number, positive_int
from fedjax_pers.data.build import Fields, arrays_of, from_rows
from fedjax_pers.data.federation import Federation
from fedjax_pers.data.identity import generator
from fedjax_pers.data.messages import unknown

Tables = Mapping[str, Fields]
Deal = Callable[[Tables, int, int], dict[str, np.ndarray]]
"""Arrays ``[rows, ...]`` by field, by split."""

_ATTEMPTS = 1000


@dataclass(frozen=True)
class Partitioner:
    """A way to deal rows to clients.

    Attributes:
      text: the call that made it, ``dirichlet(alpha=0.1)``; :func:`parse` reads it back.
      deal: ``deal(tables, num_clients, seed) -> {split: [rows]}``, the client of each row.
      column: the field that holds the client ids, where the table knows its clients.
    """

    text: str
    deal: Callable[[Tables, int, int], dict[str, np.ndarray]] = field(repr=False, compare=False)
    column: str | None = None

    def __str__(self) -> str:
        return self.text


def _named(factory: Callable[..., Any]) -> Callable[..., Partitioner]:
    """A factory of partitioners from a factory of their ``deal``: adds the text of the call."""
    signature = inspect.signature(factory)

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Partitioner:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        bound.arguments = {name: _literal(value) for name, value in bound.arguments.items()}
        settings = ", ".join(f"{name}={value!r}" for name, value in bound.arguments.items())
        deal = factory(*bound.args, **bound.kwargs)
        return Partitioner(f"{factory.__name__}({settings})", deal, bound.arguments.get("column"))

    return make


def _literal(value: Any) -> Any:
    """A setting as a value that prints the way it is written."""
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_literal(one) for one in value]
    return value.item() if isinstance(value, np.generic) else value


def partition(
    train: Mapping[str, Any],
    test: Mapping[str, Any] | None = None,
    partitioner: Partitioner | str | None = None,
    *,
    num_clients: int | None = None,
    seed: int = 0,
    **about: Any,
) -> Federation:
    """A federation dealt from one table of training rows and one of test rows, with a single draw for both.

    Example:
      >>> import numpy as np
      >>> table = {"x": np.arange(12.0)[:, None], "y": np.repeat([0, 1, 2], 4)}
      >>> federation = partition(table, table, shards(1), num_clients=3)
      >>> federation.sizes("train").tolist(), federation.sizes("test").tolist()
      ([4, 4, 4], [4, 4, 4])

    Args:
      train: arrays ``[rows, ...]`` by field, ``x`` and ``y`` among them.
      test: the same fields; no test data if None.
      partitioner: how to deal; :func:`iid` by default. Its text does as well: ``"dirichlet(alpha=0.1)"``.
      num_clients: number of clients, with the ids ``0 .. num_clients - 1``. Not for :func:`natural`.
      seed: of the draw.
      **about: ``name``, ``num_classes``, ``class_names``, ``description``, ``licence``, ``allow_missing`` as in
        :func:`from_clients`.

    Raises:
      ValueError: names the split and the field, or the setting, what was found and what is allowed.
    """
    partitioner = parse(partitioner) if isinstance(partitioner, str) else partitioner or iid()
    tables = {"train": train} if test is None else {"train": train, "test": test}
    if partitioner.column is None:
        positive_int("num_clients", num_clients)
        tables = {split: arrays_of(f"split {split!r}", table) for split, table in tables.items()}
    elif num_clients is not None:
        raise ValueError(f"num_clients: found {num_clients}, but {partitioner} takes the clients from the column")
    owners = partitioner.deal(tables, num_clients, seed)
    rows = {
        split: {name: values for name, values in table.items() if name != partitioner.column}
        for split, table in tables.items()
    }
    return from_rows(rows, owners, clients=None if num_clients is None else range(num_clients), **about)


@_named
def iid() -> Deal:
    """Rows at random, all clients of equal size (to one row). Flower's ``IidPartitioner``."""
    return _by_share(lambda rng, clients: np.full(clients, 1 / clients))


@_named
def sized(shares: Iterable[float]) -> Deal:
    """Rows at random, client k with a share proportional to ``shares[k]``. Flower's ``SizePartitioner``.

    ``sized(range(1, 11))`` is its linear partitioner for ten clients.
    """
    weights = np.asarray(shares, float)
    if weights.ndim != 1 or not np.isfinite(weights).all() or (weights < 0).any() or not weights.sum():
        raise ValueError(f"shares: found {weights.tolist()}; expected numbers of 0 or more, one for each client")

    def shares_of(rng: np.random.Generator, clients: int) -> np.ndarray:
        if len(weights) != clients:
            raise ValueError(f"shares: found {len(weights)}, expected num_clients = {clients}")
        return weights / weights.sum()

    return _by_share(shares_of)


@_named
def quantity(alpha: float = 1.0) -> Deal:
    """Rows at random, sizes from one draw of a symmetric Dirichlet: small ``alpha``, unequal clients."""
    number("alpha", alpha, low=1e-6)
    return _by_share(lambda rng, clients: rng.dirichlet(np.full(clients, float(alpha))))


@_named
def lognormal(sigma: float = 1.0) -> Deal:
    """Rows at random, sizes proportional to ``exp(sigma * normal)``, as sizes of real clients often are."""
    number("sigma", sigma, low=0.0)

    def shares_of(rng: np.random.Generator, clients: int) -> np.ndarray:
        weights = np.exp(float(sigma) * rng.standard_normal(clients))
        return weights / weights.sum()

    return _by_share(shares_of)


@_named
def dirichlet(alpha: float = 0.1, min_size: int = 0, balanced: bool = False) -> Deal:
    """Label skew: for each class, the shares of the clients are one draw from a symmetric Dirichlet.

    The same shares deal the class in train and in test, so a client's label mix is the same in both.
    Flower's ``DirichletPartitioner``, PFLlib's ``dir``.

    Args:
      alpha: small, each class is with few clients; large, all clients are alike.
      min_size: least number of training rows of a client. If one has fewer, the whole draw is made again, with the
        number of the attempt in the seed, at most 1000 times.
      balanced: a client with more than its equal part of the training rows gets nothing of the classes that follow (in
        the order of the labels).

    Source: Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019.
    """
    number("alpha", alpha, low=1e-6)
    number("min_size", min_size, low=0)

    def deal(tables: Tables, clients: int, seed: int) -> dict[str, np.ndarray]:
        classes = _classes(tables)
        in_train = [int((tables["train"]["y"] == label).sum()) for label in classes]
        smallest = -1
        for attempt in range(_ATTEMPTS):
            drawn = generator(seed, "dirichlet", attempt).dirichlet(np.full(clients, float(alpha)), size=len(classes))
            shares, sizes = _shared_out(drawn, in_train, balanced)
            smallest = max(smallest, sizes.min())
            if sizes.min() >= min_size:
                return _by_class(tables, classes, shares, seed)
        raise ValueError(
            f"min_size: found {smallest} rows at the smallest client in the best of {_ATTEMPTS} draws, expected "
            f"{min_size}; use fewer clients, a larger alpha, or balanced=True"
        )

    return deal


@_named
def shards(classes_per_client: int = 2) -> Deal:
    """Pathological label skew: every client has exactly so many classes, the same ones in train and test.

    The classes are spread evenly: each client in turn takes those with the fewest takers so far, ties drawn at random.
    The rows of a class are divided equally among its takers. Flower's ``PathologicalPartitioner``, PFLlib's ``pat``.

    Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
    """
    positive_int("classes_per_client", classes_per_client)

    def deal(tables: Tables, clients: int, seed: int) -> dict[str, np.ndarray]:
        classes = _classes(tables)
        if classes_per_client > len(classes):
            raise ValueError(f"classes_per_client: found {classes_per_client}, but there are {len(classes)} classes")
        if clients * classes_per_client < len(classes):
            raise ValueError(
                f"classes_per_client: {clients} clients with {classes_per_client} cannot hold {len(classes)} classes, "
                "and rows would be left out; use more clients or more classes for each"
            )
        rng = generator(seed, "shards")
        taken = np.zeros((len(classes), clients))
        for client in range(clients):
            order = np.lexsort((rng.random(len(classes)), taken.sum(axis=1)))
            taken[order[:classes_per_client], client] = 1
        for label, takers in zip(classes, taken.sum(axis=1), strict=True):
            rows = int((tables["train"]["y"] == label).sum())
            if rows < takers:
                raise ValueError(
                    f"class {label}: found {rows} training rows, expected {takers:.0f}, one for each client"
                )
        return _by_class(tables, classes, taken / taken.sum(axis=1, keepdims=True), seed)

    return deal


@_named
def natural(column: str) -> Deal:
    """The clients that the table itself names: a row belongs to the id in ``column``, in both splits.

    The column is no feature and is taken out. An id in one split only is reported in the notes of the federation.
    Flower's ``NaturalIdPartitioner``.
    """
    return lambda tables, clients, seed: {split: _column(split, table, column) for split, table in tables.items()}


_FACTORIES = {
    "iid": iid,
    "dirichlet": dirichlet,
    "shards": shards,
    "quantity": quantity,
    "lognormal": lognormal,
    "sized": sized,
    "natural": natural,
}


def parse(text: str) -> Partitioner:
    """The partitioner of a text such as ``"dirichlet(alpha=0.1)"``, for configurations and the command line.

    Example:
      >>> parse("shards(3)").text
      'shards(classes_per_client=3)'
    """
    try:
        call = ast.parse(text if "(" in text else f"{text}()", mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            raise ValueError("not a call")
        name = call.func.id
        args = [ast.literal_eval(one) for one in call.args]
        kwargs = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"partitioner: found {text!r}, expected a call such as 'dirichlet(alpha=0.1)'") from error
    if name not in _FACTORIES:
        raise unknown("partitioner", name, _FACTORIES)
    try:
        return _FACTORIES[name](*args, **kwargs)
    except TypeError as error:
        allowed = ", ".join(inspect.signature(_FACTORIES[name]).parameters) or "none"
        raise ValueError(f"partitioner {text!r}: {error}; settings of {name}: {allowed}") from error


def _column(split: str, table: Mapping[str, Any], column: str) -> np.ndarray:
    if column not in table:
        raise unknown(f"split {split!r}, column", column, table)
    return np.asarray(table[column])


def _classes(tables: Tables) -> np.ndarray:
    for split, table in tables.items():
        if not np.issubdtype(table["y"].dtype, np.integer) or table["y"].ndim != 1:
            found = f"{table['y'].dtype} of shape {table['y'].shape}"
            raise ValueError(f"split {split!r}, field 'y': found {found}, expected one integer label for each row")
    return np.unique(np.concatenate([table["y"] for table in tables.values()]))


def _shared_out(drawn: np.ndarray, in_train: list[int], balanced: bool) -> tuple[np.ndarray, np.ndarray]:
    """Shares ``[classes, clients]`` from the drawn ones, and the training rows that each client then has."""
    shares, sizes = drawn.copy(), np.zeros(drawn.shape[1], np.int64)
    for row, rows in zip(shares, in_train, strict=True):
        if balanced:
            room = sizes * len(sizes) <= sum(in_train)
            row *= room
            row[:] = row / row.sum() if row.sum() else room / room.sum()
        sizes += _counts(row, rows)
    return shares, sizes


def _counts(shares: np.ndarray, rows: int) -> np.ndarray:
    """Whole numbers that add up to ``rows``, each less than one away from ``shares * rows``."""
    edges = np.floor(np.cumsum(shares) * rows + 0.5).astype(np.int64)
    return np.diff(edges, prepend=0)


def _by_share(shares_of: Callable[[np.random.Generator, int], np.ndarray]) -> Deal:
    """Deals shuffled rows in runs as long as the clients' shares say."""

    def deal(tables: Tables, clients: int, seed: int) -> dict[str, np.ndarray]:
        shares = shares_of(generator(seed, "sizes"), clients)
        owners = {}
        for split, table in tables.items():
            order = shuffled_rows(table, seed, split)
            owners[split] = np.empty(len(order), np.int64)
            owners[split][order] = np.repeat(np.arange(clients), _counts(shares, len(order)))
        return owners

    return deal


def _by_class(tables: Tables, classes: np.ndarray, shares: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """Deals the shuffled rows of each class by that class's shares, ``[classes, clients]``."""
    owners = {}
    for split, table in tables.items():
        order = shuffled_rows(table, seed, split)
        owners[split] = np.empty(len(order), np.int64)
        for label, share in zip(classes, shares, strict=True):
            rows = order[table["y"][order] == label]
            owners[split][rows] = np.repeat(np.arange(len(share)), _counts(share, len(rows)))
    return owners


def shuffled_rows(table: Fields, seed: int, purpose: str) -> np.ndarray:
    """A pseudo-random order of the rows, ``[rows]``, in which a row's place depends on its content alone.

    Rows are sorted by a digest keyed with the seed. Equal rows are told apart by counting them, so that they do not end
    up side by side; which of them comes first makes no difference.
    """
    rows = len(table["x"])
    columns = [values.reshape(rows, math.prod(values.shape[1:])) for _, values in sorted(table.items())]
    key = generator(seed, purpose).bytes(16)
    seen: Counter[bytes] = Counter()
    digests = []
    for parts in zip(*(np.ascontiguousarray(column).view(np.uint8) for column in columns), strict=True):
        whole = hashlib.blake2b(digest_size=16, key=key)
        for part in parts:
            whole.update(part)
        content = whole.digest()
        count = seen[content].to_bytes(8, "little")
        digests.append(hashlib.blake2b(content + count, digest_size=8, key=key).digest())
        seen[content] += 1
    return np.argsort(np.frombuffer(b"".join(digests), np.uint64), kind="stable")
