"""Of several random starts the one with the least training loss goes on."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import fedjax_pers as fp
from fedjax_pers.keys import fold_name
from tests import toys


@pytest.fixture(scope="module")
def federation():
    return toys.federation((5, 3, 4, 6), (1,) * 4)


def test_the_start_with_the_least_loss_is_taken(federation):
    algorithm = fp.method("ifca").make(toys.classifier(), clusters=2, batch_size=3)
    losses, states = [], []
    for number in range(4):
        first = fp.start(algorithm, federation, fold_name(jax.random.key(3), f"restart {number}"))
        state, history = fp.run(algorithm, first, federation, 3, 3, evaluate_every=0)
        last = jax.tree.map(lambda x: x[-1], history.metrics)
        losses.append((last.loss * last.examples).sum() / last.examples.sum())
        states.append(state)
    assert len({round(float(loss), 6) for loss in losses}) > 1
    found = fp.best_start(algorithm, federation, 3, restarts=4, rounds=3)
    toys.same_bits(found, states[int(np.argmin(losses))])
    _, history = fp.run(algorithm, found, federation, 5, 3)
    assert history.metrics.loss.shape[0] == 2  # it goes on from round 3


def test_a_number_of_starts_is_needed(federation):
    with pytest.raises(ValueError, match="restarts: found 0"):
        fp.best_start(toys.every_method("ifca"), federation, restarts=0)
