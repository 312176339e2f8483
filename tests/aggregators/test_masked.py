"""The masked mean against NumPy, and what it must not touch."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_pers as fp
from fedjax_pers.aggregators import aggregate
from fedjax_pers.aggregators.masked import masked_mean
from fedjax_pers.masks import with_masks

NAMES = frozenset({"v", "w"})


@pytest.fixture
def uploads():
    draw = np.random.default_rng(0)
    values = {"v": draw.normal(size=(4, 5)), "w": draw.normal(size=(4, 2, 3))}
    return {name: jnp.asarray(x, jnp.float32) for name, x in values.items()}


def server_of(aggregator, *, elementwise=False):
    leaves = with_masks({"v": jnp.full(5, 10.0), "w": jnp.full((2, 3), -3.0)}, elementwise=elementwise)
    return aggregator.init(leaves, NAMES, 4)


def test_each_element_is_the_mean_of_those_who_share_it(uploads):
    weights, draw = np.array([1.0, 2.0, 3.0, 4.0]), np.random.default_rng(1)
    masks = {name: draw.random(x.shape) < 0.5 for name, x in uploads.items()}
    masks["v"][:, 2] = False
    sent = uploads | {f"mask/{name}": jnp.asarray(x) for name, x in masks.items()}
    after, _ = aggregate(masked_mean(), server_of(masked_mean(), elementwise=True), sent, weights)
    for name, start in (("v", 10.0), ("w", -3.0)):
        mass = np.tensordot(weights, masks[name].astype(float), 1)
        summed = np.tensordot(weights, masks[name] * np.asarray(uploads[name], float), 1)
        expected = np.where(mass > 0, summed / np.where(mass > 0, mass, 1), start)
        np.testing.assert_allclose(after.shared[name], expected, rtol=2e-6, atol=1e-6)
    assert after.shared["v"][2] == 10.0


def test_with_true_masks_it_is_the_mean(uploads):
    sent = uploads | {"mask/v": jnp.ones(4, bool), "mask/w": jnp.ones(4, bool)}
    weights = [1.0, 2.0, 3.0, 4.0]
    after, _ = aggregate(masked_mean(), server_of(masked_mean()), sent, weights)
    plain = fp.mean().init({"v": jnp.full(5, 10.0), "w": jnp.full((2, 3), -3.0)}, NAMES, 4)
    expected, _ = aggregate(fp.mean(), plain, uploads, weights)
    for name in NAMES:
        np.testing.assert_array_equal(after.shared[name], expected.shared[name])


def test_a_server_optimiser_leaves_what_nobody_shares_and_remembers_nothing_of_it(uploads):
    aggregator = masked_mean(optax.sgd(1.0, momentum=0.9))
    shared = uploads | {"mask/v": jnp.ones(4, bool), "mask/w": jnp.ones(4, bool)}
    first, _ = aggregate(aggregator, server_of(aggregator), shared, [1.0] * 4, trainable=NAMES)
    without_w = uploads | {"mask/v": jnp.ones(4, bool), "mask/w": jnp.zeros(4, bool)}
    after, _ = aggregate(aggregator, first, without_w, [1.0] * 4, trainable=NAMES)
    np.testing.assert_array_equal(after.shared["w"], first.shared["w"])
    velocity, before = after.opt[0].trace, first.opt[0].trace
    np.testing.assert_array_equal(velocity["w"], before["w"])
    difference = np.asarray(uploads["v"], float).mean(0) - np.asarray(first.shared["v"], float)
    np.testing.assert_allclose(velocity["v"], 0.9 * np.asarray(before["v"]) - difference, rtol=1e-5, atol=1e-5)


def test_a_leaf_without_a_mask_is_shared_by_everyone():
    server = masked_mean().init({"w": jnp.zeros(2)}, frozenset({"w"}), 2)
    after, _ = aggregate(masked_mean(), server, {"w": jnp.array([[1.0, 2.0], [3.0, 4.0]])}, [1.0, 3.0])
    assert after.shared["w"].tolist() == [2.5, 3.5]


def test_nothing_accepted_leaves_the_server_as_it_was(uploads):
    aggregator = masked_mean(optax.adam(0.1))
    first = server_of(aggregator)
    broken = {name: x.at[:].set(jnp.nan) for name, x in uploads.items()}
    sent = broken | {"mask/v": jnp.ones(4, bool), "mask/w": jnp.ones(4, bool)}
    after, info = aggregate(aggregator, first, sent, [1.0] * 4, trainable=NAMES)
    assert bool(info["skipped"])
    np.testing.assert_array_equal(after.shared["w"], first.shared["w"])
    assert int(after.opt[0].count) == 0


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ({"mask/u": jnp.zeros((), bool)}, r"found masks of \['u'\], which are no leaves"),
        ({"mask/w": jnp.zeros(3, bool)}, r"'mask/w'.*found bool\(3,\); expected bool of shape \(\) or \(2,\)"),
        ({"mask/w": jnp.zeros(2)}, r"'mask/w'.*found float32\(2,\)"),
    ],
)
def test_masks_that_fit_no_leaf_are_refused(masks, message):
    with pytest.raises(ValueError, match=message):
        masked_mean().init({"w": jnp.zeros(2)} | masks, frozenset({"w"}), 2)
