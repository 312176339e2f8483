"""What each example decides alone is split off and nothing else: the two parts give what the whole gives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import fedjax_pers as fp
from fedjax_pers import features
from fedjax_pers.per_example import split

EXAMPLES = 6


def numbers(*shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(shape).normal(size=shape), "float32")


W, HEAD, IMAGES = numbers(4, 5), numbers(5, 3), numbers(EXAMPLES, 8, 8, 2)
KERNEL, TABLE, PLACES = numbers(3, 3, 2, 4), numbers(9, 4), jnp.array([[1, 2], [3, 1], [0, 8], [4, 4], [7, 2], [5, 6]])


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(3, name="head")(nn.LayerNorm()(nn.relu(nn.Dense(5, name="body")(x))))


def convolutional(x: Any) -> Any:
    y = jax.lax.conv_general_dilated(x, KERNEL, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    pooled = nn.max_pool(nn.relu(y + numbers(4)), (2, 2), (2, 2)) + nn.avg_pool(y, (2, 2), (2, 2))
    return pooled.reshape(EXAMPLES, -1) @ numbers(64, 5)


def token(x: Any) -> Any:
    """A class token before the rows of each example, as vision transformers have."""
    rows = jnp.concatenate([jnp.broadcast_to(numbers(1, 1, 4), (EXAMPLES, 1, 4)), x[:, None]], 1)
    return jax.nn.softmax(jnp.einsum("btd,bsd->bts", rows @ numbers(4, 4), rows)).mean(1) @ numbers(2, 5)


def square(x: Any) -> Any:
    return jnp.concatenate([x, x[:, : EXAMPLES - 4]], 1)


def attended(x: Any) -> Any:
    """Five positions from an example, each of which sees the earlier ones of the same example."""
    q, k, v = ((x @ W + shift)[:, :, None] * numbers(1, 5, 3) for shift in (0, 1, 2))
    scores = jnp.where(jnp.tri(5, dtype=bool), jnp.einsum("btd,bsd->bts", q, k), -jnp.inf)
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), v).sum(-1)


BODIES = {
    "dense": lambda x: jnp.tanh(x @ W),
    "compiled within, twice": lambda x: jax.jit(jnp.tanh)(jax.jit(lambda a: a @ W)(x)) + jax.jit(jnp.tanh)(x @ W),
    "with its own derivative": lambda x: jax.nn.relu(jax.nn.silu(x @ W)),
    "recomputed": jax.checkpoint(lambda x: jnp.sin(x @ W)),
    "weights first": lambda x: (W.T @ x.T).T,
    "one after another": lambda x: jnp.stack([x @ W, x @ W * 2]).sum(0),
    "attention": lambda x: attended(x),
    "mapped": lambda x: jax.vmap(lambda row: row @ W)(x),
    "normalised by row": lambda x: (lambda y: (y - y.mean(1, keepdims=True)) / y.std(1, keepdims=True))(x @ W),
}


def found(loss: Any, batch: Any) -> Any:
    return split(loss, HEAD, batch, jax.random.key(0))


@pytest.mark.parametrize("name", BODIES)
def test_the_parts_together_are_the_whole(name: str) -> None:
    batch = {"x": numbers(EXAMPLES, 4), "y": jnp.arange(EXAMPLES) % 3, "weight": jnp.ones(EXAMPLES)}

    def loss(head: Any, batch: Any, key: Any) -> Any:
        logits = BODIES[name](batch["x"]) @ head
        return (optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]) * batch["weight"]).mean()

    check(loss, batch)


@pytest.mark.parametrize("body", [convolutional, token])
def test_the_parts_together_are_the_whole_for(body: Any) -> None:
    x = IMAGES if body is convolutional else numbers(EXAMPLES, 4)
    check(lambda head, batch, key: jnp.square(body(batch["x"]) @ head).mean(), {"x": x})


def test_an_embedding_is_looked_up_example_by_example() -> None:
    check(lambda head, batch, key: jnp.square(jnp.tanh(TABLE[batch["x"]].sum(1) @ W) @ head).mean(), {"x": PLACES})


def test_a_flax_model_is_split_at_the_first_layer_that_changes() -> None:
    model, x = Mlp(), numbers(EXAMPLES, 4)
    variables = model.init(jax.random.key(0), x)["params"]
    last = {"head": variables["head"]}

    def loss(last: Any, batch: Any, key: Any) -> Any:
        return jnp.square(model.apply({"params": {**variables, **last}}, batch["x"])).mean()

    parts = split(loss, last, {"x": x}, None)
    assert [shape.shape for shape in parts.shapes] == [(EXAMPLES, 5)]
    everything = split(
        lambda v, batch, key: jnp.square(model.apply({"params": v}, batch["x"])).mean(), variables, {"x": x}, None
    )
    assert everything is None


def test_all_of_a_transformer_below_its_head_is_decided_by_single_examples() -> None:
    """What is stored is what enters the head: all positions, after attention and the last norm."""
    example = (("x", (7,), "int32"), ("y", (7,), "int32"))
    task = fp.tasks.from_model(example, "char_transformer", num_classes=9, width=4, heads=2, hidden=6)
    variables = task.init(jax.random.key(0))
    draw = np.random.default_rng(0)
    batch = {name: jnp.asarray(draw.integers(0, 9, (EXAMPLES, 7))) for name in ("x", "y")}

    def loss(head: Any, batch: Any, key: Any) -> Any:
        return task.loss({"params": {**variables["params"], "head": head}}, batch, key)[0]

    head, key = variables["params"]["head"], jax.random.key(0)
    parts = split(loss, head, batch, key)
    assert parts is not None and [shape.shape for shape in parts.shapes] == [(EXAMPLES, 7, 4)]
    np.testing.assert_allclose(parts.rest(head, batch, key, parts.features(batch)), loss(head, batch, key), rtol=1e-6)


def check(loss: Any, batch: Any) -> None:
    parts, key = found(loss, batch), jax.random.key(0)
    assert parts is not None
    shuffle = jnp.array([3, 1, 5, 0, 4, 2])
    stored = [x[shuffle] for x in parts.features(batch)]
    moved = jax.tree.map(lambda x: x[shuffle], batch)
    np.testing.assert_allclose(parts.rest(HEAD, moved, key, stored), loss(HEAD, moved, key), rtol=1e-5)
    expected = jax.grad(loss)(HEAD, moved, key)
    np.testing.assert_allclose(jax.grad(parts.rest)(HEAD, moved, key, stored), expected, 1e-4, 1e-6)
    # Each row by itself: with all other examples spoiled, it is the same.
    spoiled = jax.tree.map(lambda x: x.at[1:].set(x[0]), batch)
    for once, alone in zip(parts.features(batch), parts.features(spoiled), strict=True):
        np.testing.assert_allclose(once[0], alone[0], 1e-5, 1e-6)


MIXED = {
    "normalised over examples": lambda x: (x - x.mean(0)) @ W,
    "summed over examples": lambda x: jnp.cumsum(x, 0) @ W,
    "summed into as many rows": lambda x: (x[:, None] + numbers(1, EXAMPLES, 4)).sum(0) @ W,
    "sorted": lambda x: jnp.sort(x, 0) @ W,
    "turned": lambda x: x[::-1] @ W,
    "shifted": lambda x: jnp.roll(x, 1, 0) @ W,
    "by place in the batch": lambda x: (x + jnp.arange(EXAMPLES, dtype=x.dtype)[:, None]) @ W,
    "examples against each other": lambda x: x @ (x.T @ x) @ W,
    "examples attending to each other": lambda x: jnp.einsum("ij,ji->i", square(x), square(x))[:, None] @ W[:1],
    "folded into another axis": lambda x: x.reshape(3, -1) @ numbers(8, 5),
    "in a loop": lambda x: jax.lax.scan(lambda c, row: (c + row, c @ W), jnp.zeros(4), x)[1],
    "a part of the examples": lambda x: x[2:5] @ W,
}


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_examples_stays_in_the_step(name: str) -> None:
    assert found(lambda head, batch, key: (MIXED[name](batch["x"]) @ head).mean(), {"x": numbers(EXAMPLES, 4)}) is None


def test_what_is_drawn_at_random_stays_in_the_step() -> None:
    def loss(head: Any, batch: Any, key: Any) -> Any:
        kept = jax.random.bernoulli(key, 0.5, batch["x"].shape)
        return (jnp.where(kept, batch["x"], 0) @ W @ head).mean()

    assert found(loss, {"x": numbers(EXAMPLES, 4)}) is None


# In methods.


def outcome(method: str, settings: dict[str, Any], room: bool) -> Any:
    federation = fp.data.load("vowel_speakers")
    task = fp.tasks.from_model(federation, "mlp", hidden=(8, 6))
    algorithm = fp.method(method).make(task, batch_size=8, **settings)
    cohort = federation.cohort([0, 3, 4])
    cohort = cohort if room else cohort._replace(room=None)
    state, metrics = jax.jit(algorithm.step)(fp.start(algorithm, federation, 0), cohort, jax.random.key(0))
    unseen = cohort._replace(ids=cohort.ids + federation.num_clients)
    return state, metrics.loss, jax.jit(algorithm.personalize)(state, unseen, jax.random.key(0))


@pytest.mark.parametrize(
    ("method", "settings"),
    [("fedrep", {"head_epochs": 4}), ("fedbabu", {}), ("fedper", {"newcomer_epochs": 3}), ("fedavg", {"epochs": 2})],
)
def test_methods_give_the_same_with_stored_features(method: str, settings: dict[str, Any]) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6),
        outcome(method, settings, room=True),
        outcome(method, settings, room=False),
    )


def test_the_head_of_a_transformer_trains_the_same_with_stored_features() -> None:
    federation = fp.data.shakespeare_roles(window=20, max_roles=2)
    task = fp.tasks.from_model(federation, "char_transformer", width=4, heads=2, blocks=1, hidden=6)
    algorithm = fp.method("fedrep").make(task, head_epochs=2, batch_size=200)
    cohort = federation.cohort([0, 1])
    step, state = jax.jit(algorithm.step), fp.start(algorithm, federation, 0)
    ours, theirs = (step(state, each, jax.random.key(0)) for each in (cohort, cohort._replace(room=None)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-6), ours, theirs)


@pytest.mark.parametrize("by_weight", [False, True])
def test_the_weight_of_a_row_is_no_property_of_its_example(by_weight: bool) -> None:
    """The rows that fill up a short batch are examples again, of weight zero."""
    federation = fp.data.load("vowel_speakers")
    task = fp.tasks.from_model(federation, "linear")
    layout, cohort, key = fp.by_role()(task), federation.cohort([0]), jax.random.key(0)
    parts = layout.init(task.init(key))

    def objective(layout: Any, parts: Any, received: Any, batch: Any, key: Any) -> Any:
        x = batch["x"] * (batch["weight"][:, None] if by_weight else 1)
        return (x @ jnp.ones((x.shape[1], 3))).sum() * parts.shared["params/head/bias"].sum(), {}

    zero = jnp.int32(0)
    context = fp.Context(cohort.data, zero, cohort.size[0], key, key, zero > 0, zero, parts, cohort.room)
    moving = {"params/head/bias": parts.shared["params/head/bias"]}
    after, _ = features.remembered(layout, parts, context, moving, objective, batch_size=4)
    assert (after.features is None) == by_weight


def test_the_body_is_evaluated_once_an_example_and_not_once_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the head's phase no product with the body's kernel remains; where features are too many, it does."""
    federation = fp.data.load("vowel_speakers")
    task = fp.tasks.from_model(federation, "mlp", hidden=(8,))
    cohort = federation.cohort([0])

    def shapes_of_features() -> Any:
        algorithm = fp.method("fedrep").make(task, head_epochs=3)
        text = str(jax.make_jaxpr(algorithm.step)(fp.start(algorithm, federation, 0), cohort, jax.random.key(0)))
        room = -(-cohort.room.shape[0] // 10) * 10
        return f"f32[{room},8]" in text

    assert shapes_of_features()
    monkeypatch.setattr(features, "MOST_BYTES", 1000)
    assert not shapes_of_features()
