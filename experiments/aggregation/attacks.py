"""One client in five sends its update with the sign flipped and tenfold: who stays near the clean run?

    python experiments/aggregation/attacks.py

Fifteen speakers, of whom three attack. Prints accuracies of the honest clients over three seeds and writes
``attacks.json``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fedjax_pers as fp
from fedjax_pers import aggregators as ag

HERE = Path(__file__).parent
SEEDS, ROUNDS, SCALE = range(3), 60, 10.0
ATTACKERS = 3
AGGREGATORS = {
    "mean": fp.mean(weights="uniform"),
    "median": ag.median(),
    "trimmed mean": ag.trimmed_mean(0.25),
    "Krum": ag.krum(ATTACKERS),
    "Multi-Krum": ag.krum(ATTACKERS, chosen=8),
    "geometric median": ag.geometric_median(weights="uniform"),
    "norm clipping": ag.norm_clipping(0.5, weights="uniform"),
}


def federation(attackers: int) -> fp.Federation:
    """Speakers with a further field that says who attacks."""
    speakers = fp.data.load("vowel_speakers")
    made = {}
    for place, client in enumerate(speakers.client_ids):
        made[client] = {}
        for name in fp.data.SPLITS:
            part = speakers.split(name)
            rows = slice(part.offsets[place], part.offsets[place + 1])
            count = part.sizes[place]
            attack = np.full(count, float(place < attackers), np.float32)
            made[client][name] = {field: x[rows] for field, x in part.data.items()} | {"attack": attack}
    return fp.data.from_clients(made, num_classes=11)


def flipping(update: Any) -> Any:
    """A client update whose change is turned round and enlarged where the client's data say so."""

    def flipped(layout: Any, parts: Any, context: Any) -> Any:
        after, report = update(layout, parts, context)
        factor = 1 - (1 + SCALE) * context.data["attack"][context.start]
        shared = jax.tree.map(lambda old, new: old + factor * (new - old), parts.shared, after.shared)
        return after._replace(shared=shared), report

    return flipped


def accuracy(aggregator: fp.Aggregator, attackers: int, seed: int) -> float:
    """Mean test accuracy of the clients that never attack."""
    data = federation(attackers)
    task = fp.tasks.from_model(data, "mlp")
    client = flipping(fp.train(0.1, epochs=2))
    algorithm = fp.compose(task, client=client, aggregator=aggregator)
    _, history = fp.run(algorithm, None, data, ROUNDS, seed)
    return float(np.nanmean(history.evaluations[-1][1].personal["accuracy"][ATTACKERS:]))


def main() -> None:
    """Runs, prints, writes."""
    found = {}
    for name, aggregator in AGGREGATORS.items():
        found[name] = {
            case: [accuracy(aggregator, attackers, seed) for seed in SEEDS]
            for case, attackers in (("clean", 0), ("attacked", ATTACKERS))
        }
        print(f"{name:18}", *(f"{case} {np.mean(values):.3f}" for case, values in found[name].items()), flush=True)
    (HERE / "attacks.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
