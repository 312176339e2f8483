"""The models: sizes by hand, forward passes in numpy, names of layers, and what they refuse."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fedjax_pers import models
from fedjax_pers.executors.fast import fast_convolutions
from fedjax_pers.paths import flatten, select
from fedjax_pers.presets import depth, head, model_of, norm
from fedjax_pers.tasks import from_model
from tests.models.by_hand import (
    FLAT,
    IMAGE,
    SENTENCE,
    SERIES,
    SMALL,
    TEXT,
    convolved,
    leaves_of,
    nested,
    normalise,
    pooled,
    relu,
    sizes,
    task_of,
)


def test_every_model_is_in_the_table():
    assert set(models.names()) == set(SMALL)


@pytest.mark.parametrize("name", models.names())
def test_a_step_changes_every_parameter_and_gives_one_output_per_class(name):
    task = task_of(name)
    draw = np.random.default_rng(0)
    fields = dict((field, shape) for field, shape, _ in task.example)
    words = task.example[0][2] == "int32"
    x = draw.integers(0, 9, (4, *fields["x"])) if words else draw.normal(size=(4, *fields["x"])).astype(np.float32)
    batch = {"x": x, "y": draw.integers(0, 9, (4, *fields["y"]))}
    variables = nested(leaves_of(task))
    gradient, tracked = jax.jit(jax.grad(task.loss, has_aux=True))(variables, batch, jax.random.key(0))
    assert all(
        np.abs(g).max() > 0
        for path, g in flatten(gradient).items()
        # A number added to all scores of a query changes no attention.
        if path.startswith("params/") and not path.endswith("attention/key/bias")
    )
    assert set(tracked) == {path for path in flatten(variables) if path.startswith("batch_stats/")}
    outputs, _ = jax.eval_shape(lambda v: task.apply(v, batch, None), variables)
    assert outputs.shape == (4, *fields["y"], 9)


@pytest.mark.parametrize("name", models.names())
def test_the_head_is_called_head_and_used_last(name):
    task = task_of(name)
    leaves = flatten(jax.eval_shape(task.init, jax.random.key(0)))
    assert select(head(1), leaves, model_of(task)) == {"params/head/kernel", "params/head/bias"}


@pytest.mark.parametrize(
    ("name", "first"),
    [
        *(("mlp", "hidden1"), ("cnn", "conv1"), ("resnet8", "stem"), ("char_lstm", "embedding"), ("cnn_norm", "conv1")),
        *(("mobilenet", "stem"), ("cnn1d", "conv1"), ("char_transformer", "embedding"), ("text_cnn", "embedding")),
    ],
)
def test_the_first_layer_is_called_what_it_is(name, first):
    task = task_of(name)
    leaves = flatten(jax.eval_shape(task.init, jax.random.key(0)))
    chosen = select(depth(1), leaves, model_of(task)) - select(norm(), leaves, model_of(task))
    assert {path.split("/")[1] for path in chosen} == {first}


@pytest.mark.parametrize("kind", ["batch", "group", "layer"])
@pytest.mark.parametrize("name", ["mlp_norm", "cnn_norm", "resnet8", "mobilenet", "cnn1d"])
def test_norms_are_found_by_name_and_by_type(name, kind):
    task = task_of(name, norm=kind)
    leaves = flatten(jax.eval_shape(task.init, jax.random.key(0)))
    by_type = select(norm(), leaves, model_of(task))
    assert by_type == select("norm*", leaves) and by_type
    assert any(path.startswith("batch_stats") for path in by_type) == (kind == "batch")
    for path in leaves:  # what a norm subtracts again is not there
        layer = path.split("/")[-2]
        assert not (path.endswith("bias") and layer not in ("head",) and not layer.startswith("norm")), path


def test_the_convolutional_network_has_the_papers_number_of_parameters():
    mnist = (("x", (28, 28, 1), "float32"), ("y", (), "int32"))
    assert sizes("cnn", mnist, 10) == 832 + 51_264 + (7 * 7 * 64 * 512 + 512) + 5_130 == 1_663_370


def test_the_language_model_has_the_papers_number_of_parameters():
    text = (("x", (80,), "int32"), ("y", (80,), "int32"))
    assert sizes("char_lstm", text, 90) == 720 + 4 * 256 * (8 + 256 + 1) + 4 * 256 * (512 + 1) + 23_130 == 820_522


def test_the_residual_network_has_8_layers_on_the_way_and_two_projections():
    cifar = (("x", (32, 32, 3), "float32"), ("y", (), "int32"))
    convolutions = 9 * (3 * 16 + 2 * 16 * 16 + 16 * 32 + 32 * 32 + 32 * 64 + 64 * 64) + 16 * 32 + 32 * 64
    norms = 2 * (16 + 2 * 16 + 3 * 32 + 3 * 64)
    assert sizes("resnet8", cifar, 10) == convolutions + norms + 64 * 10 + 10
    task = from_model(cifar, "resnet8", num_classes=10)
    kernels = [p for p in flatten(jax.eval_shape(task.init, jax.random.key(0))) if p.endswith("kernel")]
    assert len([p for p in kernels if "shortcut" not in p]) == 8 and len(kernels) == 10


def test_the_deeper_residual_network_has_20_layers_and_the_papers_size():
    cifar = (("x", (32, 32, 3), "float32"), ("y", (), "int32"))
    convolutions = 9 * (3 * 16 + 6 * 16 * 16 + 16 * 32 + 5 * 32 * 32 + 32 * 64 + 5 * 64 * 64)
    norms = 2 * 16 + 6 * 2 * (16 + 32 + 64)
    papers = convolutions + norms + 64 * 10 + 10
    assert papers == 269_722  # "0.27M" in table 6
    projections = 16 * 32 + 32 * 64 + 2 * (32 + 64)
    assert sizes("resnet20", cifar, 10) == papers + projections == 272_474
    task = from_model(cifar, "resnet20", num_classes=10)
    kernels = [p for p in flatten(jax.eval_shape(task.init, jax.random.key(0))) if p.endswith("kernel")]
    assert len([p for p in kernels if "shortcut" not in p]) == 20


def test_sizes_of_models_by_hand():
    cifar = (("x", (32, 32, 3), "float32"), ("y", (), "int32"))
    widths = (16, 32, 64, 64, 128, 128)
    blocks = sum(9 * a + a * b + 2 * (a + b) for a, b in zip(widths, widths[1:], strict=False))
    assert sizes("mobilenet", cifar, 10) == 27 * 16 + 2 * 16 + blocks + 128 * 10 + 10 == 37_162
    sensors = (("x", (128, 9), "float32"), ("y", (), "int32"))
    assert sizes("cnn1d", sensors, 6) == 5 * (9 * 32 + 32 * 64 + 64 * 64) + 2 * (32 + 64 + 64) + 64 * 6 + 6
    text = (("x", (80,), "int32"), ("y", (80,), "int32"))
    block = 4 * 64 * 65 + 64 * 256 + 256 + 256 * 64 + 64 + 2 * 2 * 64
    assert sizes("char_transformer", text, 90) == 90 * 64 + 80 * 64 + 2 * block + 2 * 64 + 64 * 90 + 90 == 116_826
    sentence = (("x", (50,), "int32"), ("y", (), "int32"))
    assert sizes("fasttext", sentence, 4) == 10_000 * 32 + 32 * 4 + 4
    # The sizes of Kim's CNN-rand: 300 numbers a word, windows of 3, 4 and 5 with 100 maps each.
    kim = {"vocabulary": 18_766, "embedding": 300, "channels": 100}
    assert sizes("text_cnn", sentence, 2, **kim) == 18_766 * 300 + 100 * (300 * (3 + 4 + 5) + 3) + 300 * 2 + 2


def test_the_perceptron_in_numpy(x64):
    task = task_of("mlp", hidden=(7, 5))
    p = leaves_of(task)
    x = np.random.default_rng(1).normal(size=(4, 6))
    hidden = relu(x @ p["params/hidden1/kernel"] + p["params/hidden1/bias"])
    hidden = relu(hidden @ p["params/hidden2/kernel"] + p["params/hidden2/bias"])
    expected = hidden @ p["params/head/kernel"] + p["params/head/bias"]
    outputs, _ = task.apply(nested(p), {"x": x, "y": np.zeros(4, int)}, None)
    np.testing.assert_allclose(outputs, expected, rtol=1e-10)


def test_softmax_regression_of_an_image_in_numpy(x64):
    task = from_model(IMAGE, "linear", num_classes=9)
    p = leaves_of(task)
    x = np.random.default_rng(1).normal(size=(4, 8, 8, 1))
    outputs, _ = task.apply(nested(p), {"x": x, "y": np.zeros(4, int)}, None)
    expected = x.reshape(4, 64) @ p["params/head/kernel"] + p["params/head/bias"]
    np.testing.assert_allclose(outputs, expected, rtol=1e-10)


@pytest.mark.parametrize("side", [8, 14])  # 14 / 2 = 7 is odd
def test_the_convolutional_network_in_numpy(x64, side):
    example = (("x", (side, side, 1), "float32"), ("y", (), "int32"))
    task = from_model(example, "cnn", num_classes=9, channels=(2, 3), hidden=4)
    p = leaves_of(task)
    x = np.random.default_rng(1).normal(size=(4, side, side, 1))
    h = pooled(relu(convolved(x, p["params/conv1/kernel"]) + p["params/conv1/bias"]))
    h = pooled(relu(convolved(h, p["params/conv2/kernel"]) + p["params/conv2/bias"]))
    h = relu(h.reshape(4, -1) @ p["params/hidden/kernel"] + p["params/hidden/bias"])
    expected = h @ p["params/head/kernel"] + p["params/head/bias"]
    outputs, _ = jax.jit(task.apply)(nested(p), {"x": x, "y": np.zeros(4, int)}, None)
    np.testing.assert_allclose(outputs, expected, rtol=1e-9)


@pytest.mark.parametrize("sides", [(8, 8), (16, 16), (28, 28), (5, 9)])
def test_image_models_take_images_of_any_size(sides):
    example = (("x", (*sides, 3), "float32"), ("y", (), "int32"))
    for name in ("cnn", "cnn_norm", "resnet8"):
        assert from_model(example, name, num_classes=4).num_classes == 4


@pytest.mark.parametrize("kind", ["batch", "group", "layer"])
def test_the_normalised_perceptron_in_numpy(x64, kind):
    task = task_of("mlp_norm", hidden=(12,), norm=kind)
    p = leaves_of(task)
    x, weight = np.random.default_rng(1).normal(size=(5, 6)), np.array([1.0, 1, 0, 1, 0])
    hidden = relu(normalise(x @ p["params/hidden1/kernel"], p, "params/norm1", kind, weight > 0))
    expected = hidden @ p["params/head/kernel"] + p["params/head/bias"]
    outputs, _ = task.apply(nested(p), {"x": x, "y": np.zeros(5, int), "weight": weight}, jax.random.key(0))
    np.testing.assert_allclose(outputs, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "kind", "strides"),
    [
        *(("resnet8", kind, (1, 2, 2)) for kind in ("batch", "group", "layer")),
        ("resnet20", "group", (1, 1, 1, 2, 1, 1, 2, 1, 1)),
    ],
)
def test_the_residual_network_in_numpy(x64, name, kind, strides):
    task = task_of(name, channels=(4, 8, 12), norm=kind)
    p = leaves_of(task)
    x, weight = np.random.default_rng(1).normal(size=(5, 8, 8, 1)), np.array([1.0, 1, 0, 1, 0])

    def normed(h, layer):
        return normalise(h, p, f"params/{layer}", kind, weight > 0)

    def convolution(h, layer, stride=1):
        return convolved(h, p[f"params/{layer}/kernel"], stride)

    h = relu(normed(convolution(x, "stem"), "norm_stem"))
    for place, stride in enumerate(strides, start=1):
        block = f"block{place}"
        y = relu(normed(convolution(h, f"{block}/conv1", stride), f"{block}/norm1"))
        y = normed(convolution(y, f"{block}/conv2"), f"{block}/norm2")
        if stride > 1:
            h = normed(convolution(h, f"{block}/conv_shortcut", stride), f"{block}/norm_shortcut")
        h = relu(h + y)
    expected = h.mean((1, 2)) @ p["params/head/kernel"] + p["params/head/bias"]
    outputs, tracked = jax.jit(task.apply)(
        nested(p), {"x": x, "y": np.zeros(5, int), "weight": weight}, jax.random.key(0)
    )
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)
    if kind == "batch":
        stem = convolution(x, "stem")[weight > 0]
        for name, now in (("mean", stem.mean((0, 1, 2))), ("var", stem.var((0, 1, 2)))):
            path = f"batch_stats/norm_stem/{name}"
            np.testing.assert_allclose(tracked[path], 0.9 * p[path] + 0.1 * now, rtol=1e-6)


def test_batch_statistics_far_from_zero_do_not_cancel():
    task = task_of("mlp_norm", hidden=(8,))
    variables = nested(leaves_of(task))
    x = np.random.default_rng(0).normal(size=(32, 6)).astype(np.float32)
    shift = np.full(6, 1000, np.float32)
    _, tracked = task.loss(variables, {"x": x + shift, "y": np.zeros(32, int)}, jax.random.key(0))
    hidden = (x + shift).astype(np.float64) @ np.asarray(variables["params"]["hidden1"]["kernel"], np.float64)
    expected = 0.9 * np.asarray(variables["batch_stats"]["norm1"]["var"]) + 0.1 * hidden.var(0)
    np.testing.assert_allclose(tracked["batch_stats/norm1/var"], expected, rtol=1e-3)


@pytest.mark.parametrize("kind", ["batch", "group"])
def test_depthwise_separable_blocks_in_numpy(x64, kind):
    task = task_of("mobilenet", channels=(4, 4, 8), norm=kind)
    p = leaves_of(task)
    x, weight = np.random.default_rng(1).normal(size=(5, 8, 8, 1)), np.array([1.0, 1, 0, 1, 0])

    def normed(h, layer):
        return relu(normalise(h, p, f"params/{layer}", kind, weight > 0))

    h = normed(convolved(x, p["params/stem/kernel"]), "norm_stem")
    for block, stride in (("block1", 1), ("block2", 2)):
        depthwise = p[f"params/{block}/depthwise/kernel"]
        alone = [convolved(h[..., [c]], depthwise[..., [c]], stride) for c in range(4)]
        h = normed(np.concatenate(alone, -1), f"{block}/norm1")
        h = normed(h @ p[f"params/{block}/pointwise/kernel"][0, 0], f"{block}/norm2")
    assert h.shape == (5, 4, 4, 8)
    expected = h.mean((1, 2)) @ p["params/head/kernel"] + p["params/head/bias"]
    batch = {"x": x, "y": np.zeros(5, int), "weight": weight}
    outputs, _ = jax.jit(task.apply)(nested(p), batch, jax.random.key(0))
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(9,), (9, 2), (9, 2, 3)])
def test_convolutions_over_time_in_numpy(x64, shape):
    example = (("x", shape, "float32"), ("y", (), "int32"))
    task = from_model(example, "cnn1d", num_classes=9, channels=(4, 8), window=4, norm="group")
    p = leaves_of(task)
    x = np.random.default_rng(1).normal(size=(5, *shape))
    h = x.reshape(5, 1, 9, -1)
    for place in (1, 2):
        h = convolved(h, p[f"params/conv{place}/kernel"][None])
        h = relu(normalise(h, p, f"params/norm{place}", "group"))
        h = np.maximum(h[:, :, : h.shape[2] // 2 * 2 : 2], h[:, :, 1::2])
    assert h.shape == (5, 1, 2, 8)
    expected = h.mean((1, 2)) @ p["params/head/kernel"] + p["params/head/bias"]
    outputs, _ = jax.jit(task.apply)(nested(p), {"x": x, "y": np.zeros(5, int)}, None)
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["mobilenet", "cnn1d", "text_cnn"])
def test_clients_side_by_side_have_the_gradients_of_plain_jax(x64, name):
    """Depthwise and one-dimensional convolutions in the words of the executors, each client with kernels of its own."""
    task = task_of(name)
    p, draw = leaves_of(task), np.random.default_rng(2)
    variables = nested({path: leaf * draw.uniform(0.5, 1.5, (3, *[1] * leaf.ndim)) for path, leaf in p.items()})
    batches = {"y": draw.integers(0, 9, (3, 4)), "weight": np.array([[1.0, 1, 1, 0]] * 3)}
    shape = (3, 4, *dict((field, shape) for field, shape, _ in task.example)["x"])
    batches["x"] = draw.integers(0, 9, shape) if name == "text_cnn" else draw.normal(size=shape)

    def gradient(variables, batch):
        return jax.grad(task.loss, has_aux=True, allow_int=True)(variables, batch, jax.random.key(0))

    found = jax.jit(fast_convolutions(jax.vmap(gradient)))(variables, batches)
    for client in range(3):
        one = jax.tree.map(lambda leaf: leaf[client], (variables, batches))  # noqa: B023 (used at once)
        expected = jax.jit(gradient)(*one)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a[client], b, 1e-6, 1e-9),  # noqa: B023
            found,
            expected,
        )


@pytest.mark.parametrize("name", models.names())
def test_an_example_of_weight_zero_changes_nothing(name):
    task = task_of(name)
    draw = np.random.default_rng(3)
    fields = {field: (shape, dtype) for field, shape, dtype in task.example}

    def rows(number):
        shape, words = (number, *fields["x"][0]), fields["x"][1] == "int32"
        x = draw.integers(0, 9, shape) if words else draw.normal(size=shape).astype(np.float32)
        return {"x": x, "y": draw.integers(0, 9, (number, *fields["y"][0]))}

    kept, others = rows(3), [rows(2), rows(2)]
    variables = jax.tree.map(lambda x: x.astype(np.float32), nested(leaves_of(task)))
    step = jax.jit(jax.value_and_grad(task.loss, has_aux=True))
    one, two = (
        step(
            variables,
            {
                **{name: np.concatenate([kept[name], other[name]]) for name in kept},
                "weight": np.float32([1, 1, 1, 0, 0]),
            },
            jax.random.key(0),
        )
        for other in others
    )
    jax.tree.map(np.testing.assert_array_equal, one, two)


@pytest.mark.parametrize(
    ("name", "example", "settings", "message"),
    [
        ("mpl", FLAT, {}, "model: found 'mpl'.*Did you mean 'mlp'"),
        ("linear", FLAT, {"hidden": (3,)}, "linear: found the setting 'hidden', but this model has none"),
        ("cnn", IMAGE, {"chanels": (3,)}, "Did you mean 'channels'"),
        (
            "cnn_norm",
            IMAGE,
            {"norm": "bach"},
            "norm: found 'bach'; allowed are batch, group, layer. Did you mean 'batch'",
        ),
        ("resnet8", IMAGE, {"norm": None}, "norm: found None"),
        ("mlp", FLAT, {"hidden": 64}, r"hidden: found 64; allowed is a list of whole numbers"),
        ("mlp", FLAT, {"hidden": ()}, "hidden: found"),
        ("mlp", FLAT, {"hidden": (64, 0)}, "hidden: found 0; allowed is a whole number of at least 1"),
        ("mlp", FLAT, {"hidden": "64"}, "hidden: found '64'"),
        ("char_lstm", TEXT, {"layers": 1.5}, "layers: found 1.5"),
        ("cnn", FLAT, {}, r"cnn: found x of shape \(6,\); expected \(height, width, channels\)"),
        ("cnn", (("x", (3, 8, 1), "float32"),), {}, "with sides of at least 4"),
        ("cnn", (("x", (8, 8, 1), "uint8"),), {}, "cnn: found x of dtype uint8; expected floating numbers"),
        ("linear", (("y", (), "int32"),), {}, r"linear: found the fields \['y'\]; expected 'x' among them"),
        ("char_lstm", FLAT, {}, "char_lstm: found x of shape"),
        ("char_lstm", (("x", (5,), "int32"), ("y", (), "int32")), {}, r"char_lstm: found y of shape \(\)"),
        ("char_transformer", TEXT, {"width": 6}, r"width: found 6; allowed is a multiple of heads \(4\)"),
        ("char_transformer", TEXT, {"blocks": 0}, "blocks: found 0"),
        ("char_transformer", FLAT, {}, "char_transformer: found x of shape"),
        (
            "fasttext",
            TEXT,
            {},
            r"fasttext: found y of shape \(5,\) and dtype int32; expected whole numbers of shape \(\)",
        ),
        ("text_cnn", SENTENCE, {"windows": (3, 3)}, r"windows: found \(3, 3\); allowed are lengths that all differ"),
        ("text_cnn", SENTENCE, {"vocabulary": 0}, "vocabulary: found 0"),
        ("resnet20", FLAT, {}, r"resnet20: found x of shape \(6,\)"),
        ("mobilenet", IMAGE, {"norm": None}, "norm: found None"),
        ("cnn1d", (("x", (7, 2), "float32"),), {}, r"cnn1d: found x of shape \(7, 2\); .* at least 8 steps"),
        ("cnn1d", SERIES, {"window": 0}, "window: found 0"),
    ],
)
def test_what_a_model_refuses(name, example, settings, message):
    with pytest.raises(ValueError, match=message):
        models.build(name, example, 9, **settings)


@pytest.mark.parametrize("count", [0, -1, 2.0, True])
def test_the_number_of_classes_is_a_whole_number(count):
    with pytest.raises(ValueError, match="num_classes: found"):
        models.build("mlp", FLAT, count)


def test_lists_are_as_good_as_tuples():
    module = models.build("cnn", IMAGE, 9, channels=[2, 3])
    assert hash(module) == hash(models.build("cnn", IMAGE, 9, channels=(2, 3)))
