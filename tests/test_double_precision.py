"""Where JAX has 64 bits, a round keeps the dtype of everything that a method remembers."""

from __future__ import annotations

import jax
import pytest

import fedjax_pers as fp
from tests import toys


@pytest.mark.parametrize("name", sorted(fp.methods()))
def test_a_round_keeps_every_dtype(name: str) -> None:
    with jax.enable_x64(True):
        algorithm, cohort = toys.every_method(name), toys.labelled_clients((7, 4, 10))
        state = toys.start(algorithm, 3)
        after, _ = jax.eval_shape(algorithm.step, state, cohort, jax.random.key(0))
    for (path, before), found in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(after), strict=True):
        assert found.dtype == before.dtype, f"{jax.tree_util.keystr(path)}: {before.dtype} became {found.dtype}"
