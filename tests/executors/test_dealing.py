"""Who runs which client: every item once, groups of like cost, devices equally laden."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pers.executors.dealing import dealt

COSTS = {
    "equal": np.full(24, 7),
    "uneven": np.clip(np.random.default_rng(0).lognormal(np.log(60) - 0.5, 1, 96), 10, 600).astype(int),
    "one giant": np.array([1000, *[1] * 23]),
    "empty": np.zeros(24, int),
}


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize(("devices", "lanes"), [(1, 1), (1, 4), (2, 1), (2, 3), (4, 2), (3, 8)])
def test_every_item_is_run_once_and_groups_have_neighbours_in_size(name, devices, lanes):
    cost = COSTS[name]
    found = np.asarray(jax.jit(dealt, static_argnums=(1, 2))(jnp.asarray(cost), devices, lanes))
    assert found.shape == (devices, len(cost) // devices // lanes, lanes)
    assert sorted(found.reshape(-1).tolist()) == list(range(len(cost)))
    falling = np.sort(cost)[::-1].reshape(-1, lanes)
    assert sorted(map(tuple, cost[found].reshape(-1, lanes))) == sorted(map(tuple, falling))
    for queue in found:  # the longest first
        assert (np.diff(cost[queue][:, 0]) <= 0).all()


def greedy(cost, devices):
    """Longest processing time first, with as many items for each device: the loads, item by item."""
    falling, load = np.sort(cost)[::-1], np.zeros(devices, int)
    for block in falling.reshape(-1, devices):
        order = np.argsort(load, kind="stable")
        load[order] += block
    return sorted(load)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_devices_get_equal_loads(devices):
    cost = COSTS["uneven"]
    found = np.asarray(dealt(jnp.asarray(cost), devices, 1))
    loads = cost[found].sum((1, 2))
    assert sorted(loads) == greedy(cost, devices)
    assert loads.max() <= 1.02 * loads.mean()


def test_equal_costs_stay_in_order():
    assert dealt(jnp.array([5, 5, 5, 5]), 1, 2).tolist() == [[[0, 1], [2, 3]]]
    assert dealt(jnp.array([2, 5, 2, 5]), 1, 1).tolist() == [[[1], [3], [0], [2]]]
