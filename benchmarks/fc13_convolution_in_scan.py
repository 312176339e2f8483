"""FC-13: local steps of a small CNN in compiled loops and over clients, against a Python loop over one compiled step.

    python -m benchmarks.fc13_convolution_in_scan

Two 3x3 convolutions (16 and 32 channels) on 28x28x1, batch 20: 10 steps of one client, then one step of each of 10
clients, without and with max-pooling. Everything is measured once in every repeat, in turn, and compared with the
Python loop of the same repeat, so that a busy neighbour slows both. Prints a table and writes
``benchmarks/results/fc13.json``.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

from fedjax_pers.executors.fast import fast_convolutions

RESULTS = Path(__file__).parent / "results" / "fc13.json"
STEPS, CLIENTS, BATCH = 10, 10, 20
YARDSTICK = "Python loop, plain"


class CNN(nn.Module):
    """Two convolutions and a linear layer."""

    pooling: bool

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        for channels in (16, 32):
            image = nn.relu(nn.Conv(channels, (3, 3))(image))
            image = nn.max_pool(image, (2, 2), (2, 2)) if self.pooling else image
        return nn.Dense(10)(image.reshape(image.shape[0], -1))


def sgd_step(model: CNN) -> Callable[[Any, Any], Any]:
    """``step(params, batch) -> params``."""
    optimizer = optax.sgd(0.05)

    def loss(params: Any, batch: Any) -> jax.Array:
        image, label = batch
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, image), label).mean()

    def step(params: Any, batch: Any) -> Any:
        updates, _ = optimizer.update(jax.grad(loss)(params, batch), optimizer.init(params))
        return optax.apply_updates(params, updates)

    return step


def in_while_loop(step: Any) -> Callable[[Any, Any, Any], Any]:
    """``run(params, batches, count) -> params``: the number of steps is not known when it is compiled."""

    def run(params: Any, batches: Any, count: Any) -> Any:
        def body(state: Any) -> Any:
            index, params = state
            return index + 1, step(params, jax.tree.map(lambda x: x[index], batches))

        return jax.lax.while_loop(lambda state: state[0] < count, body, (0, params))[1]

    return run


def one_client(step: Any, params: Any, batches: Any) -> dict[str, Callable[[], Any]]:
    """Ways to take ``STEPS`` steps one after another."""
    fast, compiled = fast_convolutions(step), jax.jit(step)
    apart = [jax.tree.map(lambda x, i=i: x[i], batches) for i in range(STEPS)]

    def python_loop() -> Any:
        found = params
        for batch in apart:
            found = compiled(found, batch)
        return found

    def scanned(step: Any) -> Callable[[], Any]:
        run = jax.jit(lambda params, batches: jax.lax.scan(lambda p, b: (step(p, b), None), params, batches)[0])
        return lambda: run(params, batches)

    run = jax.jit(in_while_loop(fast))
    return {
        YARDSTICK: python_loop,
        "scan, plain": scanned(step),
        "scan, fast": scanned(fast),
        "while_loop, fast": lambda: run(params, batches, STEPS),
    }


def many_clients(step: Any, params: Any, batches: Any) -> dict[str, Callable[[], Any]]:
    """Ways to take one step with each of ``CLIENTS`` clients, each from parameters of its own."""
    fast, compiled = fast_convolutions(step), jax.jit(step)
    stacked = jax.tree.map(lambda x: jnp.stack([x] * CLIENTS), params)
    apart = [jax.tree.map(lambda x, i=i: x[i], (stacked, batches)) for i in range(CLIENTS)]

    def mapped(step: Any) -> Callable[[], Any]:
        run = jax.jit(lambda params, batches: jax.lax.map(lambda client: step(*client), (params, batches)))
        return lambda: run(stacked, batches)

    @jax.jit
    def local_training(params: Any, batches: Any, count: Any) -> Any:
        singles = jax.tree.map(lambda x: x[:, None], batches)
        return jax.lax.map(lambda client: in_while_loop(fast)(*client, count), (params, singles))

    def vectorised(step: Any) -> Callable[[], Any]:
        run = jax.jit(jax.vmap(step))
        return lambda: run(stacked, batches)

    return {
        YARDSTICK: lambda: [compiled(*client) for client in apart],
        "scan over clients, plain": mapped(step),
        "scan over clients, fast": mapped(fast),
        "scan over clients of while_loops, fast": lambda: local_training(stacked, batches, 1),
        "vmap over clients, plain": vectorised(step),
        "vmap over clients, fast": vectorised(fast),
    }


def measured(ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, dict[str, float]]:
    """Seconds of each way, and ratios to the yardstick of the same repeat."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, run in ways.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            if repeat > 0:
                seconds[name].append(time.perf_counter() - start)
    return {
        name: {
            "seconds": statistics.median(taken),
            "least_seconds": min(taken),
            "ratio": statistics.median(np.divide(taken, seconds[YARDSTICK])),
            "ratio_of_least": min(taken) / min(seconds[YARDSTICK]),
        }
        for name, taken in seconds.items()
    }


def main(repeats: int = 9) -> None:
    """Measures, prints, writes."""
    rng = np.random.default_rng(0)
    image = jnp.asarray(rng.normal(size=(STEPS, BATCH, 28, 28, 1)), jnp.float32)
    batches = image, jnp.asarray(rng.integers(0, 10, (STEPS, BATCH)), jnp.int32)
    found: dict[str, Any] = {"jax": jax.__version__, "device": jax.devices()[0].device_kind, "repeats": repeats}
    for pooling in (False, True):
        model = CNN(pooling)
        params, step = jax.jit(model.init)(jax.random.key(0), image[0]), sgd_step(model)
        for what, ways in (("10 steps of one client", one_client), ("one step of 10 clients", many_clients)):
            title = f"{what}, {'with' if pooling else 'without'} max-pooling"
            found[title] = measured(ways(step, params, batches), repeats)
            table = Table("", "seconds", "times the Python loop", "by least seconds", title=title)
            for name, row in found[title].items():
                table.add_row(name, f"{row['seconds']:.4f}", f"{row['ratio']:.2f}", f"{row['ratio_of_least']:.2f}")
            Console(width=100).print(table)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
