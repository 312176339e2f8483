"""Settings under which a method is FedAvg: the same bits, unless a reason is given."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import fedjax_pers as fp
from tests import toys

ROUNDS = ((0, 2), (1, 2), (0, 1, 2))
LOCAL = {"batch_size": 3, "epochs": 2}
TASK = toys.classifier()
TUNED = ("fedavg_ft", "fedavg_ft_early", "fedavg_l2sp", "fedavg_ewc", "fedavg_kd")


@pytest.fixture(scope="module")
def clients():
    return toys.labelled_clients((7, 4, 10))


@pytest.fixture(scope="module")
def fedavg(clients):
    return toys.trajectory("fedavg", TASK, clients, ROUNDS, lr=0.1, **LOCAL)


def test_fedavg_moves(fedavg):
    for before, after in zip(fedavg, fedavg[1:], strict=False):
        assert all(not np.array_equal(before.shared[name], x) for name, x in after.shared.items())


BIT = {
    "fedper": {"personal": fp.nothing},
    "fedrep": {"personal": fp.nothing},
    "fedsim": {"personal": fp.nothing},
    "fedalt": {"personal": fp.nothing},
    "fedbn": {"personal": fp.nothing},
    "silobn": {},  # the model has no running statistics
    "fedbabu": {"frozen": fp.nothing, "weights": "examples"},
    "fedprox": {"mu": 0.0},
    "perfedavg": {"alpha": 0.0},
    "perfedavg_hf": {"alpha": 0.0},
    **{name: {"tune_epochs": 0} for name in TUNED},
    "ditto": {"lam": 0.7},
    "apfl": {"alpha": 0.3, "alpha_lr": 0.1},
    "term": {"t": 0.0},
    "norm_clipping": {"bound": 1e9},
}


@pytest.mark.parametrize("name", BIT)
def test_the_shared_model_is_that_of_fedavg_to_the_bit(fedavg, clients, name):
    texts = [toys.program_text(each, TASK, clients, lr=0.1, **LOCAL, **BIT.get(each, {})) for each in ("fedavg", name)]
    if texts[0] == texts[1]:  # the very same program: nothing need be compiled to know what it computes
        return
    states = toys.trajectory(name, TASK, clients, ROUNDS, lr=0.1, **LOCAL, **BIT[name])
    for found, expected in zip(states, fedavg, strict=True):
        toys.same_bits(found.shared, expected.shared)


@pytest.mark.parametrize("lam", [0.0, 3.0])
def test_the_global_model_of_ditto_does_not_depend_on_the_tie(fedavg, clients, lam):
    states = toys.trajectory("ditto", TASK, clients, ROUNDS, lr=0.1, lam=lam, **LOCAL)
    toys.same_bits(states[-1].shared, fedavg[-1].shared)
    assert not np.array_equal(states[-1].rows["own/params/head/bias"][0], states[-1].shared["params/head/bias"])


def test_the_first_round_of_scaffold_is_that_of_fedavg(fedavg, clients):
    """Its controls are still 0."""
    states = toys.trajectory("scaffold", TASK, clients, ROUNDS[:2], lr=0.1, weights="examples", **LOCAL)
    model = {name: x for name, x in states[1].shared.items() if not name.startswith("control/")}
    toys.same_bits(model, fedavg[1].shared)
    assert not np.array_equal(states[2].shared["params/head/bias"], fedavg[2].shared["params/head/bias"])


@pytest.mark.parametrize("name", TUNED)
def test_no_fine_tuning_predicts_with_the_global_model(fedavg, clients, name):
    algorithm = fp.method(name).make(TASK, tune_epochs=0, **LOCAL)
    own = jax.jit(algorithm.personalize)(fedavg[-1], clients, jax.random.key(0))
    for client in range(3):
        toys.same_bits(jax.tree.map(lambda x: x[client], own), algorithm.common(fedavg[-1]))  # noqa: B023


def test_at_alpha_zero_apfl_predicts_with_the_global_model(fedavg, clients):
    state = toys.trajectory("apfl", TASK, clients, ROUNDS, lr=0.1, alpha=0.0, alpha_lr=0.0, **LOCAL)[-1]
    algorithm = fp.method("apfl").make(TASK, **LOCAL)
    own = jax.jit(algorithm.personalize)(state, clients, jax.random.key(0))
    for client in range(3):
        toys.same_bits(jax.tree.map(lambda x: x[client], own), algorithm.common(fedavg[-1]))  # noqa: B023
