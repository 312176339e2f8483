"""What a server step costs, by aggregator, beside the weighted mean: ``python -m benchmarks.aggregators``.

On stacked uploads of 100 clients with 1.7 M parameters and of 10,000 clients with 10^4. Every step is compiled once and
serves a second round without compiling. Writes ``benchmarks/results/aggregators.json``.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.machine import RESULTS, machine
from benchmarks.rounds import seconds
from fedjax_pers import aggregators as ag
from fedjax_pers.simulate.compilations import compilations

SIZES = {"100 clients of 1.7 M": (100, 1_700_000), "10,000 clients of 10^4": (10_000, 10_000)}
REPEATS, LONGEST = 3, 30  # seconds, after which a step is not repeated
AGGREGATORS = {
    "weighted mean": ag.mean(),
    "norm clipping": ag.norm_clipping(1.0),
    "median": ag.median(),
    "trimmed mean": ag.trimmed_mean(0.1),
    "Krum": ag.krum(10),
    "geometric median, 8 steps": ag.geometric_median(),
    "AFL": ag.minimax(),
    "q-FedAvg": ag.fair(1.0, 0.1),
    "TERM": ag.tilted(1.0),
    "IFCA, 4 clusters": ag.hypotheses(4),
    "pFedGraph": ag.mixing(ag.pfedgraph()),
    "similarity": ag.mixing(ag.by_similarity()),
    "FedAMP": ag.mixing_all(ag.fedamp(1e-3, 1.0)),
    "HeurFedAMP": ag.mixing_all(ag.heurfedamp()),
}


def measure(aggregator: ag.Aggregator, clients: int, parameters: int) -> dict[str, float]:
    """Seconds of a server step."""
    leaves = {"w": jax.random.normal(jax.random.key(0), (clients, parameters)) * 0.01}
    start = jnp.zeros((aggregator.starts, parameters) if aggregator.starts > 1 else parameters)
    server = aggregator.init({"w": start}, frozenset({"w"}), clients)
    numbers = {"loss": jnp.linspace(0.1, 3, clients), "cluster": jnp.arange(clients) % max(aggregator.starts, 1)}
    said = {name: numbers[name] for name in aggregator.says}

    @jax.jit
    def step(server: ag.Server, leaves: Any, said: Any) -> ag.Server:
        return ag.aggregate(aggregator, server, leaves, said=said, trainable=frozenset({"w"}))[0]

    after = jax.block_until_ready(step(server, leaves, said))
    before = compilations()
    times: list[float] = []
    while len(times) < REPEATS and sum(times) < LONGEST:
        times.append(seconds(lambda: step(after, leaves, said)))
    assert compilations() == before, "a later round compiled"
    return {"seconds": statistics.median(times), "lowest": min(times), "highest": max(times)}


def main() -> None:
    """Measures, prints, writes."""
    found: dict[str, Any] = {"machine": machine(), "sizes": {}}
    for size, (clients, parameters) in SIZES.items():
        rows = found["sizes"][size] = {}
        for name, aggregator in AGGREGATORS.items():
            if len(sys.argv) > 1 and name not in sys.argv[1:]:
                continue
            rows[name] = measure(aggregator, clients, parameters)
            print(f"{size}: {name:28} {rows[name]['seconds']:8.3f} s", flush=True)
            jax.clear_caches()
            (RESULTS / "aggregators.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
