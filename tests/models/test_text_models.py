"""Attention and recurrence in numpy, and what padding is to models that classify texts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pers import models
from tests.models.by_hand import leaves_of, nested, relu, task_of

TOKENS = np.random.default_rng(1).integers(1, 9, (3, 5))


def outputs_of(task, leaves, x):
    y = x if task.example[1][1] else np.zeros(len(x), int)
    return np.asarray(task.apply(nested(leaves), {"x": x, "y": y}, None)[0])


def test_the_transformer_in_numpy(x64):
    task = task_of("char_transformer")  # width 4, 2 heads
    p = leaves_of(task)

    def dense(h, layer):
        return h @ p[f"params/{layer}/kernel"] + p[f"params/{layer}/bias"]

    def norm(h, layer):
        centred = h - h.mean(-1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
        return centred / deviation * p[f"params/{layer}/scale"] + p[f"params/{layer}/bias"]

    def attention(h, layer):
        """Query by query: a weighted mean of the values up to its own place."""
        q, k, v = (
            np.einsum("td,dhe->the", h, p[f"params/{layer}/{name}/kernel"]) + p[f"params/{layer}/{name}/bias"]
            for name in ("query", "key", "value")
        )
        found = np.zeros((5, 2, 2))
        for head in range(2):
            for t in range(5):
                weight = np.exp(k[: t + 1, head] @ q[t, head] / np.sqrt(2))
                found[t, head] = weight @ v[: t + 1, head] / weight.sum()
        return np.einsum("the,hed->td", found, p[f"params/{layer}/out/kernel"]) + p[f"params/{layer}/out/bias"]

    def gelu(h):
        return h / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))

    for text, found in zip(TOKENS, outputs_of(task, p, TOKENS), strict=True):
        h = p["params/embedding/embedding"][text] + p["params/position/embedding"]
        for block in ("block1", "block2"):
            h = h + attention(norm(h, f"{block}/norm1"), f"{block}/attention")
            up = gelu(dense(norm(h, f"{block}/norm2"), f"{block}/feed_forward/up"))
            h = h + dense(up, f"{block}/feed_forward/down")
        np.testing.assert_allclose(found, dense(norm(h, "norm"), "head"), rtol=1e-9)


def test_the_mean_of_embeddings_in_numpy(x64):
    task = task_of("fasttext")
    p = leaves_of(task)
    text = np.array([[3, 5, 0, 3, 0], [0] * 5])
    table, kernel, bias = (p[f"params/{name}"] for name in ("embedding/embedding", "head/kernel", "head/bias"))
    expected = [(2 * table[3] + table[5]) / 3 @ kernel + bias, bias]
    np.testing.assert_allclose(outputs_of(task, p, text), expected, rtol=1e-10)


def test_detectors_of_phrases_in_numpy(x64):
    task = task_of("text_cnn")  # windows of 2 and 3
    p = leaves_of(task)

    def strongest(words, window):
        before = (window - 1) // 2
        padded = np.pad(words, [(before, window - 1 - before), (0, 0)])
        phrases = np.stack([padded[t : t + window] for t in range(len(words))])
        answers = np.einsum("twe,wec->tc", phrases, p[f"params/conv{window}/kernel"]) + p[f"params/conv{window}/bias"]
        return relu(answers).max(0)

    expected = []
    for text in TOKENS:
        words = p["params/embedding/embedding"][text]
        found = np.concatenate([strongest(words, window) for window in (2, 3)])
        expected.append(found @ p["params/head/kernel"] + p["params/head/bias"])
    np.testing.assert_allclose(outputs_of(task, p, TOKENS), expected, rtol=1e-9)


@pytest.mark.parametrize("name", ["fasttext", "text_cnn"])
def test_padding_at_the_end_changes_nothing(name):
    task = task_of(name)
    p = leaves_of(task)
    # Detectors that answer words less than they answer nothing: padding must not win the maximum.
    p |= {path: -abs(leaf) for path, leaf in p.items() if "conv" in path and path.endswith("kernel")}
    p |= {path: 5 + abs(leaf) for path, leaf in p.items() if "conv" in path and path.endswith("bias")}
    p |= {path: abs(leaf) for path, leaf in p.items() if path.endswith("embedding")}
    padded = np.pad(TOKENS, [(0, 0), (0, 4)])
    np.testing.assert_allclose(outputs_of(task, p, padded), outputs_of(task, p, TOKENS), rtol=1e-5)
    variables = nested(p)
    gradient, _ = jax.grad(task.loss, has_aux=True)(variables, {"x": padded, "y": np.arange(3)}, jax.random.key(0))
    assert not np.asarray(gradient["params"]["embedding"]["embedding"])[0].any()


@pytest.mark.parametrize("name", ["char_transformer", "fasttext", "text_cnn"])
def test_a_token_that_does_not_exist_is_not_taken_for_another(name):
    task = task_of(name)
    unknown = np.where(np.arange(5) == 2, 9, TOKENS)
    assert np.isnan(outputs_of(task, leaves_of(task), unknown)).any(axis=-1).any()


def test_the_recurrent_network_in_numpy(x64):
    task = task_of("char_lstm", layers=2)
    p = leaves_of(task)
    x = np.random.default_rng(1).integers(0, 9, (3, 5))

    def sigmoid(z):
        return 1 / (1 + np.exp(-z))

    sequence = p["params/embedding/embedding"][x]
    for layer in ("lstm1", "lstm2"):
        hidden = cell = np.zeros((3, 4))
        steps = []
        for t in range(5):
            gates = sequence[:, t] @ p[f"params/{layer}/input/kernel"] + p[f"params/{layer}/input/bias"]
            i, f, g, o = np.split(gates + hidden @ p[f"params/{layer}/recurrent"], 4, axis=1)
            cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(g)
            hidden = sigmoid(o) * np.tanh(cell)
            steps.append(hidden)
        sequence = np.stack(steps, axis=1)
    expected = sequence @ p["params/head/kernel"] + p["params/head/bias"]
    outputs, _ = task.apply(nested(p), {"x": x, "y": x}, None)
    np.testing.assert_allclose(outputs, expected, rtol=1e-9)


def test_the_forget_gate_starts_open():
    bias = models.Lstm(4).init(jax.random.key(0), jnp.ones((1, 1, 3)))["params"]["input"]["bias"]
    assert bias.tolist() == [0] * 4 + [1] * 4 + [0] * 8


@pytest.mark.parametrize("name", ["char_lstm", "char_transformer"])
def test_a_position_does_not_see_later_characters(name):
    task = task_of(name)
    variables = nested(leaves_of(task))
    x = np.random.default_rng(1).integers(0, 9, (3, 5))
    later = np.where(np.arange(5) < 3, x, (x + 1) % 9)
    ours, theirs = (task.apply(variables, {"x": z, "y": z}, None)[0] for z in (x, later))
    assert np.array_equal(ours[:, :3], theirs[:, :3]) and not np.allclose(ours[:, 3], theirs[:, 3])
    earlier = np.where(np.arange(5) > 0, x, (x + 1) % 9)
    theirs = task.apply(variables, {"x": earlier, "y": earlier}, None)[0]
    assert not any(np.allclose(ours[:, t], theirs[:, t]) for t in range(5))  # all see the first
