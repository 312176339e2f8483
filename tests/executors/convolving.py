"""Convolutions of every kind, and what the tests of their replacements need to compare them."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend import core

# Compilation is most of the time of these tests, and the optimiser of machine code most of that.
compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

REPLACED = {"conv_general_dilated", "reduce_window_max", "select_and_scatter_add", "select_and_gather_add"}
LAYOUTS = {
    1: [("NWC", "WIO", "NWC"), ("NCW", "OIW", "NCW"), ("WNC", "IWO", "CWN")],
    2: [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("HNWC", "OHIW", "CHNW")],
    3: [("NDHWC", "DHWIO", "NDHWC")],
}


class Case(NamedTuple):
    name: str
    convolve: Any
    lhs: np.ndarray
    rhs: np.ndarray


def convolution(
    name: str,
    space: tuple[int, ...],
    kernel: tuple[int, ...],
    features: tuple[int, int] = (5, 6),
    batch: int = 4,
    layout: int = 0,
    feature_groups: int = 1,
    batch_groups: int = 1,
    stride: tuple[int, ...] | None = None,
    padding: Any = "SAME",
    **options: Any,
) -> Case:
    """Numbers from a seed that is the name, arranged in one of the layouts."""
    numbers = LAYOUTS[len(space)][layout]
    canonical = LAYOUTS[len(space)][0]
    rng = np.random.default_rng(list(name.encode()))
    lhs = rng.normal(size=(batch, *space, features[0]))
    rhs = rng.normal(size=(*kernel, features[0] // feature_groups, features[1]))
    convolve = functools.partial(
        lax.conv_general_dilated,
        window_strides=stride or (1,) * len(space),
        padding=padding,
        dimension_numbers=numbers,
        feature_group_count=feature_groups,
        batch_group_count=batch_groups,
        **options,
    )
    arranged = [
        array.transpose([old.index(letter) for letter in new])
        for array, old, new in zip((lhs, rhs), canonical, numbers, strict=False)
    ]
    return Case(name, convolve, *arranged)


def transposed(name: str, stride: int, padding: Any) -> Case:
    case = convolution(name, (5, 6), (3, 3))
    numbers = LAYOUTS[2][0]
    return case._replace(
        convolve=functools.partial(
            lax.conv_transpose, strides=(stride, stride), padding=padding, dimension_numbers=numbers
        )
    )


NAMED = [
    convolution("few products", (8, 7), (3, 3), (1, 4)),
    convolution("many products", (8, 7), (3, 3), (7, 8)),
    convolution("one by one", (6, 6), (1, 1), (40, 3)),
    convolution("strided", (9, 8), (3, 3), stride=(2, 2)),
    convolution("strides that leave a rest", (9, 8), (2, 3), stride=(3, 2), padding="VALID", layout=1),
    convolution("stride over the kernel", (9, 9), (2, 2), (9, 3), stride=(3, 3), padding="VALID"),
    convolution("unequal padding", (7, 6), (3, 2), padding=((0, 3), (2, 1)), layout=2),
    convolution("negative padding", (9, 9), (3, 3), padding=((-1, 2), (1, -2))),
    convolution("dilated kernel", (11, 10), (3, 3), rhs_dilation=(2, 3)),
    convolution("dilated image", (5, 5), (3, 3), lhs_dilation=(2, 3), padding=((1, 2), (0, 3))),
    convolution("dilated both", (6, 5), (3, 2), lhs_dilation=(2, 1), rhs_dilation=(1, 2), padding=((2, 2), (1, 0))),
    convolution("depthwise", (7, 7), (3, 3), (6, 6), feature_groups=6),
    convolution("depthwise, two for each, strided", (8, 7), (3, 3), (4, 8), feature_groups=4, stride=(2, 1), layout=1),
    convolution("groups", (6, 6), (3, 3), (16, 6), feature_groups=2),
    convolution("groups in another layout", (6, 5), (3, 3), (15, 6), feature_groups=3, layout=2, rhs_dilation=(2, 1)),
    convolution("groups of the batch", (6, 6), (3, 3), (5, 6), feature_groups=1, batch_groups=2),
    convolution("groups of the batch, strided", (6, 6), (3, 3), (4, 8), batch_groups=4, stride=(2, 2), layout=1),
    convolution("series", (12,), (5,), (9, 4)),
    convolution("series, channels first", (13,), (4,), (9, 5), stride=(3,), padding=((2, 0),), layout=1),
    convolution("series, depthwise", (12,), (3,), (4, 4), feature_groups=4, rhs_dilation=(2,), layout=2),
    convolution("volume", (4, 5, 4), (2, 3, 3), (3, 4), stride=(1, 2, 1)),
    transposed("transposed", 2, "SAME"),
    transposed("transposed, no padding", 3, "VALID"),
]


def generated(count: int) -> list[Case]:
    """Everything at once: options drawn independently of each other."""
    rng = np.random.default_rng(0)
    cases = []
    while len(cases) < count:
        rank = int(rng.choice([1, 2]))
        groups = int(rng.choice([1, 1, 2, 3]))
        kernel = rng.integers(1, 5, rank)
        dilation = rng.integers(1, 3, rank)
        padding = rng.integers(-1, 4, (rank, 2))
        image, stride, spread = (rng.integers(low, high, rank) for low, high in ((3, 9), (1, 4), (1, 3)))
        if ((image - 1) * spread + 1 + padding.sum(1) < (kernel - 1) * dilation + 1).any():
            continue
        ints = [tuple(int(v) for v in array) for array in (image, kernel, stride, spread, dilation)]
        cases.append(
            convolution(
                f"generated {len(cases)}",
                *ints[:2],
                features=(groups * int(rng.integers(1, 7)), groups * int(rng.integers(1, 4))),
                layout=int(rng.integers(3)),
                feature_groups=groups,
                stride=ints[2],
                padding=tuple((int(low), int(high)) for low, high in padding),
                lhs_dilation=ints[3],
                rhs_dilation=ints[4],
            )
        )
    return cases


def primitives(fn: Any, *args: Any) -> list[str]:
    """Names of all primitives in the jaxpr of a function, those inside loops, branches and calls too."""

    def walk(jaxpr: Any) -> list[str]:
        params = [value for eqn in jaxpr.eqns for value in eqn.params.values()]
        leaves = [leaf for value in params for leaf in (value if isinstance(value, tuple) else (value,))]
        inner = [walk(leaf) for leaf in leaves if isinstance(leaf, core.Jaxpr | core.ClosedJaxpr)]
        return [eqn.primitive.name for eqn in jaxpr.eqns] + sum(inner, [])

    return walk(jax.make_jaxpr(fn)(*args).jaxpr)


def assert_close(found: Any, expected: Any, rtol: float) -> None:
    pairs = zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True)
    for (path, value), reference in pairs:
        assert value.dtype == reference.dtype
        value, reference = (np.asarray(array, np.float64) for array in (value, reference))
        scale = np.abs(reference).max(initial=0)
        np.testing.assert_allclose(value, reference, rtol, rtol * scale, err_msg=jax.tree_util.keystr(path))
