"""Tasks: what a model is trained for, from the package's own models or those of any library.

- ``from_model(federation, "mlp", hidden=(32,))``: a model of :mod:`fedjax_pers.models`, by name
- ``linen(module, federation.example)``: Flax Linen
- ``nnx(make, federation.example)``: Flax NNX, ``make(rngs) -> module``
- ``equinox(make, federation.example)``: Equinox, ``make(key) -> module`` of one example
- ``haiku(function, federation.example)``: Haiku
- ``supervised(init, apply, example=federation.example)``: two pure functions
"""

from __future__ import annotations

from fedjax_pers.tasks.criteria import Criterion, binary_cross_entropy, cross_entropy, squared_error
from fedjax_pers.tasks.equinox import equinox
from fedjax_pers.tasks.from_model import from_model
from fedjax_pers.tasks.haiku import haiku
from fedjax_pers.tasks.linen import linen
from fedjax_pers.tasks.nnx import nnx
from fedjax_pers.tasks.supervised import supervised, weighted_mean

__all__ = [
    "Criterion",
    "binary_cross_entropy",
    "cross_entropy",
    "equinox",
    "from_model",
    "haiku",
    "linen",
    "nnx",
    "squared_error",
    "supervised",
    "weighted_mean",
]
