"""Tables of examples that know their clients by a column, or are dealt by a partitioner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedjax_pers.data.federation import Federation
from fedjax_pers.data.partitioners import Partitioner, natural, partition

CLIENT = "client"
"""The column of a table in which a source puts the ids of the clients."""


def check_dealing(name: str, client_key: object, partitioner: object) -> None:
    """ValueError unless exactly one of the two says whose the examples are."""
    if (client_key is None) == (partitioner is None):
        found = "neither" if client_key is None else "both"
        raise ValueError(
            f"{name}: found {found} of client_key and partitioner, expected one: the feature that names the client, or "
            "a partitioner such as 'dirichlet(0.1)' with num_clients"
        )


def federate(
    train: Mapping[str, Any],
    test: Mapping[str, Any] | None,
    partitioner: Partitioner | str | None,
    *,
    num_clients: int | None,
    validation: float,
    seed: int,
    **about: Any,
) -> Federation:
    """The federation of tables with a column of clients, or of tables dealt by the partitioner."""
    chosen = natural(CLIENT) if partitioner is None else partitioner
    federation = partition(train, test, chosen, num_clients=num_clients, seed=seed, **about)
    return federation.with_validation(validation, seed) if validation else federation
