"""Seconds a round, and the share of the machine's matrix product that it reaches, by way of running the clients.

    python -m benchmarks.rounds [W0 W1 ...]

A round of the workloads W0 to W6, on all cores (``use_cores``), on one device, all clients at once, and one client
after another without the rewriting of convolutions (what ``lax.scan`` over an ordinary client update does). W6 also
with the body evaluated in every epoch. The ways are interleaved and compared with each other: same result, a loss that
falls, no compilation after the first round. Writes ``benchmarks/results/rounds.json``.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fedjax_pers as fp
from benchmarks.machine import RESULTS, machine
from benchmarks.operations import operations
from benchmarks.workloads import WORKLOADS, Workload, algorithm_of, federation, task_of
from fedjax_pers.executors.default import default_executor
from fedjax_pers.simulate.compilations import compilations
from fedjax_pers.simulate.placement import everywhere, placed

REPEATS = 7
LONGEST = 20  # seconds, after which a way is not repeated
USUAL = "all cores"


class Way:
    """A way of running a round, compiled, with a state to start from."""

    def __init__(self, algorithm: fp.Algorithm, executor: fp.Executor, first: fp.State, cohort: fp.Cohort):
        devices = jax.local_device_count() if executor.devices is None else executor.devices
        self.arguments = placed(first, devices), everywhere(cohort, devices), jax.random.key(0)
        self.algorithm = fp.with_executor(algorithm, executor)
        self.step = jax.jit(self.algorithm.step)
        begun = time.perf_counter()
        after, metrics = jax.block_until_ready(self.run())
        self.first_call, before = time.perf_counter() - begun, compilations()
        _, later = self.step(after, *self.arguments[1:])
        self.compiled_later = compilations() - before
        self.losses = float(jnp.nanmean(metrics.loss)), float(jnp.nanmean(later.loss))
        self.result = jax.tree.map(np.asarray, (after.shared, after.rows))
        self.times: list[float] = []

    def run(self) -> Any:
        """One round."""
        return self.step(*self.arguments)

    def cached_call(self) -> float:
        """Seconds of a first call whose compiled program lies on the disk."""
        self.step = jax.jit(self.algorithm.step)
        return seconds(self.run)


def ways(workload: Workload, algorithm: fp.Algorithm, first: fp.State, cohort: fp.Cohort) -> dict[str, Way]:
    """By name; the first is the default."""
    usual = default_executor((first.shared, first.fresh, first.frozen))
    executors = {
        USUAL: usual,
        "one device": usual._replace(devices=1),
        "vmap over all clients": fp.vectorised(),
        "plain scan": fp.Executor(1, "plain"),
    }
    if workload.model == "resnet8" or workload.method == "fedrep":
        del executors["plain scan"]  # more than a minute a round; W1 shows it
    found = {name: Way(algorithm, executor, first, cohort) for name, executor in executors.items()}
    if workload.method == "fedrep":
        found["body in every epoch"] = Way(algorithm, usual, first, cohort._replace(room=None))
    return found


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


def measure(name: str) -> dict[str, Any]:
    """Medians by way of running."""
    workload = WORKLOADS[name]
    data = federation(workload)
    task = task_of(workload, data)
    algorithm = algorithm_of(workload, task)
    first = fp.start(algorithm, data, 0)
    found = ways(workload, algorithm, first, data.cohort())
    expected = found["one device"].result
    product, peaks = roof(), []
    for _ in range(REPEATS):
        peaks.append(product())
        for way in found.values():
            if sum(way.times) < LONGEST:
                way.times.append(seconds(way.run))
    peak, work = statistics.median(peaks), operations(task, workload, algorithm)
    rows = {}
    for title, way in found.items():
        assert way.losses[1] < way.losses[0], f"{name}, {title}: the loss rises, {way.losses}"
        assert way.compiled_later == 0, f"{name}, {title}: the second round compiled {way.compiled_later} programs"
        pairs = zip(jax.tree.leaves(way.result), jax.tree.leaves(expected), strict=True)
        rows[title] = {
            "seconds": statistics.median(way.times),
            "lowest": min(way.times),
            "highest": max(way.times),
            "share_of_roof": work / statistics.median(way.times) / peak,
            "first_call_seconds": way.first_call,
            "largest_difference": max(float(np.abs(x - y).max()) for x, y in pairs),
        }
    jax.clear_caches()
    rows[USUAL]["cached_first_call_seconds"] = found[USUAL].cached_call()
    return {"roof_gflops": peak / 1e9, "gflop_a_round": work / 1e9, "ways": rows}


def described(row: dict[str, float]) -> str:
    """One way in a line."""
    lowest, median, highest = (row[name] * 1e3 for name in ("lowest", "seconds", "highest"))
    cached = row.get("cached_first_call_seconds", np.nan)
    return (
        f"{median:8.1f} ms ({lowest:.1f} .. {highest:.1f}), {row['share_of_roof']:.2f} of the roof, first call "
        f"{row['first_call_seconds']:.1f} s ({cached:.1f} cached), differs by {row['largest_difference']:.0e}"
    )


def main() -> None:
    """Measures, prints, writes."""
    fp.use_cores()
    file = RESULTS / "rounds.json"
    found = {"machine": machine(), "workloads": {}}
    with tempfile.TemporaryDirectory() as cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        for name in sys.argv[1:] or WORKLOADS:
            row = found["workloads"][name] = measure(name)
            print(
                f"{name}: roof {row['roof_gflops']:.0f} GFLOP/s, {row['gflop_a_round']:.2f} GFLOP a round", flush=True
            )
            for way, one in row["ways"].items():
                print(f"  {way:22} {described(one)}", flush=True)
            file.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
