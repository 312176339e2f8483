"""Names are unique over shared, personal and frozen leaves; what would break that is refused. And layouts copy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_pers as fp
from fedjax_pers.layouts import replace
from tests.tasks.conftest import LIBRARIES, normed, small
from tests.toys import same_bits

MAKERS = {
    "by_role": lambda **options: fp.by_role(**options),
    "twin": lambda **options: fp.twin(**options),
    "interpolate": lambda **options: fp.interpolate(0.25, **options),
}


def task_of(**leaves):
    """A task of these leaves, with a loss that nobody asks for."""
    return fp.Task(lambda key: jax.tree.map(jnp.asarray, leaves), loss=None, metrics=None)


@pytest.mark.parametrize("statistics", ["average", "local", "ignore"])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_no_name_has_two_roles_and_every_view_finds_its_leaves(library, maker, statistics):
    task = normed(library)
    layout = MAKERS[maker](frozen=fp.bias(), statistics=statistics)(task)
    parts = jax.eval_shape(lambda: layout.init(task.init(jax.random.key(0))))
    names = [name for leaves in parts for name in leaves]
    assert len(names) == len(set(names))
    assert all(set(view.keys.values()) <= set(names) for view in layout.views.values())
    assert layout.trainable <= set(parts.shared) | set(parts.personal)


@pytest.mark.parametrize("library", LIBRARIES)
def test_random_state_of_a_model_is_no_leaf(library):
    layout = fp.twin()(small(library, dropout=0.5).task)
    parts = jax.eval_shape(lambda: layout.init(layout.task.init(jax.random.key(0))))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(parts))


@pytest.mark.parametrize("maker", ["twin", "interpolate"])
def test_a_model_whose_leaves_are_named_like_copies(maker):
    task = task_of(own={"w": np.zeros(2)}, w=np.ones(2))
    with pytest.raises(ValueError, match=r"task: found leaves \['own/w'\]; 'own/' marks a client's own copies"):
        MAKERS[maker]()(task)


def test_a_model_with_a_leaf_named_like_the_mixing_weight():
    task = task_of(alpha=np.zeros(2), w=np.ones(2))
    for name in ("alpha", "own/w"):
        with pytest.raises(ValueError, match=f"name: found '{name}', which is a leaf of the models; choose another"):
            fp.interpolate(0.25, name=name)(task)
    parts = fp.interpolate(0.25, name="mix")(task).init(task.init(None))
    assert {name: x.shape for name, x in parts.personal.items()} == {"own/alpha": (2,), "own/w": (2,), "mix": ()}


@pytest.mark.parametrize("weight", [-0.1, 1.5, np.nan, "half", None])
def test_mixing_weights_that_are_no_share(weight):
    with pytest.raises(ValueError, match=r"weight: found .*; allowed is (0 \.\. 1|a number)"):
        fp.interpolate(weight)


def test_a_traced_mixing_weight():
    task = task_of(w=np.float32([1, 2]))

    def mixed(weight):
        layout = fp.interpolate(weight)(task)
        parts = replace(layout.init(task.init(None)), {"own/w": jnp.float32([5, 10])})
        return layout.view("model").read(parts)["w"]

    assert jax.vmap(mixed)(jnp.array([0.0, 0.25, 1.0])).tolist() == [[1, 2], [2, 4], [5, 10]]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_a_mixture_keeps_the_precision_of_its_leaves(dtype):
    task = task_of(w=jnp.array([1, 2], dtype), count=np.int32(3))
    layout = fp.interpolate(0.25)(task)
    parts = replace(layout.init(task.init(None)), {"own/w": jnp.array([5, 10], dtype), "own/count": jnp.int32(8)})
    # 1/4 (5, 10) + 3/4 (1, 2); counters are the client's own
    same_bits(layout.view("model").read(parts), {"w": np.asarray([2, 4], dtype), "count": np.int32(8)})


def test_a_mixture_in_double_precision():
    with jax.enable_x64(True):
        task = task_of(w=np.float64([1, 2]))
        layout = fp.interpolate(0.25)(task)
        parts = replace(layout.init(task.init(None)), {"own/w": np.float64([1 + 2.0**-40, 2])})
        same_bits(layout.view("model").read(parts), {"w": np.float64([1 + 2.0**-42, 2])})


def aligned_zeros(size):
    """An array that JAX would take over without a copy: those that start at a multiple of 64 bytes."""
    room = np.zeros(size + 16, np.float32)
    first = -room.ctypes.data % 64 // room.itemsize
    return room[first : first + size]


@pytest.mark.parametrize("maker", MAKERS)
def test_what_a_layout_is_given_may_change_afterwards(maker):
    variables = {"b": aligned_zeros(64), "w": aligned_zeros(64)}
    parts = MAKERS[maker](frozen="b")(task_of(**variables)).init(variables)
    expected = jax.tree.map(np.array, parts)
    for x in variables.values():
        x += 1
    same_bits(parts, expected)


def test_a_clients_copy_is_no_alias_of_the_shared_model():
    variables = {"w": jnp.zeros(64)}
    parts = fp.twin()(task_of(**variables)).init(variables)
    places = {x.unsafe_buffer_pointer() for x in (variables["w"], parts.shared["w"], parts.personal["own/w"])}
    assert len(places) == 3
