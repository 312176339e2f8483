"""The table of a set from its figures: python experiments/families/table.py SET."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import fedjax_pers as fp

HERE = Path(__file__).parent
BASELINES = ("fedavg_ft", "local_only")


def main(name: str) -> None:
    """Prints the methods by family, best first, and which families are above both baselines."""
    found = json.loads((HERE / f"{name}.json").read_text())
    bar = max(np.mean(found[each]["mean"]) for each in BASELINES)
    print("| family | method | mean by client, % | worst tenth, % | kB a round, up and down |")
    print("| --- | --- | ---: | ---: | ---: |")
    order = sorted(found, key=lambda each: (fp.method(each).family, -np.mean(found[each]["mean"])))
    for method in order:
        row, family = found[method], fp.method(method).family
        mean, worst = (np.array(row[part]) * 100 for part in ("mean", "worst_tenth"))
        mark = "**" if mean.mean() / 100 > bar else ""
        deviations = [f"{x.mean():.1f} ± {x.std(ddof=1):.1f}" for x in (mean, worst)]
        up, down = (f"{x / 1000:.1f}" for x in row["bytes"])
        print(f"| {family} | {method} | {mark}{deviations[0]}{mark} | {deviations[1]} | {up}, {down} |")
    print(f"\nIn bold: above both FedAvg + fine-tuning and local training, whose better one has {100 * bar:.1f} %.")


if __name__ == "__main__":
    main(sys.argv[1])
