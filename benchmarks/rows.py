"""What it costs that clients' personal rows lie on the host: ``python -m benchmarks.rows``.

10^6 clients that keep 1,000 numbers each, 100 a round, in blocks of ten rounds; runs with the rows on the device and on
the host take turns. Prints milliseconds a round.
"""

from __future__ import annotations

import statistics
import time

import fedjax_pers as fp
from benchmarks.growth import LARGE, federation
from fedjax_pers.simulate.run import Block

ROUNDS, REPEATS = 30, 5


def main() -> None:
    """Measures and prints."""
    data = federation(LARGE)
    algorithm = fp.method(LARGE.method).make(fp.tasks.from_model(data, "mlp", hidden=LARGE.hidden), steps=LARGE.steps)
    places = ("device", "host")
    states, times = dict.fromkeys(places), {place: [] for place in places}
    began, blocks = 0.0, []

    def clock(_: Block) -> None:
        nonlocal began
        now = time.perf_counter()
        blocks.append((now - began) / 10)
        began = now

    for place in places:
        states[place], _ = fp.run(algorithm, None, data, 10, cohort_size=LARGE.cohort, evaluate_every=0, rows_on=place)
    for repeat in range(1, REPEATS + 1):
        for place in places:
            blocks.clear()
            states[place], _ = fp.run(
                algorithm,
                states[place],
                data,
                10 + repeat * ROUNDS,
                cohort_size=LARGE.cohort,
                evaluate_every=0,
                on_block=clock,
            )
            times[place] += blocks[1:]  # the first one has the copy of the state that was passed in
    for place in places:
        median = statistics.median(times[place]) * 1e3
        lowest, highest = min(times[place]) * 1e3, max(times[place]) * 1e3
        print(f"rows on the {place}: {median:.2f} ms a round ({lowest:.2f} .. {highest:.2f})")


if __name__ == "__main__":
    main()
