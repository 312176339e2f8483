"""How the time and the memory of a round grow with clients a round, clients in all, parameters, steps and devices.

    python -m benchmarks.growth [CURVE ...]

Every point is a process of its own, which holds a federation and the compiled program that ``fp.run`` would use, and
times some rounds whenever it is asked; the points of a curve are asked in turn, several times. Peaks of resident memory
are those of that process: up to the first block of rounds, and during the blocks after it. Writes
``benchmarks/results/growth.json`` and ``docs/pictures/growth.png`` (:mod:`benchmarks.growth_report`).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedjax_pers as fp
from benchmarks.growth_report import BATCHES, LARGEST, LARGEST_ON_ONE, NOT_DRAWN, RESULTS, draw
from fedjax_pers.simulate.compilations import compilations
from fedjax_pers.simulate.placement import devices_for, everywhere, placed
from fedjax_pers.simulate.pools import pool_of
from fedjax_pers.simulate.programs import rounds_program, split_floats
from fedjax_pers.simulate.run import chosen_sampler
from fedjax_pers.simulate.sampling import Sampler

REPEATS = 9
SECONDS = 0.3
"""What one timing should last: rounds are timed in blocks, as ``fp.run`` dispatches them."""
BLOCK = 10
FEATURES, CLASSES = 64, 10


class Point(NamedTuple):
    """One size at which rounds are measured; by default 100 of 1,000 clients of 20 examples and an MLP 64-32-10.

    Attributes:
      clients: in the federation.
      cohort: clients a round.
      method: by name.
      hidden: widths of the MLP's hidden layers.
      examples: of each client.
      batch: examples a step. Where a client has fewer, the batch is filled up with the same ones at weight zero, so the
        work does not depend on the number of examples.
      steps: that a client takes in a round.
      drawn: false takes clients at equal distances in place of a random draw, to tell what the draw costs.
      devices: in the process; ``None`` for one on each core.
    """

    clients: int = 1000
    cohort: int = 100
    method: str = "fedavg"
    hidden: tuple[int, ...] = (32,)
    examples: int = 20
    batch: int = 10
    steps: int = 2
    drawn: bool = True
    devices: int | None = None


def width(parameters: int) -> int:
    """The width ``h`` of two hidden layers at which an MLP has about so many parameters, ``h^2 + 76 h + 10``."""
    return round(np.sqrt(parameters + 38**2 - 10) - 38)


CORES = len(os.sched_getaffinity(0))
# 10^6 clients of 20 examples would be 5 GB of data; with 2 they are 0.5 GB.
ROWS = Point(method="fedper", examples=2)
# The head of 64-99-10 is 99 * 10 + 10 = 1,000 numbers that every client keeps: 4 GB of rows.
LARGE = ROWS._replace(clients=10**6, hidden=(99,), examples=1)
WIDE = Point(clients=100, cohort=10)
CURVES = {
    "clients a round": {n: Point(clients=10_000, cohort=n) for n in (10, 30, 100, 300, 1000, 3000, 10_000)},
    "clients in all": {n: ROWS._replace(clients=n) for n in (10**3, 10**4, 10**5, 3 * 10**5, 10**6)},
    "parameters": {
        n: WIDE._replace(hidden=(width(n),) * 2) for n in (10**4, 3 * 10**4, 10**5, 3 * 10**5, 10**6, 3 * 10**6, 10**7)
    },
    "local steps": {n: Point(steps=n) for n in (1, 3, 10, 30, 100)},
    "devices": {n: Point(cohort=1000, devices=n) for n in sorted({2**i for i in range(8) if 2**i < CORES} | {CORES})},
    # Controls, which say what the bends of the curves above are.
    NOT_DRAWN: {n: ROWS._replace(clients=n, drawn=False) for n in (10**3, 10**6)},
    BATCHES: {n: WIDE._replace(hidden=(width(3 * 10**6),) * 2, examples=40, batch=n) for n in (10, 40)},
    LARGEST: {10**6: LARGE},
    LARGEST_ON_ONE: {10**6: LARGE._replace(devices=1)},
}


def federation(point: Point) -> fp.Federation:
    """Equal clients with random examples."""
    rows = point.clients * point.examples
    x = np.random.default_rng(0).standard_normal((rows, FEATURES), np.float32)
    table, owners = {"x": x, "y": np.arange(rows) % CLASSES}, np.arange(rows) // point.examples
    return fp.data.from_rows({"train": table}, {"train": owners}, name="random", num_classes=CLASSES)


def evenly(cohort: int) -> Sampler:
    """A sampler that draws nothing: clients at equal distances, others in every round."""
    return lambda key, round, clients: (jnp.arange(cohort) * (clients // cohort) + round) % clients


class Rounds:
    """The program of a run with its state, in steady use."""

    def __init__(self, point: Point):
        fp.use_cores(point.devices)
        data = federation(point)
        task = fp.tasks.from_model(data, "mlp", hidden=point.hidden)
        algorithm = fp.method(point.method).make(task, batch_size=point.batch, steps=point.steps)
        self.state = fp.start(algorithm, data, 0)
        self.row_bytes = sum(x.nbytes for x in self.state.rows.values())
        self.parameters = sum(x.size for x in (self.state.shared | self.state.fresh).values())
        devices, (static, self.floats) = devices_for(algorithm), split_floats(algorithm)
        self.state, self.key = placed(self.state, devices), jax.random.key(0)
        self.pool = everywhere(pool_of(data, "train"), devices)
        sampler = chosen_sampler(algorithm, data, point.cohort) if point.drawn else evenly(point.cohort)
        self.program = rounds_program(static, sampler, BLOCK, devices)

    def seconds(self, count: int) -> float:
        """Seconds a round, in a block of so many."""
        begun = time.perf_counter()
        self.state, metrics = self.program(self.floats, self.state, self.pool, self.key, jnp.int32(count))
        jax.block_until_ready((self.state, metrics))
        return (time.perf_counter() - begun) / count


def megabytes(field: str) -> float:
    """Resident memory of this process, ``VmRSS`` now or ``VmHWM`` at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e6


