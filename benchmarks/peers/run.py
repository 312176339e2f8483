"""Other simulators and programs beside this package, on the same bytes and rounds.

    python -m benchmarks.peers.run [--repeats 3] [W1 W2 ...]

Each peer is a program with an environment of its own in ``.venv-peers``, made at first use. All programs run
one after another, then all once more, so that a noisy minute hits all of them. Writes
``benchmarks/results/peers.json``. The machine should have nothing else to do; with it all takes about an hour.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine import RESULTS, machine
from benchmarks.peers.contract import peer_name
from benchmarks.peers.workloads import write

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / ".venv-peers"
ROUNDS = {"W0": 10, "W1": 5, "W2": 10, "W3": 10, "W4": 3, "W5": 3, "W6": 5}
SECONDS_A_RUN, SECONDS_TO_INSTALL = 600, 3600
OWN = "ours"  # runs in the environment of this program
SHARED = {"pfllib_fedrep": "torch_loop"}  # programs that run in another's environment


class Job(NamedTuple):
    """A program in one of its variants."""

    program: str
    variant: str


SIMPLE = ("W0", "W1", "W2", "W3")
FEDAVG = (*SIMPLE, "W4", "W5")
DENSE = ("W0", "W2", "W3")
JOBS = {
    Job(OWN, "fedavg"): FEDAVG,
    Job("torch_loop", "loop"): FEDAVG,
    Job("torch_loop", "processes"): FEDAVG,
    Job("torch_loop", "vmap"): FEDAVG,
    Job("naive_jax", "scan"): DENSE,  # with convolutions a round takes up to minutes
    Job("naive_jax", "vmap"): DENSE,
    Job("fedjax_peer", "jit"): SIMPLE,
    Job("fedjax_peer", "pmap"): SIMPLE,
    Job("pfl_research", "one"): SIMPLE,
    Job("pfl_research", "processes"): SIMPLE,
    Job("blazefl_peer", "threads"): SIMPLE,
    Job("blazefl_peer", "serial"): SIMPLE,
    Job("flower", "strategy"): SIMPLE,
    Job("flower", "grid"): SIMPLE,
    Job(OWN, "fedrep"): ("W6",),
    Job("pfllib_fedrep", "fedrep"): ("W6",),
}


def run_alone(command: list[str], timeout: float, **environment: str) -> str:
    """What the command prints. Its whole process group has ended when this returns.

    Raises:
      RuntimeError: it failed or took too long; with the last lines it printed.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
        start_new_session=True,
    )
    try:
        printed, complaints = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"longer than {timeout} s") from None
    finally:
        end_group(process)
    if process.returncode:
        raise RuntimeError("\n".join((complaints or printed or "no output").splitlines()[-5:]))
    return printed


def end_group(process: subprocess.Popen) -> None:
    """Ends the process and all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def environment(program: str) -> str:
    """The Python of the program's environment, which is made where it is not there or wants other packages."""
    if program == OWN:
        return sys.executable
    program = SHARED.get(program, program)
    wanted, folder = HERE / "requirements" / f"{program}.txt", ENVIRONMENTS / program
    python, made_of = str(folder / "bin" / "python"), folder / "requirements.txt"
    if not made_of.exists() or made_of.read_text() != wanted.read_text():
        print(f"making the environment of {program}", flush=True)
        run_alone([sys.executable, "-m", "venv", "--clear", str(folder)], SECONDS_TO_INSTALL)
        install = [python, "-m", "pip", "install", "--quiet", "--requirement", str(wanted)]
        # See requirements/blazefl_peer.txt; everything is pinned, so that nothing else is let in by it.
        ignored = {"PIP_IGNORE_REQUIRES_PYTHON": "1"} if program == "blazefl_peer" else {}
        run_alone(install, SECONDS_TO_INSTALL, **ignored)
        made_of.write_text(wanted.read_text())
    return python


def measure(job: Job, python: str, workload: str, path: Path) -> dict[str, Any]:
    """One run: the line that the program prints, or its error."""
    program = [python, str(HERE / f"{job.program}.py"), str(path)]
    command = [*program, "--variant", job.variant, "--rounds", str(ROUNDS[workload])]
    leftovers = {"TMPDIR": str(path.parent), "RAY_TMPDIR": str(path.parent)}
    try:
        printed = run_alone(command, SECONDS_A_RUN, PYTHONPATH=str(HERE.parents[1]), **leftovers)
        return json.loads(printed.splitlines()[-1])
    except (RuntimeError, ValueError, IndexError) as error:
        return failed(job, workload, str(error))


def failed(job: Job, workload: str, error: str) -> dict[str, Any]:
    """The row of a run that did not come about."""
    return {"peer": peer_name(job.program), "variant": job.variant, "workload": workload, "error": error}


def table(runs: list[dict[str, Any]], workload: str) -> str:
    """Seconds a round of all repeats, the fastest first."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        if run["workload"] == workload:
            found.setdefault((run["peer"], run["variant"]), []).append(run)
    lines = []
    for (peer, variant), repeats in found.items():
        name = f"  {peer + ', ' + variant:24}"
        good = [run for run in repeats if "error" not in run]
        if not good:
            lines.append((float("inf"), f"{name}  failed: {repeats[0]['error'].splitlines()[-1]}"))
            continue
        bad = f"  ({len(repeats) - len(good)} of {len(repeats)} failed)" if len(good) < len(repeats) else ""
        seconds = [second for run in good for second in run["seconds"]]
        median, memory = statistics.median(seconds), max(run["peak_mb"] for run in good)
        spread = f"({min(seconds):.4f} .. {max(seconds):.4f})"
        lines.append((median, f"{name} {median:9.4f} s {spread:24} {memory:7.0f} MB{bad}"))
    return "\n".join([workload, *(line for _, line in sorted(lines))])


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("workloads", nargs="*", default=list(ROUNDS), metavar="WORKLOAD")
    asked = parser.parse_args()
    pythons, errors = {}, {}
    for program in dict.fromkeys(job.program for job in JOBS):
        try:
            pythons[program] = environment(program)
        except RuntimeError as error:
            errors[program] = f"not installed: {error}"
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        paths = {workload: write(workload, Path(folder)) for workload in asked.workloads}
        for repeat in range(asked.repeats):
            for workload, path in paths.items():
                for job in (job for job, suited in JOBS.items() if workload in suited):
                    if job.program in errors:
                        row = failed(job, workload, errors[job.program])
                    else:
                        row = measure(job, pythons[job.program], workload, path)
                    runs.append({"repeat": repeat} | row)
                    (RESULTS / "peers.json").write_text(
                        json.dumps({"machine": machine(), "runs": runs}, indent=2) + "\n"
                    )
    print("\n".join(table(runs, workload) for workload in asked.workloads))


if __name__ == "__main__":
    main()
