"""Server optimisers whose settings take the optimiser away are FedAvg, up to rounding in what they still compute."""

from __future__ import annotations

import numpy as np
import pytest

import fedjax_pers as fp
from fedjax_pers.aggregators import mean, minimax
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


UNIFORM = {"weights": "uniform"}


@pytest.mark.parametrize(
    ("name", "settings", "of_fedavg"),
    [
        ("qffl", {"q": 0.0}, UNIFORM),
        ("trimmed_mean", {"trim": 0.0}, UNIFORM),
        ("krum", {"byzantine": 0, "chosen": 3}, UNIFORM),
    ],
)
def test_an_aggregator_without_its_special_is_the_mean(name, settings, of_fedavg):
    task, clients = toys.classifier(), toys.labelled_clients((7, 4, 10))
    expected = toys.trajectory("fedavg", task, clients, ROUNDS, **LOCAL, **of_fedavg)
    found = toys.trajectory(name, task, clients, ROUNDS, **LOCAL, **settings)
    for leaf, x in expected[-1].shared.items():
        np.testing.assert_allclose(found[-1].shared[leaf], x, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("personal", [fp.nothing, fp.head(1)])
def test_ifca_with_one_cluster_is_fedavg_or_fedper_to_the_bit(personal):
    task, clients = toys.classifier(), toys.labelled_clients((7, 4, 10))
    expected = toys.trajectory("fedper", task, clients, ROUNDS, **LOCAL, personal=personal)
    found = toys.trajectory("ifca", task, clients, ROUNDS, **LOCAL, clusters=1, personal=personal)
    for one, other in zip(found, expected, strict=True):
        toys.same_bits({name: x[0] for name, x in one.shared.items()}, other.shared)
        toys.same_bits(one.rows, other.rows)


def test_cfl_that_never_splits_is_fedavg():
    """To the bit: clients of equal sizes too, and one that is empty."""
    task, clients = toys.classifier(), toys.labelled_clients((7, 4, 10, 4, 0, 7))
    rounds = ((0, 2), (1, 2, 3), (0, 1, 2, 3, 4, 5), (5, 0))
    expected = toys.trajectory("fedavg", task, clients, rounds, **LOCAL, **UNIFORM)
    found = toys.trajectory("cfl", task, clients, rounds, **LOCAL, eps1=0.0, eps2=0.0, warm_up=0)
    for one, other in zip(found, expected, strict=True):
        toys.same_bits({name: x[0] for name, x in one.shared.items()}, other.shared)


def test_fedgroup_with_one_group_is_fedavg():
    """Up to rounding; everybody is there in the cold start: who comes later is not counted at first."""
    task, clients, rounds = toys.classifier(), toys.labelled_clients((7, 4, 10)), ((0, 1, 2), *ROUNDS)
    expected = toys.trajectory("fedavg", task, clients, rounds, **LOCAL)
    found = toys.trajectory("fedgroup", task, clients, rounds, **LOCAL, groups=1, mixing=0.1)
    for one, other in zip(found, expected, strict=True):
        for leaf, x in other.shared.items():
            np.testing.assert_allclose(one.shared[leaf][0], x, rtol=2e-6, atol=2e-7)


def test_pfedgraph_that_ignores_similarity_is_fedavg():
    """Everybody takes part: an absent client would keep an older mixture."""
    task, clients, rounds = toys.classifier(), toys.labelled_clients((7, 4, 10)), ((0, 1, 2),) * 3
    expected = toys.trajectory("fedavg", task, clients, rounds, **LOCAL)
    found = toys.trajectory("pfedgraph", task, clients, rounds, **LOCAL, lam=1e7)
    for leaf, x in expected[-1].shared.items():
        for client in range(3):
            np.testing.assert_allclose(found[-1].aux["mixed"][leaf][client], x, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("clients", [3, 4, 5, 6, 7])
def test_agnostic_weights_that_stay_are_fedper(clients):
    task, federation = toys.classifier(), toys.federation((7, 4, 10, 5, 6, 3, 8)[:clients])
    found, expected = (trained(task, federation, each) for each in (minimax(0.0), mean(weights="uniform")))
    toys.same_bits((found.shared, found.rows), (expected.shared, expected.rows))


def test_agnostic_weights_of_one_domain_are_fedper():
    """Within a domain clients count by their examples."""
    task, federation = toys.classifier(), toys.federation((7, 4, 10))
    found, expected = (trained(task, federation, each) for each in (minimax(0.3, domains=(0, 0, 0)), mean()))
    toys.same_bits((found.shared, found.rows), (expected.shared, expected.rows))


def trained(task, federation, aggregator):
    """The state of FedPer with this aggregator after four rounds."""
    client, layout = fp.train(0.1, batch_size=4), fp.by_role(personal=fp.head(1))
    algorithm = fp.compose(task, layout=layout, client=client, aggregator=aggregator)
    return fp.run(algorithm, None, federation, 4, evaluate_every=0)[0]
