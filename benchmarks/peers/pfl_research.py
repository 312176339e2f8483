"""FedAvg of pfl-research (``pfl``) with PyTorch.

``one`` is a process; ``processes`` is pfl's own distributed simulation on one machine, a process a core.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from itertools import cycle

import torch
from contract import Run
from torch.nn import functional
from torch_models import averaged, build, mean_loss, put, tensors, use_threads

CORES = os.cpu_count()


def start_others() -> list[subprocess.Popen]:
    """Starts this program once more for each further core; pfl finds the workers by the environment."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(CORES)]
    os.environ["PFL_WORKER_ADDRESSES"] = ",".join(f"127.0.0.1:{one.getsockname()[1]}" for one in sockets)
    for one in sockets:
        one.close()
    os.environ["PFL_WORKER_RANK"] = "0"
    command = [sys.executable, *sys.argv]
    return [subprocess.Popen(command, env=os.environ | {"PFL_WORKER_RANK": str(rank)}) for rank in range(1, CORES)]


def main() -> None:
    """One run."""
    run = Run(("one", "processes"), ("pfl", "torch"))
    alone, other = run.variant == "one", "PFL_WORKER_RANK" in os.environ
    others = [] if alone or other else start_others()
    # pfl reads the environment as it is imported, and names what newer versions of PyTorch have removed.
    torch.distributed.reduce_op = torch.distributed.ReduceOp
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    workload, (x, y) = run.workload, tensors(run.workload)
    use_threads(workload, alone)

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            run.round_ended()
            return False, Metrics()

    net = build(workload)
    net.loss = lambda x, y: functional.cross_entropy(net(x), y)
    net.metrics = lambda x, y: {}  # asked for in evaluations, of which there are none
    first = [leaf.detach().clone() for leaf in averaged(net)]
    clients = range(len(workload.sizes))
    rows = [(x[span], y[span]) for span in workload.spans]

    def shuffled(client: int) -> Dataset:
        order = torch.randperm(len(rows[client][0]))
        return Dataset(tuple(field[order] for field in rows[client]), user_id=str(client))

    everyone = cycle(clients)
    sizes = dict(enumerate(workload.sizes.tolist()))
    federation = FederatedDataset(shuffled, lambda: next(everyone), user_id_to_weight=sizes)
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=run.rounds,
            evaluation_frequency=run.rounds + 1,
            train_cohort_size=len(clients),
            val_cohort_size=None,
        ),
        SimulatedBackend(federation, federation, [WeightByDatapoints()]),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=workload.lr, local_batch_size=workload.batch),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[Clock()],
        send_metrics_to_platform=False,
    )
    if not other:
        after = mean_loss(net, x, y)
        run.report(mean_loss(put(net, first), x, y), after)
    for one in others:
        one.wait()


if __name__ == "__main__":
    main()
