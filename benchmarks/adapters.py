"""Memory of LoRA on a large backbone, by its size and by the number of clients: ``python -m benchmarks.adapters``.

Every figure is of a new process that runs three rounds of FedSA-LoRA (rank 8 beside every weight but the head's) with
all clients in each, and then judges all of them. Writes ``benchmarks/results/adapters.json``.
"""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.machine import RESULTS, machine

WIDTHS = {"1 M": 680, "10 M": 2200}
CLIENTS = (16, 64, 256)
RUN = """
import json, sys
from pathlib import Path

import jax
import numpy as np

import fedjax_pers as fp

width, count = map(int, sys.argv[1:])
draw = np.random.default_rng(0)

def split(rows):
    return {"x": draw.normal(size=(rows, 256)).astype("float32"), "y": draw.integers(0, 10, rows).astype("int32")}

federation = fp.data.from_clients({i: {"train": split(20), "test": split(10)} for i in range(count)}, num_classes=10)
task = fp.tasks.from_model(federation, "mlp", hidden=(width,) * 3)
algorithm = fp.method("fedsa_lora").make(task, rank=8, alpha=16.0, lr=0.05)
state, history = fp.run(algorithm, None, federation, 3, evaluate_every=3)
size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
parts = {"backbone": state.frozen, "rows": state.rows, "shared": state.shared}
print(json.dumps({"peak": peak} | {name: size(tree) for name, tree in parts.items()}))
"""


def measure(width: int, clients: int) -> dict[str, int]:
    """Bytes: the most that the process had, the backbone, the clients' rows, the shared leaves."""
    command = [sys.executable, "-c", RUN, str(width), str(clients)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    """Measures, prints, writes."""
    found: dict = {"machine": machine(), "backbones": {}}
    for name, width in WIDTHS.items():
        cells = found["backbones"][name] = {}
        for clients in CLIENTS:
            cells[clients] = cell = measure(width, clients)
            print(name, clients, {key: f"{value / 1e6:,.0f} MB" for key, value in cell.items()}, flush=True)
    (RESULTS / "adapters.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
