"""Steps of size zero leave every model as it was."""

from __future__ import annotations

import pytest

import fedjax_pers as fp
from tests import toys

RATES = ("lr", "personal_lr", "alpha_lr", "inner_lr")


@pytest.mark.parametrize("name", [name for name in fp.methods() if name != "scaffold"])
def test_a_step_of_zero(name):
    federation = toys.federation((3,) * 20, (2,) * 20)
    rates = {rate: 0.0 for rate in RATES if rate in fp.method(name).settings}
    algorithm = toys.every_method(name, **rates)
    everyone = algorithm.participation == "everyone"
    first = fp.start(algorithm, federation, 0)
    last, _ = fp.run(algorithm, None, federation, 1, cohort_size=None if everyone else 2, evaluate_every=0)
    toys.same_bits((last.shared, last.rows, last.frozen), (first.shared, first.rows, first.frozen))


def test_scaffold_which_divides_by_its_step_refuses_zero():
    with pytest.raises(ValueError, match="lr: found 0"):
        toys.every_method("scaffold", lr=0.0)
    assert toys.every_method("scaffold", lr=0.0, option="I").participation == "any"
