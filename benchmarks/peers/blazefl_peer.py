"""FedAvg with the protocols of BlazeFL and PyTorch.

``threads`` trains a client a core in BlazeFL's thread pool, which its authors recommend (on a Python without the global
lock, which this is not), ``serial`` one client after another.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import as_completed
from queue import SimpleQueue
from typing import NamedTuple

import torch
from blazefl.core import BaseClientTrainer, BaseServerHandler, ThreadPoolClientTrainer
from contract import Run
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch_models import build, mean_loss, tensors, use_threads


class Up(NamedTuple):
    """What a client sends."""

    trained: Tensor
    size: int


class Server(BaseServerHandler[Up, Tensor]):
    """Averages as the clients come in."""

    def __init__(self, run: Run):
        self.run, self.shared = run, parameters_to_vector(build(run.workload).parameters()).detach()
        self.total, self.received = torch.zeros_like(self.shared), 0

    def sample_clients(self) -> list[int]:
        return list(range(len(self.run.workload.sizes)))

    def if_stop(self) -> bool:
        return len(self.run.ends) == self.run.rounds

    def downlink_package(self) -> Tensor:
        return self.shared

    def load(self, payload: Up) -> bool:
        self.total.add_(payload.trained, alpha=payload.size)
        self.received += 1
        if self.received < len(self.run.workload.sizes):
            return False
        self.shared = self.total / len(self.run.workload.x)
        self.total, self.received = torch.zeros_like(self.shared), 0
        self.run.round_ended()
        return True


class Local:
    """Trains clients, a model for each that trains at the same time; the pool's threads last but a round."""

    def __init__(self, run: Run):
        self.workload, self.spans, self.models = run.workload, run.workload.spans, SimpleQueue()
        self.x, self.y = tensors(run.workload)
        for _ in range(os.cpu_count()):
            self.models.put(build(run.workload))

    def train(self, shared: Tensor, client: int) -> Up:
        model, span = self.models.get(), self.spans[client]
        vector_to_parameters(shared.clone(), model.parameters())
        optimiser = torch.optim.SGD(model.parameters(), lr=self.workload.lr)
        size = span.stop - span.start
        for rows in (span.start + torch.randperm(size)).split(self.workload.batch):
            optimiser.zero_grad()
            functional.cross_entropy(model(self.x[rows]), self.y[rows]).backward()
            optimiser.step()
        trained = parameters_to_vector(model.parameters()).detach()
        self.models.put(model)
        return Up(trained, size)


class Serial(BaseClientTrainer[Up, Tensor]):
    """One client after another."""

    def __init__(self, local: Local):
        self.local, self.cache = local, []

    def local_process(self, payload: Tensor, cid_list: list[int]) -> None:
        self.cache = [self.local.train(payload, client) for client in cid_list]

    def uplink_package(self) -> list[Up]:
        return self.cache


class Threads(ThreadPoolClientTrainer[Up, Tensor]):
    """A thread a core."""

    def __init__(self, local: Local):
        self.local, self.cache = local, []
        self.num_parallels, self.device, self.device_count = os.cpu_count(), "cpu", 0
        self.stop_event = threading.Event()

    def progress_fn(self, it):
        return as_completed(it)

    def worker(self, cid: int, device: str, payload: Tensor, stop_event: threading.Event) -> Up:
        return self.local.train(payload, cid)

    def uplink_package(self) -> list[Up]:
        found, self.cache = self.cache, []
        return found


def main() -> None:
    """One run."""
    run = Run(("threads", "serial"), ("blazefl", "torch"))
    use_threads(run.workload, alone=run.variant == "serial")
    server, local = Server(run), Local(run)
    trainer = {"threads": Threads, "serial": Serial}[run.variant](local)
    model = build(run.workload)
    before = mean_loss(model, local.x, local.y)
    while not server.if_stop():
        trainer.local_process(server.downlink_package(), server.sample_clients())
        for payload in trainer.uplink_package():
            server.load(payload)
    vector_to_parameters(server.shared, model.parameters())
    run.report(before, mean_loss(model, local.x, local.y))


if __name__ == "__main__":
    main()
