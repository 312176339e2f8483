"""FC-12: adding a client changes everybody's random numbers."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import fedjax_pers as fp
from fedjax_pers.keys import client_key
from tests import toys

CLIENTS, ROUND, CLIENT = 21, 4, 7
SMALL, LARGE = (3, 7, 11), (3, 5, 7, 11, 20)


class Noisy(nn.Module):
    """Dropout, so that a client needs random numbers besides the order of its examples."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dropout(0.5, deterministic=not train)(nn.tanh(nn.Dense(6, name="hidden")(x)))
        return nn.Dense(toys.CLASSES, name="head")(x)


def federation_of(named):
    """Clients 0 .. 20, or the same under the names ``client-00`` .. ``client-20``."""
    data = toys.labelled(tuple(4 + k % 5 for k in range(CLIENTS)))
    return fp.data.from_clients(
        {
            (f"client-{k:02}" if named else k): {name: x[k, : 4 + k % 5] for name, x in data.items()}
            for k in range(CLIENTS)
        },
        num_classes=toys.CLASSES,
    )


def results(named, cohorts, one_by_one):
    """Client 7's leaves after round 4, for each cohort, from the same state."""
    federation = federation_of(named)
    task = fp.tasks.linen(Noisy(), federation.example)
    algorithm = fp.method("local_only").make(task, batch_size=3, epochs=2)
    if one_by_one:
        algorithm = fp.with_executor(algorithm, fp.looped())
    state = toys.start(algorithm, CLIENTS)._replace(round=jnp.int32(ROUND))
    step = jax.jit(algorithm.step)
    return [
        {name: np.asarray(x[CLIENT]) for name, x in step(state, federation.cohort(cohort), jax.random.key(0))[0].rows.items()}
        for cohort in cohorts
    ]


def digest(leaves):
    return hashlib.sha256(b"".join(leaves[name].tobytes() for name in sorted(leaves))).hexdigest()


@pytest.mark.parametrize("named", [False, True], ids=["integers", "text"])
def test_a_client_trains_alike_whoever_else_is_there(named):
    small, large = results(named, (SMALL, LARGE), one_by_one=True)
    toys.same_bits(large, small)
    start = toys.start(fp.method("local_only").make(fp.tasks.linen(Noisy(), toys.EXAMPLE)), 1).fresh
    assert all(not np.array_equal(small[name], start[name]) for name in start)


def test_side_by_side_it_is_equal_up_to_rounding():
    small, large = results(False, (SMALL, LARGE), one_by_one=False)
    for name, x in small.items():
        np.testing.assert_allclose(large[name], x, atol=1e-6)


@pytest.mark.parametrize("named", [False, True], ids=["integers", "text"])
def test_another_process_gives_the_same(named):
    root = Path(__file__).parents[2]
    code = (
        "from tests.field_cases.test_fc12_adding_a_client import *\n"
        f"print(digest(results({named}, (LARGE,), one_by_one=True)[0]))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == digest(results(named, (SMALL,), one_by_one=True)[0])


@pytest.mark.parametrize("named", [False, True], ids=["integers", "text"])
def test_no_key_is_used_twice(named):
    ids = [f"client-{k}" for k in range(300)] if named else list(range(300))
    one = {"x": np.zeros((1, 2)), "y": [0]}
    tags = jnp.asarray(fp.data.from_clients({k: one for k in ids}).tags)

    def keys_of(purpose, round):
        return jax.vmap(lambda tag: client_key(jax.random.key(0), purpose, round, tag))(tags)

    keys = [jax.vmap(lambda round: keys_of(purpose, round))(jnp.arange(40)) for purpose in ("train", "personalize")]
    words = np.asarray(jax.random.key_data(jnp.stack(keys))).reshape(-1, 2)
    assert len(np.unique(words, axis=0)) == len(words) == 2 * 40 * 300
