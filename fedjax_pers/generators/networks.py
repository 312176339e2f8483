"""Networks that make leaves of a model out of a code."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pers.base import Array, Leaves
from fedjax_pers.checks import positive_int
from fedjax_pers.keys import fold_name


class Generator(NamedTuple):
    """``init(key, like) -> variables`` for leaves such as ``like``; ``apply(variables, code) -> leaves``."""

    init: Callable[..., Any]
    apply: Callable[[Any, Array], Leaves]


def mlp(hidden: tuple[int, ...] = (32,)) -> Generator:
    for width in hidden:
        positive_int("hidden", width)

    def init(key: Array, like: Leaves, code: int) -> Any:
        widths = [code, *hidden]
        layers = [
            {
                "kernel": jax.random.normal(fold_name(key, f"hidden{n}"), (a, b)) * math.sqrt(2 / a),
                "bias": jnp.zeros(b),
            }
            for n, (a, b) in enumerate(zip(widths, widths[1:], strict=False))
        ]
        outputs = {
            name: {
                "kernel": 0.01
                * jax.random.normal(fold_name(key, name), (widths[-1], *x.shape))
                / math.sqrt(widths[-1]),
                "bias": jnp.asarray(x, jnp.float32),
            }
            for name, x in like.items()
        }
        return {"hidden": layers, "outputs": outputs}

    def apply(variables: Any, code: Array) -> Leaves:
        for layer in variables["hidden"]:
            code = jax.nn.relu(code @ layer["kernel"] + layer["bias"])
        return {n: jnp.tensordot(code, x["kernel"], 1) + x["bias"] for n, x in variables["outputs"].items()}

    return Generator(init, apply)
