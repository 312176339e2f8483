"""FC-07: methods that work when everyone is there, run with 2 of 20 clients a round."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import fedjax_pers as fp
from tests import toys

CLIENTS, ROUNDS = 20, 3
NEED_EVERYONE = ("afl", "centralised", "drfa", "l2gd")


@pytest.fixture(scope="module")
def federation():
    return toys.federation((3,) * CLIENTS, (2,) * CLIENTS)


@pytest.mark.parametrize("name", toys.methods(*NEED_EVERYONE))
def test_two_of_twenty_clients(federation, name):
    algorithm = toys.every_method(name)
    first = fp.start(algorithm, federation, 0)
    rows = [jax.tree.map(np.array, first.rows)]
    state, history = fp.run(
        algorithm,
        None,
        federation,
        ROUNDS,
        cohort_size=2,
        evaluate_every=1,
        on_block=lambda block: rows.append(jax.tree.map(np.array, block.state.rows)),
    )
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state.shared, state.rows, history.metrics)))

    present = np.asarray(history.metrics.ids)
    assert present.shape == (ROUNDS, 2)
    for number in range(ROUNDS):
        absent = np.setdiff1d(np.arange(CLIENTS), present[number])
        before, after = ({leaf: x[absent] for leaf, x in rows[number + later].items()} for later in (0, 1))
        toys.same_bits(after, before)
    times = np.bincount(present.ravel(), minlength=CLIENTS)
    assert state.seen.tolist() == times.tolist()
    never = np.flatnonzero(times == 0)
    assert len(never) >= CLIENTS - 2 * ROUNDS
    for leaf, x in state.rows.items():
        np.testing.assert_array_equal(
            x[never], np.broadcast_to(first.fresh[leaf], (len(never), *first.fresh[leaf].shape))
        )

    assert [done for done, _ in history.evaluations] == [1, 2, 3]
    for done, table in history.evaluations:
        assert table.rounds_taken_part.sum() == 2 * done
        for scores in (*table.personal.values(), *table.common.values()):
            assert scores.shape == (CLIENTS,) and np.isfinite(scores).all()


def test_a_client_that_was_never_there_predicts_with_its_first_personal_part(federation):
    algorithm = toys.every_method("fedper")
    state, history = fp.run(algorithm, None, federation, ROUNDS, cohort_size=2, evaluate_every=1)
    _, table = history.evaluations[-1]
    kernel = np.asarray(state.shared["kernel"], np.float64)
    assert not np.array_equal(kernel, fp.start(algorithm, federation, 0).shared["kernel"])
    never = np.flatnonzero(table.rounds_taken_part == 0)
    for client in never:
        rows = federation.test.client(client)
        scores = rows["x"] @ kernel  # the personal bias starts at 0
        losses = np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(2), rows["y"]]
        assert table.personal["loss"][client] == pytest.approx(losses.mean(), rel=1e-5)
        assert table.personal["accuracy"][client] == np.mean(scores.argmax(axis=1) == rows["y"])


@pytest.mark.parametrize("name", NEED_EVERYONE)
def test_a_method_that_needs_everyone_says_so_before_any_training(federation, name):
    def report(block):
        raise AssertionError("a round was run")

    with pytest.raises(ValueError, match=r"cohort_size: found 2; this method needs everyone .*20 clients"):
        fp.run(toys.every_method(name), None, federation, ROUNDS, cohort_size=2, on_block=report)
