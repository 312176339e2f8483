"""FC-12: adding a client changes everybody's random numbers."""

from __future__ import annotations

import functools
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


@functools.cache
def local_training(one_by_one):
    """A compiled round of local training, and the state before round 4."""
    algorithm = fp.method("local_only").make(fp.tasks.linen(Noisy(), toys.EXAMPLE), batch_size=3, epochs=2)
    executor = fp.looped() if one_by_one else fp.vectorised()
    state = toys.start(algorithm, CLIENTS)._replace(round=jnp.int32(ROUND))
    return jax.jit(fp.with_executor(algorithm, executor).step), state


def client_after(named, cohort, one_by_one=True):
    """Client 7's leaves after round 4 with that cohort."""
    step, state = local_training(one_by_one)
    after, _ = step(state, federation_of(named).cohort(cohort), jax.random.key(0))
    return {name: np.asarray(x[CLIENT]) for name, x in after.rows.items()}


def digest(leaves):
    return hashlib.sha256(b"".join(leaves[name].tobytes() for name in sorted(leaves))).hexdigest()


@pytest.mark.parametrize("named", [False, True], ids=["integers", "text"])
def test_a_client_trains_alike_whoever_else_is_there(named):
    small, large = (client_after(named, cohort) for cohort in (SMALL, LARGE))
    toys.same_bits(large, small)
    _, first = local_training(True)
    assert all(not np.array_equal(x, first.fresh[name]) for name, x in small.items())


def test_names_are_what_random_numbers_come_from():
    """The same examples under other names are seen in another order."""
    numbers, names = (client_after(named, SMALL) for named in (False, True))
    assert not np.array_equal(numbers["params/hidden/kernel"], names["params/hidden/kernel"])


def test_side_by_side_it_is_equal_up_to_rounding():
    small, large = (client_after(False, cohort, one_by_one=False) for cohort in (SMALL, LARGE))
    for name, x in small.items():
        np.testing.assert_allclose(large[name], x, atol=1e-6)


def test_another_process_gives_the_same():
    root = Path(__file__).parents[2]
    code = (
        "from tests.field_cases.test_fc12_adding_a_client import LARGE, client_after, digest\n"
        "print(*(digest(client_after(named, LARGE)) for named in (False, True)))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [digest(client_after(named, SMALL)) for named in (False, True)]


@pytest.mark.parametrize("named", [False, True], ids=["integers", "text"])
def test_no_key_is_used_twice(named):
    ids = [f"client-{k}" for k in range(300)] if named else list(range(300))
    one = {"x": np.zeros((1, 2)), "y": [0]}
    tags = jnp.asarray(fp.data.from_clients({k: one for k in ids}).tags)

    def words_of(purpose):
        def of_round(round):
            return jax.vmap(lambda tag: client_key(jax.random.key(0), purpose, round, tag))(tags)

        return np.asarray(jax.random.key_data(jax.vmap(of_round)(jnp.arange(40)))).reshape(-1, 2)

    words = np.concatenate([words_of("train"), words_of("personalize")])
    assert len(np.unique(words, axis=0)) == len(words) == 2 * 40 * 300
