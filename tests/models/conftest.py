"""Float64 for comparisons with numpy."""

import jax
import pytest


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
