"""FC-01: a personal head that still reaches other clients."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import fedjax_pers as fp
from fedjax_pers.layouts import replace
from tests import toys

TASK = toys.classifier()
HEAD = {"params/head/kernel", "params/head/bias"}
TOOK_PART, SHIFTED = [0, 1, 3], 1


def shift_head(layout, parts, context):
    """After local training and before the upload: the head moves by what the client's first example says."""
    by = context.data["shift"][context.start]
    moved = replace(parts, {name: x + by for name, x in parts.personal.items()})
    return moved, fp.Report(jax.numpy.float32(0), jax.numpy.int32(1), jax.numpy.array(True))


@pytest.fixture(scope="module")
def algorithm():
    return fp.compose(
        TASK, layout=fp.by_role(personal=fp.head(1)), client=fp.phases(fp.train(0.1, batch_size=3), shift_head)
    )


@pytest.fixture(scope="module")
def rounds(algorithm):
    """The state after the same round twice, as it is and with the head of client 1 moved by a million."""
    data = toys.labelled((5, 5, 5, 5))
    step, first = jax.jit(algorithm.step), toys.start(algorithm, 4)
    states = []
    for by in (0.0, 1e6):
        shift = np.zeros((4, 5), np.float32)
        shift[SHIFTED] = by
        cohort = fp.cohort_of({**data, "shift": shift})
        states.append(step(first, toys.only(cohort, TOOK_PART), jax.random.key(0))[0])
    return first, *states


def test_the_aggregate_has_no_head(algorithm, rounds):
    _, plain, _ = rounds
    assert set(plain.shared) == {"params/hidden1/kernel", "params/hidden1/bias"}
    assert set(plain.rows) == HEAD
    _, upload, row = jax.eval_shape(
        algorithm.exchange, plain, fp.cohort_of(toys.labelled((5,)) | {"shift": np.zeros((1, 5))}), jax.random.key(0)
    )
    assert HEAD.isdisjoint(upload) and set(row) == HEAD


def test_nobody_else_notices(rounds):
    first, plain, shifted = rounds
    toys.same_bits(shifted.shared, plain.shared)
    for name in HEAD:
        others = np.array([0, 2, 3])
        toys.same_bits(shifted.rows[name][others], plain.rows[name][others])
        assert (np.asarray(shifted.rows[name][SHIFTED]) > 9e5).all()
        toys.same_bits(plain.rows[name][2], first.rows[name][2])  # was not there
    assert not np.array_equal(plain.shared["params/hidden1/kernel"], first.shared["params/hidden1/kernel"])


def test_the_bytes_are_those_of_the_body():
    # The body is 4 x 5 and 5, the head 5 x 3 and 3, 4 bytes each.
    algorithm = fp.method("fedper").make(TASK, personal=fp.head(1), batch_size=3)
    _, history, rows = toys.recorded(algorithm, toys.federation((5, 5, 5, 5)), 1, cohort_size=3, evaluate_every=0)
    assert (history.traffic.up, history.traffic.down, history.traffic.row) == (100, 100, 72)
    assert rows[0]["megabytes_up"] == pytest.approx(3 * (100 + 8) / 1e6)
    assert rows[0]["megabytes_down"] == pytest.approx(3 * 100 / 1e6)
