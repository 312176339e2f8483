"""Rounds whose examples are brought from the host give the bytes of rounds whose examples are all on the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import fedjax_pers as fp
from fedjax_pers.simulate import placement, pools
from fedjax_pers.simulate.compilations import compilations
from tests import toys

SIZES = (7, 4, 10, 1, 0, 3, 25, 6)
FEDERATION = toys.federation(SIZES)


def outcome(name: str, data_on: str, **options: Any) -> Any:
    algorithm = toys.every_method(name)
    state, history = fp.run(algorithm, None, FEDERATION, 5, 3, evaluate_every=2, data_on=data_on, **options)
    return state, history.metrics, [table.personal for _, table in history.evaluations], history.traffic


@pytest.mark.parametrize(
    ("name", "options"), [("fedrep", {"cohort_size": 2}), ("scaffold", {"cohort_size": 3}), ("l2gd", {})]
)
def test_streamed_and_resident_runs_have_the_same_bytes(name: str, options: dict[str, Any]) -> None:
    jax.tree.map(np.testing.assert_array_equal, outcome(name, "host", **options), outcome(name, "device", **options))


def test_only_the_clients_of_a_block_are_on_the_device() -> None:
    pool = pools.pool_of_clients(FEDERATION, "train", np.array([2, 5]))
    rows = FEDERATION.train
    assert next(iter(pool.data.values())).shape[0] == 16  # 10 + 3, filled up
    np.testing.assert_array_equal(pool.size, [0, 0, 10, 0, 0, 3, 0, 0])
    for client in (2, 5):
        start, size = int(pool.start[client]), int(pool.size[client])
        for field, values in rows.client(client).items():
            np.testing.assert_array_equal(pool.data[field][start : start + size], values)
    assert pool.room.shape == (25, 0)


def test_blocks_of_like_size_share_a_program() -> None:
    algorithm, key = toys.every_method("fedavg"), jax.random.key(0)
    options = {"cohort_size": 3, "evaluate_every": 0, "data_on": "host"}
    fp.run(algorithm, None, FEDERATION, 40, key, **options)
    before = compilations()
    fp.run(algorithm, None, FEDERATION, 40, key, **options)
    assert compilations() == before


def test_examples_stay_on_the_host_where_they_would_fill_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pools.place_of_examples(FEDERATION, "auto") == "device"  # a CPU does not say
    needed = sum(x.nbytes for name in ("train", "validation", "test") for x in FEDERATION.split(name).data.values())
    for limit, place in ((2 * needed, "host"), (3 * needed, "device")):
        accelerator = SimpleNamespace(memory_stats=lambda limit=limit: {"bytes_limit": limit})
        monkeypatch.setattr(placement.jax, "local_devices", lambda accelerator=accelerator: [accelerator])
        assert pools.place_of_examples(FEDERATION, "auto") == place
        assert pools.place_of_examples(FEDERATION, "device") == "device"


def test_a_place_that_is_none() -> None:
    with pytest.raises(ValueError, match="data_on: found 'disk'; allowed are auto, device, host"):
        fp.run(toys.every_method("fedavg"), None, FEDERATION, 1, data_on="disk")
