"""Writes ``docs/benchmarks.md`` from the figures in ``benchmarks/results``: ``python -m benchmarks.report``."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import growth_report
from benchmarks.machine import RESULTS
from benchmarks.workloads import TITLES, WORKLOADS

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
WORDS = Path(__file__).parent / "page.md"
WAYS = ("all cores", "one device", "vmap over all clients", "plain scan", "body in every epoch")
PEERS = {
    ("torch_loop", "loop"): "PyTorch by hand, one process",
    ("torch_loop", "processes"): "PyTorch by hand, a process a core",
    ("torch_loop", "vmap"): "PyTorch, `torch.func.vmap`",
    ("pfl_research", "one"): "pfl-research, one process",
    ("pfl_research", "processes"): "pfl-research, a process a core",
    ("fedjax", "jit"): "FedJAX, `jit`",
    ("fedjax", "pmap"): "FedJAX, `pmap`",
    ("blazefl", "threads"): "BlazeFL, threads",
    ("blazefl", "serial"): "BlazeFL, serial",
    ("flower", "strategy"): "Flower, its FedAvg on Ray",
    ("flower", "grid"): "Flower, its Grid",
    ("naive_jax", "scan"): "JAX without a framework, `scan`",
    ("naive_jax", "vmap"): "JAX without a framework, `vmap`",
    ("pfllib_fedrep", "fedrep"): "FedRep as PFLlib does it",
}
Row = dict[str, Any]


def read(name: str) -> Any:
    """The figures of a program."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(head: Iterable[str], rows: Iterable[Iterable[str]], left: int = 1) -> str:
    """A table whose first columns are words, the others numbers."""
    head = list(head)
    lines = [head, ["---"] * left + ["---:"] * (len(head) - left), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def milliseconds(row: Row) -> str:
    """Median, and lowest to highest."""
    return f"{row['seconds'] * 1e3:,.0f} ({row['lowest'] * 1e3:,.0f} .. {row['highest'] * 1e3:,.0f})"


def machine_line(found: Row) -> str:
    """What all figures are of."""
    had = found["machine"]
    return f"{had['cores']} cores ({had['processor']}), Python {had['python']}, jax {had['jax']}, flax {had['flax']}"


def rounds(found: Row) -> str:
    """Milliseconds a round by way of running the clients."""
    rows = []
    for name, one in found["workloads"].items():
        ways = one["ways"]
        usual, others = ways["all cores"], [ways.get(way) for way in WAYS[1:4]]
        first = f"{usual['first_call_seconds']:.1f} / {usual['cached_first_call_seconds']:.1f}"
        medians = [f"{other['seconds'] * 1e3:,.0f}" if other else "" for other in others]
        # FedRep's round is more than the gradient steps that are counted.
        share = "" if name == "W6" else f"{usual['share_of_roof']:.2f}"
        rows.append([f"{name}: {TITLES[name]}", milliseconds(usual), share, *medians, first])
    head = ["", "all cores", "share of the product", "one device", "`vmap` over all", "plain scan", "first call, s"]
    return table(head, rows)


def frozen(found: Row) -> str:
    """W6 with and without stored features."""
    ways = found["workloads"]["W6"]["ways"]
    stored, again = ways["all cores"]["seconds"], ways["body in every epoch"]["seconds"]
    body = found["workloads"]["W1"]["ways"]["all cores"]["seconds"]
    head, every = stored - body, again - body
    return (
        f"A FedRep round takes {stored * 1e3:,.0f} ms, and {again * 1e3:,.0f} ms where the frozen body is evaluated in "
        f"every epoch of the head ({again / stored:.1f} times). Less a round of W1, which is the body's epoch, "
        f"{head * 1e3:,.0f} against {every * 1e3:,.0f} ms ({every / head:.1f} times)."
    )


def by_peer(runs: list[Row], workload: str) -> dict[tuple[str, str], Row]:
    """Median, spread and memory of each peer that ran the workload; or its error."""
    found: dict[tuple[str, str], list[Row]] = {}
    for run in runs:
        if run["workload"] == workload:
            found.setdefault((run["peer"], run["variant"]), []).append(run)
    rows = {}
    for peer, repeats in found.items():
        good = [run for run in repeats if "error" not in run]
        times = [second for run in good for second in run["seconds"]]
        if times:
            spread = {"seconds": statistics.median(times), "lowest": min(times), "highest": max(times)}
            rows[peer] = spread | {"peak_mb": max(run["peak_mb"] for run in good)}
        else:
            rows[peer] = {"error": repeats[0]["error"]}
    return rows


def peers(found: Row) -> str:
    """Milliseconds a round, times this package's, and memory, of every peer and workload."""
    workloads = list(dict.fromkeys(run["workload"] for run in found["runs"]))
    columns = {workload: by_peer(found["runs"], workload) for workload in workloads}

    def cell(workload: str, peer: tuple[str, str]) -> str:
        own = next(row for (name, _), row in columns[workload].items() if name == "ours")
        row = columns[workload].get(peer)
        if row is None:
            return ""
        if "error" in row:
            return "failed"
        return f"{row['seconds'] * 1e3:,.0f} ({row['seconds'] / own['seconds']:.1f}x, {row['peak_mb']:,.0f})"

    ours = ["**this package**"]
    for workload in workloads:
        own = next(row for (name, _), row in columns[workload].items() if name == "ours")
        ours.append(f"**{milliseconds(own)}** {own['peak_mb']:,.0f}")
    rows = [[title, *(cell(workload, peer) for workload in workloads)] for peer, title in PEERS.items()]
    return table(["ms a round (times this package's, MB)", *workloads], [ours, *rows])


def profile(found: Row) -> str:
    """Shares of a round on one core by kind of operation."""
    rows = []
    for name, one in found["workloads"].items():
        shares = [f"{share:.0%}" for share in one["shares"].values()]
        rates = f"{one['gflops']:.0f} / {one['gflops_of_products']:.0f}"
        rows.append([f"{name}", f"{one['seconds'] * 1e3:,.0f}", *shares, rates])
    kinds = next(iter(found["workloads"].values()))["shares"]
    return table(["one core", "ms", *kinds, "GFLOP/s: all / in products"], rows)


def sweeps(found: Row) -> str:
    """W7."""
    ways = found["ways"]
    swept = ways["swept"]["seconds"]
    rows = [
        [name, f"{row['seconds']:.1f}", f"{row['seconds'] / swept:.1f}", f"{row.get('first', row['seconds']):.1f}"]
        for name, row in ways.items()
    ]
    return table([f"{found['runs']} runs", "seconds", "times the sweep", "the first time"], rows)


def lanes(found: Row) -> str:
    """Rounds by number of lanes, times the best."""
    tried = ("1", "2", "4", "8", "32")
    rows = []
    for name, row in found["workloads"].items():
        best = min(row["seconds"].values())
        cells = [f"{row['seconds'][n] / best:.2f}" if n in row["seconds"] else "" for n in tried]
        last = max(row["seconds"], key=int)
        rows.append(
            [
                f"{name}, {row['clients']} clients",
                f"{row['model_bytes']:,}",
                *cells,
                f"{row['seconds'][last] / best:.2f}",
            ]
        )
    return table(["", "bytes", *tried, "all of a device"], rows)


def convolutions(found: Row) -> str:
    """FC-13: ratios without and with max-pooling."""
    rows = []
    for title in ("10 steps of one client", "one step of 10 clients"):
        without, pooled = (found[f"{title}, {how} max-pooling"] for how in ("without", "with"))
        for way, row in list(without.items())[1:]:
            rows.append([f"{title}: {way}", f"{row['ratio']:.2f}", f"{pooled[way]['ratio']:.2f}"])
    return table(["", "without max-pooling", "with"], rows)


def memory(found: Row) -> str:
    """FC-14: programs and megabytes."""
    programs, held = found["compilations"], found["resident_megabytes"]
    return (
        f"- 60 clients of 5 to 400 examples: {programs['round_1']} programs in the first round, helpers among them, "
        f"{programs['round_2']} and {programs['round_3']} in the next two, {programs['19_more_learning_rates']} for 19 "
        f"more learning rates.\n"
        f"- 300 rounds of 50 of 2,000 clients with 5,000 personal numbers each, which are 40 MB: "
        f"{held['gained']:.0f} MB from round 10 to 300, {held['gained_after_round_100']:.0f} MB of it after round 100."
    )


def footprint(found: Row) -> str:
    """What a process costs: imports, and peaks of memory by stage."""
    took, peaks = found["import_seconds"], found["peak_mb"]
    stages = next(iter(peaks.values()))
    rows = [[stage, *(f"{peaks[name][stage]:,.0f}" for name in peaks)] for stage in stages]
    line = (
        f"Importing jax and flax takes {took['jax_and_flax']:.2f} s, fedjax_pers {took['more']:.2f} s more (with optax "
        "and the parts of flax that it uses).\n\n"
    )
    return line + table(["peak after, MB", *peaks], rows)


def aggregators(found: Row) -> str:
    """Seconds of a server step by aggregator, and times those of the mean."""
    sizes = found["sizes"]
    names = next(iter(sizes.values()))

    def cell(rows: Row, name: str) -> str:
        if name not in rows:
            return ""
        return f"{rows[name]['seconds']:.2f} ({rows[name]['seconds'] / rows['weighted mean']['seconds']:,.1f}x)"

    rows = [[name, *(cell(of_size, name) for of_size in sizes.values())] for name in names]
    return table(["seconds (times the mean)", *sizes], rows)


def adapters(found: Row) -> str:
    """Peaks of memory by backbone and clients."""
    rows = []
    for name, cells in found["backbones"].items():
        for clients, cell in cells.items():
            sizes = [f"{cell[part] / 1e6:,.0f}" for part in ("backbone", "rows", "peak")]
            rows.append([f"{name}, {clients} clients", *sizes])
    return table(["backbone", "backbone, MB", "clients' rows, MB", "peak of the process, MB"], rows)


# Shares of the large product, and times as fast as others, that a round is to reach.
SHARES = {"W1": 0.75, "W2": 0.60, "W3": 0.55, "W4": 0.5, "W5": 0.7}
FASTER = {
    "W0": {"every other": 10},
    "W1": {"torch_loop": 1.2, "fedjax": 1.8},
    "W2": {"torch_loop": 3, "pfl_research": 4, "fedjax": 4, "flower": 35},
    "W3": {"torch_loop": 2.7},
    "W4": {"torch_loop": 1.5},
    "W5": {"torch_loop": 1.5},
    "W6": {"pfllib_fedrep": 3},
}


def targets(found: Row, others: Row) -> str:
    """What was aimed at, and what came out."""
    rows = []
    for workload, aim in SHARES.items():
        got = found["workloads"][workload]["ways"]["all cores"]["share_of_roof"]
        rows.append([f"{workload}: share of the large product", f"{aim}", f"{got:.2f}", _met(got >= aim)])
    for workload, aims in FASTER.items():
        columns = by_peer(others["runs"], workload)
        own = next((row for (name, _), row in columns.items() if name == "ours"), None)
        for peer, aim in aims.items():
            times = [
                row["seconds"]
                for (name, _), row in columns.items()
                if "error" not in row
                and (name == peer or (peer == "every other" and name not in ("ours", "naive_jax")))
            ]
            if own and times:
                got = min(times) / own["seconds"]
                rows.append([f"{workload}: times as fast as {peer}", f"{aim}", f"{got:.1f}", _met(got >= aim)])
    return table(["aim", "at least", "measured", ""], rows + _further(found, others))


def _further(found: Row, others: Row) -> list[list[str]]:
    """Aims that are no ratios to peers."""
    ways = {name: one["ways"] for name, one in found["workloads"].items()}
    examples = {name: int(WORKLOADS[name].sizes.sum()) for name in ("W2", "W3")}
    each = {name: ways[name]["all cores"]["seconds"] / examples[name] for name in examples}
    stored, again = (ways["W6"][way]["seconds"] for way in ("all cores", "body in every epoch"))
    first = ways["W1"]["all cores"]
    swept = {name: row["seconds"] for name, row in read("sweeps")["ways"].items()}
    rows = []

    def aim(title: str, bound: float, got: float, *, at_most: bool = False) -> None:
        words = f"at most {bound:g}" if at_most else f"{bound:g}"
        rows.append([title, words, f"{got:.2f}", _met(got <= bound if at_most else got >= bound)])

    aim("W3: time of an example, times W2's", 1.1, each["W3"] / each["W2"], at_most=True)
    aim("W6: times as fast as with the body in every epoch", 3, again / stored)
    aim("W7: times as fast as 32 runs that share a program", 5, swept["one after another"] / swept["swept"])
    aim("W7: times as fast as 32 runs with a program each", 5, swept["a program each"] / swept["swept"])
    aim("W1: first call, seconds", 8, first["first_call_seconds"], at_most=True)
    cached = first["cached_first_call_seconds"] / first["first_call_seconds"]
    aim("W1: first call with a program on the disk, times one without", 1 / 3, cached, at_most=True)
    aim("importing, seconds more than jax and flax", 1.5, read("footprint")["import_seconds"]["more"], at_most=True)
    for workload in ("W1", "W2", "W3"):
        columns = by_peer(others["runs"], workload)
        own = next(row["peak_mb"] for (name, _), row in columns.items() if name == "ours")
        leanest = min(row["peak_mb"] for (name, _), row in columns.items() if name != "ours" and "error" not in row)
        aim(f"{workload}: peak memory, times that of the leanest", 1, own / leanest, at_most=True)
    return rows


def _met(met: bool) -> str:
    return "reached" if met else "not reached"


def main() -> None:
    """Writes the page."""
    found = read("rounds")
    parts = {
        "machine": machine_line(found),
        "roof": _range(one["roof_gflops"] for one in found["workloads"].values()),
        "rounds": rounds(found),
        "frozen": frozen(found),
        "profile": profile(read("profile")),
        "peers": peers(read("peers")),
        "targets": targets(found, read("peers")),
        "convolutions": convolutions(read("fc13")),
        "memory": memory(read("fc14")),
        "footprint": footprint(read("footprint")),
        "aggregators": aggregators(read("aggregators")),
        "adapters": adapters(read("adapters")),
        "sweeps": sweeps(read("sweeps")),
        "growth": growth_report.section(read("growth")),
        "lanes": lanes(read("lanes")),
    }
    text = WORDS.read_text()
    for name, part in parts.items():
        assert f"{{{name}}}" in text, f"{WORDS}: there is no place for {name}"
        text = text.replace(f"{{{name}}}", part)
    PAGE.write_text(text)
    print(f"wrote {PAGE}")


def _range(values: Iterable[float]) -> str:
    values = list(values)
    return f"{min(values):.0f} to {max(values):.0f}"


if __name__ == "__main__":
    main()
