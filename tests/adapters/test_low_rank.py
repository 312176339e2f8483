"""LoRA of any model of any library: the function of the merged weights, and no gradient of what is frozen."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import fedjax_pers as fp
from fedjax_pers.adapters import lora, slots, starting_from
from tests import toys

TOKENS = (("x", (6,), "int32"), ("y", (6,), "int32"))
IMAGES = (("x", (8, 8, 2), "float32"), ("y", (), "int32"))
VECTORS = (("x", (6,), "float32"), ("y", (), "int32"))


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Embed(9, 8, name="embedding")(x)
        return nn.Dense(9, name="head")(x + nn.MultiHeadDotProductAttention(2, name="attention")(x))


class Convolution(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="head")(nn.relu(nn.Conv(4, (3, 3), name="conv")(x)).mean((1, 2)))


class Scanned(nn.Module):
    """A recurrent layer, whose weights are multiplied inside a loop."""

    @nn.compact
    def __call__(self, x):
        h = nn.RNN(nn.SimpleCell(5, name="cell"))(x[..., None])
        return nn.Dense(3, name="head")(h[:, -1])


class Perceptron(nnx.Module):
    def __init__(self, rngs):
        self.body, self.head = nnx.Linear(6, 5, rngs=rngs), nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.body(x)))


TASKS = {
    "dense": (lambda: toys.classifier(), toys.EXAMPLE, "**/kernel"),
    "attention, embedding": (lambda: fp.tasks.linen(Attention(), TOKENS), TOKENS, fp.everything),
    "convolution": (lambda: fp.tasks.linen(Convolution(), IMAGES), IMAGES, "**/conv"),
    "recurrent": (lambda: fp.tasks.linen(Scanned(), VECTORS), VECTORS, "**/cell/h/kernel"),
    "nnx": (lambda: fp.tasks.nnx(Perceptron, VECTORS), VECTORS, "**/kernel"),
    "equinox": (lambda: fp.tasks.equinox(lambda key: eqx.nn.MLP(6, 3, 5, 1, key=key), VECTORS), VECTORS, "**/weight"),
}


@pytest.fixture(params=TASKS, scope="module")
def pair(request):
    make, example, on = TASKS[request.param]
    task = make()
    return task, lora(task, on, rank=2, alpha=3.0), batch_of(example)


def batch_of(example, rows=5):
    draw = np.random.default_rng(1)
    shapes = {name: ((rows, *shape), dtype) for name, shape, dtype in example}
    return {
        name: jnp.asarray(draw.integers(0, 3, shape) if dtype == "int32" else draw.normal(size=shape), dtype)
        for name, (shape, dtype) in shapes.items()
    }


def moved(variables):
    """Factors away from their start, at which their product is zero."""
    keys = jax.random.split(jax.random.key(7), len(variables))
    return {
        name: x + 0.3 * jax.random.normal(key, x.shape) if "lora_" in name else x
        for key, (name, x) in zip(keys, variables.items(), strict=True)
    }


def test_at_the_start_the_model_is_the_backbone_to_the_bit(pair):
    task, adapted, batch = pair
    key = jax.random.key(3)
    plain, variables = task.init(key), adapted.init(key)
    toys.same_bits(jax.jit(adapted.metrics)(variables, batch), jax.jit(task.metrics)(plain, batch))
    toys.same_bits(fp.flatten(adapted.plain(variables)), fp.flatten(plain))


def test_the_adapted_model_is_the_model_with_merged_weights(pair):
    task, adapted, batch = pair
    variables = moved(adapted.init(jax.random.key(3)))
    assert any("lora_b" in name for name in variables)
    key = jax.random.key(0)
    merged = adapted.plain(variables)
    np.testing.assert_allclose(adapted.loss(variables, batch, key)[0], task.loss(merged, batch, key)[0], rtol=1e-5)
    for name, values in task.metrics(merged, batch).items():
        np.testing.assert_allclose(adapted.metrics(variables, batch)[name], values, rtol=1e-5, atol=1e-6)
    gradient = jax.grad(lambda v: adapted.loss(v, batch, key)[0])(variables)
    expected = jax.grad(lambda v: task.loss(adapted.plain(v), batch, key)[0])(variables)
    for name, x in gradient.items():
        np.testing.assert_allclose(x, expected[name], rtol=2e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("scaling", "scale"), [("standard", 6 / 4), ("rank_stabilized", 6 / 2)])
def test_merged_weights_against_float64(scaling, scale):
    adapted = lora(toys.classifier(), "**/hidden1/kernel", rank=4, alpha=6.0, scaling=scaling)
    leaves = moved(adapted.init(jax.random.key(0)))
    a, b, w = (
        np.asarray(leaves[f"params/hidden1/{name}"], np.float64)
        for name in ("lora_a/kernel", "lora_b/kernel", "kernel")
    )
    found = fp.flatten(adapted.plain(leaves))["params/hidden1/kernel"]
    np.testing.assert_allclose(found, w + scale * a @ b, rtol=1e-5, atol=1e-6)


def test_matrices_are_split_where_they_are_most_square():
    found = {slot.path: slot.size for slot in slots(TASKS["attention, embedding"][0](), fp.everything, 2)}
    assert found == {
        "params/attention/key/kernel": (8, 8),
        "params/attention/out/kernel": (8, 8),
        "params/attention/query/kernel": (8, 8),
        "params/attention/value/kernel": (8, 8),
        "params/embedding/embedding": (9, 8),
        "params/head/kernel": (8, 9),
    }
    assert [slot.size for slot in slots(TASKS["convolution"][0](), "**/conv", 2)] == [(3 * 3 * 2, 4)]


def test_queries_and_values_alone():
    task = TASKS["attention, embedding"][0]()
    found = [slot.path for slot in slots(task, "**/attention/{query,value}", 2)]
    assert found == ["params/attention/query/kernel", "params/attention/value/kernel"]


def test_the_first_factor_is_on_the_side_of_the_inputs():
    of_equinox = lora(TASKS["equinox"][0](), "**/layers/0/weight", rank=2).init(jax.random.key(0))  # [out, in]
    shapes = {name.split("/")[-2]: x.shape for name, x in of_equinox.items() if "lora_" in name}
    assert shapes == {"lora_a": (2, 6), "lora_b": (5, 2)}


def test_the_first_factor_has_the_variance_of_one_over_the_inputs():
    task = fp.tasks.from_model((("x", (400,), "float32"), ("y", (), "int32")), "mlp", num_classes=3, hidden=(300,))
    leaves = lora(task, "**/hidden1/kernel", rank=100).init(jax.random.key(0))
    a, b = leaves["params/hidden1/lora_a/kernel"], leaves["params/hidden1/lora_b/kernel"]
    assert float(a.var() * 400) == pytest.approx(1, abs=0.05) and not b.any()


def test_no_gradient_of_a_frozen_dense_weight_is_made():
    task = fp.tasks.from_model((("x", (40,), "float32"), ("y", (), "int32")), "mlp", num_classes=3, hidden=(30,))
    adapted, batch = lora(task, "**/hidden1/kernel", rank=2), batch_of((("x", (40,), "float32"), ("y", (), "int32")))
    leaves = adapted.init(jax.random.key(0))
    factors = {name: x for name, x in leaves.items() if "lora_" in name}

    def loss(factors):
        return adapted.loss({**leaves, **factors}, batch, jax.random.key(0))[0]

    products = [
        equation.outvars[0].aval.shape
        for equation in jax.make_jaxpr(jax.grad(loss))(factors).eqns
        if equation.primitive.name == "dot_general"
    ]
    assert products and (40, 30) not in products and (30, 40) not in products


def test_selectors_see_layers_as_they_were():
    task = toys.classifier()
    adapted = lora(task, rank=2)
    layout = fp.by_role(personal=fp.head(1), frozen=~(fp.lora() | fp.head(1)))(adapted)
    parts = layout.init(adapted.init(jax.random.key(0)))
    assert sorted(parts.shared) == ["params/hidden1/lora_a/kernel", "params/hidden1/lora_b/kernel"]
    assert {"kernel", "lora_a/kernel", "lora_b/kernel", "bias"} == {n.partition("head/")[2] for n in parts.personal}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 4}, r"rank: found 4; params/head/kernel \[5, 3\] allows 1 .. 3"),
        ({"rank": 0}, "rank: found 0"),
        ({"on": "**/nowhere"}, "nowhere"),
        ({"on": "**/bias"}, "on: .*bias.* selects no floating weight"),
        ({"alpha": 0.0}, "alpha: found 0.0"),
        ({"scaling": "none"}, "scaling: found 'none'; allowed are rank_stabilized, standard"),
    ],
)
def test_what_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        lora(toys.classifier(), **{"rank": 2, **settings})


def test_a_task_is_adapted_once():
    with pytest.raises(ValueError, match="it is adapted already"):
        lora(lora(toys.classifier(), "**/head/kernel", rank=2), "**/head/kernel", rank=2)


def test_a_task_that_starts_from_a_trained_backbone():
    task = toys.classifier()
    trained = {"params/hidden1/kernel": np.full((4, 5), 2.0)}
    start = lora(starting_from(task, trained), "**/hidden1/kernel", rank=2).init(jax.random.key(0))
    assert (start["params/hidden1/kernel"] == 2).all() and start["params/hidden1/lora_a/kernel"].any()
    toys.same_bits(start["params/head/kernel"], fp.flatten(task.init(jax.random.key(0)))["params/head/kernel"])
    with pytest.raises(ValueError, match="params/hiden1/kernel, which the task does not have; nearest: params/hidden1"):
        starting_from(task, {"params/hiden1/kernel": np.ones((4, 5))})
    with pytest.raises(ValueError, match=r"of shape \(5, 4\); the task has \(4, 5\)"):
        starting_from(task, {"params/hidden1/kernel": np.ones((5, 4))})


@pytest.mark.parametrize("on", ["**/conv", "**/head/kernel"], ids=["summed first", "added to a product"])
def test_half_precision_stays_half_precision(on):
    """Settings are arguments of a compiled run, float32 ones, which must not widen the weights."""

    def cast(tree):
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)

    plain = fp.tasks.linen(Convolution(), IMAGES)
    task = plain._replace(init=lambda key: cast(plain.init(key)))
    algorithm = fp.method("fedit").make(task, on=on, also="**/bias", rank=2, batch_size=2)

    @jax.jit
    def step(alpha, state, cohort):
        return algorithm.recipe.build({"lr": 0.1, "alpha": alpha}).step(state, cohort, 0)

    data = {name: x[None] for name, x in batch_of(IMAGES).items()}
    after, _ = step(
        jnp.float32(8.0), toys.start(algorithm, 1), fp.cohort_of({**data, "x": data["x"].astype(jnp.bfloat16)})
    )
    assert all(x.dtype == jnp.bfloat16 for x in after.shared.values())
