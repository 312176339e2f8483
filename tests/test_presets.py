"""Presets on real models of four libraries; what they must select is written down from reading the models."""

from __future__ import annotations

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

from fedjax_pers.base import Task
from fedjax_pers.paths import everything, flatten, select
from fedjax_pers.presets import bias, depth, embedding, head, lora, model_of, norm, norm_statistics
from fedjax_pers.tasks.kinds import equinox_kinds, haiku_kinds, linen_kinds, nnx_kinds

KEY = jax.random.key(0)
EXAMPLE = (("x", (4,), "float32"), ("y", (), "int32"))
X = jax.ShapeDtypeStruct((2, 4), "float32")


def classify(init, logits, *, example=EXAMPLE, kinds=()) -> Task:
    """A task from ``init(key)`` and ``logits(variables, x)``."""

    def metrics(variables, batch):
        scores = logits(variables, batch["x"])
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"])
        return {"loss": losses, "accuracy": jnp.argmax(scores, -1) == batch["y"]}

    return Task(init, loss=lambda variables, batch, key: (0.0, {}), metrics=metrics, example=example, kinds=kinds)


def chosen(selector, task: Task) -> set[str]:
    return set(select(selector, flatten(jax.eval_shape(task.init, KEY)), model_of(task)))


def below(task: Task, *prefixes: str) -> set[str]:
    return {path for path in flatten(jax.eval_shape(task.init, KEY)) if path.startswith(prefixes)}


# Flax Linen: a residual network whose names say the wrong thing, in the wrong order


