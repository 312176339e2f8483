"""Training steps with convolutions in loops, branches, calls and models; what is replaced there and what is not."""

from __future__ import annotations

import functools
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from fedjax_pers.executors.fast import fast_convolutions
from fedjax_pers.simulate.compilations import compilations
from tests.executors.convolving import (
    LAYOUTS,
    NAMED,
    REPLACED,
    assert_close,
    compiled,
    convolution,
    primitives,
)

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
    params = [jnp.asarray(rng.normal(size=shape), "float32") for shape in ((6, 5, 3, 3), (3, 3, 6, 8))]
    batches = [jnp.asarray(rng.normal(size=(count, 2, *shape)), "float32") for shape in ((5, 8, 6), (8,))]
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


# What comes out for the compiler.


def lowered(fn: Any, platform: str) -> str:
    params, batches = model_and_batches()
    return jax.jit(fn).trace(params, batches).lower(lowering_platforms=(platform,)).as_text()


def test_on_a_cpu_every_convolution_is_in_the_fast_layout_without_groups() -> None:
    def clients(params: Any, batches: Any) -> Any:
        return jax.vmap(scanned)(*jax.tree.map(lambda x: jnp.stack([x, x]), (params, batches)))

    text = lowered(fast_convolutions(clients), "cpu")
    layout = "dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"
    assert text.count("stablehlo.convolution") == text.count(layout) == text.count("feature_group_count = 1 ") >= 2
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
