"""Small problems whose answers can be worked out by hand, and what is needed to run and compare methods on them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_pers as fp
from fedjax_pers.base import Batch
from fedjax_pers.simulate.pools import pool_of
from fedjax_pers.simulate.records import Ledger
from fedjax_pers.testing import assert_bitwise

TWO_QUADRATICS = {"a": [[0.0], [1.0]], "h": [[1.0], [4.0]]}
"""Two clients with ``f = h/2 (w - a)^2``, one example each: (h, a) = (1, 0) and (4, 1)."""


def weighted(values: jax.Array, batch: Batch) -> jax.Array:
    """The mean of the examples that count."""
    return (values * batch["weight"]).sum() / batch["weight"].sum()


def plain_task(loss_of: Callable[[Any, Batch], jax.Array], **start: Any) -> fp.Task:
    """A task with one leaf for each keyword, whose loss of each example is ``loss_of(variables, batch)``."""

    def loss(variables, batch, key):
        return weighted(loss_of(variables, batch), batch), {}

    return fp.Task(
        init=lambda key: {name: jnp.asarray(value, jnp.float32) for name, value in start.items()},
        loss=loss,
        metrics=lambda variables, batch: {"loss": loss_of(variables, batch)},
    )


@functools.cache
def quadratic(w: float | tuple[float, ...] = 0.0) -> fp.Task:
    """``f(w) = mean of sum h/2 (w - a)^2`` over a client's examples ``(a, h)``, from the given start."""

    def loss_of(variables, batch):
        losses = 0.5 * batch["h"] * (variables["w"] - batch["a"]) ** 2
        return losses.reshape(losses.shape[0], -1).sum(axis=1)

    return plain_task(loss_of, w=w)


@functools.cache
def two_leaves() -> fp.Task:
    """``f(w, v) = 1/2 (w + v - 1)^2`` from w = v = 0: what separates simultaneous from alternating steps."""
    return plain_task(lambda v, batch: 0.5 * (v["w"] + v["v"] - 1 + 0 * batch["a"]) ** 2, w=0.0, v=0.0)


def clients(fields: dict[str, Any] = TWO_QUADRATICS, **options: Any) -> fp.Cohort:
    """A cohort from float32 fields ``[clients, examples, ...]``."""
    return fp.cohort_of({name: np.asarray(x, np.float32) for name, x in fields.items()}, **options)


def copies(counts: list[int], fields: dict[str, Any] = TWO_QUADRATICS) -> fp.Cohort:
    """A cohort in which client i owns ``counts[i]`` copies of its one example, so that only its weight changes."""
    repeated = {name: np.repeat(np.asarray(x), max(counts), axis=1) for name, x in fields.items()}
    return clients(repeated, sizes=counts)


def only(cohort: fp.Cohort, members: list[int]) -> fp.Cohort:
    """These clients of a cohort of everyone; the other places are padding, so that no shape changes."""
    valid = jnp.isin(cohort.ids, jnp.asarray(members))
    return cohort._replace(ids=jnp.where(valid, cohort.ids, cohort.ids.shape[0]), valid=valid)


def start(algorithm: fp.Algorithm, num_clients: int, seed: int = 0) -> fp.State:
    """The first state on ``num_clients`` clients."""
    return algorithm.init(algorithm.task.init(jax.random.key(seed)), seed, num_clients=num_clients)


def experiment(name: str, task: fp.Task, *, num_clients: int = 2, **static: Any) -> Callable[..., tuple]:
    """``run(cohort, rounds, **values) -> (state, metrics of the last round)``, compiled once for all values."""

    @jax.jit
    def program(cohort, rounds, values):
        algorithm = fp.method(name).make(task, **static, **values)
        state = start(algorithm, num_clients)
        _, shapes = jax.eval_shape(algorithm.step, state, cohort, jax.random.key(0))
        metrics = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.fori_loop(
            0, rounds, lambda _, carry: algorithm.step(carry[0], cohort, jax.random.key(0)), (state, metrics)
        )

    return lambda cohort, rounds, **values: program(cohort, rounds, values)


CLASSES, FEATURES = 3, 4
EXAMPLE = (("x", (FEATURES,), "float32"), ("y", (), "int32"))


@functools.cache
def classifier(norm: bool = False) -> fp.Task:
    """Two dense layers, ``hidden1`` and ``head``, with batch normalisation ``norm1`` between them or without."""
    model = "mlp_norm" if norm else "mlp"
    return fp.tasks.from_model(EXAMPLE, model, num_classes=CLASSES, hidden=(5,))


def labelled(sizes: tuple[int, ...], seed: int = 0) -> dict[str, np.ndarray]:
    """Random labelled examples, ``[clients, largest size, ...]``."""
    draw = np.random.default_rng(seed)
    shape = (len(sizes), max(sizes))
    return {
        "x": draw.normal(size=(*shape, FEATURES)).astype(np.float32),
        "y": draw.integers(0, CLASSES, shape).astype(np.int32),
    }


def labelled_clients(sizes: tuple[int, ...] = (7, 4, 10), seed: int = 0) -> fp.Cohort:
    """A cohort with labelled examples."""
    return fp.cohort_of(labelled(sizes, seed), sizes=list(sizes))


def federation(train: tuple[int, ...], test: tuple[int, ...] | None = None, seed: int = 0) -> fp.Federation:
    """Clients ``0, 1, ...`` with so many labelled examples."""
    sizes = {"train": train, "test": (0,) * len(train) if test is None else test}
    tables = {split: labelled((*sizes[split], 1), seed + place) for place, split in enumerate(sizes)}
    data = {
        client: {
            split: {name: x[client, : sizes[split][client]] for name, x in table.items()}
            for split, table in tables.items()
        }
        for client in range(len(train))
    }
    return fp.data.from_clients(data, num_classes=CLASSES)


