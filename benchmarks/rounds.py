"""Seconds a round, and the share of the machine's matrix product that it reaches, by way of running the clients.

    python -m benchmarks.rounds [W0 W1 ...]

A FedAvg round of the workloads W0 to W4, on all cores (``use_cores``), on one device, all clients at once, and one
client after another without the rewriting of convolutions (what ``lax.scan`` over an ordinary client update does). The
ways are interleaved and compared with each other: same result, and a loss that falls. Writes
``benchmarks/results/rounds.json``.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fedjax_pers as fp
from fedjax_pers.executors.default import default_executor
from fedjax_pers.simulate.placement import everywhere, placed

RESULTS = Path(__file__).parent / "results" / "rounds.json"
REPEATS = 7


class Workload(NamedTuple):
    """A federation of random examples and a model."""

    sizes: np.ndarray
    shape: tuple[int, ...]
    classes: int
    model: str
    settings: dict[str, Any]
    batch: int


UNEVEN = np.clip(np.random.default_rng(0).lognormal(np.log(60) - 0.5, 1, 100), 10, 600).astype(int)
MLP = ((784,), 10, "mlp", {"hidden": (200, 200)}, 10)
WORKLOADS = {
    "W0": Workload(np.full(1000, 20), (64,), 10, "mlp", {"hidden": (32,)}, 10),
    "W1": Workload(np.full(10, 100), (28, 28, 1), 62, "cnn", {}, 20),
    "W2": Workload(np.full(100, 60), *MLP),
    "W3": Workload(UNEVEN, *MLP),
    "W4": Workload(np.full(10, 100), (32, 32, 3), 10, "resnet8", {}, 20),
}


def federation(workload: Workload) -> fp.Federation:
    """Clients with random examples."""
    rng = np.random.default_rng(0)
    made = {}
    for client, size in enumerate(workload.sizes):
        x = rng.normal(size=(size, *workload.shape)).astype(np.float32)
        made[client] = {"train": {"x": x, "y": rng.integers(0, workload.classes, size)}}
    return fp.data.from_clients(made, name="random", num_classes=workload.classes)


def ways(algorithm: fp.Algorithm, state: fp.State) -> dict[str, fp.Executor]:
    """Executors by name; the first is the default."""
    usual = default_executor((state.shared, state.fresh))
    return {
        "all cores": usual,
        "one device": usual._replace(devices=1),
        "vmap over all clients": fp.vectorised(),
        "plain scan": fp.Executor(1, "plain"),
    }


def seconds(call: Callable[[], Any]) -> float:
    """Wall-clock time of one call."""
    begun = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - begun


def roof() -> Callable[[], float]:
    """Floating point operations a second of a matrix product on each device at the same time."""
    mesh = Mesh(np.array(jax.local_devices()), ("device",))
    sharding = NamedSharding(mesh, PartitionSpec("device"))
    one = jax.device_put(jnp.ones((jax.local_device_count(), 1536, 1536)), sharding)
    product = jax.jit(
        jax.shard_map(lambda x: x @ x, mesh=mesh, in_specs=PartitionSpec("device"), out_specs=PartitionSpec("device"))
    )
    product(one)
    return lambda: 2 * 1536**3 * jax.local_device_count() / seconds(lambda: product(one))


def operations(task: fp.Task, workload: Workload) -> float:
    """Floating point operations of a round: those of one compiled gradient step, times the steps."""
    batch = {name: jnp.zeros((workload.batch, *shape), dtype) for name, shape, dtype in task.example}
    batch["weight"] = jnp.ones(workload.batch)
    variables = task.init(jax.random.key(0))
    step = jax.jit(jax.grad(lambda v: task.loss(v, batch, jax.random.key(0))[0]))
    cost = step.lower(variables).compile().cost_analysis()
    return cost["flops"] * float(np.ceil(workload.sizes / workload.batch).sum())


def measure(name: str) -> dict[str, Any]:
    """Medians by way of running."""
    workload = WORKLOADS[name]
    data = federation(workload)
    task = fp.tasks.from_model(data, workload.model, **workload.settings)
    algorithm = fp.method("fedavg").make(task, batch_size=workload.batch)
    first, key = fp.start(algorithm, data, 0), jax.random.key(0)
    steps, found, shared, compiled = {}, {}, {}, {}
    for way, executor in ways(algorithm, first).items():
        devices = jax.local_device_count() if executor.devices is None else executor.devices
        state, cohort = placed(first, devices), everywhere(data.cohort(), devices)
        step = jax.jit(fp.with_executor(algorithm, executor).step)
        begun = time.perf_counter()
        after, metrics = jax.block_until_ready(step(state, cohort, key))
        compiled[way] = time.perf_counter() - begun
        _, later = step(after, cohort, key)
        assert float(jnp.nanmean(later.loss)) < float(jnp.nanmean(metrics.loss)), f"{name}, {way}: the loss rises"
        shared[way] = jax.tree.map(np.asarray, after.shared)
        steps[way] = lambda step=step, state=state, cohort=cohort: step(state, cohort, key)
    expected = shared["one device"]
    apart = {way: max(float(np.abs(x[leaf] - expected[leaf]).max()) for leaf in expected) for way, x in shared.items()}
    product, peaks = roof(), []
    for _ in range(REPEATS):
        peaks.append(product())
        for way, step in steps.items():
            found.setdefault(way, []).append(seconds(step))
    peak, work = max(peaks), operations(task, workload)
    return {
        "roof_gflops": peak / 1e9,
        "gflop_a_round": work / 1e9,
        "ways": {
            way: {
                "seconds": statistics.median(times),
                "lowest": min(times),
                "highest": max(times),
                "share_of_roof": work / statistics.median(times) / peak,
                "first_call_seconds": compiled[way],
                "largest_difference": apart[way],
            }
            for way, times in found.items()
        },
    }


def main() -> None:
    """Measures, prints, writes."""
    fp.use_cores()
    found = {"jax": jax.__version__, "device": jax.devices()[0].device_kind, "cores": os.cpu_count(), "workloads": {}}
    for name in sys.argv[1:] or WORKLOADS:
        row = found["workloads"][name] = measure(name)
        best = row["ways"]["all cores"]["seconds"]
        print(f"{name}: roof {row['roof_gflops']:.0f} GFLOP/s, {row['gflop_a_round']:.2f} GFLOP a round", flush=True)
        for way, one in row["ways"].items():
            print(
                f"  {way:22} {one['seconds'] * 1e3:8.1f} ms ({one['lowest'] * 1e3:.1f} .. {one['highest'] * 1e3:.1f}), "
                f"{one['seconds'] / best:5.2f}x, {one['share_of_roof']:.2f} of the roof, first call "
                f"{one['first_call_seconds']:.1f} s, differs by {one['largest_difference']:.1e}",
                flush=True,
            )
        RESULTS.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
