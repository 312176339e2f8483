"""Cohorts from stacked arrays: what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import fedjax_pers as fp

X = np.zeros((3, 4, 2))


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ({}, {}, "data: every field needs the same leading"),
        ({"x": X, "y": np.zeros((3, 5))}, {}, r"data: .*\(3, 5\)"),
        ({"x": np.zeros((3, 0, 2))}, {}, r"data: found no example .*\(3, 0\)"),
        ({"x": X}, {"ids": [0, 1, 1]}, r"ids: found \[0, 1, 1\]; they must be unique"),
        ({"x": X}, {"ids": [0, 1]}, r"ids: found shape \(2,\), expected \(3,\)"),
        ({"x": X}, {"sizes": [0, 5, 4]}, r"sizes: found \[0, 5, 4\]; allowed are 0 .. 4"),
        ({"x": X}, {"sizes": [0, -1, 4]}, r"sizes: found \[0, -1, 4\]; allowed are 0 .. 4"),
    ],
)
def test_what_makes_no_cohort(data, options, message):
    with pytest.raises(ValueError, match=message):
        fp.cohort_of(data, **options)
