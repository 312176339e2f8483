"""Changes to the features of a federation: planted differences between clients, scaling, missing values.

Each returns a new federation; the unseen clients, if any, are changed with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from fedjax_pers.data.federation import SPLITS, Federation, Split
from fedjax_pers.data.identity import generator


def rotate(federation: Federation, degrees: Sequence[float]) -> Federation:
    """Turns each client's images counter-clockwise: client k by ``degrees[k % len(degrees)]``.

    Multiples of 90 are exact; other angles are interpolated linearly, with zeros where nothing was.

    Example:
      >>> from fedjax_pers.data import load
      >>> plain = load("digits", partitioner="iid", num_clients=4)
      >>> turned = rotate(plain, [0, 90, 180, 270])
      >>> bool((turned.train.client(2)["x"] == plain.train.client(2)["x"][:, ::-1, ::-1]).all())
      True

    Args:
      federation: ``x`` holds square images, ``[rows, side, side]`` or ``[rows, side, side, channels]``.
      degrees: one angle for each client, or fewer, which the clients (in canonical order) take in turn.

    Source: Ghosh et al., "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020, section 6.
    """
    angles = _in_turn("degrees", degrees, federation)
    shape = federation.train.data["x"].shape[1:]
    if len(shape) not in (2, 3) or shape[0] != shape[1]:
        raise ValueError(f"field 'x': found examples of shape {shape}, expected square images (side, side[, channels])")

    def turned(images: np.ndarray, part: Federation, index: int, split: str) -> np.ndarray:
        angle = angles[(part.first_id + index) % len(angles)]
        if angle % 90 == 0:
            return np.rot90(images, int(angle // 90), axes=(1, 2))
        from scipy import ndimage

        values = ndimage.rotate(images.astype(np.float64), angle, axes=(1, 2), reshape=False, order=1)
        return values if np.issubdtype(images.dtype, np.floating) else np.rint(values)

    return _map_x(federation, turned)


def noise(federation: Federation, std: Sequence[float], seed: int = 0) -> Federation:
    """Adds Gaussian noise to each client's features: client k with deviation ``std[k % len(std)]``.

    A client's noise is drawn from its tag and the split, so another client changes nothing.

    Args:
      federation: ``x`` holds floats.
      std: one deviation for each client, or fewer, which the clients (in canonical order) take in turn; in units of x.
      seed: of the draw.
    """
    deviations = _in_turn("std", std, federation)
    if (deviations < 0).any():
        raise ValueError(f"std: found {deviations.tolist()}, expected numbers of 0 or more")
    _require_floats(federation)

    def noisy(x: np.ndarray, part: Federation, index: int, split: str) -> np.ndarray:
        drawn = generator(seed, f"noise/{split}", part.tags[index]).standard_normal(x.shape)
        return x + drawn * deviations[(part.first_id + index) % len(deviations)]

    return _map_x(federation, noisy)


def standardise(federation: Federation) -> Federation:
    """Brings each feature to mean 0 and deviation 1 over the training rows of all clients, each row counting once.

    One scale for everybody keeps the differences between clients. NaN is left out of the statistics and stays; a
    feature that never varies becomes 0.
    """
    _require_floats(federation)
    mean, deviation = _moments(federation.train.data["x"])
    scale = np.where(deviation > 0, deviation, 1)
    return _map_x(federation, lambda x, part, index, split: (x - mean) / scale)


def impute(federation: Federation, indicator: bool = False) -> Federation:
    """Replaces NaN by the feature's mean over the client's own training rows, or by 0 where it has no value there.

    After :func:`standardise`, 0 is the mean over all clients, so a feature that a client never measured takes the
    average of the others.

    Args:
      federation: ``x`` is ``[rows, features]``, read with ``allow_missing=True``.
      indicator: append one column for each feature, 1 where the value was missing: ``[rows, 2 * features]``.
    """
    _require_floats(federation)
    shape = federation.train.data["x"].shape[1:]
    if len(shape) != 1:
        raise ValueError(f"field 'x': found examples of shape {shape}, expected one row of features each")

    def filled(x: np.ndarray, part: Federation, index: int, split: str) -> np.ndarray:
        missing = np.isnan(x)
        values = np.where(missing, _moments(part.train.client(index)["x"])[0], x)
        return np.concatenate([values, missing], axis=1) if indicator else values

    return _map_x(federation, filled)


def _moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of each feature over the rows in which it is known; 0 where it never is."""
    x = x.astype(np.float64)
    known = ~np.isnan(x)
    count = np.maximum(known.sum(axis=0), 1)
    mean = np.where(known, x, 0).sum(axis=0) / count
    return mean, np.sqrt((np.where(known, x - mean, 0) ** 2).sum(axis=0) / count)


def _in_turn(name: str, values: Sequence[float], federation: Federation) -> np.ndarray:
    numbers = np.asarray(values, np.float64)
    clients = federation.num_clients + (0 if federation.unseen is None else federation.unseen.num_clients)
    if numbers.ndim != 1 or not 1 <= len(numbers) <= clients or not np.isfinite(numbers).all():
        raise ValueError(f"{name}: found {numbers.tolist()}, expected 1 to {clients} finite numbers, at most one each")
    return numbers


def _require_floats(federation: Federation) -> None:
    dtype = federation.train.data["x"].dtype
    if not np.issubdtype(dtype, np.floating):
        raise ValueError(f"field 'x': found dtype {dtype}, expected floats")


def _map_x(federation: Federation, change: Callable[[np.ndarray, Federation, int, str], np.ndarray]) -> Federation:
    """``x = change(x, federation, index, split)`` for every client and split; the dtype stays."""

    def changed(split: str) -> Split:
        whole = federation.split(split)
        x = whole.data["x"]
        parts = [change(whole.client(i)["x"], federation, i, split) for i in range(federation.num_clients)]
        return Split({**whole.data, "x": np.concatenate(parts).astype(x.dtype)}, whole.offsets)

    unseen = None if federation.unseen is None else _map_x(federation.unseen, change)
    return replace(federation, **{split: changed(split) for split in SPLITS}, unseen=unseen)
