"""The public conformance suite on every entry of the registry, check by check."""

from __future__ import annotations

import pytest

import fedjax_pers as fp
from fedjax_pers.testing import CHECKS, Subject, subject_for
from tests import toys

EXAMPLE = (("x", (3,), "float32"), ("y", (), "int32"))


@pytest.fixture(scope="module", params=toys.methods())
def subject(request) -> Subject:
    # Batch normalisation, so that running statistics take part; the personal part of FedBN would be empty without.
    task = fp.tasks.from_model(EXAMPLE, "mlp_norm", num_classes=3, hidden=(4,))
    return subject_for(fp.method(request.param).make, task, batch_size=4, **toys.small(request.param))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conforms(subject, check):
    check(subject)
