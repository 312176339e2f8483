"""FedAvg and FedRep of this package, on all cores as in ``benchmarks.rounds``."""

from __future__ import annotations

import jax
import numpy as np
from contract import Run

import fedjax_pers as fp
from benchmarks.workloads import WORKLOADS, algorithm_of, task_of
from fedjax_pers.simulate.placement import devices_for, everywhere, placed


def main() -> None:
    """One run."""
    run = Run(("fedavg", "fedrep"), ("jax", "flax"))
    fp.use_cores()
    workload = run.workload
    clients = {i: {"train": {"x": workload.x[at], "y": workload.y[at]}} for i, at in enumerate(workload.spans)}
    federation = fp.data.from_clients(clients, name=workload.name, num_classes=workload.classes)
    known = WORKLOADS[workload.name]
    algorithm = algorithm_of(known, task_of(known, federation))
    first = fp.start(algorithm, federation, 0)
    devices = devices_for(algorithm)
    state, cohort = placed(first, devices), everywhere(federation.cohort(), devices)
    step = jax.jit(algorithm.step)
    for key in jax.random.split(jax.random.key(1), run.rounds):
        state, _ = jax.block_until_ready(step(state, cohort, key))
        run.round_ended()

    def mean_loss(state: fp.State) -> float:
        table = fp.evaluate_clients(algorithm, state, federation, "train", adapt=False)
        return float(np.average(table.personal["loss"], weights=workload.sizes))

    run.report(mean_loss(first), mean_loss(state))


if __name__ == "__main__":
    main()