# What follows runs in a point's process, which is asked for one thing after another.
_held: dict[str, Any] = {}


def prepare(point: Point) -> dict[str, Any]:
    """Builds everything, compiles, warms up; what is known before the timings."""
    baseline = megabytes("VmRSS")
    rounds = _held["rounds"] = Rounds(point)
    rounds.seconds(1)
    _held["count"] = int(np.clip(SECONDS / rounds.seconds(1), 1, BLOCK))
    setup = megabytes("VmHWM")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    _held["compilations"] = compilations()
    return {
        "parameters": rounds.parameters,
        "baseline_megabytes": baseline,
        "row_megabytes": rounds.row_bytes / 1e6,
        "setup_peak_megabytes": setup,
    }


def timing() -> float:
    """Seconds a round, once more."""
    return _held["rounds"].seconds(_held["count"])


def afterwards() -> dict[str, Any]:
    """What is known after the timings."""
    return {
        "rounds_peak_megabytes": megabytes("VmHWM"),
        "compilations_after_first_round": compilations() - _held["compilations"],
    }


def measure(points: dict[int, Point]) -> list[dict[str, Any]]:
    """All points of a curve, their timings interleaved."""
    spawn = multiprocessing.get_context("spawn")
    workers = {size: ProcessPoolExecutor(1, spawn) for size in points}
    found = {size: {"size": size, **workers[size].submit(prepare, point).result()} for size, point in points.items()}
    times = {size: [] for size in points}
    for _ in range(REPEATS):
        for size, worker in workers.items():
            times[size].append(worker.submit(timing).result())
    for size, worker in workers.items():
        spread = {"seconds": statistics.median(times[size]), "lowest": min(times[size]), "highest": max(times[size])}
        found[size] |= spread | worker.submit(afterwards).result()
        worker.shutdown()
    return list(found.values())


def main() -> None:
    """Measures, prints, writes, draws."""
    everything = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"curves": {}}
    everything |= {"jax": jax.__version__, "cores": CORES, "repeats": REPEATS}
    for curve in sys.argv[1:] or CURVES:
        everything["curves"][curve] = measure(CURVES[curve])
        for one in everything["curves"][curve]:
            print(
                f"{curve} {one['size']:>9,}: {one['seconds'] * 1e3:9.3f} ms ({one['lowest'] * 1e3:.3f} .. "
                f"{one['highest'] * 1e3:.3f}), {one['rounds_peak_megabytes']:.0f} MB in rounds, "
                f"{one['setup_peak_megabytes']:.0f} MB before, {one['compilations_after_first_round']} compilations",
                flush=True,
            )
        RESULTS.write_text(json.dumps(everything, indent=2) + "\n")
    if set(CURVES) <= set(everything["curves"]):
        draw(everything)


if __name__ == "__main__":
    main()
