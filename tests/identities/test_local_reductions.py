"""Settings under which a method is local training or another method: the same bits, unless a reason is given."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

import fedjax_pers as fp
from tests import toys

ROUNDS = ((0, 2), (1, 2), (0, 1, 2))
LOCAL = {"lr": 0.1, "batch_size": 3, "epochs": 2}
TASK = toys.classifier()
CLIENTS = (7, 4, 10)


def run(name, clients=CLIENTS, rounds=ROUNDS, **settings):
    return toys.trajectory(name, TASK, toys.labelled_clients(clients), rounds, **LOCAL, **settings)


@pytest.fixture(scope="module")
def alone():
    """Local training."""
    return run("local_only")


def own(rows):
    """The leaves of a client's own model, by their paths in the model."""
    return {name.removeprefix("own/"): x for name, x in rows.items() if name.startswith("own/")}


def test_a_client_trains_when_it_is_there(alone):
    for number, members in enumerate(ROUNDS):
        before, after = (np.asarray(each.rows["params/head/kernel"]) for each in alone[number : number + 2])
        moved = [not np.array_equal(before[client], after[client]) for client in range(3)]
        assert moved == [client in members for client in range(3)]


def test_fedper_that_keeps_everything_is_local_training_and_sends_nothing(alone):
    states = run("fedper", personal=fp.everything)
    for found, expected in zip(states, alone, strict=True):
        toys.same_bits(found.rows, expected.rows)
    assert states[-1].shared == {}
    federation = toys.federation(CLIENTS)
    algorithm = fp.method("fedper").make(TASK, personal=fp.everything, **LOCAL)
    _, history = fp.run(algorithm, None, federation, 1, evaluate_every=0)
    assert (history.traffic.up, history.traffic.metadata_up, history.traffic.down) == (0, 0, 0)
    assert not history.metrics.transmitted.any()


def test_without_a_tie_the_personal_model_of_ditto_trains_alone(alone):
    for found, expected in zip(run("ditto", lam=0.0), alone, strict=True):
        toys.same_bits(own(found.rows), expected.rows)


def test_at_alpha_one_the_personal_model_of_apfl_trains_alone(alone):
    for found, expected in zip(run("apfl", alpha=1.0, alpha_lr=0.0), alone, strict=True):
        toys.same_bits(own(found.rows), expected.rows)


def test_lg_fedavg_is_fedper_with_the_complementary_mask():
    for mine, theirs in zip(run("lg_fedavg", shared=fp.head(1)), run("fedper", personal=~fp.head(1)), strict=True):
        toys.same_bits(mine, theirs)


@pytest.fixture(scope="module")
def fedper():
    return run("fedper", personal=fp.head(1))


def test_fedsim_is_fedper(fedper):
    for mine, theirs in zip(run("fedsim", personal=fp.head(1), personal_lr=0.1), fedper, strict=True):
        toys.same_bits(mine, theirs)


def test_fedalt_is_fedrep_with_the_same_schedule(fedper):
    alternating = run("fedalt", personal=fp.head(1), personal_epochs=3, personal_lr=0.1)
    for mine, theirs in zip(alternating, run("fedrep", personal=fp.head(1), head_epochs=3), strict=True):
        toys.same_bits(mine, theirs)
    assert not np.array_equal(
        alternating[-1].shared["params/hidden1/kernel"], fedper[-1].shared["params/hidden1/kernel"]
    )


def momentum_and_decay(lr):
    """An optimiser that moves leaves whose gradient is zero: freezing must not be a zero gradient."""
    return optax.chain(optax.add_decayed_weights(0.1), optax.sgd(lr, momentum=0.9))


def test_the_head_of_fedbabu_rests_and_its_training_is_that_of_fedrep_without_head_epochs():
    # One client after another: vectorised, one head for each client is another matrix product than one head for all,
    # which sums in another order.
    settings = {"optimizer": momentum_and_decay, "executor": fp.looped()}
    babu = run("fedbabu", **settings)
    rep = run("fedrep", personal=fp.head(1), head_epochs=0, weights="uniform", **settings)
    initial = {name: x for name, x in fp.flatten(TASK.init(jax.random.key(0))).items() if "head" in name}
    assert set(initial) == {"params/head/kernel", "params/head/bias"}
    for mine, theirs in zip(babu, rep, strict=True):
        toys.same_bits(mine.shared, theirs.shared)
        toys.same_bits(mine.frozen, initial)
        for client in range(3):
            toys.same_bits({name: x[client] for name, x in theirs.rows.items()}, initial)
    assert not np.array_equal(babu[0].shared["params/hidden1/kernel"], babu[-1].shared["params/hidden1/kernel"])


def test_fedavg_of_one_client_is_sequential_local_training():
    """Up to rounding: the server adds the change, ``w + (w_1 - w)``, which need not be the float ``w_1``."""
    rounds = ((0,), (0,), (0,))
    together, alone = (run(name, clients=(7,), rounds=rounds)[-1] for name in ("fedavg", "local_only"))
    for name, x in together.shared.items():
        np.testing.assert_allclose(x, alone.rows[name][0], rtol=1e-6, atol=1e-7)


STILL = {
    "local_only": {},
    "fedper": {"personal": fp.head(1)},
    "fedsim": {"personal": fp.head(1), "personal_lr": 0.0},
    "fedrep": {"personal": fp.head(1), "head_epochs": 3},
    "lg_fedavg": {"shared": fp.head(1)},
    "ditto": {"personal_lr": 0.0, "lam": 0.0},
    "apfl": {"alpha": 0.4, "alpha_lr": 0.0},
    "pfedme": {"inner_lr": 0.0},
    "perfedavg": {},
    "fedrod": {},
}


@pytest.mark.parametrize("name", STILL)
def test_steps_of_size_zero_leave_every_model_as_it_was(name):
    settings = {**LOCAL, **STILL[name], "lr": 0.0}
    first, *_, last = toys.trajectory(name, TASK, toys.labelled_clients(CLIENTS), ROUNDS, **settings)
    toys.same_bits((last.shared, last.rows, last.frozen), (first.shared, first.rows, first.frozen))
    assert last.seen.tolist() == [2, 2, 3]
