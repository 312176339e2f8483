"""FC-04: a proximal pull that is always zero."""

from __future__ import annotations

import pytest

from tests import toys

CLIENT = {"a": [[1.0]], "h": [[1.0]]}


@pytest.fixture(scope="module")
def fedprox():
    return toys.experiment("fedprox", toys.quadratic(), num_clients=1, batch_size=1, steps=10)


@pytest.mark.parametrize(("strength", "end"), [(0.0, 0.65132), (1.0, 0.44631), (10.0, 0.09091)])
def test_the_anchor_stays_at_the_round_start(fedprox, strength, end):
    state, _ = fedprox(toys.clients(CLIENT), 1, mu=strength, lr=0.1)
    assert float(state.shared["w"]) == pytest.approx(end, abs=1e-5)


def test_strength_zero_is_plain_local_training(fedprox):
    plain = toys.experiment("fedavg", toys.quadratic(), num_clients=1, batch_size=1, steps=10)
    found, expected = fedprox(toys.clients(CLIENT), 3, mu=0.0)[0], plain(toys.clients(CLIENT), 3)[0]
    toys.same_bits(found.shared, expected.shared)
