"""Networks that make leaves of a model out of a few numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pers.base import Array, Leaves
from fedjax_pers.checks import positive, positive_int, require
from fedjax_pers.keys import fold_name


class Generator(NamedTuple):
    """A network whose outputs are leaves.

    Attributes:
      init: ``init(key, like, code) -> variables``, for leaves of the shapes of ``like`` and codes of so many numbers.
      apply: ``apply(variables, code [code]) -> leaves``.
    """

    init: Callable[[Array, Leaves, int], Any]
    apply: Callable[[Any, Array], Leaves]


def mlp(hidden: tuple[int, ...] = (), *, spread: float = 0.1) -> Generator:
    """Dense layers with ReLU, and one linear output for each leaf, whose bias starts at the leaf's own start.

    ``f = relu(.. relu(code W_1 + c_1) ..)``, ``leaf = f K + b``: ``b`` is the leaf as the task starts it, and K normal
    with standard deviation ``spread / sqrt(width of f * inputs of the leaf)``, so that a generated leaf differs from
    its ordinary start by about ``spread`` times what one of variance 1 / inputs has. Without hidden layers the network
    is linear.

    Example:
      >>> network = mlp((4,))
      >>> like = {"head/kernel": jnp.ones((3, 2)), "head/bias": jnp.zeros(2)}
      >>> made = network.apply(network.init(jax.random.key(0), like, 5), jnp.zeros(5))
      >>> made["head/kernel"].tolist() == like["head/kernel"].tolist(), made["head/bias"].shape
      (True, (2,))

    Args:
      hidden: widths of the hidden layers.
      spread: how far outputs start from the ordinary start, above 0.
    """
    positive("spread", spread)
    listed = isinstance(hidden, (tuple, list))
    require(listed, f"hidden: found {hidden!r}; allowed is a list of whole numbers, such as (32,), or () for none")
    for width in hidden:
        positive_int("hidden", width)

    def init(key: Array, like: Leaves, code: int) -> Any:
        positive_int("code", code)
        widths = [code, *hidden]
        layers = [
            {
                "kernel": _normal(fold_name(key, f"hidden {n}"), (a, b), math.sqrt(2 / a)),
                "bias": jnp.zeros(b, jnp.float32),
            }
            for n, (a, b) in enumerate(zip(widths, widths[1:], strict=False))
        ]
        outputs = {}
        for name, x in like.items():
            deviation = spread / math.sqrt(widths[-1] * _inputs_of(name, x.shape))
            kernel = _normal(fold_name(key, name), (widths[-1], *x.shape), deviation)
            outputs[name] = {"kernel": kernel.astype(x.dtype), "bias": jnp.array(x)}
        return {"hidden": layers, "outputs": outputs}

    def apply(variables: Any, code: Array) -> Leaves:
        for layer in variables["hidden"]:
            code = jax.nn.relu(code @ layer["kernel"] + layer["bias"])
        return {
            name: jnp.tensordot(code.astype(x["kernel"].dtype), x["kernel"], 1) + x["bias"]
            for name, x in variables["outputs"].items()
        }

    return Generator(init, apply)


def _inputs_of(path: str, shape: tuple[int, ...]) -> int:
    """Over how many inputs a leaf sums: outputs are its last axis, or the first of a ``weight`` (Equinox, PyTorch)."""
    if len(shape) < 2:
        return 1
    return math.prod(shape[1:] if path.rpartition("/")[2] == "weight" else shape[:-1])


def _normal(key: Array, shape: tuple[int, ...], deviation: float) -> Array:
    return deviation * jax.random.normal(key, shape, jnp.float32)
