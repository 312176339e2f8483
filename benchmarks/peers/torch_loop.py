"""FedAvg by hand in PyTorch, as somebody would write it who wants it fast.

``loop`` trains one client after another in one set of weights, ``processes`` does so in one process a core, with models
and sums in shared memory, and ``vmap`` trains many clients at once with ``torch.func``.
"""

from __future__ import annotations

import os

import numpy as np
import torch
import torch.multiprocessing as multiprocessing
from contract import Run, Workload
from torch import Tensor
from torch.func import functional_call, grad, replace_all_batch_norm_modules_, vmap
from torch.nn import functional
from torch_models import averaged, build, mean_loss, put, tensors, trained, use_threads

CORES = os.cpu_count()
TOGETHER = 100  # clients that vmap trains at once


class Trainer:
    """Trains clients on one resident model."""

    def __init__(self, workload: Workload, x: Tensor, y: Tensor):
        self.workload, self.x, self.y, self.spans = workload, x, y, workload.spans
        self.model = build(workload)
        self.averaged, self.parameters = averaged(self.model), list(trained(self.model).values())

    def add(self, total: list[Tensor], shared: list[Tensor], client: int) -> None:
        """Adds a client's trained model, times its examples."""
        span = self.spans[client]
        order = torch.randperm(span.stop - span.start)
        x, y = self.x[span][order], self.y[span][order]
        with torch.no_grad():
            torch._foreach_copy_(self.averaged, shared)
        for batch in zip(x.split(self.workload.batch), y.split(self.workload.batch)):
            self.step(*batch)
        with torch.no_grad():
            torch._foreach_add_(total, self.averaged, alpha=len(x))

    def step(self, x: Tensor, y: Tensor) -> None:
        gradients = torch.autograd.grad(functional.cross_entropy(self.model(x), y), self.parameters)
        with torch.no_grad():
            torch._foreach_add_(self.parameters, gradients, alpha=-self.workload.lr)


def loop(run: Run, shared: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
    """One client after another."""
    use_threads(run.workload, alone=True)
    trainer = Trainer(run.workload, x, y)
    for _ in range(run.rounds):
        total = [torch.zeros_like(leaf) for leaf in shared]
        for client in range(len(run.workload.sizes)):
            trainer.add(total, shared, client)
        shared = torch._foreach_div(total, len(x))
        run.round_ended()
    return shared


def dealt(sizes: np.ndarray) -> list[list[int]]:
    """The clients of each core: the longest first, to the core with the least to do."""
    hands, loads = [[] for _ in range(CORES)], np.zeros(CORES)
    for client in np.argsort(-sizes, kind="stable"):
        core = int(loads.argmin())
        hands[core].append(int(client))
        loads[core] += sizes[client]
    return hands


def processes(run: Run, shared: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
    """A process a core; this one is the first."""
    use_threads(run.workload, alone=False)
    hands = dealt(run.workload.sizes)
    shared = [leaf.clone().share_memory_() for leaf in shared]
    totals = [[torch.zeros_like(leaf).share_memory_() for leaf in shared] for _ in range(CORES)]
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(CORES)

    def work(core: int, end_round) -> None:
        trainer = Trainer(run.workload, x, y)
        torch.manual_seed(core)
        for _ in range(run.rounds):
            torch._foreach_zero_(totals[core])
            for client in hands[core]:
                trainer.add(totals[core], shared, client)
            barrier.wait()
            end_round()
            barrier.wait()

    def average() -> None:
        for leaf, *parts in zip(shared, *totals):
            leaf.copy_(sum(parts) / len(x))
        run.round_ended()

    others = [context.Process(target=work, args=(core, lambda: None), daemon=True) for core in range(1, CORES)]
    for other in others:
        other.start()
    work(0, average)
    for other in others:
        other.join()
    return shared


def vectorised(run: Run, shared: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
    """Many clients at once, the longest first, so that those still training are the first ones of a group."""
    torch.set_num_threads(CORES)
    workload = run.workload
    model = replace_all_batch_norm_modules_(build(workload))  # vmap cannot update running statistics: there are none
    names = list(trained(model))
    shared, unused = shared[: len(names)], shared[len(names) :]
    starts = np.array([span.start for span in workload.spans])
    order = np.argsort(-workload.sizes, kind="stable")

    def loss(leaves: list[Tensor], x: Tensor, y: Tensor, counts: Tensor) -> Tensor:
        scores = functional_call(model, dict(zip(names, leaves)), x)
        losses = functional.cross_entropy(scores, y, reduction="none").reshape(len(counts), -1).mean(1)
        return (losses * counts).sum() / counts.sum()

    gradients = vmap(grad(loss))
    for _ in range(run.rounds):
        total = [torch.zeros_like(leaf) for leaf in shared]
        for group in np.split(order, range(TOGETHER, len(order), TOGETHER)):
            sizes = torch.from_numpy(workload.sizes[group])
            steps = -(-sizes // workload.batch)
            # Rows in random order, those that do not count last.
            counts = (torch.arange(int(steps[0]) * workload.batch) < sizes[:, None]).float()
            rows = (torch.rand(counts.shape) + 1 - counts).argsort(1) * counts.long()
            rows += torch.from_numpy(starts[group])[:, None]
            leaves = [leaf.repeat(len(group), *[1] * leaf.ndim) for leaf in shared]
            batches = zip(rows.split(workload.batch, 1), counts.split(workload.batch, 1))
            for step, (row, count) in enumerate(batches):
                active = int((steps > step).sum())
                still = [leaf[:active] for leaf in leaves]
                row = row[:active]
                torch._foreach_add_(still, gradients(still, x[row], y[row], count[:active]), alpha=-workload.lr)
            for leaf, last in zip(total, leaves):
                leaf += torch.tensordot(sizes.float(), last, 1)
        shared = torch._foreach_div(total, len(x))
        run.round_ended()
    return [*shared, *unused]


def main() -> None:
    """One run."""
    run = Run(("loop", "processes", "vmap"), ("torch",))
    x, y = tensors(run.workload)
    model = build(run.workload)
    first = [leaf.detach().clone() for leaf in averaged(model)]
    last = {"loop": loop, "processes": processes, "vmap": vectorised}[run.variant](run, first, x, y)
    run.report(mean_loss(put(model, first), x, y), mean_loss(put(model, last), x, y))


if __name__ == "__main__":
    main()
