"""What a server must see of a single client is declared, true, and refused where the server is to know sums alone."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import fedjax_pers as fp
from fedjax_pers.aggregators import by_rule, krum, mean, mixing, norm_clipping
from fedjax_pers.config import Config
from fedjax_pers.simulate.study import validate
from tests import toys


@pytest.mark.parametrize("name", sorted(fp.methods()))
def test_the_registry_says_of_a_method_what_its_aggregator_says(name: str) -> None:
    assert fp.method(name).secure_aggregation == (not toys.every_method(name).sees)


@pytest.mark.parametrize(
    "aggregator",
    [krum(1), by_rule(lambda each, weight: each), mixing(lambda crowd: jnp.eye(2))],
    ids=["krum", "by_rule", "mixing"],
)
def test_an_aggregator_that_collects_uploads_is_refused(aggregator: fp.Aggregator) -> None:
    with pytest.raises(ValueError, match="secure_aggregation: found true; .* must see each client's upload"):
        fp.compose(toys.quadratic(), aggregator=aggregator, secure_aggregation=True)


@pytest.mark.parametrize("aggregator", [mean(), norm_clipping(1.0)], ids=["mean", "norm_clipping"])
def test_sums_are_enough_for_others(aggregator: fp.Aggregator) -> None:
    assert fp.compose(toys.quadratic(), aggregator=aggregator, secure_aggregation=True).sees == ""


def test_a_run_that_cannot_have_it_is_refused_before_any_work() -> None:
    for method, what in (("afl", "loss"), ("cfl", "upload"), ("ifca", "which model each client chose")):
        with pytest.raises(ValueError, match=f"secure_aggregation: found true; .*{what}"):
            validate(Config(model="linear", method=method, secure_aggregation=True))
    validate(Config(model="linear", method="fedper", secure_aggregation=True))
