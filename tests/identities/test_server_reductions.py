"""Server optimisers whose settings take the optimiser away are FedAvg, up to rounding in what they still compute."""

from __future__ import annotations

import numpy as np
import pytest

from tests import toys

ROUNDS = ((0, 2), (1, 2), (0, 1, 2))
LOCAL = {"lr": 0.1, "batch_size": 3, "epochs": 2}
STILL = {"beta1": 0.0, "tau": 1e4, "server_lr": 2e4}
"""With ``v_0 = tau^2`` far above every squared change, the step is ``server_lr / (2 tau)`` times the change."""


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedavgm", {"beta": 0.0, "server_lr": 1.0}),
        ("fedadagrad", STILL),
        ("fedadam", {**STILL, "beta2": 1.0}),  # or v would decay
        ("fedyogi", {**STILL, "beta2": 0.99}),
    ],
)
def test_the_shared_model_is_that_of_fedavg_and_rests_with_it(name, settings):
    task, clients = toys.classifier(), toys.labelled_clients((7, 4, 10))
    expected = toys.trajectory("fedavg", task, clients, ROUNDS, **LOCAL)
    found = toys.trajectory(name, task, clients, ROUNDS, **LOCAL, **settings)
    for leaf, x in expected[-1].shared.items():
        assert not np.array_equal(x, expected[0].shared[leaf])
        np.testing.assert_allclose(found[-1].shared[leaf], x, rtol=2e-6, atol=2e-7)

    settings = {**LOCAL, **settings, "lr": 0.0}
    first, *_, last = toys.trajectory(name, task, clients, ROUNDS, **settings)
    toys.same_bits(last.shared, first.shared)  # steps of size zero
