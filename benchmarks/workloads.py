"""The workloads that are measured: random examples, models as a user writes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import fedjax_pers as fp
from benchmarks.transformer import Transformer


class Workload(NamedTuple):
    """A federation of random examples, a model and a method."""

    sizes: np.ndarray
    shape: tuple[int, ...]
    classes: int
    model: str
    settings: dict[str, Any]
    batch: int
    method: str = "fedavg"
    options: dict[str, Any] = {}


LR = 0.1
UNEVEN = np.clip(np.random.default_rng(0).lognormal(np.log(60) - 0.5, 1, 100), 10, 600).astype(int)
MLP = ((784,), 10, "mlp", {"hidden": (200, 200)}, 10)
CNN = (np.full(10, 100), (28, 28, 1), 62, "cnn", {}, 20)
WORKLOADS = {
    "W0": Workload(np.full(1000, 20), (64,), 10, "mlp", {"hidden": (32,)}, 10),
    "W1": Workload(*CNN),
    "W2": Workload(np.full(100, 60), *MLP),
    "W3": Workload(UNEVEN, *MLP),
    "W4": Workload(np.full(10, 100), (32, 32, 3), 10, "resnet8", {}, 20),
    "W5": Workload(np.full(16, 32), (64,), 128, "transformer", {}, 8),
    "W6": Workload(*CNN, method="fedrep", options={"head_epochs": 5}),
}
TITLES = {
    "W0": "1,000 clients of 20, MLP 64-32-10",
    "W1": "10 clients of 100, CNN of 1.66 M",
    "W2": "100 clients of 60, MLP 784-200-200-10",
    "W3": "as W2, clients of 10 to 600",
    "W4": "10 clients of 100, ResNet-8 with batch norm",
    "W5": "16 clients of 32, transformer with LoRA of rank 8",
    "W6": "W1 with FedRep: 5 epochs of the head, 1 of the body",
}


def federation(workload: Workload) -> fp.Federation:
    """Clients with random examples; a transformer's are characters, each of which has the next for a label."""
    rng, made = np.random.default_rng(0), {}
    for client, size in enumerate(workload.sizes):
        if workload.model == "transformer":
            x = rng.integers(0, workload.classes, (size, *workload.shape))
            y = rng.integers(0, workload.classes, (size, *workload.shape))
        else:
            x = rng.normal(size=(size, *workload.shape)).astype(np.float32)
            y = rng.integers(0, workload.classes, size)
        made[client] = {"train": {"x": x, "y": y}}
    return fp.data.from_clients(made, name="random", num_classes=workload.classes)


def task_of(workload: Workload, data: fp.Federation) -> fp.Task:
    """The model's task."""
    if workload.model == "transformer":
        return fp.tasks.linen(Transformer(workload.classes), data.example, num_classes=workload.classes)
    return fp.tasks.from_model(data, workload.model, **workload.settings)


def algorithm_of(workload: Workload, task: fp.Task) -> fp.Algorithm:
    """The method with its settings; of a transformer the adapters are trained, and the rest is frozen."""
    if workload.model == "transformer":
        return fp.compose(task, layout=fp.by_role(frozen=~fp.lora()), client=fp.train(LR, batch_size=workload.batch))
    return fp.method(workload.method).make(task, lr=LR, batch_size=workload.batch, **workload.options)
