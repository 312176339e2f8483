"""Plain JAX is the reference throughout: values, tangents and gradients with and without the transform."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend import core
from jax.sharding import PartitionSpec

from fedjax_pers.executors.convolutions import fast_convolutions
from fedjax_pers.simulate.compilations import compilations

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


def derivatives(convolve: Any, lhs: Any, rhs: Any) -> Any:
    """The value, its tangent, and the gradients of its sine summed."""

    value, tangent = jax.jvp(convolve, (lhs, rhs), (jnp.cos(lhs), jnp.cos(rhs)))
    return {"value": value, "tangent": tangent, "gradients": jax.vjp(convolve, lhs, rhs)[1](jnp.cos(value))}


@pytest.mark.parametrize(("dtype", "rtol"), [("float64", 1e-10), ("float32", 1e-5), ("bfloat16", 2e-2)])
def test_derivatives_of_the_fast_function_are_those_of_the_plain_one(dtype: str, rtol: float) -> None:
    cases = NAMED + generated(6) if dtype == "float64" else NAMED[:12:4]

    def everything(transform: Any, arrays: Any) -> Any:
        return {case.name: derivatives(transform(case.convolve), *arrays[case.name]) for case in cases}

    def differentiated_first(arrays: Any) -> Any:
        return {
            case.name: fast_convolutions(functools.partial(derivatives, case.convolve))(*arrays[case.name])
            for case in cases[1::7]
        }

    with jax.enable_x64(dtype == "float64"):
        arrays = {case.name: (jnp.asarray(case.lhs, dtype), jnp.asarray(case.rhs, dtype)) for case in cases}
        expected = compiled(functools.partial(everything, lambda fn: fn))(arrays)
        assert_close(compiled(functools.partial(everything, fast_convolutions))(arrays), expected, rtol)
        first = compiled(differentiated_first)(arrays)
        assert_close(first, {name: expected[name] for name in first}, rtol)
        assert not REPLACED & set(primitives(functools.partial(everything, fast_convolutions), arrays))


@pytest.mark.parametrize("axes", [(0, 2), (1, None), (None, 0)])
def test_under_vmap_for_clients_with_their_own_images_kernels_or_both(axes: tuple[int | None, int | None]) -> None:
    names = ["few products", "strided", "groups", "groups of the batch"]
    cases = {case.name: case for case in NAMED if case.name in names}

    def stacked(array: np.ndarray, axis: int | None) -> Any:
        return jnp.asarray(array) if axis is None else jnp.stack([jnp.asarray(array) * (i + 1) for i in range(3)], axis)

    def everything(transform: Any, arrays: Any) -> Any:
        results = {
            name: jax.vmap(functools.partial(derivatives, transform(case.convolve)), axes)(*arrays[name])
            for name, case in cases.items()
        }
        lhs, rhs = arrays["groups"]
        clients = jax.vmap(transform(cases["groups"].convolve), axes)
        results["nested, one shared"] = jax.vmap(clients, (0, None))(jnp.stack([lhs, 2 * lhs]), rhs)
        results["nested"] = jax.vmap(clients)(jnp.stack([lhs, 2 * lhs]), jnp.stack([rhs, 3 * rhs]))
        return results

    with jax.enable_x64(True):
        arrays = {name: tuple(map(stacked, case[2:], axes)) for name, case in cases.items()}
        expected = compiled(functools.partial(everything, lambda fn: fn))(arrays)
        assert_close(compiled(functools.partial(everything, fast_convolutions))(arrays), expected, 1e-10)


@pytest.mark.parametrize("features", [(1, 4), (7, 8)])
def test_the_type_that_is_asked_for_comes_out(features: tuple[int, int]) -> None:
    case = convolution("preferred", (8, 7), (3, 3), features, preferred_element_type=jnp.float32)
    args = jnp.asarray(case.lhs, "bfloat16"), jnp.asarray(case.rhs, "bfloat16")
    assert_close(jax.jit(fast_convolutions(case.convolve))(*args), jax.jit(case.convolve)(*args), 1e-5)


# A training step of a model with convolutions and pooling, in every place where it may stand.


def loss(params: Any, batch: Any) -> Any:
    image, target = batch
    hidden = nn.max_pool(nn.relu(lax.conv(image, params[0], (1, 1), "SAME").transpose(0, 2, 3, 1)), (2, 2), (2, 2))
    hidden = lax.conv_general_dilated(hidden, params[1], (2, 1), "SAME", dimension_numbers=LAYOUTS[2][0])
    return ((hidden.mean((1, 2)) - target) ** 2).sum()


def step(params: Any, batch: Any) -> Any:
    value, gradients = jax.value_and_grad(loss)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients), value


def model_and_batches(count: int = 3) -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    params = [jnp.asarray(rng.normal(size=shape), "float32") for shape in ((6, 2, 3, 3), (3, 3, 6, 8))]
    batches = [jnp.asarray(rng.normal(size=(count, 2, *shape)), "float32") for shape in ((2, 8, 6), (8,))]
    return params, batches


def scanned(params: Any, batches: Any) -> Any:
    return lax.scan(step, params, batches)


def scanned_inside(params: Any, batches: Any) -> Any:
    return lax.scan(fast_convolutions(step), params, batches)


def in_while_loop(params: Any, batches: Any) -> Any:
    def body(state: Any) -> Any:
        index, params, losses = state
        params, value = step(params, [field[index] for field in batches])
        return index + 1, params, losses.at[index].set(value)

    count = batches[0].shape[0]
    return lax.while_loop(lambda state: state[0] < count, body, (0, params, jnp.zeros(count)))[1:]


def in_branch(params: Any, batches: Any) -> Any:
    def one(params: Any, batch: Any) -> Any:
        return lax.cond(batch[1].sum() > 1e9, lambda p, b: (p, 0.0), step, params, batch)

    return lax.scan(one, params, batches)


def in_remat(params: Any, batches: Any) -> Any:
    rematerialised = jax.checkpoint(loss, policy=jax.checkpoint_policies.dots_saveable)

    def one(params: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(rematerialised)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients), value

    return lax.scan(one, params, batches)


def in_shard_map(params: Any, batches: Any) -> Any:
    mesh = jax.make_mesh((1,), ("clients",), axis_types=(jax.sharding.AxisType.Auto,))
    varying = PartitionSpec("clients")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(varying, varying), out_specs=varying)
    def client(params: Any, batches: Any) -> Any:
        alone = scanned([p[0] for p in params], [b[0] for b in batches])
        return jax.tree.map(lambda x: x[None], alone)

    leading = jax.tree.map(lambda x: x[None], (params, batches))
    return jax.tree.map(lambda x: x[0], client(*leading))


def in_custom_derivatives(params: Any, batches: Any) -> Any:
    with_vjp = jax.custom_vjp(step)
    with_vjp.defvjp(lambda params, batch: (step(params, batch), None), lambda _, cotangent: (None, None))
    with_jvp = jax.custom_jvp(jax.jit(with_vjp))
    with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), tangents))
    return lax.scan(with_jvp, params, batches)


PLACES = [scanned, scanned_inside, in_while_loop, in_branch, in_remat, in_shard_map, in_custom_derivatives]


def test_a_step_is_replaced_wherever_it_stands() -> None:
    params, batches = model_and_batches()
    expected, losses = params, []
    for index in range(3):
        expected, value = compiled(step)(expected, [field[index] for field in batches])
        losses.append(value)

    def everywhere(params: Any, batches: Any) -> Any:
        return {place.__name__: place(params, batches) for place in PLACES}

    found = compiled(fast_convolutions(everywhere))(params, batches)
    assert_close(found, {place.__name__: (expected, jnp.stack(losses)) for place in PLACES}, 1e-5)
    names = primitives(fast_convolutions(everywhere), params, batches)
    assert REPLACED & set(primitives(everywhere, params, batches))
    assert not REPLACED & set(names)
    assert names.count("fast_conv_general_dilated") >= 5 * len(PLACES)


def test_clients_of_one_vmap_do_what_they_do_alone() -> None:
    params, batches = model_and_batches(4)
    clients = [jnp.stack([p, 2 * p, -p, p + 0.1]) for p in params]
    alone = [compiled(step)([p[i] for p in clients], [b[i] for b in batches]) for i in range(4)]
    expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *alone)
    mean = jax.vmap(lambda params, batch: lax.pmean(step(params, batch)[1], "clients"), axis_name="clients")
    assert_close(jax.jit(jax.vmap(fast_convolutions(step)))(clients, batches), expected, 1e-5)
    assert_close(compiled(fast_convolutions(jax.vmap(step)))(clients, batches), expected, 1e-5)
    assert_close(compiled(fast_convolutions(mean))(clients, batches), jnp.full(4, expected[1].mean()), 1e-5)


def test_second_derivatives_in_every_order() -> None:
    params, batches = model_and_batches()
    batch = [field[0] for field in batches]

    def adapted(params: Any) -> Any:
        return loss(step(params, batch)[0], batch)

    def hessian_product(fn: Any, params: Any) -> Any:
        return jax.jvp(jax.grad(fn), (params,), (params,))[1]

    with jax.enable_x64(True):
        params, batch = jax.tree.map(lambda x: x.astype("float64"), (params, batch))
        expected = compiled(lambda p: (jax.grad(adapted)(p), hessian_product(adapted, p)))(params)
        fast = fast_convolutions(adapted)
        outside = compiled(lambda p: (jax.grad(fast)(p), hessian_product(fast, p)))(params)
        inside = compiled(
            lambda p: (
                fast_convolutions(jax.grad(adapted))(p),
                fast_convolutions(functools.partial(hessian_product, adapted))(p),
            )
        )(params)
        assert_close(outside, expected, 1e-10)
        assert_close(inside, expected, 1e-10)


def test_derivatives_with_respect_to_what_is_closed_over() -> None:
    params, batches = model_and_batches()
    batch = [field[0] for field in batches]
    expected = compiled(jax.grad(loss))(params, batch)
    found = compiled(jax.grad(lambda params: fast_convolutions(lambda batch: loss(params, batch))(batch)))(params)
    assert_close(found, expected, 1e-5)


# Max-pooling.

POOLINGS = {
    "window 2": ((1, 2, 2, 1), "VALID"),
    "with a rest": ((1, 3, 2, 1), "VALID"),
    "padded": ((1, 3, 4, 1), "SAME"),
    "padded in front": ((1, 2, 3, 1), ((0, 0), (1, 0), (2, 2), (0, 0))),
    "over batch and features": ((2, 2, 1, 3), "VALID"),
}


@pytest.mark.parametrize("special", ["none", "ties", "nan", "infinite"])
def test_max_pooling_gives_the_gradient_to_the_element_that_xla_selects(special: str) -> None:
    rng = np.random.default_rng(2)
    image = rng.normal(size=(4, 7, 8, 3))
    if special == "ties":
        image = np.round(image)
    elif special == "nan":
        image[rng.random(image.shape) < 0.3] = np.nan
    elif special == "infinite":
        image[rng.random(image.shape) < 0.7] = -np.inf
    image, other = jnp.asarray(image, "float32"), jnp.asarray(rng.normal(size=(4, 7, 8, 3)), "float32")

    def everything(transform: Any, image: Any) -> Any:
        results = {}
        for name, (window, padding) in POOLINGS.items():
            plain = functools.partial(
                lax.reduce_window,
                init_value=-jnp.inf,
                computation=lax.max,
                window_dimensions=window,
                window_strides=window,
                padding=padding,
            )
            pool = transform(plain)
            value, pull = jax.vjp(pool, image)
            cotangent = 1 + jnp.arange(value.size, dtype="float32").reshape(value.shape)
            mapped = jax.vmap(lambda x, cotangent=cotangent, pool=pool: jax.vjp(pool, x)[1](cotangent)[0], 1)
            inside = transform(lambda x, c, plain=plain: jax.vjp(plain, x)[1](c)[0])
            results[name] = value, pull(cotangent), inside(image, cotangent), mapped(jnp.stack([image, -image], 1))
            if special in ("none", "ties"):
                results[name] += (jax.jvp(pool, (image,), (other,)),)
        return results

    expected = compiled(functools.partial(everything, lambda fn: fn))(image)
    found = compiled(functools.partial(everything, fast_convolutions))(image)
    assert "select_and_scatter_add" in primitives(functools.partial(everything, lambda fn: fn), image)
    assert not REPLACED & set(primitives(functools.partial(everything, fast_convolutions), image))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


# What comes out for the compiler.


def lowered(fn: Any, platform: str) -> str:
    params, batches = model_and_batches()
    return jax.jit(fn).trace(params, batches).lower(lowering_platforms=(platform,)).as_text()


def test_on_a_cpu_every_convolution_is_in_the_fast_layout_without_groups() -> None:
    def clients(params: Any, batches: Any) -> Any:
        return jax.vmap(scanned)(*jax.tree.map(lambda x: jnp.stack([x, x]), (params, batches)))

    text = lowered(fast_convolutions(clients), "cpu")
    layout = "dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"
    assert text.count("stablehlo.convolution") == text.count(layout) == text.count("feature_group_count = 1 ") >= 3
    assert "select_and_scatter" not in text
    plain = lowered(clients, "cpu")
    assert plain.count("stablehlo.convolution") > plain.count("feature_group_count = 1 ")


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_on_other_platforms_it_is_what_it_was(platform: str) -> None:
    def operations(fn: Any) -> list[str]:
        text = lowered(fn, platform)
        lines = [line.split("loc(")[0] for line in text.splitlines()]
        marks = ("stablehlo.convolution", "select_and_scatter", "reduce_window", "stablehlo.while")
        marked = [line for line in lines if any(mark in line for mark in marks)]
        return sorted(line.split("=", 1)[1].split("{", 2)[0].split("(")[0] for line in marked)

    assert operations(fast_convolutions(scanned)) == operations(scanned)


# What it leaves alone.


def test_what_is_not_covered_stays_as_it_was() -> None:
    image, kernel = np.ones((1, 6, 6, 1), "float32"), np.ones((3, 3, 1, 1), "float32")
    convolve = functools.partial(
        lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=LAYOUTS[2][0]
    )

    def left(image: Any, kernel: Any) -> Any:
        return (
            convolve(image + 1j, kernel + 1j),
            convolve(image.astype("int32"), kernel.astype("int32")),
            convolve(image.astype("float8_e5m2"), kernel.astype("float8_e5m2")).astype("float32"),
            nn.max_pool(image, (3, 3), (2, 2)),
            lax.reduce_window(image, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID", None, (1, 2, 2, 1)),
            jax.grad(lambda x: lax.reduce_window(x, jnp.inf, lax.min, *2 * [(1, 2, 2, 1)], "VALID").sum())(image),
            nn.avg_pool(image, (2, 2), (2, 2)),
            lax.reduce_window(image, -jnp.inf, lax.max, (1, 9, 9, 1), (1, 9, 9, 1), "SAME"),
        )

    names = primitives(fast_convolutions(left), image, kernel)
    assert not [name for name in names if name.startswith("fast")]
    jax.tree.map(np.testing.assert_array_equal, compiled(fast_convolutions(left))(image, kernel), left(image, kernel))


def test_a_function_without_convolutions_comes_back_bit_for_bit() -> None:
    def fn(key: Any, tree: Any, *, rate: float) -> Any:
        noise = jax.random.normal(key, (5,))
        total, _ = lax.scan(lambda c, x: (c * rate + jnp.tanh(x), None), 0.0, tree["x"] + noise)
        return {
            "key": jax.random.split(key),
            "total": total,
            "none": tree["none"],
            "n": tree["n"] + 1,
            "weak": 2 * rate,
        }

    tree = {"x": jnp.linspace(0, 1, 5), "none": None, "n": jnp.int32(3)}
    key = jax.random.key(7)
    plain, fast = functools.partial(fn, rate=0.3), functools.partial(fast_convolutions(fn), rate=0.3)
    assert str(jax.make_jaxpr(fast)(key, tree)) == str(jax.make_jaxpr(plain)(key, tree))
    assert jax.eval_shape(fast, key, tree) == jax.eval_shape(plain, key, tree)
    for call in (plain, jax.jit(plain)):
        same = fast if call is plain else jax.jit(fast)
        found, expected = same(key, tree), call(key, tree)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        found["key"], expected["key"] = (jax.random.key_data(out["key"]) for out in (found, expected))
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_whatever_is_no_array_goes_in_and_comes_out_as_it_is() -> None:
    image, kernel = np.ones((1, 4, 4, 2), "float32"), np.ones((3, 3, 2, 5), "float32")

    def fn(image: Any, kernel: Any, activation: Any, *, name: str, flag: bool) -> Any:
        out = lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=LAYOUTS[2][0])
        return (activation(out) if flag else out), name, flag, None, activation, jnp.int32(4)

    found = fast_convolutions(fn)(image, kernel, jax.nn.relu, name="conv", flag=True)
    assert found[1:5] == ("conv", True, None, jax.nn.relu)
    assert isinstance(found[5], jax.Array) and int(found[5]) == 4
    assert_close(found[0], fn(image, kernel, jax.nn.relu, name="conv", flag=True)[0], 1e-6)
    assert fast_convolutions(fn).__name__ == "fn"


def test_a_gradient_with_respect_to_integers_passes() -> None:
    def fn(count: Any, kernel: Any) -> Any:
        return count * lax.conv(jnp.ones((1, 2, 4, 4)), kernel, (1, 1), "SAME").sum()

    args = jnp.int32(2), jnp.ones((5, 2, 3, 3))
    found = fast_convolutions(jax.grad(fn, (0, 1), allow_int=True))(*args)
    assert found[0].dtype == jax.dtypes.float0
    assert_close(found[1], jax.grad(fn, 1)(*args), 1e-6)


def test_an_eager_call_compiles_nothing_the_second_time() -> None:
    params, batches = model_and_batches()
    fast = fast_convolutions(scanned)
    fast(params, batches)
    before = compilations()
    fast(params, batches)
    assert compilations() == before


def test_a_gradient_of_symbolic_shape_can_be_exported() -> None:
    case = convolution("exported", (3, 3), (2, 2), padding="VALID")

    def gradient(lhs: Any, rhs: Any) -> Any:
        return jax.grad(lambda rhs: case.convolve(lhs, rhs).sum())(rhs)

    (batch,) = jax.export.symbolic_shape("batch")
    shapes = (batch, *case.lhs.shape[1:]), case.rhs.shape
    abstract = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    exported = jax.export.export(jax.jit(fast_convolutions(gradient)))(*abstract)
    args = case.lhs.astype("float32"), case.rhs.astype("float32")
    assert_close(jax.jit(exported.call)(*args), jax.jit(gradient)(*args), 1e-5)


def test_a_convolution_with_an_explicit_sharding_stays_as_it_was() -> None:
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Explicit,))
    case = next(case for case in NAMED if case.name == "many products")
    convolve = functools.partial(case.convolve, out_sharding=PartitionSpec("batch"))
    with jax.set_mesh(mesh):
        lhs = jax.device_put(case.lhs.astype("float32"), jax.NamedSharding(mesh, PartitionSpec("batch")))
        rhs = jnp.asarray(case.rhs, "float32")
        assert primitives(fast_convolutions(convolve), lhs, rhs) == ["conv_general_dilated"]
        found, expected = jax.jit(fast_convolutions(convolve))(lhs, rhs), jax.jit(convolve)(lhs, rhs)
    assert found.sharding == expected.sharding
    np.testing.assert_array_equal(found, expected)


# Models as users write them.


class FlaxModel(nn.Module):
    @nn.compact
    def __call__(self, image: Any) -> Any:
        hidden = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(8, (3, 3), use_bias=False)(image)))
        hidden = nn.max_pool(hidden, (2, 2), (2, 2), padding="SAME")
        hidden = nn.relu(nn.Conv(8, (3, 3), feature_group_count=8)(hidden))
        return nn.Dense(3)(nn.ConvTranspose(4, (2, 2), (2, 2))(hidden).mean((1, 2)))


def test_a_training_step_of_a_flax_model() -> None:
    model, optimizer = FlaxModel(), optax.adam(1e-2)
    image = jax.random.normal(jax.random.key(0), (4, 9, 9, 3))
    variables = compiled(model.init)(jax.random.key(1), image)

    def train(params: Any, state: Any, image: Any) -> Any:
        def objective(params: Any) -> Any:
            logits, changed = model.apply(variables | {"params": params}, image, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(4) % 3).mean(), changed

        (value, changed), gradients = jax.value_and_grad(objective, has_aux=True)(params)
        updates, state = optimizer.update(gradients, state, params)
        return gradients, optax.apply_updates(params, updates), state, value, changed

    args = variables["params"], optimizer.init(variables["params"]), image
    with jax.enable_x64(True):
        args = jax.tree.map(lambda x: x.astype("float64") if x.dtype == "float32" else x, args)
        assert_close(compiled(fast_convolutions(train))(*args), compiled(train)(*args), 1e-7)


def test_a_model_with_functions_among_its_leaves() -> None:
    keys = jax.random.split(jax.random.key(0))
    layers = [eqx.nn.Conv2d(3, 4, 3, key=keys[0]), eqx.nn.Lambda(jax.nn.relu), eqx.nn.MaxPool2d(2, 2)]
    model = eqx.nn.Sequential(layers)

    def gradients(model: Any, image: Any) -> Any:
        return eqx.filter_grad(lambda model, image: (model(image) ** 2).sum())(model, image)

    image = jax.random.normal(keys[1], (3, 8, 8))
    found, expected = fast_convolutions(gradients)(model, image), gradients(model, image)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert_close(eqx.filter(found, eqx.is_array), eqx.filter(expected, eqx.is_array), 1e-5)
