"""Tests run on the CPU unless the environment says otherwise; set before anything imports JAX."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
