"""The checkpoint does not give back what was put in: keys without type, dicts for named tuples, ids as text, casts."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_pers.simulate.checkpoint import latest, restore, save


def put_in():
    """A tree of all that a run remembers."""
    weights = {"w": jnp.array([0.1, -0.0, jnp.inf], jnp.bfloat16), "count": jnp.array([1, -7], jnp.int32)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    return {
        "key": jax.random.key(42),
        "optimizer": optimizer.init(weights["w"]),
        "absent": None,
        "clients": {0: jnp.array([0.5]), 10: jnp.array([10.5])},
        **weights,
    }


SAVER = f"""
import os, sys
import jax, jax.numpy as jnp, optax
from fedjax_pers.simulate.checkpoint import save

{inspect.getsource(put_in)}
os.chdir(sys.argv[1])
save("relative/run", 7, put_in())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint that another process has written, by a relative path."""
    place = tmp_path_factory.mktemp("fc15")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", SAVER, str(place)], check=True, env=environment)
    return place / "relative" / "run"


def template():
    """The same tree with other values."""
    blank = jax.tree.map(lambda leaf: jnp.zeros_like(leaf) if leaf.dtype != jax.random.key(0).dtype else leaf, put_in())
    return blank | {"key": jax.random.key(0)}


def bits(leaf):
    return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf).tobytes()


def test_the_same_tree_the_same_types_bit_for_bit(folder, monkeypatch):
    monkeypatch.chdir(folder.parents[1])
    found, expected = restore("relative/run", template()), put_in()
    assert latest("relative/run") == 7
    assert jax.tree.structure(found) == jax.tree.structure(expected)  # named tuples, None, integer keys
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (one.dtype, one.shape, bits(one)) == (other.dtype, other.shape, bits(other))
    assert type(found["optimizer"][1][0]) is optax.ScaleByAdamState
    assert found["absent"] is None
    assert found["clients"][10].item() == 10.5
    # By hand, so that a change of put_in cannot hide a fault of both sides.
    assert jax.random.uniform(found["key"]) == jax.random.uniform(jax.random.key(42))
    assert found["w"].dtype == jnp.bfloat16 and found["count"].dtype == jnp.int32 and found["count"].tolist() == [1, -7]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"count": jnp.zeros(3, jnp.int32)}, ["['count']", "int32[2]", "int32[3]"]),
        ({"count": jnp.zeros(2, jnp.int16)}, ["['count']", "int32[2]", "int16[2]"]),
        ({"w": jnp.zeros(3, jnp.float32)}, ["['w']", "bfloat16[3]", "float32[3]"]),
        ({"extra": jnp.zeros(1)}, ["['extra']", "no such leaf", "float32[1]"]),
        ({"clients": {0: jnp.zeros(1)}}, ["['clients'][10]", "float32[1]", "no such leaf"]),
        ({"clients": {"0": jnp.zeros(1), "10": jnp.zeros(1)}}, ["['clients'][0]", "float32[1]", "no such leaf"]),
        ({"absent": jnp.zeros(1)}, ["['absent']", "None", "float32[1]"]),
    ],
)
def test_any_difference_is_an_error_that_names_the_leaf_and_both_sides(folder, change, named):
    with pytest.raises(ValueError) as caught:
        restore(folder, template() | change)
    assert all(word in str(caught.value) for word in named), caught.value


def test_saving_a_step_that_exists_is_refused(folder):
    with pytest.raises(FileExistsError, match="already saved"):
        save(folder, 7, put_in())
