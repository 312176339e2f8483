"""Layers that are chosen while a run goes on, on two numbers, by hand.

``f = (s - 1)^2 / 2 + (d - a)^2 / 2`` from ``s = d = 0`` with one step of 1/2 a round: clients agree on ``s``, and
differ on ``d`` by their ``a``.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_pers as fp
from fedjax_pers.aggregators import aggregate
from fedjax_pers.aggregators.choice import agreement, divergence, layer_choice, selected
from fedjax_pers.masks import ALL_SENT, with_masks
from fedjax_pers.traffic import crossed
from tests import toys

TASK = toys.plain_task(lambda v, batch: 0.5 * (v["s"] - 1) ** 2 + 0.5 * (v["d"] - batch["a"]) ** 2, s=0.0, d=0.0)
GROUPS = {"s": frozenset({"s"}), "d": frozenset({"d"})}


def conditional(**settings):
    return fp.method("conditional_layers").make(TASK, lr=0.5, groups=("s", "d"), batch_size=9, **settings)


def rounds_of(algorithm, a, rounds, sizes=None):
    """States and metrics after each round, and what a client's exchange costs at most."""
    cohort = toys.copies(sizes or [1] * len(a), {"a": [[x] for x in a]})
    state, step, found = toys.start(algorithm, len(a)), jax.jit(algorithm.step), []
    for _ in range(rounds):
        state, metrics = step(state, cohort, jax.random.key(0))
        found.append((state, metrics))
    return found


def costs(up, down):
    return fp.Traffic(down, up, 8, 0, 0, (), ())


def test_four_rounds_by_hand():
    """a = 1 and 3: after a full round d = 1/2 and 3/2, of mean 1 and divergence 1/2; it becomes personal."""
    found = rounds_of(conditional(warm_up=1, reselect_every=2), [1.0, 3.0], 4)
    states = [state for state, _ in found]
    np.testing.assert_allclose([float(s.shared["s"]) for s in states], [0.5, 0.75, 0.875, 0.9375], atol=1e-6)
    # Both begin with the server's 1, then go on with their own; the server's is measured again in the third round.
    np.testing.assert_allclose([float(s.shared["d"]) for s in states], [1.0, 1.0, 1.75, 1.75], atol=1e-6)
    own = [np.asarray(s.rows["own/d"]).tolist() for s in states[1:]]
    np.testing.assert_allclose(own, [[1.0, 2.0], [1.0, 2.5], [1.0, 2.75]], atol=1e-6)
    scores = [np.asarray(s.aux["scores"]).tolist() for s in states]
    np.testing.assert_allclose(scores, [[0, 0.5], [0, 0.5], [0, 0.75 / 1.75], [0, 0.75 / 1.75]], atol=1e-6)
    assert [s.aux["personal"].tolist() for s in states] == [[False, True]] * 4

    # Two leaves are 8 bytes, three bits one byte. Up: full, s, full (measured), s; 8 bytes say how many examples.
    # Down: d once more where it has just become personal.
    moved = [crossed(costs(9, 9), metrics) for _, metrics in found]
    assert [up.tolist() for up, _ in moved] == [[16, 16], [12, 12], [16, 16], [12, 12]]
    assert [down.tolist() for _, down in moved] == [[9, 9], [9, 9], [5, 5], [5, 5]]


def test_what_predicts_is_the_server_s_s_and_a_client_s_own_d():
    algorithm = conditional(warm_up=1)
    (_, _), (state, _) = rounds_of(algorithm, [1.0, 3.0], 2)
    models = algorithm.personalize(state, toys.clients({"a": [[1.0], [3.0]]}), 0)
    np.testing.assert_allclose(models["s"], [0.75, 0.75], atol=1e-6)
    np.testing.assert_allclose(models["d"], [1.0, 2.0], atol=1e-6)


def test_a_client_never_seen_trains_what_is_personal_from_the_server_s_value():
    algorithm = conditional(warm_up=1, newcomer_epochs=1)
    (_, _), (state, _) = rounds_of(algorithm, [1.0, 3.0], 2)
    unseen = toys.clients({"a": [[5.0]]}, ids=[2])
    models = algorithm.personalize(state, unseen, 0)
    np.testing.assert_allclose([models["s"][0], models["d"][0]], [0.75, 1 + 0.5 * 4], atol=1e-6)


