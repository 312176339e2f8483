"""One client after another, in groups or all at once: the same sums, outputs in order; and the choice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

import fedjax_pers as fp
from fedjax_pers.executors import Executor, chunked, looped, vectorised
from fedjax_pers.executors.default import default_executor, overridden
from fedjax_pers.executors.lanes import map_reduce, padding, split
from tests import toys

CLIENTS = 7
# Their sum depends on the order of additions: beside 1e8 numbers are multiples of 8.
NUMBERS = np.float32([1e8, 3, -1e8, 5.1, 1 / 3, 2, 0.7])
EXECUTORS = [looped(), chunked(2), chunked(3), chunked(CLIENTS), chunked(50), vectorised()]
ids = str


def items(clients=CLIENTS):
    return {"x": jnp.asarray(NUMBERS[:clients, None] * np.float32([1, 0.7])), "number": jnp.arange(clients)}


def client(item):
    """Sums of square roots and numbers; the output says who it is."""
    root = jnp.sign(item["x"]) * jnp.sqrt(jnp.abs(item["x"]))
    return {"x": item["x"], "root": root, "count": item["number"]}, (item["number"], root)


def equally_long(executor, client, items):
    """All clients take as long."""
    cost = jnp.zeros(jax.tree.leaves(items)[0].shape[0], jnp.int32)
    return map_reduce(executor, lambda common, item: client(item), (), items, cost)


def mapped(executor, client=client, given=None):
    """As a round does it: filled up to a multiple of the lanes with items that add nothing."""
    given = items() if given is None else given
    count = jax.tree.leaves(given)[0].shape[0]
    extra = padding(executor, count)
    filled = jax.tree.map(lambda x: jnp.concatenate([x, jnp.zeros((extra, *x.shape[1:]), x.dtype)]), given)
    total, outputs = jax.jit(lambda items: equally_long(executor, client, items))(filled)
    return total, jax.tree.map(lambda x: x[:count], outputs)


def in_order(rows):
    """The sum of rows, one after another in their own precision."""
    total = np.zeros_like(rows[0])
    for row in rows:
        total = total + row
    return total


# Sums and outputs


@pytest.mark.parametrize("executor", EXECUTORS, ids=ids)
def test_sums_are_those_of_a_loop_to_the_bit_and_outputs_are_in_order(executor):
    total, (numbers, roots) = mapped(executor)
    x = np.asarray(items()["x"])
    assert in_order(x).tolist() != in_order(x[::-1]).tolist()
    root = np.sign(x) * np.sqrt(np.abs(x))
    toys.same_bits(total, {"x": in_order(x), "root": in_order(root), "count": np.int32(21)})
    assert numbers.tolist() == list(range(CLIENTS))
    toys.same_bits(roots, root)


@pytest.mark.parametrize("executor", [looped(), chunked(3), vectorised()], ids=ids)
def test_a_round_of_a_method_does_not_depend_on_the_executor(executor):
    optima = np.float32([3, 0.1, -2, 5.1, 1 / 3, 2, 0.7])
    cohort = toys.clients({"a": optima[:, None], "h": np.ones((CLIENTS, 1))})
    everyone = (tuple(range(CLIENTS)),)
    found, expected = (
        toys.trajectory("fedavg", toys.quadratic(), cohort, everyone, executor=each, lr=0.5)[-1]
        for each in (executor, chunked(2))
    )
    toys.same_bits(found, expected)
    np.testing.assert_allclose(found.shared["w"], optima.mean() / 2, rtol=1e-6)  # from 0, half of the way


@pytest.mark.parametrize("executor", EXECUTORS, ids=ids)
def test_no_clients(executor):
    total, (numbers, roots) = mapped(executor, given=items(0))
    toys.same_bits(total, {"x": np.zeros(2, np.float32), "root": np.zeros(2, np.float32), "count": np.int32(0)})
    toys.same_bits((numbers, roots), (np.zeros(0, np.int32), np.zeros((0, 2), np.float32)))


@pytest.mark.parametrize("executor", EXECUTORS, ids=ids)
def test_one_client(executor):
    total, (numbers, _) = mapped(executor, given=items(1))
    toys.same_bits(total["x"], np.float32([1e8, 1e8]) * np.float32([1, 0.7]))
    assert numbers.tolist() == [0]


@pytest.mark.parametrize(
    ("executor", "clients", "used", "extra"),
    [
        (looped(), 7, 1, 0),
        (chunked(3), 7, 3, 2),
        (chunked(7), 7, 7, 0),
        (chunked(8), 7, 7, 0),  # never more lanes than clients
        (chunked(4), 8, 4, 0),
        (vectorised(), 7, 7, 0),
        (chunked(3), 0, 1, 1),
    ],
    ids=ids,
)
def test_lanes_and_padding(executor, clients, used, extra):
    assert split(executor, clients) == (1, used)
    assert padding(executor, clients) == extra


def operations(function, *arguments):
    """Everything that is computed, programs within programs included."""
    programs = [jax.make_jaxpr(function)(*arguments)]
    while programs:
        for operation in programs.pop().eqns:
            yield operation
            inner = jax.tree.leaves(operation.params, is_leaf=lambda x: isinstance(x, core.Jaxpr | core.ClosedJaxpr))
            programs += [x for x in inner if isinstance(x, core.Jaxpr | core.ClosedJaxpr)]


@pytest.mark.parametrize(("lanes", "kept"), [(1, 1), (2, 2), (3, 3), (6, 6)])
def test_uploads_are_held_for_one_group_only(lanes, kept):
    def upload(item):
        return jnp.outer(item["x"], jnp.arange(500.0)), item["number"]

    found = operations(lambda items: equally_long(Executor(lanes), upload, items), items(6))
    assert max(x.aval.size for operation in found for x in operation.outvars) == kept * 2 * 500


# Settings


@pytest.mark.parametrize("lanes", [0, -2, 2.0, True, "2"])
def test_lanes_that_are_no_positive_whole_number(lanes):
    message = "lanes: found .*; allowed is a whole number of at least 1"
    with pytest.raises(ValueError, match=message):
        chunked(lanes)
    with pytest.raises(ValueError, match=message):
        padding(Executor(lanes), 5)
    with pytest.raises(ValueError, match=message):
        equally_long(Executor(lanes), client, items())


def convolves(executor):
    """Whether an operation of the executor's program is a convolution as JAX has it."""

    def convolve(x):
        return jax.lax.conv(x, jnp.ones((5, 4, 3, 3)), (1, 1), "SAME"), ()

    found = operations(lambda items: equally_long(executor, convolve, items), jnp.ones((4, 2, 4, 8, 8)))
    return "conv_general_dilated" in {operation.primitive.name for operation in found}


