"""Who a client is: its id, its place in the canonical order, and the 32-bit tag its random numbers come from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from fedjax_pers.data.messages import listed

ClientId = int | str


def plain_id(client_id: object) -> ClientId:
    """A client id as a Python int or str; anything else is refused."""
    if isinstance(client_id, str):
        return str(client_id)
    if isinstance(client_id, int | np.integer) and not isinstance(client_id, bool):
        return int(client_id)
    raise ValueError(
        f"client id {client_id!r}: found a value of type {type(client_id).__name__}, expected an integer or text"
    )


def canonical_ids(ids: Iterable[object]) -> tuple[ClientId, ...]:
    """Client ids in ascending order: integers numerically, text by code point.

    Example:
      >>> canonical_ids([10, 9]), canonical_ids(["10", "9"])
      ((9, 10), ('10', '9'))

    Raises:
      ValueError: no ids, an id that is neither integer nor text, both kinds together, or an id that occurs twice.
    """
    plain = [plain_id(client_id) for client_id in ids]
    if not plain:
        raise ValueError("clients: found an empty set of clients, expected at least one")
    text = [client_id for client_id in plain if isinstance(client_id, str)]
    if text and len(text) < len(plain):
        number = next(client_id for client_id in plain if not isinstance(client_id, str))
        raise ValueError(f"client ids: found text ({text[0]!r}) and integers ({number!r}); expected one kind")
    ordered = sorted(plain)
    twice = {one for one, other in zip(ordered, ordered[1:], strict=False) if one == other}
    if twice:
        raise ValueError(f"client ids: found more than once: {listed(sorted(twice))}; each client is given once")
    return tuple(ordered)


def _digest(client_id: ClientId, attempt: int) -> int:
    salt = attempt.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(str(client_id).encode(), digest_size=4, salt=salt).digest(), "little")


def tags_of(ids: tuple[ClientId, ...]) -> tuple[np.ndarray, tuple[str, ...]]:
    """The tag of each client, ``uint32 [clients]``, and a note for each collision that had to be resolved.

    An integer in ``0 .. 2**32 - 1`` is its own tag; other ids have a four-byte BLAKE2b digest, the same in every
    process. Where two digests are equal, the later id in canonical order takes its next digest.
    """
    own = {i for i in ids if isinstance(i, int) and 0 <= i < 2**32}
    holder: dict[int, ClientId] = {i: i for i in own}
    tags, notes = np.empty(len(ids), np.uint32), []
    for index, client_id in enumerate(ids):
        if client_id in own:
            tags[index] = client_id
            continue
        attempt = 0
        while (tag := _digest(client_id, attempt)) in holder:
            notes.append(f"clients {holder[tag]!r} and {client_id!r} share the digest {tag}; the second took another")
            attempt += 1
        holder[tag] = client_id
        tags[index] = tag
    return tags, tuple(notes)


def generator(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """The stream of random numbers of (seed, purpose, numbers), independent of every other one."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise ValueError(f"seed: found {seed!r}, expected an integer of 0 or more")
    return np.random.default_rng([int(seed), *(int(n) for n in numbers), *purpose.encode()])