def test_a_personal_part_of_an_absent_client_waits():
    algorithm = conditional(warm_up=1)
    cohort, step = toys.clients({"a": [[1.0], [3.0]]}), jax.jit(algorithm.step)
    state = toys.start(algorithm, 2)
    for members in ([0, 1], [0, 1], [0], [0]):
        state, _ = step(state, toys.only(cohort, members), jax.random.key(0))
    assert float(state.rows["own/d"][1]) == 2.0 and float(state.shared["d"]) == 1.0


def test_identical_clients_do_not_diverge_and_agree():
    for score, expected in (("divergence", 0), ("agreement", 1)):
        ((state, _),) = rounds_of(conditional(score=score, warm_up=1), [2.0, 2.0, 2.0], 1)
        np.testing.assert_allclose(state.aux["scores"], [expected] * 2, atol=1e-6)


def test_opposed_updates_do_not_agree():
    ((state, _),) = rounds_of(conditional(score="agreement", warm_up=1), [1.0, -3.0], 1)
    np.testing.assert_allclose(state.aux["scores"], [1, -1], atol=1e-6)
    assert state.aux["personal"].tolist() == [False, True]


@pytest.mark.parametrize("score", ["agreement", "divergence"])
def test_with_one_client_alone_the_deciding_round_is_repeated(score):
    algorithm, cohort = conditional(score=score, warm_up=1), toys.clients({"a": [[1.0], [3.0]]})
    step, state = jax.jit(algorithm.step), toys.start(conditional(score=score, warm_up=1), 2)
    for members in ([0], [1]):
        state, _ = step(state, toys.only(cohort, members), jax.random.key(0))
        assert not state.aux["personal"].any() and int(state.aux["rounds"]) == 0
    state, _ = step(state, cohort, jax.random.key(0))
    assert int(state.aux["rounds"]) == 1 and int(state.aux["personal"].sum()) == 1


def test_a_run_with_one_client_a_round_is_refused():
    with pytest.raises(ValueError, match="cohort_size: found 1; this method needs at least 2 clients"):
        fp.run(toys.every_method("conditional_layers"), None, toys.federation((4, 3, 5)), 1, cohort_size=1)


def scored(score, uploads, weights, shared):
    """The scores of layers ``a`` (two leaves) and ``b`` after one measuring round."""
    groups = {"a": frozenset({"k", "c"}), "b": frozenset({"w"})}
    aggregator = layer_choice(groups, score, scored={"k", "c", "w"}, warm_up=1)
    server = aggregator.init(with_masks(shared) | {ALL_SENT: jnp.array(False)}, frozenset("kcw"), 5)
    beside = {f"mask/{name}": jnp.ones(5, bool) for name in "kcw"} | {ALL_SENT: jnp.ones(5, bool)}
    after, _ = aggregate(aggregator, server, uploads | beside, weights, trainable=frozenset("kcw"))
    return after.aux


@pytest.fixture
def uploads():
    draw = np.random.default_rng(0)
    shapes = {"k": (5, 4, 3), "c": (5, 3), "w": (5, 6)}
    return {name: jnp.asarray(draw.normal(size=shape) + 0.5, jnp.float32) for name, shape in shapes.items()}


def flat(uploads, names):
    return np.concatenate([np.asarray(uploads[name], float).reshape(5, -1) for name in names], axis=1)


def test_divergence_is_that_of_numpy(uploads):
    weights = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    shared = {name: jnp.full(x.shape[1:], 0.25) for name, x in uploads.items()}
    found = scored(divergence(), uploads, weights, shared)["scores"]
    share = weights / weights.sum()
    for place, names in enumerate(("kc", "w")):
        w = flat(uploads, names)
        mean = share @ w
        expected = share @ np.linalg.norm(w - mean, axis=1) / np.linalg.norm(mean)
        assert float(found[place]) == pytest.approx(expected, rel=1e-5)


def test_agreement_is_the_mean_cosine_of_all_pairs(uploads):
    shared = {name: jnp.full(x.shape[1:], 0.25) for name, x in uploads.items()}
    found = scored(agreement(), uploads, [1.0, 2.0, 3.0, 4.0, 5.0], shared)["scores"]
    for place, names in enumerate(("kc", "w")):
        u = flat(uploads, names) - 0.25
        u /= np.linalg.norm(u, axis=1, keepdims=True)
        expected = np.mean([a @ b for a, b in itertools.combinations(u, 2)])
        assert float(found[place]) == pytest.approx(expected, abs=1e-5)