def test_convolutions_are_left_as_they_are_or_made_fast():
    assert convolves(Executor(2, "plain"))
    assert not convolves(Executor(2, "fast"))
    assert convolves(Executor(2, "auto")) == (jax.default_backend() != "cpu")


def test_other_words_for_convolutions():
    message = "convolutions: found 'fats'; allowed are auto, fast, plain. Did you mean 'fast'"
    with pytest.raises(ValueError, match=message):
        equally_long(Executor(convolutions="fats"), client, items())
    task, misspelt = toys.quadratic(), Executor(convolutions="fats")
    for algorithm in (fp.compose(task, executor=misspelt), fp.with_executor(fp.compose(task), misspelt)):
        state, cohort = toys.start(algorithm, 2), toys.clients()
        for use in (algorithm.step, algorithm.personalize):
            with pytest.raises(ValueError, match=message):
                use(state, cohort, jax.random.key(0))


# The choice


def text_of(algorithm):
    """The program of a round of six clients."""
    state, cohort = toys.start(algorithm, 6), toys.copies([1] * 6, {"a": [[0.0]] * 6, "h": [[1.0]] * 6})
    return jax.jit(algorithm.step).lower(state, cohort, jax.random.key(0)).as_text()


def test_an_executor_given_afterwards_is_as_one_given_before():
    task = toys.quadratic()
    programs = {lanes: text_of(fp.compose(task, executor=Executor(lanes))) for lanes in (2, None)}
    assert len(set(programs.values())) == 2
    for lanes, program in programs.items():
        assert text_of(fp.with_executor(fp.compose(task), Executor(lanes))) == program
    # Where parts named an executor, that one stays.
    assert text_of(fp.with_executor(fp.compose(task, executor=chunked(2)), looped())) == programs[2]


def test_an_algorithm_that_is_made_again_keeps_its_executor():
    algorithm = fp.with_executor(fp.method("fedavg").make(toys.softmax_regression(), batch_size=3), chunked(2))
    assert algorithm.recipe.executor == chunked(2)
    again = algorithm.recipe.build(algorithm.recipe.floats)
    state, cohort = toys.start(again, 6), toys.labelled_clients((1, 2, 3, 4, 5, 6))
    programs = [jax.jit(each.step).lower(state, cohort, jax.random.key(0)).as_text() for each in (algorithm, again)]
    assert programs[0] == programs[1]
    with overridden(looped()):  # the innermost is meant
        assert jax.jit(again.step).lower(state, cohort, jax.random.key(0)).as_text() == programs[0]


def test_the_choice_holds_within_its_block_only():
    usual = default_executor({"w": jnp.ones(3)})
    with overridden(chunked(5)):
        assert default_executor({"w": jnp.ones(3)}) == chunked(5)
        with overridden(looped()):
            assert default_executor({"w": jnp.ones(3)}) == looped()
        assert default_executor({"w": jnp.ones(3)}) == chunked(5)
    assert default_executor({"w": jnp.ones(3)}) == usual
    with pytest.raises(RuntimeError), overridden(looped()):
        raise RuntimeError
    assert default_executor({"w": jnp.ones(3)}) == usual


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="on accelerators the whole cohort runs at once")
def test_on_a_cpu_clients_with_convolutions_run_one_by_one():
    assert default_executor({"kernel": jnp.zeros((3, 3, 1, 2)), "bias": jnp.zeros(2)}).lanes == 1
    assert default_executor({"kernel": jnp.zeros((3, 3)), "bias": jnp.zeros(2)}).lanes > 1


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="on accelerators the whole cohort runs at once")
@pytest.mark.parametrize(
    ("size", "lanes"),
    [(0, 32), (4, 32), (64 * 1024, 32), (64 * 1024 + 4, 1), (10**9, 1)],
)
def test_on_a_cpu_larger_models_get_fewer_lanes(size, lanes):
    shared, personal = (jax.ShapeDtypeStruct((n // 4,), jnp.float32) for n in (size - size // 8 * 4, size // 8 * 4))
    assert default_executor(({"w": shared}, {"v": personal})) == Executor(lanes, "auto", devices=None)
