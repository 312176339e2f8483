"""What all peers have in common: their command line, their workload, their clock and their one line of output.

It needs nothing but numpy, so that it runs in each peer's environment.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np

BEGUN = time.perf_counter()


class Workload(NamedTuple):
    """In each round every client trains for one epoch of SGD, and the models are averaged, weighted by examples."""

    name: str
    x: np.ndarray  # [rows, ...], client after client; images have their channels last, characters are integers
    y: np.ndarray  # int32 [rows], of characters [rows, time]
    sizes: np.ndarray  # rows of each client
    batch: int
    lr: float
    model: str  # "mlp64", "mlp784", "cnn", "resnet8" or "transformer"
    classes: int

    @property
    def spans(self) -> list[slice]:
        """Where each client's rows lie."""
        ends = np.cumsum(self.sizes).tolist()
        return [slice(end - size, end) for end, size in zip(ends, self.sizes.tolist())]


def load(path: str) -> Workload:
    """What ``workloads.py`` wrote."""
    with np.load(path) as saved:
        kinds = {"name": str, "batch": int, "lr": float, "model": str, "classes": int}
        return Workload(**{field: kinds.get(field, np.asarray)(saved[field]) for field in Workload._fields})


class Run:
    """One run of a peer: ``python PROGRAM.py WORKLOAD.npz [--variant V] --rounds R``.

    Args:
      variants: that it knows, the first by default.
      packages: whose versions are reported.
    """

    def __init__(self, variants: tuple[str, ...], packages: tuple[str, ...]):
        parser = argparse.ArgumentParser()
        parser.add_argument("workload")
        parser.add_argument("--variant", choices=variants, default=variants[0])
        parser.add_argument("--rounds", type=int, required=True, help="timed rounds, after one to warm up")
        asked = parser.parse_args()
        self.peer, self.packages, self.variant = peer_name(sys.argv[0]), packages, asked.variant
        self.path = asked.workload
        self.rounds = asked.rounds + 1
        self.workload = load(asked.workload)
        self.ends: list[float] = []

    def round_ended(self) -> None:
        """To be called at the end of each round; memory is read after the last, while all processes live."""
        self.ends.append(time.perf_counter())
        if len(self.ends) == self.rounds:
            self.peak_mb = peak_mb()

    def report(self, before: float, after: float) -> None:
        """Prints the run.

        Args:
          before: mean loss over all examples of the model that the first round begins with.
          after: that of the model that the last round ends with.
        """
        if not after < before:
            sys.exit(f"{self.peer}, {self.variant}: the loss does not fall: {before} before, {after} after")
        row = {
            "peer": self.peer,
            "variant": self.variant,
            "workload": self.workload.name,
            "seconds": np.diff(self.ends).tolist(),
            "startup_seconds": self.ends[0] - BEGUN,
            "peak_mb": self.peak_mb,
            "loss": [before, after],
            "versions": {"python": sys.version.split()[0]} | {package: version(package) for package in self.packages},
        }
        print(json.dumps(row), flush=True)


def peer_name(program: str) -> str:
    """What the peer is called: its program, which may not be named as the package that it imports."""
    return Path(program).stem.removesuffix("_peer")


def peak_mb() -> float:
    """Peak resident memory of this process and its descendants; pages that they share count once for each."""
    total, waiting = 0.0, [os.getpid()]
    while waiting:
        process = Path("/proc", str(waiting.pop()))
        try:
            status = (process / "status").read_text()
            total += int(status.partition("VmHWM:")[2].split()[0]) / 1024
            for children in process.glob("task/*/children"):
                waiting += [int(child) for child in children.read_text().split()]
        except (OSError, IndexError):
            continue  # It has ended meanwhile.
    return total
