"""One client in five sends its update with the sign flipped and tenfold: who stays near the clean run?

    python experiments/aggregation/attacks.py

Twenty clients with evenly dealt digits, of whom four attack, and fifteen speakers, of whom three attack. Prints
accuracies of the honest clients over three seeds and writes ``attacks.json``.
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
SETS = {"digits": 4, "speakers": 3}
"""How many clients attack."""
AGGREGATORS = {
    "mean": fp.mean(weights="uniform"),
    "median": ag.median(),
    "trimmed mean": ag.trimmed_mean(0.25),
    "Krum": ag.krum(4),
    "Multi-Krum": ag.krum(4, chosen=8),
    "geometric median": ag.geometric_median(weights="uniform"),
    "norm clipping": ag.norm_clipping(0.5, weights="uniform"),
}


def federation(name: str, attackers: int, seed: int) -> fp.Federation:
    """The first clients attack: a further field of their data says so."""
    if name == "digits":
        plain = fp.data.digits(partitioner=fp.data.iid(), num_clients=20, seed=seed)
    else:
        plain = fp.data.load("vowel_speakers")
    made: dict[Any, dict[str, Any]] = {}
    for place, client in enumerate(plain.client_ids):
        made[client] = {}
        for name in fp.data.SPLITS:
            part = plain.split(name)
            rows = slice(part.offsets[place], part.offsets[place + 1])
            count = part.sizes[place]
            attack = np.full(count, float(place < attackers), np.float32)
            made[client][name] = {field: x[rows] for field, x in part.data.items()} | {"attack": attack}
    return fp.data.from_clients(made, num_classes=plain.num_classes)


def flipping(update: Any) -> Any:
    """A client update whose change is turned round and enlarged where the client's data say so."""

    def flipped(layout: Any, parts: Any, context: Any) -> Any:
        after, report = update(layout, parts, context)
        factor = 1 - (1 + SCALE) * context.data["attack"][context.start]
        shared = jax.tree.map(lambda old, new: old + factor * (new - old), parts.shared, after.shared)
        return after._replace(shared=shared), report

    return flipped


def accuracy(name: str, aggregator: fp.Aggregator, attackers: int, seed: int) -> float:
    """Mean test accuracy of the clients that never attack."""
    data = federation(name, attackers, seed)
    task = fp.tasks.from_model(data, "mlp")
    client = flipping(fp.train(0.1, epochs=2))
    algorithm = fp.compose(task, client=client, aggregator=aggregator)
    _, history = fp.run(algorithm, None, data, ROUNDS, seed)
    return float(np.nanmean(history.evaluations[-1][1].personal["accuracy"][SETS[name] :]))


def main() -> None:
    """Runs, prints, writes."""
    found: dict[str, Any] = {}
    for data, attackers in SETS.items():
        for name, aggregator in AGGREGATORS.items():
            cases = {"clean": 0, "attacked": attackers}
            rows = {case: [accuracy(data, aggregator, bad, seed) for seed in SEEDS] for case, bad in cases.items()}
            found.setdefault(data, {})[name] = rows
            print(f"{data:9} {name:18}", *(f"{case} {np.mean(x):.3f}" for case, x in rows.items()), flush=True)
    (HERE / "attacks.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