def test_hysteresis_by_hand():
    """0.6 against the personal 0.5: it takes the place where it is more than the hysteresis above."""
    scores, personal = jnp.array([0.5, 0.6, 0.1, 0.05]), jnp.array([True, False, True, False])
    assert selected(scores, personal, 2, 0.0).tolist() == [True, True, False, False]
    assert selected(scores, personal, 2, 0.45).tolist() == [True, True, False, False]  # 0.55 < 0.6
    assert selected(scores, personal, 2, 0.55).tolist() == [True, False, True, False]  # 0.65 > 0.6
    assert selected(scores, personal, 0, 0.0).tolist() == [False] * 4
    assert selected(jnp.zeros(3), jnp.zeros(3, bool), 1, 0.0).tolist() == [True, False, False]  # the first of equals


def test_the_choice_does_not_depend_on_the_order_of_clients():
    algorithm, fields = conditional(warm_up=1), {"a": [[1.0], [3.0], [-2.0]]}
    cohort = toys.clients(fields)
    step, start = jax.jit(algorithm.step), toys.start(algorithm, 3)
    plain, _ = step(start, cohort, jax.random.key(0))
    mixed, _ = step(start, cohort.at(jnp.array([2, 0, 1])), jax.random.key(0))
    toys.same_bits(mixed.aux, plain.aux)


def test_depth_by_the_number_of_examples():
    """The client with two examples keeps d: the server's d is that of the other alone."""
    algorithm = fp.method("layers_by_client").make(TASK, lr=0.5, groups=("s", "d"), batch_size=9, examples=(2,))
    (first, round_1), (second, round_2) = rounds_of(algorithm, [1.0, 3.0], 2, sizes=[1, 2])
    np.testing.assert_allclose([first.shared["s"], first.shared["d"]], [0.5, 0.5], atol=1e-6)
    np.testing.assert_allclose([second.shared["s"], second.shared["d"]], [0.75, 0.75], atol=1e-6)
    np.testing.assert_allclose(first.rows["own/d"], [0.5, 1.5], atol=1e-6)
    np.testing.assert_allclose(second.rows["own/d"], [0.75, 2.25], atol=1e-6)
    assert second.rows["kept/d"].tolist() == [False, True]
    moved = [crossed(costs(9, 9), metrics) for metrics in (round_1, round_2)]  # masks go up, not down
    assert [up.tolist() for up, _ in moved] == [[17, 13], [17, 13]]
    assert [down.tolist() for _, down in moved] == [[8, 8], [8, 4]]


def test_the_ledger_of_a_run_has_what_each_client_was_spared():
    federation = toys.federation((4, 3, 5))
    algorithm = toys.every_method("conditional_layers", warm_up=1)
    _, history, rows = toys.recorded(algorithm, federation, 3, evaluate_every=0)
    up, down = crossed(history.traffic, history.metrics)
    # Kernel 4 x 3 and bias 3: 60 bytes, 12 of the bias or 48 of the kernel stay after the first round.
    assert up[0].tolist() == [68] * 3 and down[0].tolist() == [61] * 3
    assert set(up[2].tolist()) in ({56}, {20}) and set(down[2].tolist()) == {int(up[2, 0]) - 8 + 1}
    assert [row["megabytes_up"] for row in rows] == pytest.approx((up.sum(1) / 1e6).tolist())
    assert rows[-1]["total_megabytes_down"] == pytest.approx(down.sum() / 1e6)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("conditional_layers", {"layers": 2}, "layers: found 2 of 2 .*at least one must stay shared"),
        ("conditional_layers", {"layers": -1}, "layers: found -1"),
        ("conditional_layers", {"warm_up": 0}, "warm_up: found 0"),
        ("conditional_layers", {"reselect_every": -1}, "reselect_every: found -1"),
        ("conditional_layers", {"hysteresis": -0.1}, "hysteresis: found -0.1"),
        ("conditional_layers", {"score": "cka"}, "score: found 'cka'; allowed are agreement, divergence"),
        ("conditional_layers", {"groups": ("s", "s")}, "groups: 1 leaves are in more than one"),
        ("layers_by_client", {"examples": (1, 2)}, "examples: found 2 numbers; allowed are 1 .. 1"),
        ("layers_by_client", {"examples": (-1,)}, "examples: found -1"),
        ("layers_by_client", {"examples": 20}, "examples: found 20; expected numbers"),
        ("layers_by_client", {"examples": [2, 1]}, "examples: found .2, 1.; expected an ascending order"),
        ("layers_by_client", {"examples": ()}, "examples: found 0 numbers"),
    ],
)
def test_bad_settings_are_named_when_the_method_is_made(name, settings, message):
    with pytest.raises(ValueError, match=message):
        fp.method(name).make(TASK, **{"groups": ("s", "d"), **settings})
