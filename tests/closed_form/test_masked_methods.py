"""FedCAC, FedSelect and FedLP on four numbers, by hand.

``f_i = |w - a_i|^2 / 2`` with one step of 1/2 from w: ``w_i = w + (a_i - w) / 2``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_pers as fp
from fedjax_pers.aggregators.critical import collaborators, overlaps
from fedjax_pers.algorithms.fedselect import grown_by_change
from fedjax_pers.masks import masks_of, values_of
from fedjax_pers.traffic import crossed
from tests import toys


def cohort_of(*centres):
    return toys.clients({"a": [[a] for a in centres], "h": [[[1.0] * 4] for _ in centres]})


def after(algorithm, cohort, rounds):
    state, step = toys.start(algorithm, cohort.ids.shape[0]), jax.jit(algorithm.step)
    found = []
    for _ in range(rounds):
        state, metrics = step(state, cohort, jax.random.key(0))
        found.append((state, metrics))
    return found


def costs():
    return fp.Traffic(17, 17, 8, 0, 0, (), ())  # four numbers and four bits


def test_a_round_of_fedcac_by_hand():
    """From 1: (3, 2.5, -1.1, 1), (3, 2, 1, 1) and (1, 3, 3, 1).

    ``|change * value|`` is largest at 0 and 1 twice, and at 1 and 2; of the first client ``|change|`` is so at 2 and 0.
    """
    cohort = cohort_of([5.0, 4, -3.2, 1], [5.0, 3, 1, 1], [1.0, 5, 5, 1])
    algorithm = fp.method("fedcac").make(toys.quadratic((1.0,) * 4), lr=0.5, tau=0.5, beta=2)
    ((state, metrics),) = after(algorithm, cohort, 1)
    critical = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0]]
    assert state.aux["critical"]["w"].tolist() == np.array(critical, bool).tolist()
    # Overlaps 1, 1/2, 1/2: mean 2/3, threshold 2/3 + 1/2 * 1/3 = 5/6. The first two collaborate.
    np.testing.assert_allclose(state.aux["weights"], [[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]], atol=1e-6)
    np.testing.assert_allclose(state.shared["w"], [7 / 3, 2.5, 2.9 / 3, 1], atol=1e-6)
    models = algorithm.personalize(state, cohort, 0)["w"]
    expected = [[3, 2.25, 2.9 / 3, 1], [3, 2.25, 2.9 / 3, 1], [7 / 3, 3, 3, 1]]
    np.testing.assert_allclose(models, expected, atol=1e-6)
    up, down = crossed(costs(), metrics)
    assert up.tolist() == [25] * 3 and down.tolist() == [16] * 3


def test_the_circle_of_collaborators_becomes_smaller_until_each_is_alone():
    masks = {"w": jnp.array([[1, 1, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]], bool)}
    overlap = overlaps(masks)
    np.testing.assert_allclose(overlap[0], [1, 1, 0.5, 0], atol=1e-6)
    np.testing.assert_allclose(overlap[2], [0.5, 0.5, 1, 0.5], atol=1e-6)
    there = jnp.array([True, True, True, False])
    # Over pairs of those that are there: mean 2/3, highest 1.
    first, last, alone = (np.asarray(collaborators(overlap, there, jnp.int32(t), 2)) for t in (1, 2, 3))
    for found in (first, last):
        np.testing.assert_allclose(found, [[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 1, 0], [0] * 4])
    np.testing.assert_allclose(alone, np.diag([1.0, 1, 1, 0]))
    equal = collaborators(jnp.ones((4, 4)), there, jnp.int32(3), 2)  # the threshold alone would keep them together
    np.testing.assert_allclose(equal, np.diag([1.0, 1, 1, 0]))


def select(**settings):
    return fp.method("fedselect").make(toys.quadratic((0.0,) * 4), lr=0.5, growth=0.25, **settings)


def test_two_rounds_of_fedselect_by_hand():
    """Round 1: a / 2, of which the largest change becomes personal. Round 2: that goes on by itself."""
    cohort = cohort_of([8.0, 4, 2, 1], [1.0, 2, 4, 8])
    (first, costs_1), (second, costs_2) = after(select(bound=1.0), cohort, 2)
    np.testing.assert_allclose(first.shared["w"], [2.25, 1.5, 1.5, 2.25], atol=1e-6)
    assert first.rows["kept/w"].tolist() == [[True, False, False, False], [False, False, False, True]]
    own = [[6, 2.75, 1.75, 1.625], [1.625, 1.75, 2.75, 6]]
    np.testing.assert_allclose(second.rows["own/w"], own, atol=1e-6)
    np.testing.assert_allclose(second.shared["w"], [1.625, 2.25, 2.25, 1.625], atol=1e-6)
    # Of three that are shared, 0.75 is one: the largest change is from 1.5 to 2.75.
    assert second.rows["kept/w"].tolist() == [[True, True, False, False], [False, False, True, True]]
    moved = [crossed(costs(), metrics) for metrics in (costs_1, costs_2)]
    assert [up.tolist() for up, _ in moved] == [[25, 25], [21, 21]]
    assert [down.tolist() for _, down in moved] == [[16, 16], [12, 12]]


def test_the_mask_grows_by_a_share_of_what_is_shared():
    """Half of four, not of six; the bound of half of six is three."""
    personal, change = jnp.array([1, 1, 0, 0, 0, 0], bool), jnp.array([9.0, 9, -4, 1, 2, 3])
    for bound, expected in ((1.0, [1, 1, 1, 0, 0, 1]), (0.5, [1, 1, 1, 0, 0, 0]), (0.1, [1, 1, 0, 0, 0, 0])):
        found = grown_by_change(personal, change, 0.5, bound)
        assert found.tolist() == np.array(expected, bool).tolist()


def test_fedselect_stops_at_its_bound():
    (_, _), (_, _), (state, _) = after(select(bound=0.25), cohort_of([8.0, 4, 2, 1], [1.0, 2, 4, 8]), 3)
    assert state.rows["kept/w"].sum(1).tolist() == [1, 1]


def test_what_is_personal_at_everybody_stays_as_it_was_at_the_server():
    (first, _), (second, _) = after(select(bound=1.0), cohort_of([8.0, 4, 2, 1]), 2)
    assert float(second.shared["w"][0]) == float(first.shared["w"][0]) == 4.0
    np.testing.assert_allclose(second.rows["own/w"][0, 0], 6.0)


def test_fedlp_averages_a_layer_over_those_that_sent_it():
    task, clients = toys.classifier(), toys.labelled_clients((7, 4, 10))
    algorithm = fp.method("fedlp").make(task, preserve=0.5, batch_size=5)
    state = toys.start(algorithm, 3)
    step, exchange = jax.jit(algorithm.step), jax.jit(algorithm.exchange)
    sizes, some = np.array([7.0, 4.0, 10.0]), False
    for number in range(3):
        uploads = [exchange(state, toys.only(clients, [i]).at(jnp.array([i])), jax.random.key(0))[1] for i in range(3)]
        masks = {name: np.array([bool(masks_of(each)[name]) for each in uploads]) for name in masks_of(uploads[0])}
        assert all((masks[f"params/{layer}/bias"] == masks[f"params/{layer}/kernel"]).all() for layer in ("head",))
        next_state, _ = step(state, clients, jax.random.key(0))
        for name, x in values_of(state.shared).items():
            stacked = np.stack([np.asarray(each[name], float) for each in uploads])
            weights = sizes * masks[name]
            some |= 0 < masks[name].sum() < 3
            expected = np.tensordot(weights, stacked, 1) / weights.sum() if weights.sum() else np.asarray(x)
            np.testing.assert_allclose(next_state.shared[name], expected, rtol=1e-5, atol=1e-6, err_msg=str(number))
        state = next_state
    assert some


def test_fedlp_sends_a_layer_as_often_as_it_says():
    """Kernel of 48 and bias of 12 bytes, 0.7 each: what crosses of 3 x 300 uploads, within 4 standard errors."""
    algorithm = toys.every_method("fedlp", preserve=0.7)
    _, history = fp.run(algorithm, None, toys.federation((4, 3, 5)), 300, evaluate_every=0)
    spared = np.asarray(history.metrics.spared_up)
    assert set(np.unique(spared)) == {0, 12, 48, 60}
    deviation = np.sqrt(0.7 * 0.3 * (48**2 + 12**2) / spared.size)
    assert abs((60 - spared).mean() - 0.7 * 60) < 4 * deviation
    up, _ = crossed(history.traffic, history.metrics)
    assert set(np.unique(up)) == {60 - x + 1 + 8 for x in (0, 12, 48, 60)}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("fedcac", {"tau": 1.5}, "tau: found 1.5; allowed is 0 .. 1"),
        ("fedcac", {"beta": 0}, "beta: found 0"),
        ("fedselect", {"growth": -0.1}, "growth: found -0.1"),
        ("fedselect", {"bound": 1.2}, "bound: found 1.2; allowed is 0 .. 1"),
        ("fedselect", {"personal_epochs": -1}, "personal_epochs: found -1"),
        ("fedlp", {"preserve": 0.0}, "preserve: found 0.0; allowed is a finite number above 0"),
        ("fedlp", {"groups": "w"}, r"groups: found 'w'; expected selectors"),
        ("fedlp", {"preserve": 1.1}, "preserve: found 1.1; allowed is 0 .. 1"),
    ],
)
def test_bad_settings_are_named_when_the_method_is_made(name, settings, message):
    with pytest.raises(ValueError, match=message):
        fp.method(name).make(toys.quadratic(), **settings)
