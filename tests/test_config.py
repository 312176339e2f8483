from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import optax
import pytest

from fedjax_pers.config import Config
from fedjax_pers.data import dirichlet
from fedjax_pers.presets import bias, head


def test_plain_values_there_and_back():
    config = Config(
        data=Path("data/clients.npz"),
        data_options={"partitioner": dirichlet(0.5)},
        model_options={"hidden": (8, 4)},
        settings={"personal": head(2) | bias(), "lr": 0.05, "steps": None},
        rounds=3,
        cohort_size=2,
    )
    plain = json.loads(json.dumps(config.to_dict()))
    assert plain["data"] == "data/clients.npz"
    assert plain["data_options"]["partitioner"].startswith("dirichlet(alpha=0.5")
    assert plain["model_options"] == {"hidden": [8, 4]}
    assert plain["settings"] == {"personal": "head(2) | bias()", "lr": 0.05, "steps": None}
    assert (plain["rounds"], plain["cohort_size"], plain["lanes"]) == (3, 2, None)
    assert Config.from_dict(plain).to_dict() == plain


def test_numbers_of_numpy_are_numbers():
    plain = Config(seed=np.int64(3), unseen=np.float64(0.25)).to_dict()
    assert (type(plain["seed"]), plain["seed"], plain["unseen"]) == (int, 3, 0.25)


def test_what_is_absent_has_its_default():
    assert Config.from_dict({"rounds": 3}) == Config(rounds=3)


def test_fields_that_no_run_has():
    with pytest.raises(ValueError, match="config: found 'ronds'; allowed are .*Did you mean 'rounds'"):
        Config.from_dict({"ronds": 3})
    with pytest.raises(ValueError, match=r"config: found \[1\]"):
        Config.from_dict([1])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lr": math.nan}, "settings.lr: found nan; allowed is a finite number"),
        ({"optimizer": optax.adam}, r"settings.optimizer: found <function.*optimizers by name"),
        ({"epochs": [1, {2}]}, r"settings.epochs\[1\]: found \{2\}"),
    ],
)
def test_values_without_a_plain_form(settings, expected):
    with pytest.raises(ValueError, match=expected):
        Config(settings=settings).to_dict()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rounds": 0}, "rounds: found 0; allowed is a whole number of at least 1"),
        ({"rounds": 2.0}, "rounds: found 2.0"),
        ({"rounds": True}, "rounds: found True"),
        ({"cohort_size": 0}, "cohort_size: found 0"),
        ({"lanes": 0}, "lanes: found 0"),
        ({"devices": 0}, "devices: found 0"),
        ({"seed": -1}, "seed: found -1"),
        ({"seed": 2**32}, "seed: found 4294967296"),
        ({"unseen": 1.0}, "unseen: found 1.0; allowed is a share"),
        ({"unseen": math.nan}, "unseen: found nan"),
        ({"warm_start": -1}, "warm_start: found -1"),
        ({"checkpoint_every": 0}, "checkpoint_every: found 0"),
        ({"evaluate_every": None}, "evaluate_every: found None"),
        ({"stop_on_rejected": 1}, "stop_on_rejected: found 1"),
        ({"secure_aggregation": 1}, "secure_aggregation: found 1"),
        ({"settings": ["lr"]}, r"settings: found \['lr'\]"),
        ({"method": None}, "method: found None; allowed is a name"),
    ],
)
def test_fields_of_another_type_or_range(fields, expected):
    with pytest.raises(ValueError, match=expected):
        Config(**fields).check()


def test_the_default_run_is_a_run():
    Config().check()
