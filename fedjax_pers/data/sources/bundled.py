"""The sets that come with the package, and scikit-learn's digits."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import numpy as np

from fedjax_pers.checks import positive_int
from fedjax_pers.data.build import from_clients
from fedjax_pers.data.federation import Federation
from fedjax_pers.data.partitioners import Partitioner, partition, shards
from fedjax_pers.data.sources.npz import npz, read_npz

_CC_BY = "CC BY 4.0 (https://creativecommons.org/licenses/by/4.0/)"


def _bundle(name: str) -> Path:
    with resources.as_file(resources.files("fedjax_pers.data") / "bundle" / f"{name}.npz") as path:
        return path


def vowel_speakers(*, validation: float = 0.2, seed: int = 0) -> Federation:
    """Eleven English vowels by 15 speakers, 66 utterances each: ten log area ratios (unscaled, about -5 .. 5).

    Natural clients that reward personalisation. Of a speaker's six utterances of a vowel the last two are test.
    The source's own split by speaker trains on speakers 00 to 07 and tests on 08 to 14; to follow it, pass those seven
    to :meth:`Federation.with_unseen`.

    Args:
      validation: share of each speaker's training rows that becomes the validation split; 0 for none.
      seed: of the draw of the validation rows.

    Source: D. Deterding, M. Niranjan, T. Robinson, UCI Connectionist Bench (Vowel Recognition).
    """
    return npz(
        _bundle("vowel_speakers"),
        validation=validation,
        seed=seed,
        name="vowel_speakers",
        description="vowels by speaker: 10 log area ratios, 11 classes, 15 natural clients",
        licence=f"{_CC_BY}; D. Deterding, M. Niranjan, T. Robinson, via the UCI repository",
    )


def digits_domains(*, validation: float = 0.2, seed: int = 0) -> Federation:
    """Handwritten digits in three domains, one a client: ``[rows, 16, 16, 1]`` floats in 0 .. 1.

    The same ten classes everywhere, other-looking images: feature shift. The last quarter of each domain and class is
    test.

    Args:
      validation: share of each domain's training rows that becomes the validation split; 0 for none.
      seed: of the draw of the validation rows.

    Source: MNIST; UCI Optical Recognition and Pen-Based Recognition of Handwritten Digits (E. Alpaydin, C. Kaynak,
    F. Alimoglu).
    """
    return npz(
        _bundle("digits_domains"),
        validation=validation,
        seed=seed,
        name="digits_domains",
        description="digits in three domains (mnist, optdigits, pendigits): 16x16 grey images, 10 classes",
        licence=(
            f"optdigits, pendigits: {_CC_BY}; E. Alpaydin, C. Kaynak, F. Alimoglu, via the UCI repository. "
            "mnist: CC BY-SA 3.0; Y. LeCun, C. Cortes, C. Burges; file MIT, (c) 2015 Juan Cazala"
        ),
    )


def digits(
    *,
    partitioner: Partitioner | str | None = None,
    num_clients: int = 20,
    validation: float = 0.2,
    seed: int = 0,
) -> Federation:
    """The 1,797 digits that come with scikit-learn, dealt to clients: ``[rows, 8, 8, 1]`` floats in 0 .. 1.

    The last quarter of each class in the order of the file is test, which keeps most writers on one side.

    Args:
      partitioner: how to deal, as an object or its text; ``shards(2)``, two classes a client, by default.
      num_clients: number of clients.
      validation: share of each client's training rows that becomes the validation split; 0 for none.
      seed: of the deal and of the draw of the validation rows.

    Source: E. Alpaydin, C. Kaynak, UCI Optical Recognition of Handwritten Digits (its test part).
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    test = np.zeros(len(labels), bool)
    for label in range(10):
        rows = np.flatnonzero(labels == label)
        test[rows[-round(len(rows) / 4) :]] = True
    partitioner = shards(2) if partitioner is None else partitioner
    federation = partition(
        {"x": x[~test], "y": labels[~test]},
        {"x": x[test], "y": labels[test]},
        partitioner,
        num_clients=num_clients,
        seed=seed,
        name="digits",
        class_names=[str(label) for label in range(10)],
        description=f"8x8 grey images of digits, 10 classes, dealt by {partitioner} with seed {seed}",
        licence=f"{_CC_BY}; E. Alpaydin, C. Kaynak, via the UCI repository and scikit-learn",
    )
    return federation.with_validation(validation, seed) if validation else federation


def shakespeare_roles(*, window: int = 80, max_roles: int | None = None, validation: float = 0.2) -> Federation:
    """Shakespeare's plays by speaking role: predict each next character; 165 roles of 8,000 to 64,916 characters.

    ``x`` and ``y`` are ``int32 [rows, window]``, places in the alphabet of 72 characters (``class_names``); ``y`` is
    ``x`` one character later. Windows do not overlap. Within a role the order is that of the play: training, then
    validation (its tail, not a random draw), then test, about the last fifth.

    Args:
      window: characters in one example.
      max_roles: only the first so many roles, in canonical order ("play/role"); all by default.
      validation: share of each role's training windows, from the tail, that becomes the validation split; 0 for none.

    Source: Open Shakespeare, Open Knowledge Foundation; the task as in Caldas et al., "LEAF", 2018.
    """
    content = read_npz(_bundle("shakespeare_roles"))
    roles = content["client_ids"].tolist()
    positive_int("window", window)
    if max_roles is not None:
        positive_int("max_roles", max_roles)
    if not 0 <= validation < 1:
        raise ValueError(f"validation: found the share {validation}, expected one of 0 or more and below 1")
    if window >= int(np.diff(content["offsets"]).min()) // 10:
        raise ValueError(f"window: found {window}, expected at most 799, so that every role has rows in every split")
    place = np.zeros(256, np.int32)
    place[content["alphabet"]] = np.arange(len(content["alphabet"]))
    text = place[content["text"]]
    clients = {}
    for role, start, test, end in zip(
        roles[:max_roles], content["offsets"], content["test_start"], content["offsets"][1:], strict=False
    ):
        train = _windows(text[start:test], window)
        kept = len(train["x"]) - round(validation * len(train["x"]))
        clients[role] = {
            "train": {key: values[:kept] for key, values in train.items()},
            "validation": {key: values[kept:] for key, values in train.items()},
            "test": _windows(text[test:end], window),
        }
    return from_clients(
        clients,
        name="shakespeare_roles",
        class_names=[chr(code) for code in content["alphabet"]],
        description=f"Shakespeare's plays by role: the next character in windows of {window}, 72 characters",
        licence="public domain (the plays), CC BY 2.5 (the collection); Open Shakespeare, Open Knowledge Foundation",
    )


def _windows(text: np.ndarray, window: int) -> dict[str, np.ndarray]:
    """Windows ``[rows, window]`` of the text as x, and the same windows one character later as y."""
    rows = (len(text) - 1) // window
    return {
        "x": text[: rows * window].reshape(rows, window),
        "y": text[1 : rows * window + 1].reshape(rows, window),
    }