@functools.cache
def softmax_regression() -> fp.Task:
    """Two leaves, ``kernel`` and ``bias``: the smallest task that every method of the registry can take."""

    def init(key):
        return {"kernel": jax.random.normal(key, (FEATURES, CLASSES)), "bias": jnp.zeros(CLASSES)}

    def apply(variables, batch, key):
        return batch["x"] @ variables["kernel"] + variables["bias"], {}

    return fp.tasks.supervised(init, apply, example=EXAMPLE)


ROLES = {
    **{name: {"personal": "bias"} for name in ("fedper", "fedrep", "fedsim", "fedalt", "fedbn")},
    "lg_fedavg": {"shared": "kernel"},
    "fedbabu": {"frozen": "bias"},
    **{name: {"head": fp.everything} for name in ("fedrod", "fedrod_hyper")},
    "fedpac": {"head": "kernel"},
    **{
        name: {"on": "kernel", "also": "bias"}
        for name in ("fedit", "ffa_lora", "fedsa_lora", "local_lora", "fedex_lora", "flora", "hetlora", "fed_adapter")
    },
    "pfedlora": {"on": "kernel"},
    "bitfit": {"also": "bias"},
    "pfedmoe": {"head": "kernel"},
    **{name: {"on": "bias"} for name in ("private_generator", "shared_generator")},
    "knn_per": {"head": "kernel"},
    "conditional_layers": {"groups": ("kernel", "bias")},
    "layers_by_client": {"groups": ("kernel", "bias")},
    "fedlp": {"groups": ("kernel", "bias")},
}
"""Settings that name leaves of :func:`softmax_regression`."""

SMALL = {"rank": 2, "ranks": (1, 2), "size": 2}
"""Settings of the sizes of adapters that fit into a toy, whose matrices are thin."""


def small(name: str) -> dict[str, Any]:
    """Those that the method of that name has."""
    return {setting: value for setting, value in SMALL.items() if setting in fp.method(name).settings}


def methods(*but: str) -> list[Any]:
    """All methods but those, as parameters of a test; the first of each family stands for it in short runs.

    What is tested of a method is tested in one process, so that its programs are compiled once.
    """
    found, families = [], set()
    for name, method in fp.methods().items():
        if name not in but:
            marks = [pytest.mark.xdist_group(name)]
            found.append(pytest.param(name, marks=[*marks, *[pytest.mark.every_method] * (method.family in families)]))
            families.add(method.family)
    return found


def every_method(name: str, **settings: Any) -> fp.Algorithm:
    """The method of that name on :func:`softmax_regression`; runs that differ in float settings share a program."""
    return fp.method(name).make(softmax_regression(), batch_size=3, **small(name), **ROLES.get(name, {}), **settings)


def recorded(algorithm: fp.Algorithm, federation: fp.Federation, rounds: int, **options: Any) -> tuple:
    """A run as :func:`fedjax_pers.run` gives it, and the rows that go into its record: ``(state, history, rows)``."""
    costs = fp.traffic(algorithm, fp.start(algorithm, federation, 0), pool_of(federation, "train"))
    ledger, rows = Ledger("toy", costs, federation, None), []
    state, history = fp.run(
        algorithm, None, federation, rounds, on_block=lambda block: rows.extend(ledger.rows(block)), **options
    )
    return state, history, rows


@functools.cache
def _step(name: str, task: fp.Task, static: tuple[tuple[str, Any], ...], executor: fp.Executor | None) -> Callable:
    """A method's step with its float settings as arguments, which is how a run compiles it."""

    @jax.jit
    def step(state, cohort, key, floats):
        algorithm = fp.method(name).make(task, **dict(static), **floats)
        return (fp.with_executor(algorithm, executor) if executor else algorithm).step(state, cohort, key)

    return step


def _split(settings: dict[str, Any]) -> tuple[tuple[tuple[str, Any], ...], dict[str, float]]:
    floats = {key: value for key, value in settings.items() if isinstance(value, float)}
    return tuple(sorted((key, value) for key, value in settings.items() if key not in floats)), floats


def program_text(name: str, task: fp.Task, cohort: fp.Cohort, **settings: Any) -> str:
    """What is handed to the compiler for a round: methods of equal text compute equal bits."""
    static, floats = _split(settings)
    state = start(fp.method(name).make(task, **settings), cohort.ids.shape[0])
    return _step(name, task, static, None).lower(state, cohort, jax.random.key(0), floats).as_text()


def trajectory(
    name: str,
    task: fp.Task,
    cohort: fp.Cohort,
    rounds: tuple[tuple[int, ...], ...],
    *,
    seed: int = 0,
    executor: fp.Executor | None = None,
    **settings: Any,
) -> list[fp.State]:
    """The states of a method before and after rounds with these clients; equal static settings compile once."""
    static, floats = _split(settings)
    step = _step(name, task, static, executor)
    states = [start(fp.method(name).make(task, **settings), cohort.ids.shape[0], seed)]
    for members in rounds:
        states.append(step(states[-1], only(cohort, list(members)), jax.random.key(seed), floats)[0])
    return states


def same_bits(found: Any, expected: Any) -> None:
    """Trees equal in structure, dtype, shape and every bit."""
    assert_bitwise(jax.tree.map(np.array, found), jax.tree.map(np.array, expected), "compared trees")
