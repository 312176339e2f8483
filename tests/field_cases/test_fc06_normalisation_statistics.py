"""FC-06: normalisation statistics that are nobody's."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import linen as nn

import fedjax_pers as fp
from fedjax_pers.config import Config
from tests import toys

SIZES, MEANS = (30, 10), (0.0, 8.0)
MEAN, VAR = "batch_stats/norm/mean", "batch_stats/norm/var"
NORM = {MEAN, VAR, "params/norm/scale", "params/norm/bias"}
LOCAL = {"batch_size": 10, "epochs": 2}


class Normed(nn.Module):
    """One layer of batch normalisation, and a linear layer."""

    @nn.compact
    def __call__(self, x, train, mask=None):
        mask = None if mask is None else mask[:, None]
        x = nn.BatchNorm(not train, momentum=0.9, use_fast_variance=False, name="norm")(x, mask=mask)
        return nn.Dense(toys.CLASSES, name="head")(x)


TASK = fp.tasks.linen(Normed(), toys.EXAMPLE)


@pytest.fixture(scope="module")
def data():
    """Feature means of exactly 0 and 8."""
    data = toys.labelled(SIZES)
    for client, size in enumerate(SIZES):
        x = data["x"][client, :size]
        data["x"][client, :size] = x - x.mean(axis=0) + MEANS[client]
    return data


@pytest.fixture(scope="module")
def own(data):
    """What each client's own training from the common start leaves."""
    state, _ = one_round("local_only", fp.cohort_of(data, sizes=SIZES))
    return state.rows


def one_round(name, cohort, **settings):
    # One client after another, so that a round's training is the same program as training alone.
    algorithm = fp.with_executor(fp.method(name).make(TASK, **LOCAL, **settings), fp.looped())
    return jax.jit(algorithm.step)(toys.start(algorithm, 2), cohort, jax.random.key(0))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_average_is_weighted_whichever_client_comes_first(data, own, order):
    turned = {name: x[list(order)] for name, x in data.items()}
    cohort = fp.cohort_of(turned, ids=order, sizes=[SIZES[client] for client in order])
    state, _ = one_round("fedavg", cohort)
    for name in NORM:
        expected = 0.75 * np.asarray(own[name][0], np.float64) + 0.25 * np.asarray(own[name][1], np.float64)
        np.testing.assert_allclose(state.shared[name], expected, atol=1e-6, rtol=1e-6)
    # Client 1 has taken 2 steps, so its mean has gone 1 - 0.9^2 of the way to 8; client 0's batches lie around 0.
    assert float(state.shared[MEAN].mean()) == pytest.approx(0.25 * 8 * (1 - 0.9**2), abs=0.02)


def test_local_keeps_what_each_clients_own_training_left(data, own):
    state, _ = one_round("fedbn", fp.cohort_of(data, sizes=SIZES))
    assert NORM.isdisjoint(state.shared) and set(state.rows) == NORM
    toys.same_bits(state.rows, {name: own[name] for name in state.rows})
    np.testing.assert_allclose(own[MEAN][0], 0.0, atol=0.5)
    np.testing.assert_allclose(own[MEAN][1], 8 * (1 - 0.9**2), rtol=1e-5)


def test_the_treatment_is_an_option_with_a_value_in_the_configuration():
    for treatment in ("average", "local", "ignore"):
        config = Config(method="fedavg", settings={"statistics": treatment})
        assert config.to_dict()["settings"]["statistics"] == treatment
        assert Config.from_dict(config.to_dict()).settings["statistics"] == treatment
    assert fp.method("fedavg").settings["statistics"] == "average"
    with pytest.raises(ValueError, match="statistics: found 'averaged'"):
        fp.method("fedavg").make(TASK, statistics="averaged")


def test_statistics_can_be_estimated_again(data):
    algorithm = fp.method("silobn").make(TASK, newcomer_passes=100, batch_size=30)
    newcomer = fp.cohort_of({name: x[1:] for name, x in data.items()}, ids=[2], sizes=SIZES[1:])
    models = jax.jit(algorithm.personalize)(toys.start(algorithm, 2), newcomer, jax.random.key(0))
    x = data["x"][1, : SIZES[1]].astype(np.float64)
    np.testing.assert_allclose(models["batch_stats"]["norm"]["mean"][0], x.mean(axis=0), rtol=1e-4)
    np.testing.assert_allclose(models["batch_stats"]["norm"]["var"][0], x.var(axis=0), rtol=1e-3)
