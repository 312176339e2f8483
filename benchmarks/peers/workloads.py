"""The workloads of :mod:`benchmarks.workloads` as files that every peer can read."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.workloads import LR, WORKLOADS, federation


def write(name: str, folder: Path) -> Path:
    """Writes ``NAME.npz``, the examples of :func:`benchmarks.workloads.federation` and how to train on them."""
    workload = WORKLOADS[name]
    train = federation(workload).train
    path = folder / f"{name}.npz"
    model = f"mlp{workload.shape[0]}" if workload.model == "mlp" else workload.model
    np.savez(
        path,
        name=name,
        x=train.data["x"],
        y=train.data["y"],
        sizes=train.sizes,
        batch=workload.batch,
        lr=LR,
        model=model,
        classes=workload.classes,
    )
    return path
