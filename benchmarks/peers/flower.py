"""FedAvg in Flower's simulation (``flwr`` on Ray) with PyTorch, an actor a core.

``strategy`` is Flower's own FedAvg with a record a layer, as in its tutorials. ``grid`` is a server of our own on its
public Grid, which sends the model as one vector and asks for replies every 5 ms. In both an actor keeps data and model.
"""

from __future__ import annotations

import os
import tempfile
import time
from functools import cache

import numpy as np
import torch
from contract import Run, load
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch_models import build, mean_loss, tensors

client_app = ClientApp()


@cache
def resident(path: str):
    """What an actor keeps between clients."""
    torch.set_num_threads(1)
    workload = load(path)
    return workload, workload.spans, *tensors(workload), build(workload)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """One client's round."""
    config, arrays = message.content["config"], message.content["arrays"]
    workload, spans, x, y, model = resident(config["path"])
    span = spans[int(context.node_config["partition-id"])]
    if config["variant"] == "grid":
        vector_to_parameters(torch.tensor(arrays.to_numpy_ndarrays()[0]), model.parameters())
    else:
        model.load_state_dict(arrays.to_torch_state_dict())
    optimiser = torch.optim.SGD(model.parameters(), lr=workload.lr)
    size = span.stop - span.start
    for rows in (span.start + torch.randperm(size)).split(workload.batch):
        optimiser.zero_grad()
        functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimiser.step()
    vector = config["variant"] == "grid"
    arrays = ArrayRecord([flat(model)] if vector else model.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": size})}), reply_to=message)


def flat(model: torch.nn.Module) -> np.ndarray:
    """The parameters as one vector."""
    return parameters_to_vector(model.parameters()).detach().numpy().copy()


class Timed(FedAvg):
    """Flower's FedAvg over all clients, with a clock."""

    def __init__(self, run: Run):
        super().__init__(fraction_evaluate=0.0, min_available_nodes=len(run.workload.sizes))
        self.run = run

    def aggregate_train(self, server_round, replies):
        found = super().aggregate_train(server_round, replies)
        self.run.round_ended()
        return found


def strategy(run: Run, grid: Grid, model: torch.nn.Module, config: ConfigRecord) -> torch.nn.Module:
    """Rounds of Flower's own strategy."""
    found = Timed(run).start(grid, ArrayRecord(model.state_dict()), num_rounds=run.rounds, train_config=config)
    model.load_state_dict(found.arrays.to_torch_state_dict())
    return model


def own_server(run: Run, grid: Grid, model: torch.nn.Module, config: ConfigRecord) -> torch.nn.Module:
    """Rounds of a server that does nothing but average."""
    shared = flat(model)
    while len(nodes := list(grid.get_node_ids())) < len(run.workload.sizes):
        time.sleep(0.05)
    for _ in range(run.rounds):
        content = RecordDict({"arrays": ArrayRecord([shared]), "config": config})
        waiting = set(grid.push_messages([Message(content, node, "train") for node in nodes]))
        total = np.zeros_like(shared)
        while waiting:
            for reply in (replies := list(grid.pull_messages(waiting))):
                if reply.has_error():
                    raise RuntimeError(reply.error)
                size = np.float32(reply.content["metrics"]["num-examples"])
                total += size * reply.content["arrays"].to_numpy_ndarrays()[0]
                waiting.discard(reply.metadata.reply_to_message_id)
            if not replies:
                time.sleep(0.005)
        shared = total / np.float32(run.workload.sizes.sum())
        run.round_ended()
    vector_to_parameters(torch.from_numpy(shared), model.parameters())
    return model


def main() -> None:
    """One run."""
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "FLWR_HOME": tempfile.mkdtemp()}
    from flwr.simulation import run_simulation

    run = Run(("strategy", "grid"), ("flwr", "ray", "torch"))
    (x, y), losses, server_app = tensors(run.workload), [], ServerApp()

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        model = build(run.workload)
        losses.append(mean_loss(model, x, y))
        config = ConfigRecord({"path": os.path.abspath(run.path), "variant": run.variant})
        model = {"strategy": strategy, "grid": own_server}[run.variant](run, grid, model, config)
        losses.append(mean_loss(model, x, y))

    run_simulation(
        server_app,
        client_app,
        num_supernodes=len(run.workload.sizes),
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": os.cpu_count(), "object_store_memory": 10**9, "include_dashboard": False},
        },
    )
    run.report(*losses)


if __name__ == "__main__":
    from flower import main as main_by_name  # so that Ray sends the client by name

    main_by_name()
