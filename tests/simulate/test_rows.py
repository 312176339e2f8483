"""Rounds whose personal rows are lent from the host give the bytes of rounds whose rows are all on the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_pers as fp
from fedjax_pers.config import Config
from fedjax_pers.simulate import placement, rows
from fedjax_pers.simulate.compilations import compilations
from fedjax_pers.simulate.study import last_state, run_study
from tests import toys

SIZES = (7, 4, 10, 1, 0, 3, 25, 6)
FEDERATION = toys.federation(SIZES)


def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that says it has one byte."""
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 1})
    monkeypatch.setattr(placement.jax, "local_devices", lambda: [device])


def outcome(name: str, **options: Any) -> Any:
    state, history = fp.run(toys.every_method(name), None, FEDERATION, 5, 3, evaluate_every=2, **options)
    return state, history.metrics, [table.personal for _, table in history.evaluations], history.traffic


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedper", {"cohort_size": 2}),
        ("scaffold", {"cohort_size": 3, "data_on": "host"}),
        ("ditto", {"sampler": fp.dropouts(fp.poisson(0.3), 0.3)}),
    ],
)
def test_lent_and_resident_rows_have_the_same_bytes(name: str, options: dict[str, Any]) -> None:
    there, here = (outcome(name, rows_on=place, **options) for place in ("host", "device"))
    assert all(isinstance(x, np.ndarray) for x in there[0].rows.values())
    assert not any(isinstance(x, np.ndarray) for x in here[0].rows.values())
    assert here[0].rows
    jax.tree.map(np.testing.assert_array_equal, there, here)


def test_a_method_that_draws_among_those_who_are_there_writes_the_rows_of_the_drawn_alone() -> None:
    """DRFA's places for nobody stand where the last client's row lies."""
    algorithm = fp.method("drfa").make(toys.softmax_regression(), personal="bias", clients=6, steps=2, batch_size=3)
    there, here = (
        fp.run(algorithm, None, FEDERATION, 4, 3, evaluate_every=0, rows_on=p)[0] for p in ("host", "device")
    )
    assert np.abs(here.rows["bias"]).sum() > 0
    jax.tree.map(np.testing.assert_array_equal, there, here)


def test_the_device_holds_the_rows_of_a_block_alone() -> None:
    state = fp.start(toys.every_method("fedper"), FEDERATION, rows_on="host")
    part = rows.lent(state, np.array([2, 5]), 3, 1)
    for name, whole in state.rows.items():
        assert part.rows[name].shape == (3, *whole.shape[1:])
    assert (
        rows.slots_of(np.array([2, 5]), 8).tolist()
        == [rows.NOWHERE] * 2 + [0] + [rows.NOWHERE] * 2 + [1] + [rows.NOWHERE] * 2
    )


def test_no_row_stays_on_the_device_between_blocks() -> None:
    clients, width = 64, 4096
    task = toys.plain_task(lambda v, batch: ((v["w"] - batch["x"][:, :1]) ** 2).sum(1), w=np.zeros(width))
    federation = toys.federation((2,) * clients)
    algorithm = fp.compose(task, layout=fp.by_role(personal="**"))
    sizes = []

    def look(block: Any) -> None:
        assert block.state.rows["w"].shape == (clients, width)
        sizes.append(max((x.shape[0] for x in jax.live_arrays() if x.shape[1:] == (width,)), default=0))

    state, _ = fp.run(algorithm, None, federation, 4, cohort_size=3, evaluate_every=2, rows_on="host", on_block=look)
    assert sizes == [0, 0]
    assert (np.abs(state.rows["w"]).sum(1) > 0).sum() == (np.asarray(state.seen) > 0).sum()


def test_blocks_share_a_program() -> None:
    algorithm, options = toys.every_method("fedper"), {"cohort_size": 3, "evaluate_every": 4, "rows_on": "host"}
    half, _ = fp.run(algorithm, None, FEDERATION, 4, 0, **options)
    half, _ = fp.run(algorithm, half, FEDERATION, 5, 0, **options)
    before = compilations()
    fp.run(algorithm, half, FEDERATION, 22, 0, **options)
    assert compilations() == before


def test_a_run_goes_on_from_rows_on_either_side_and_leaves_them_as_they_were() -> None:
    algorithm, options = toys.every_method("fedper"), {"cohort_size": 3, "evaluate_every": 0}
    whole, _ = fp.run(algorithm, None, FEDERATION, 4, 0, **options)
    for begins in ("host", "device"):
        half, _ = fp.run(algorithm, None, FEDERATION, 2, 0, rows_on=begins, **options)
        kept = jax.tree.map(np.array, half)
        for goes_on in ("host", "device", "auto"):
            state, _ = fp.run(algorithm, half, FEDERATION, 4, 0, rows_on=goes_on, **options)
            on_host = isinstance(next(iter(state.rows.values())), np.ndarray)
            assert on_host == ((begins if goes_on == "auto" else goes_on) == "host")
            jax.tree.map(np.testing.assert_array_equal, state, whole)
        jax.tree.map(np.testing.assert_array_equal, half, kept)


def test_newcomers_get_the_fresh_row() -> None:
    federation = fp.data.load("vowel_speakers", unseen=0.2)
    algorithm = fp.method("fedper").make(fp.tasks.from_model(federation, "linear"))
    tables = []
    for place in ("host", "device"):
        state, _ = fp.run(algorithm, None, federation, 2, evaluate_every=0, rows_on=place)
        tables.append(fp.evaluate_clients(algorithm, state, federation.unseen).personal)
    jax.tree.map(np.testing.assert_array_equal, *tables)


def test_a_study_whose_rows_do_not_fit_writes_the_same_bytes(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(model="linear", method="fedper", rounds=4, warm_start=2, evaluate_every=2, cohort_size=5)
    plain = run_study(config, tmp_path / "plain")
    with monkeypatch.context() as patched:
        little_memory(patched)
        tight = run_study(config, tmp_path / "tight")
        _, state = last_state(tight.folder)
        assert all(isinstance(x, np.ndarray) for x in state.rows.values())
    for name in ("metrics.jsonl", "clients.csv", "summary.json"):
        assert (plain.folder / name).read_bytes() == (tight.folder / name).read_bytes()
    _, expected = last_state(plain.folder)
    assert isinstance(next(iter(expected.rows.values())), jnp.ndarray)
    jax.tree.map(np.testing.assert_array_equal, state, expected)


def test_a_place_that_is_none() -> None:
    with pytest.raises(ValueError, match="rows_on: found 'disk'; allowed are auto, device, host"):
        fp.run(toys.every_method("fedavg"), None, FEDERATION, 1, rows_on="disk")
