"""The conformance suite: what every algorithm must do, whatever it computes. Public: your own method can pass it.

Each check is a function ``check(subject)`` that raises AssertionError with what differed. :func:`check_algorithm` runs
them all.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pers.base import Cohort, State, Task
from fedjax_pers.compose import SAID, Algorithm, with_executor
from fedjax_pers.executors import Executor
from fedjax_pers.simulate import checkpoint

CLIENTS, UNSEEN = 5, 2
PLACES = CLIENTS + 1  # of every cohort here but one, so that the checks share one compiled program
VALUES = (0.1, 0.05)  # of the float setting; all checks but one use the first


@dataclass(frozen=True)
class Subject:
    """What is checked.

    Attributes:
      make: ``make(**settings) -> Algorithm``; ``settings`` overrides a float setting.
      task: its task.
      data: pools of examples, rows of all clients, ``[rows, ...]`` by field.
      sizes: examples of each client; ``CLIENTS`` of them take part in training, ``UNSEEN`` more never do.
      float_setting: name of a float setting to vectorise over, or ``None``.
    """

    make: Callable[..., Algorithm]
    task: Task
    data: dict[str, np.ndarray]
    sizes: tuple[int, ...]
    float_setting: str | None

    def at(self, value: Any) -> Algorithm:
        """The algorithm with this value of its float setting."""
        return self.make(**({} if self.float_setting is None else {self.float_setting: value}))

    @cached_property
    def algorithm(self) -> Algorithm:
        """The algorithm that is checked."""
        return self.at(VALUES[0])

    @cached_property
    def compiled(self) -> Callable:
        """``compiled(value, state, cohort, key)``: a step, the value of the float setting being an argument."""
        return jax.jit(lambda value, *arguments: self.at(value).step(*arguments))

    def step(self, state: State, cohort: Cohort, key: Any) -> tuple[State, Any]:
        """The compiled step of the algorithm that is checked."""
        return self.compiled(VALUES[0], state, cohort, key)

    def cohort(self, clients: list[int], *, places: int = PLACES, spoil: bool = False) -> Cohort:
        """A cohort of these clients in this order, padded; ``spoil`` writes NaN where nobody may read."""
        start = np.concatenate([[0], np.cumsum(self.sizes)])[:-1]
        padding = places - len(clients)
        data = dict(self.data)
        if spoil:
            used = np.concatenate(
                [np.arange(start[c], start[c] + self.sizes[c]) for c in clients] or [np.zeros(0, int)]
            )
            unused = np.setdiff1d(np.arange(sum(self.sizes)), used)
            data = {name: _spoiled(x, unused) for name, x in data.items()}

        def padded(values: Any, fill: Any, dtype: Any) -> jax.Array:
            return jnp.asarray([*values, *[fill] * padding], dtype)

        return Cohort(
            ids=padded(clients, CLIENTS, jnp.int32),
            tags=padded(clients, 0, jnp.uint32),
            start=padded([start[c] for c in clients], 0, jnp.int32),
            size=padded([self.sizes[c] for c in clients], 0, jnp.int32),
            valid=padded([True] * len(clients), False, bool),
            data={name: jnp.asarray(x) for name, x in data.items()},
            room=jnp.zeros((max(self.sizes), 0)),
        )

    def start(self, seed: Any = 0) -> State:
        """A first state of the algorithm."""
        key = jax.random.key(seed)
        return self.algorithm.init(self.algorithm.task.init(key), key, num_clients=CLIENTS)

    def those(self, clients: list[int]) -> list[int]:
        """These clients, or all where the method needs everyone."""
        return list(range(CLIENTS)) if self.algorithm.participation == "everyone" else clients


def _spoiled(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    x = np.array(x)
    x[rows] = np.nan if np.issubdtype(x.dtype, np.floating) else -(10**6)
    return x


def assert_bitwise(found: Any, expected: Any, what: str) -> None:
    """Trees equal in structure, dtype, shape and every bit; the message names the first leaf that is not."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(expected)]
    assert str(jax.tree.structure(found)) == str(jax.tree.structure(expected)), f"{what}: the trees differ in structure"
    for path, a, b in zip(paths, jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype and a.shape == b.shape, (
            f"{what}: {path} is {a.dtype}{a.shape}, not {b.dtype}{b.shape}"
        )
        if a.tobytes() != b.tobytes():
            differ = int(np.sum(~((a == b) | ((a != a) & (b != b)))))
            example = np.argwhere(a != b)[:1].tolist()
            raise AssertionError(f"{what}: {path} differs in {differ} of {a.size} entries, for example at {example}")


def assert_close(found: Any, expected: Any, what: str, rtol: float = 2e-5, atol: float = 1e-6) -> None:
    """Trees equal up to re-association of sums in float32."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(expected)]
    assert str(jax.tree.structure(found)) == str(jax.tree.structure(expected)), f"{what}: the trees differ in structure"
    for path, a, b in zip(paths, jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol, atol, err_msg=f"{what}: {path}")


def _programs(compiled: Any) -> int:
    return compiled._cache_size()


def same_structure(subject: Subject) -> None:
    """The state that comes out has the tree, shapes and dtypes of the one that went in; metrics are one a place.

    A method that draws clients itself has as many places as it draws.
    """
    state, cohort = subject.start(), subject.cohort(subject.those([3, 0]))
    after, metrics = jax.eval_shape(subject.algorithm.step, state, cohort, jax.random.key(0))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    assert after == shapes, f"step changes the state's tree:\n{after}\nfrom\n{shapes}"
    places = metrics.ids.shape
    assert len(places) == 1 and places[0] <= PLACES, f"metrics.ids has shape {places}, for {PLACES} places"
    for name in ("loss", "steps", "examples", "weight", "rejected", "empty", "transmitted"):
        assert getattr(metrics, name).shape == places, f"metrics.{name} has shape {getattr(metrics, name).shape}"


def compiled_equals_eager(subject: Subject) -> None:
    """A compiled step, clients side by side, gives what the step gives outside ``jit``, one client after another."""
    state, cohort = subject.start(), subject.cohort(subject.those([0, 2]))
    eager, _ = with_executor(subject.algorithm, Executor(1)).step(state, cohort, jax.random.key(1))
    compiled, _ = subject.step(state, cohort, jax.random.key(1))
    assert_close(compiled, eager, "jit(step) against step, one client after another")


def one_compilation(subject: Subject) -> None:
    """Rounds with different cohorts, sizes included, reuse one program; and two equal runs give equal bytes."""
    runs = []
    for _ in range(2):
        state = subject.start()
        for clients in ([0, 1], [4, 2, 3], [3]):
            state, _ = subject.step(state, subject.cohort(subject.those(clients)), jax.random.key(0))
        runs.append(state)
    programs = _programs(subject.compiled)
    assert programs == 1, f"step was compiled {programs} times for cohorts of one shape"
    assert_bitwise(runs[1], runs[0], "the same run twice")
    assert int(state.round) == 3, f"state.round is {int(state.round)} after 3 rounds"
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(state.shared)), (
        "the shared leaves are not finite"
    )


def order(subject: Subject) -> None:
    """The order of clients changes nothing; rows outside the cohort (NaN here) are not read."""
    state, clients = subject.start(), subject.those([4, 0, 2])
    plain, _ = subject.step(state, subject.cohort(sorted(clients)), jax.random.key(0))
    mixed, _ = subject.step(state, subject.cohort(clients[::-1], spoil=True), jax.random.key(0))
    assert_bitwise(mixed, plain, "clients in another order, rows of others NaN")


def pure(subject: Subject) -> None:
    """``step`` does not change its arguments, and ``init`` copies what it is given: the state may be donated."""
    params = subject.algorithm.task.init(jax.random.key(0))
    state = subject.algorithm.init(params, jax.random.key(0), num_clients=CLIENTS)
    cohort = subject.cohort(list(range(CLIENTS)))
    before = jax.tree.map(np.array, (state, cohort, params))
    subject.step(state, cohort, jax.random.key(0))
    assert_bitwise(jax.tree.map(np.array, (state, cohort, params)), before, "arguments after a step")
    for leaf in {id(x): x for x in jax.tree.leaves(state)}.values():
        leaf.delete()  # what donation does
    assert_bitwise(jax.tree.map(np.array, params), before[2], "the user's params after the state was donated")


def absent_rows(subject: Subject) -> None:
    """Rows of clients that did not take part keep every bit; so do those that had nothing to train on."""
    state, clients = subject.start(), subject.those([1, 3])
    after, _ = subject.step(state, subject.cohort(clients), jax.random.key(0))
    idle = [c for c in range(CLIENTS) if c not in clients or subject.sizes[c] == 0]
    rows = [jax.tree.map(lambda x: np.asarray(x)[idle], each.rows) for each in (after, state)]
    assert_bitwise(rows[0], rows[1], f"rows of clients {idle}")
    assert (np.asarray(after.seen)[idle] == 0).all(), f"state.seen counts {idle}, which did not train"


def executors_and_padding(subject: Subject) -> None:
    """In chunks of a size that does not divide the cohort, with more padding (NaN here): the same result.

    The default is all at once for models as small as those of the checks; :func:`compiled_equals_eager` has one client
    after another.
    """
    state, clients = subject.start(), subject.those([0, 2, 3, 4])
    expected, _ = subject.step(state, subject.cohort(clients), jax.random.key(0))
    step = jax.jit(with_executor(subject.algorithm, Executor(4)).step)
    wider, _ = step(state, subject.cohort(clients, places=PLACES + 3, spoil=True), jax.random.key(0))
    assert_close(wider, expected, "in chunks of 4, with three more places of padding, against the default")


def vectorises(subject: Subject) -> None:
    """``vmap`` over seeds and over a float setting, both at once, equals one run after another, compiled once."""
    cohort = subject.cohort(subject.those([0, 3]))

    def one(value: Any, seed: Any) -> State:
        key = jax.random.key(seed)
        return subject.compiled(value, subject.start(seed), cohort, key)[0]

    values, seeds = jnp.array(VALUES), jnp.array([0, 1])
    alone = [one(value, seed) for value, seed in zip(VALUES, (0, 1), strict=True)]
    programs = _programs(subject.compiled)
    assert programs == 1, f"a second value of {subject.float_setting} compiled again"
    together = jax.jit(jax.vmap(one))(values, seeds)
    expected = jax.tree.map(lambda *x: jnp.stack(x), *alone)
    assert_close(together, expected, f"vmap over seeds and {subject.float_setting}")


def personalises(subject: Subject) -> None:
    """Every client, unseen ones included, has finite metrics of its own model; nothing is written."""
    everyone = list(range(CLIENTS + UNSEEN))
    state, _ = subject.step(subject.start(), subject.cohort(list(range(CLIENTS))), jax.random.key(0))
    before = jax.tree.map(np.array, state)
    personalize = jax.jit(subject.algorithm.personalize)
    models = personalize(state, subject.cohort(everyone, places=len(everyone)), jax.random.key(0))
    batch = {name: jnp.asarray(x[:4]) for name, x in subject.data.items()} | {"weight": jnp.ones(4)}
    table = jax.vmap(lambda variables: subject.algorithm.task.metrics(variables, batch))(models)
    for name, values in table.items():
        assert values.shape == (len(everyone), 4), f"metric {name!r} has shape {values.shape}"
        assert np.isfinite(np.asarray(values)).all(), f"metric {name!r} of a personalised model is not finite"
    few = [CLIENTS + 1, 2, 0]
    some = personalize(state, subject.cohort(few, places=len(everyone)), jax.random.key(0))
    some = jax.tree.map(lambda x: x[: len(few)], some)
    same = jax.tree.map(lambda x: x[np.array(few)], models)
    assert_bitwise(some, same, "personalize for fewer clients, in another order")
    assert_bitwise(jax.tree.map(np.array, state), before, "the state after personalize")


def firewall(subject: Subject) -> None:
    """No personal leaf is in the upload, by name; personal leaves that are NaN after training leave it as it is."""
    exchange = subject.algorithm.exchange
    if exchange is None:
        return
    state, cohort = subject.start(), subject.cohort([0])

    @jax.jit
    def crossing(spoil: Any) -> Any:
        def tamper(row: Any) -> Any:
            return jax.tree.map(
                lambda x: jnp.where(spoil, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 0, x).astype(x.dtype),
                row,
            )

        return exchange(state, cohort, jax.random.key(0), tamper)

    (_, upload, row), (_, again, _) = crossing(False), crossing(True)
    assert not set(upload) & set(row), f"personal leaves in the upload: {sorted(set(upload) & set(row))}"
    leaves = {name for name in upload if not name.startswith(SAID)}
    assert leaves == set(state.shared), f"the upload has {sorted(leaves)}, the server {sorted(state.shared)}"
    assert set(row) == set(state.rows), f"the row has {sorted(row)}, the state's rows {sorted(state.rows)}"
    assert_bitwise(again, upload, "the upload when personal leaves are NaN after training")


def saves_and_loads(subject: Subject) -> None:
    """A run that is saved, restored and continued ends in the same bytes as one that was not interrupted."""
    cohort = subject.cohort(list(range(CLIENTS)))
    state, _ = subject.step(subject.start(), cohort, jax.random.key(0))
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(Path(folder) / "run", 1, state)
        restored = checkpoint.restore(Path(folder) / "run", subject.start(seed=9))
    assert_bitwise(restored, state, "a restored state")
    ends = [subject.step(each, cohort, jax.random.key(0))[0] for each in (restored, state)]
    assert_bitwise(ends[0], ends[1], "continued")


def rejects_broken_uploads(subject: Subject) -> None:
    """A client whose examples are NaN is left out and marked; all else is as if it had been absent."""
    if subject.algorithm.participation == "everyone":
        return
    state, first = subject.start(), sum(subject.sizes[:3])
    broken = np.arange(first, first + subject.sizes[3])
    data = {n: jnp.asarray(_spoiled(x, broken) if x.dtype.kind == "f" else x) for n, x in subject.data.items()}
    after, metrics = subject.step(state, subject.cohort([0, 3])._replace(data=data), jax.random.key(0))
    expected, _ = subject.step(state, subject.cohort([0]), jax.random.key(0))
    assert np.asarray(metrics.rejected).tolist() == [False, True] + [False] * (PLACES - 2), (
        f"rejected: {metrics.rejected}"
    )
    assert_bitwise(after, expected, "with a broken client, against without it")


CHECKS: tuple[Callable[[Subject], None], ...] = (
    same_structure,
    compiled_equals_eager,
    one_compilation,
    order,
    pure,
    absent_rows,
    executors_and_padding,
    vectorises,
    personalises,
    firewall,
    saves_and_loads,
    rejects_broken_uploads,
)


def subject_for(
    factory: Callable[..., Algorithm], task: Task, *, float_setting: str | None = "lr", seed: int = 0, **settings: Any
) -> Subject:
    """A factory and a task with small random data: clients of 6, 1, 0, 7, 3 examples and two unseen ones."""
    if task.example is None:
        raise ValueError("task.example: found None; the checks need the shapes of an example")
    rng = np.random.default_rng(seed)
    sizes = (6, 1, 0, 7, 3, 4, 0)
    data = {}
    for name, shape, dtype in task.example:
        size = (sum(sizes), *shape)
        whole = np.issubdtype(np.dtype(dtype), np.integer)
        data[name] = (rng.integers(0, task.num_classes or 2, size) if whole else rng.normal(size=size)).astype(dtype)

    def make(**override: Any) -> Algorithm:
        return factory(task, **{**settings, **override})

    return Subject(make, task, data, sizes, float_setting)


def check_algorithm(
    factory: Callable[..., Algorithm], task: Task, *, float_setting: str | None = "lr", **settings: Any
) -> None:
    """Runs every check on ``factory(task, **settings)``; AssertionError says which failed and on what.

    Example:
      >>> import fedjax_pers as fp
      >>> from fedjax_pers.testing import check_algorithm
      >>> task = fp.tasks.from_model((("x", (3,), "float32"), ("y", (), "int32")), "linear", num_classes=2)
      >>> def my_method(task, *, lr=0.1):
      ...     return fp.compose(task, client=fp.train(lr, batch_size=4))
      >>> check_algorithm(my_method, task)  # doctest: +SKIP

    Args:
      factory: ``factory(task, **settings) -> Algorithm``.
      task: a task with ``example``; labels are drawn from its classes.
      float_setting: the float setting to vectorise over; ``None`` for none.
      settings: passed to the factory.
    """
    subject = subject_for(factory, task, float_setting=float_setting, **settings)
    for check in CHECKS:
        try:
            check(subject)
        except AssertionError as error:
            raise AssertionError(f"{check.__name__}: {error}") from error