class Residual(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        y = nn.Dense(8, name="normal_dense")(x)
        y = nn.relu(nn.BatchNorm(not train, name="odd")(y))
        y = nn.Dense(8, name="z_second")(y)
        y = nn.BatchNorm(not train, name="a_norm")(y)
        short = nn.BatchNorm(not train, name="downsample_1")(nn.Dense(8, name="downsample_0")(x))
        y = nn.relu(y + short)
        y = nn.LayerNorm(name="c")(y)
        return nn.Dense(3, name="a_classifier")(y)


def residual_task(typed: bool = True) -> Task:
    model = Residual()

    def init(key):
        return model.init(key, jnp.zeros((1, 4)))

    kinds = linen_kinds(model, jax.eval_shape(init, KEY), X, train=True) if typed else ()
    return classify(init, model.apply, kinds=kinds)


def test_linen_head_and_depth_go_by_use_and_not_by_name() -> None:
    task = residual_task()
    last = below(task, "params/a_classifier/")
    shortcut = below(task, "params/downsample_", "batch_stats/downsample_", "params/c/")
    second = below(task, "params/z_second/", "params/a_norm/", "batch_stats/a_norm/")
    first = below(task, "params/normal_dense/", "params/odd/", "batch_stats/odd/")
    assert (len(last), len(shortcut), len(second), len(first)) == (2, 8, 6, 6)
    assert chosen(head(1), task) == last
    assert chosen(head(2), task) == last | shortcut
    assert chosen(head(3), task) == last | shortcut | second
    assert chosen(depth(1), task) == first
    assert chosen(depth(2), task) == first | second
    assert chosen(head(4), task) == chosen(depth(4), task) == chosen(everything, task)
    with pytest.raises(
        ValueError,
        match=r"head\(5\): found 4 layers .* 1 \.\. 4; .* normal_dense, z_second, downsample_0, a_classifier",
    ):
        chosen(head(5), task)


def test_linen_norms_go_by_type() -> None:
    task = residual_task()
    layers = ["odd", "a_norm", "downsample_1"]
    statistics = below(task, *(f"batch_stats/{name}/" for name in layers))
    assert len(statistics) == 6
    assert chosen(norm(), task) == statistics | below(task, *(f"params/{name}/" for name in [*layers, "c"]))
    assert chosen(norm_statistics(), task) == statistics


def test_linen_norms_go_by_name_where_types_are_unknown() -> None:
    task = residual_task(typed=False)
    assert task.kinds == ()
    # The odd names are missed but for their statistics: that is what types are for.
    assert chosen(norm(), task) == below(task, "params/a_norm/", "batch_stats/")
    assert chosen(norm_statistics(), task) == below(task, "batch_stats/")


def test_linen_kinds_names_each_layer_in_each_collection() -> None:
    assert dict(residual_task().kinds) == {
        "params": "Residual",
        "batch_stats": "Residual",
        **dict.fromkeys([f"params/{name}" for name in ("normal_dense", "z_second", "downsample_0")], "Dense"),
        **{
            f"{kept}/{of}": "BatchNorm"
            for kept in ("params", "batch_stats")
            for of in ("odd", "a_norm", "downsample_1")
        },
        "params/c": "LayerNorm",
        "params/a_classifier": "Dense",
    }


class Step(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.LayerNorm(name="n")(x + nn.Dense(4, name="w")(x)), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.remat(nn.Dense)(4, name="z_in")(x)
        x, _ = nn.scan(Step, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)(name="y_deep")(x, None)
        return nn.SpectralNorm(nn.Dense(2, name="a_out"), name="x_norm")(x, update_stats=False)


def test_layers_within_scan_remat_and_spectral_normalisation() -> None:
    model = Scanned()

    def init(key):
        return model.init(key, jnp.zeros((1, 4)))

    kinds = linen_kinds(model, jax.eval_shape(init, KEY), X)
    assert ("params/y_deep/n", "LayerNorm") in kinds
    assert ("params/z_in", "Dense") in kinds
    task = classify(init, model.apply, kinds=kinds)
    assert chosen(norm(), task) == below(task, "params/y_deep/n/")
    assert chosen(depth(1), task) == below(task, "params/z_in/")
    assert chosen(depth(2), task) - chosen(depth(1), task) == below(task, "params/y_deep/")
    assert chosen(head(1), task) == below(task, "params/a_out/", "batch_stats/x_norm/")


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(7, 4, name="z_table")(tokens)
        x = nn.RNN(nn.GRUCell(5), name="rnn")(x)
        return nn.Dense(3, name="a_out")(x[:, -1])


def test_recurrent_model_with_embedding() -> None:
    model = Recurrent()

    def init(key):
        return model.init(key, jnp.zeros((1, 6), int))

    tokens = jax.ShapeDtypeStruct((2, 6), "int32")
    kinds = linen_kinds(model, jax.eval_shape(init, KEY), tokens)
    task = classify(init, model.apply, example=(("x", (6,), "int32"), ("y", (), "int32")), kinds=kinds)
    assert chosen(embedding(), task) == chosen(depth(1), task) == {"params/z_table/embedding"}
    assert chosen(head(1), task) == {"params/a_out/bias", "params/a_out/kernel"}
    assert chosen(head(2, by="block"), task) == chosen(~embedding(), task)


# Flax NNX: modules in attributes, without collections


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.strange = nnx.BatchNorm(4, use_running_average=True, rngs=rngs)
        self.normal = nnx.Linear(4, 4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, deterministic=True, rngs=rngs)

    def __call__(self, x):
        return x + self.normal(self.drop(self.strange(self.linear(x))))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.a_last = nnx.LoRALinear(4, 3, lora_rank=2, rngs=rngs)
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.z_first = nnx.Linear(4, 4, rngs=rngs)
        self.final = nnx.RMSNorm(4, rngs=rngs)

    def __call__(self, x):
        x = self.z_first(x)
        for block in self.blocks:
            x = block(x)
        return self.a_last(self.final(x))


def nnx_task(raw: bool) -> Task:
    """With the variables a nested dict, or the ``nnx.State`` itself."""
    model = Net(nnx.Rngs(0))
    graph, state = nnx.split(model)
    variables = state if raw else nnx.to_pure_dict(state)

    def logits(variables, x):
        current = variables
        if not raw:
            current = jax.tree.map(lambda leaf: leaf, state)
            nnx.replace_by_pure_dict(current, variables)
        return nnx.merge(graph, current)(x)

    return classify(lambda key: variables, logits, kinds=nnx_kinds(model, variables))


@pytest.mark.parametrize("raw", [False, True])
def test_nnx_presets(raw: bool) -> None:
    task = nnx_task(raw)
    end = "/value" if raw else ""
    last = below(task, "a_last/")
    assert last == {f"a_last/{leaf}{end}" for leaf in ("bias", "kernel", "lora/lora_a", "lora/lora_b")}
    assert chosen(head(1), task) == last
    assert chosen(head(2), task) == last | below(task, "blocks/1/normal/", "final/")
    assert chosen(depth(2), task) == below(task, "z_first/", "blocks/0/linear/", "blocks/0/strange/")
    assert chosen(depth(1, by="block"), task) == below(task, "z_first/")
    assert chosen(head(1, by="block"), task) == last
    assert chosen(norm(), task) == below(task, "blocks/0/strange/", "blocks/1/strange/", "final/")
    statistics = {f"blocks/{i}/strange/{leaf}{end}" for i in (0, 1) for leaf in ("mean", "var")}
    assert chosen(norm_statistics(), task) == statistics
    assert chosen(lora(), task) == {f"a_last/lora/lora_{factor}{end}" for factor in "ab"}
    layers = ["a_last", "z_first", *(f"blocks/{i}/{name}" for i in (0, 1) for name in ("linear", "normal", "strange"))]
    assert chosen(bias(), task) == {f"{layer}/bias{end}" for layer in layers}


def test_nnx_kinds() -> None:
    kinds = dict(nnx_task(raw=False).kinds)
    assert kinds["blocks/1/strange"] == "BatchNorm"
    assert kinds["a_last"] == "LoRALinear"
    assert kinds["a_last/lora"] == "LoRA"
    assert kinds[""] == "Net"


def test_low_rank_factors_around_another_module() -> None:
    model = nnx.LoRA(4, 2, 3, base_module=nnx.Linear(4, 3, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
    graph, state = nnx.split(nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), model))
    task = classify(lambda key: state, lambda state, x: nnx.merge(graph, state)(x))
    assert chosen(lora(), task) == {f"layers/1/lora_{factor}/value" for factor in "ab"}
    assert chosen(head(1), task) == below(task, "layers/1/")


# Equinox: the state of a layer is kept apart, by number


class Equinox(eqx.Module):
    a_last: eqx.nn.Linear
    gain: jax.Array
    odd: eqx.nn.BatchNorm
    table: eqx.nn.Embedding
    layers: list

    def __init__(self, key):
        self.a_last = eqx.nn.Linear(4, 3, key=key)
        self.gain = jnp.ones(3)
        self.odd = eqx.nn.BatchNorm(4, "batch", mode="ema")
        self.table = eqx.nn.Embedding(9, 4, key=key)
        self.layers = [eqx.nn.Linear(4, 4, key=key), jax.nn.relu, eqx.nn.LayerNorm(4)]

    def __call__(self, x, state):
        x, state = self.odd(self.layers[0](x), state, inference=True)
        x = self.layers[2](self.layers[1](x))
        return self.gain * self.a_last(x + self.table(0)), state


def test_equinox_presets() -> None:
    model, state = eqx.nn.make_with_state(Equinox)(KEY)
    params, static = eqx.partition(model, eqx.is_array)
    variables = {"params": params, "state": state}

    def logits(variables, x):
        model = eqx.combine(variables["params"], static)
        return jax.vmap(lambda row: model(row, variables["state"])[0])(x)

    kinds = equinox_kinds(variables)
    assert kinds == (
        ("params", "Equinox"),
        ("params/a_last", "Linear"),
        ("params/odd", "BatchNorm"),
        ("params/table", "Embedding"),
        ("params/layers/0", "Linear"),
        ("params/layers/2", "LayerNorm"),
        ("state/0", "BatchNorm"),
        ("state/1", "BatchNorm"),
    )
    task = classify(lambda key: variables, logits, kinds=kinds)
    assert chosen(norm(), task) == below(task, "params/odd/", "params/layers/2/", "state/")
    assert chosen(norm_statistics(), task) == {"state/0", "state/1/0", "state/1/1"}
    assert chosen(embedding(), task) == {"params/table/weight"}
    assert chosen(head(1), task) == {"params/gain"}
    assert chosen(head(2), task) == {"params/gain", "params/a_last/weight", "params/a_last/bias"}
    # state/0 only says that nothing was seen yet, which inference does not ask for.
    assert chosen(depth(1), task) == below(task, "params/layers/", "params/odd/", "state/1/")


# Haiku: names with slashes, and moving averages in modules of their own


def test_haiku_presets() -> None:
    def forward(x, train):
        x = hk.Linear(4, name="z_first")(x)
        x = hk.BatchNorm(True, True, 0.9, name="odd")(x, train)
        x = hk.nets.MLP([4, 4], name="mlp")(x)
        return hk.Linear(3, name="a_last")(x)

    model = hk.transform_with_state(forward)

    def init(key):
        return dict(zip(("params", "state"), model.init(key, jnp.zeros((2, 4)), True), strict=True))

    kinds = haiku_kinds(model.init, jax.eval_shape(init, KEY), X, train=True)
    assert ("params/mlp/~/linear_1", "Linear") in kinds
    assert {("params/odd", "BatchNorm"), ("state/odd", "BatchNorm")} <= set(kinds)
    task = classify(init, lambda v, x: model.apply(v["params"], v["state"], None, x, False)[0], kinds=kinds)
    assert chosen(norm(), task) == below(task, "params/odd/", "state/odd/")
    assert chosen(norm_statistics(), task) == below(task, "state/")
    assert len(below(task, "state/")) == 6
    assert chosen(head(1), task) == {"params/a_last/w", "params/a_last/b"}
    assert chosen(head(2), task) == below(task, "params/a_last/", "params/mlp/~/linear_1/")
    assert chosen(depth(1), task) == below(task, "params/z_first/", "params/odd/", "state/odd/")
    assert chosen(head(2, by="block"), task) == below(task, "params/a_last/", "params/mlp/")
    assert len(chosen(bias(), task)) == 5


# Plain trees


def test_plain_dict_and_list() -> None:
    def init(key):
        return {
            "b": [{"w": jnp.ones((4, 4)), "b1": jnp.ones(4)}, {"w": jnp.ones((4, 4)), "b1": jnp.ones(4)}],
            "a": jnp.ones((4, 3)),
        }

    def logits(variables, x):
        for layer in variables["b"]:
            x = jnp.tanh(x @ layer["w"] + layer["b1"])
        return x @ variables["a"]

    task = classify(init, logits)
    assert chosen(head(1), task) == {"a"}
    assert chosen(head(2), task) == {"a", "b/1/w", "b/1/b1"}
    assert chosen(depth(1, by="block"), task) == below(task, "b/")
    assert chosen(bias(), task) == {"b/0/b1", "b/1/b1"}
    assert chosen(norm(), task) == chosen(lora(), task) == chosen(embedding(), task) == set()


def test_blocks_at_the_root_are_the_leaves_themselves() -> None:
    task = classify(
        lambda key: {"z": jnp.ones((4, 4)), "a": jnp.ones((4, 3))},
        lambda variables, x: x @ variables["z"] @ variables["a"],
    )
    assert chosen(head(1, by="block"), task) == {"a"}
    assert chosen(head(1), task) == {"a", "z"}
    with pytest.raises(ValueError, match=r"found 1 layers .*\(the model itself\)"):
        chosen(head(2), task)


def test_one_array_is_one_layer() -> None:
    task = classify(lambda key: jnp.ones((4, 3)), lambda w, x: x @ w)
    assert chosen(head(1), task) == {"value"}


def test_a_model_of_norms_only_is_counted_by_its_norms() -> None:
    task = classify(
        lambda key: {"norm2": {"scale": jnp.ones(4)}, "norm1": {"scale": jnp.ones(4)}},
        lambda variables, x: x * variables["norm1"]["scale"] * variables["norm2"]["scale"],
    )
    assert chosen(depth(1), task) == chosen(depth(1, by="block"), task) == {"norm1/scale"}


def test_unused_leaves_are_in_no_layer_but_unused_leaves_of_used_layers_are() -> None:
    task = classify(
        lambda key: {"idle": {"w": jnp.ones(3)}, "used": {"w": jnp.ones((4, 3)), "spare": jnp.ones(2)}},
        lambda variables, x: x @ variables["used"]["w"],
    )
    assert chosen(head(1), task) == {"used/w", "used/spare"}


def test_layers_are_counted_over_the_model_also_where_some_leaves_are_to_choose_from() -> None:
    task = residual_task()
    leaves = dict.fromkeys(below(task, "params/z_second/", "params/a_norm"), 0)
    assert select(head(1), leaves, model_of(task)) == frozenset()
    assert select(head(3), leaves, model_of(task)) == frozenset(leaves)
    with pytest.raises(ValueError, match="unknown to the model"):
        select(head(1), {"own/params/z_second/kernel": 0}, model_of(task))


def test_presets_that_need_the_order_say_so() -> None:
    leaves = {"a": 0}
    with pytest.raises(ValueError, match=r"head\(1\) needs the order .* Task.example"):
        select(head(1), leaves)
    task = classify(lambda key: {"a": jnp.ones(3)}, lambda variables, x: x, example=None)
    with pytest.raises(ValueError, match=r"depth\(2\) needs the order"):
        select(depth(2), leaves, model_of(task))
    assert select(bias(), {"bias": 0}, model_of(task)) == {"bias"}


@pytest.mark.parametrize("n", [0, -1, 1.5, "1", True, None])
def test_numbers_of_layers_are_checked_when_made(n: object) -> None:
    for make in (head, depth):
        with pytest.raises(ValueError, match=f"{make.__name__}: found n="):
            make(n)
    with pytest.raises(ValueError, match="allowed are 'layer' and 'block'"):
        head(1, by="module")


def test_kinds_of_layers_that_do_not_exist_are_refused() -> None:
    task = classify(lambda key: {"bn": {"scale": jnp.ones(3)}}, lambda v, x: x, kinds=(("nb", "BatchNorm"),))
    with pytest.raises(ValueError, match="'nb' .BatchNorm. has no leaves; nearest: bn"):
        model_of(task)
