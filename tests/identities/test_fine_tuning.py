"""Settings under which a held or stopped fine-tuning is a plain one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_pers as fp
from fedjax_pers.batches import split_off
from fedjax_pers.layouts import leaves_of
from fedjax_pers.objectives import add, ewc, l2_sp, task_loss
from tests import toys

TASK, KEY = toys.classifier(norm=True), jax.random.key(1)
SCHEDULE = {"epochs": 3, "batch_size": 3}


@pytest.fixture(scope="module")
def clients():
    return toys.labelled_clients((7, 4, 10))


def adapted(clients, update):
    """What clients predict with after a client update from one common start."""
    algorithm = fp.compose(TASK, adapt=update)
    return jax.jit(algorithm.personalize)(toys.start(algorithm, 3), clients, KEY)


def with_method(clients, name, **settings):
    """The same of a method of the registry, its float settings traced as in a run."""
    floats = {key: value for key, value in settings.items() if isinstance(value, float)}
    static = {key: value for key, value in settings.items() if key not in floats}
    state = toys.start(fp.method(name).make(TASK, **settings), 3)

    @jax.jit
    def program(floats):
        return fp.method(name).make(TASK, **static, **floats).personalize(state, clients, KEY)

    return program(floats)


@pytest.mark.parametrize("tune", [fp.everything, fp.head(1)], ids=str)
@pytest.mark.parametrize("name", ["fedavg_l2sp", "fedavg_ewc", "fedavg_kd"])
def test_no_pull_is_plain_fine_tuning_to_the_bit(clients, name, tune):
    settings = {"tune": tune, "tune_lr": 0.1, "tune_epochs": 3, "batch_size": 3}
    plain = with_method(clients, "fedavg_ft", **settings)
    toys.same_bits(with_method(clients, name, strength=0.0, **settings), plain)
    pulled = with_method(clients, name, strength=2.0, **settings)
    assert not np.array_equal(pulled["params"]["head"]["kernel"], plain["params"]["head"]["kernel"])


def test_equal_information_is_l2_sp(clients):
    def ones(layout, parts, context):
        fisher = {name: jnp.ones_like(x) for name, x in leaves_of(parts).items() if name in layout.trainable}
        return fp.train(0.1, objective=add(task_loss(), ewc(0.7, fisher)), **SCHEDULE)(layout, parts, context)

    expected = adapted(clients, fp.train(0.1, objective=add(task_loss(), l2_sp(0.7)), **SCHEDULE))
    found = adapted(clients, ones)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), found, expected)


@pytest.mark.parametrize("leaves", [fp.everything, fp.head(1)], ids=str)
def test_what_helps_to_the_end_is_training_on_the_rest(clients, leaves):
    """Small steps on labels that lie apart: each epoch is better than the one before, on what is held back too."""
    easy = {**clients.data, "x": 3.0 * jax.nn.one_hot(clients.data["y"], toys.FEATURES)}
    clients = clients._replace(data=easy)

    def on_the_rest(layout, parts, context):
        return fp.train(0.01, leaves=leaves, **SCHEDULE)(layout, parts, split_off(context, 0.3)[0])

    def trained(update):
        algorithm = fp.compose(plain, adapt=update)
        return jax.jit(algorithm.personalize)(toys.start(algorithm, 3), clients, KEY)

    plain = toys.classifier()
    found = trained(fp.fine_tune(0.01, holdout=0.3, leaves=leaves, **SCHEDULE))
    toys.same_bits(found, trained(on_the_rest))


@pytest.mark.parametrize("executor", [fp.looped(), fp.chunked(2)], ids=["one after another", "two at a time"])
def test_a_phase_behind_a_whole_method_is_the_phase_of_its_parts(clients, executor):
    adapt = fp.train(0.1, leaves=fp.head(1), **SCHEDULE)
    parts = {"layout": fp.by_role(personal=fp.head(1)), "executor": executor}
    whole, plain = fp.compose(TASK, **parts, adapt=adapt), fp.compose(TASK, **parts)
    behind = fp.with_adaptation(plain, adapt)
    state = toys.start(plain, 3)
    tuned, same, before = (
        jax.jit(each.personalize)(state, clients, KEY) for each in (behind, whole, fp.without_adaptation(behind))
    )
    toys.same_bits(tuned, same)
    for each in (plain, fp.without_adaptation(whole)):
        toys.same_bits(jax.jit(each.personalize)(state, clients, KEY), before)
    assert not np.array_equal(tuned["params"]["head"]["kernel"], before["params"]["head"]["kernel"])


def test_a_method_is_made_again_with_its_phase():
    """A run rebuilds a method with its float settings traced; the phase behind it must be there then."""
    federation, adapt = toys.federation((7, 4, 10), (5, 5, 5)), fp.train(0.1, epochs=3, batch_size=3)
    task = toys.classifier()
    fedavg = fp.method("fedavg").make(task, batch_size=3)
    expected = fp.method("fedavg_ft").make(task, batch_size=3, tune_epochs=3)
    behind = fp.with_adaptation(fedavg, adapt)
    tables = [fp.run(each, None, federation, 2)[1].evaluations[-1][1] for each in (behind, expected)]
    np.testing.assert_array_equal(tables[0].personal["loss"], tables[1].personal["loss"])
    state = fp.start(fedavg, federation)
    before = [fp.evaluate_clients(each, state, federation) for each in (fp.without_adaptation(behind), fedavg)]
    np.testing.assert_array_equal(before[0].personal["loss"], before[1].personal["loss"])
    assert fp.without_adaptation(fedavg) is fedavg
