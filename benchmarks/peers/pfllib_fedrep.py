"""FedRep in PyTorch the way PFLlib does it, which is no package and so is not installed.

Each client keeps a model. It trains the head for 5 epochs with the body's gradients switched off, the body computed
anew in each, then the body for one epoch with the head fixed; bodies are averaged, weighted by examples. Unlike
PFLlib's, its examples lie in memory as tensors, without a data loader.
"""

from __future__ import annotations

import copy
import os

import torch
from contract import Run
from torch import Tensor, nn
from torch.nn import functional
from torch_models import build, mean_loss, tensors

HEAD_EPOCHS = 5


def train(model: nn.Module, trained: nn.Module, x: Tensor, y: Tensor, batch: int, lr: float) -> None:
    """An epoch of one part of the model, with the other fixed."""
    model.requires_grad_(False)
    trained.requires_grad_(True)
    optimiser = torch.optim.SGD(trained.parameters(), lr=lr)
    for rows in torch.randperm(len(x)).split(batch):
        optimiser.zero_grad()
        functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimiser.step()


def main() -> None:
    """One run."""
    run = Run(("fedrep",), ("torch",))
    workload, (x, y) = run.workload, tensors(run.workload)
    torch.set_num_threads(os.cpu_count())
    models = [copy.deepcopy(build(workload)) for _ in workload.sizes]
    clients = [(model, model[:-1], model[-1], x[at], y[at]) for model, at in zip(models, workload.spans)]
    shared = [leaf.detach().clone() for leaf in models[0][:-1].parameters()]

    def give() -> None:
        with torch.no_grad():
            for _, body, *_ in clients:
                torch._foreach_copy_(list(body.parameters()), shared)

    def personal_loss() -> float:
        return sum(mean_loss(model, x, y) * len(x) for model, _, _, x, y in clients) / len(x)

    before = personal_loss()
    for _ in range(run.rounds):
        give()
        for model, body, head, *rows in clients:
            for _ in range(HEAD_EPOCHS):
                train(model, head, *rows, workload.batch, workload.lr)
            train(model, body, *rows, workload.batch, workload.lr)
        with torch.no_grad():
            torch._foreach_zero_(shared)
            for _, body, _, rows, _ in clients:
                torch._foreach_add_(shared, list(body.parameters()), alpha=len(rows) / len(x))
        run.round_ended()
    give()
    run.report(before, personal_loss())


if __name__ == "__main__":
    main()
