"""What holds for a task of any library: values and gradients by hand, padding, keys, mapped clients, statistics."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pers.paths import flatten, select
from fedjax_pers.presets import head, model_of, norm


def by_hand(weights, batch):
    """Loss, accuracy and the gradient by back-propagation of softmax(tanh(x W1 + b1) W2 + b2), in numpy."""
    w1, b1, w2, b2 = (np.asarray(w, np.float64) for w in weights)
    x, y, weight = batch["x"], batch["y"], batch["weight"]
    hidden = np.tanh(x @ w1 + b1)
    outputs = hidden @ w2 + b2
    p = np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True)
    losses = -np.log(p[np.arange(len(y)), y])
    d_outputs = (p - np.eye(p.shape[1])[y]) * weight[:, None] / weight.sum()
    d_hidden = (d_outputs @ w2.T) * (1 - hidden**2)
    gradient = [x.T @ d_hidden, d_hidden.sum(0), hidden.T @ d_outputs, d_outputs.sum(0)]
    return losses, (outputs.argmax(1) == y).astype(float), gradient


@functools.cache
def stepper(task):
    return jax.jit(jax.value_and_grad(task.loss, has_aux=True, allow_int=True))


@functools.cache
def applier(task):
    return jax.jit(task.apply)


@functools.cache
def starter(task):
    return jax.jit(task.init)


def value_and_gradient(task, variables, batch, key=None):
    key = jax.random.key(0) if key is None else key
    (loss, tracked), gradient = stepper(task)(variables, batch, key)
    return loss, tracked, gradient


def test_loss_and_gradient_are_those_of_back_propagation_by_hand(plain, precise, batch):
    variables = precise(plain.task)
    losses, _, expected = by_hand(plain.weights(variables), batch)
    loss, tracked, gradient = value_and_gradient(plain.task, variables, batch)
    assert tracked == {}
    np.testing.assert_allclose(loss, (losses * batch["weight"]).sum() / 4, rtol=1e-12)
    for found, wanted in zip(plain.weights(gradient), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-14)


def test_metrics_are_one_number_per_example(plain, precise, batch):
    variables = precise(plain.task)
    losses, right, _ = by_hand(plain.weights(variables), batch)
    found = plain.task.metrics(variables, batch)
    assert set(found) == {"loss", "accuracy"}
    np.testing.assert_allclose(found["loss"], losses, rtol=1e-12)
    np.testing.assert_array_equal(found["accuracy"], right)


def test_apply_and_criterion_give_the_loss(plain, precise, batch):
    variables = precise(plain.task)
    outputs, tracked = plain.task.apply(variables, batch, None)
    losses, _, _ = by_hand(plain.weights(variables), batch)
    assert outputs.shape == (6, 5) and tracked == {}
    np.testing.assert_allclose(plain.task.criterion(outputs, batch), losses, rtol=1e-12)


def test_a_row_of_weight_zero_changes_nothing(plain, precise, batch):
    variables = precise(plain.task)
    padded = batch["weight"] == 0
    other = {**batch, "x": np.where(padded[:, None], 7.0, batch["x"]), "y": np.where(padded, 3, batch["y"])}
    ours, theirs = (value_and_gradient(plain.task, variables, b) for b in (batch, other))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_a_batch_in_which_nothing_counts_has_loss_and_gradient_zero(plain, batch):
    variables = starter(plain.task)(jax.random.key(0))
    loss, _, gradient = value_and_gradient(plain.task, variables, {**batch, "weight": np.zeros(6)})
    assert loss == 0
    assert all((np.asarray(g) == 0).all() for g in jax.tree.leaves(gradient))


def test_without_weight_every_row_counts_once(plain, batch):
    variables = starter(plain.task)(jax.random.key(0))
    bare = {name: batch[name] for name in ("x", "y")}
    loss, _, gradient = value_and_gradient(plain.task, variables, bare)
    same, _, same_gradient = value_and_gradient(plain.task, variables, {**batch, "weight": np.ones(6)})
    for ours, theirs in zip(jax.tree.leaves((loss, gradient)), jax.tree.leaves((same, same_gradient)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    assert plain.task.metrics(variables, bare)["loss"].shape == (6,)


def test_init_is_jittable_and_a_function_of_the_key(plain):
    eager, jitted = plain.task.init(jax.random.key(3)), jax.jit(plain.task.init)(jax.random.key(3))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), eager, jitted)
    again, other = plain.task.init(jax.random.key(3)), plain.task.init(jax.random.key(4))
    jax.tree.map(np.testing.assert_array_equal, eager, again)
    assert not np.array_equal(plain.weights(eager)[0], plain.weights(other)[0])
    shapes = jax.eval_shape(plain.task.init, jax.random.key(0))
    assert [leaf.shape for leaf in plain.weights(jax.tree.map(lambda s: np.zeros(s.shape), shapes))] == [
        (3, 4), (4,), (4, 5), (5,),
    ]  # fmt: skip


def test_clients_mapped_at_once_are_clients_one_by_one(normed_task, batch):
    draw = np.random.default_rng(1)
    keys = jax.random.split(jax.random.key(0), 3)
    stacked = jax.vmap(normed_task.init)(keys)
    batches = {
        "x": draw.normal(size=(3, 6, 3)),
        "y": draw.integers(0, 5, (3, 6)),
        "weight": np.tile(batch["weight"], (3, 1)),
    }
    step = stepper(normed_task)
    together = jax.jit(jax.vmap(step))(stacked, batches, keys)
    for i in range(3):
        variables, rows = jax.tree.map(lambda leaf, i=i: leaf[i], (stacked, batches))
        alone = step(variables, rows, keys[i])
        ours = jax.tree.map(lambda leaf, i=i: leaf[i], together)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(alone), strict=True):
            if a.dtype != jax.dtypes.float0:
                np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_the_key_drives_dropout_in_training_and_nothing_in_evaluation(noisy, precise, batch):
    variables = precise(noisy.task)
    first, again, second = (applier(noisy.task)(variables, batch, jax.random.key(k))[0] for k in (1, 1, 2))
    assert np.array_equal(first, again) and not np.allclose(first, second)
    calm, _ = noisy.task.apply(variables, batch, None)
    w1, b1, w2, b2 = noisy.weights(variables)
    np.testing.assert_allclose(calm, np.tanh(batch["x"] @ w1 + b1) @ w2 + b2, rtol=1e-12)
    np.testing.assert_allclose(
        noisy.task.metrics(variables, batch)["loss"], by_hand((w1, b1, w2, b2), batch)[0], rtol=1e-12
    )


def test_dropout_keeps_half_of_the_hidden_units_and_doubles_them(noisy, precise, batch):
    variables = precise(noisy.task)
    w1, b1, w2, b2 = (np.asarray(w) for w in noisy.weights(variables))
    apply = jax.jit(jax.vmap(noisy.task.apply, in_axes=(None, None, 0)))
    outputs, _ = apply(variables, batch, jax.random.split(jax.random.key(0), 64))
    # Four hidden units and five outputs: the kept units can be solved for.
    hidden = np.linalg.lstsq(w2.T, (np.asarray(outputs) - b2).reshape(-1, 5).T, rcond=None)[0].T.reshape(64, 6, 4)
    ratio = hidden / np.tanh(batch["x"] @ w1 + b1)
    assert np.minimum(abs(ratio), abs(ratio - 2)).max() < 1e-8
    assert abs(ratio.mean() - 1) < 0.15  # 1536 coins: standard error 0.026
    assert len(np.unique(ratio.round(3), axis=0)) == 64


def test_leaves_are_arrays_and_no_random_state(noisy):
    leaves = flatten(starter(noisy.task)(jax.random.key(0)))
    assert len(leaves) == 4
    assert all(
        isinstance(leaf, jax.Array) and leaf.dtype == jnp.float32 and not leaf.weak_type for leaf in leaves.values()
    )


def test_head_is_the_last_layer_used(noisy):
    leaves = flatten(starter(noisy.task)(jax.random.key(0)))
    chosen = select(head(1), leaves, model_of(noisy.task))
    assert len(chosen) == 2 and all("head" in path.split("/") for path in chosen)


def test_normalisation_is_found_by_type_with_its_statistics(normed_task):
    leaves = flatten(starter(normed_task)(jax.random.key(0)))
    chosen = select(norm(), leaves, model_of(normed_task))
    assert chosen == {path for path in leaves if "head" not in path.split("/")}


def test_statistics_are_exactly_what_training_tracks(normed_task, batch):
    variables = starter(normed_task)(jax.random.key(0))
    leaves = flatten(variables)
    _, tracked, _ = value_and_gradient(normed_task, variables, batch)
    assert set(tracked) == normed_task.statistics.select(leaves) != set()
    assert {p: (x.shape, x.dtype) for p, x in tracked.items()} == {
        p: (leaves[p].shape, leaves[p].dtype) for p in tracked
    }
    assert not any(x.weak_type for x in [*leaves.values(), *tracked.values()])
    assert normed_task.apply(variables, batch, None)[1] == {}


def test_a_batch_in_which_nothing_counts_leaves_the_statistics(normed_task, batch):
    variables = starter(normed_task)(jax.random.key(0))
    loss, tracked, gradient = value_and_gradient(normed_task, variables, {**batch, "weight": np.zeros(6)})
    leaves = flatten(variables)
    assert loss == 0 and all(np.array_equal(x, leaves[path]) for path, x in tracked.items())
    assert all((g == 0).all() for g in jax.tree.leaves(gradient) if g.dtype != jax.dtypes.float0)


def test_applying_changes_no_argument(normed_task, batch):
    variables = starter(normed_task)(jax.random.key(0))
    before = {path: np.array(leaf) for path, leaf in flatten(variables).items()}
    first = normed_task.apply(variables, batch, jax.random.key(0))
    second = normed_task.apply(variables, batch, jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    jax.tree.map(np.testing.assert_array_equal, before, dict(flatten(variables)))


def normalised_by_hand(variables, x, mean, var):
    """Outputs of the model that normalises features at mean and var, then a linear layer."""
    leaves = {path: np.asarray(leaf, np.float64) for path, leaf in flatten(variables).items()}
    found = {path.rpartition("/")[2]: leaf for path, leaf in leaves.items() if "head" in path.split("/")}
    scale, shift = (
        next(
            leaf for path, leaf in leaves.items() if "params" in path and "odd" in path and path.endswith(ends)
        ).reshape(-1)
        for ends in (("scale", "weight"), ("bias", "offset"))
    )
    kernel = found["weight"].T if "weight" in found else found.get("kernel", found.get("w"))
    bias = found.get("bias", found.get("b"))
    return ((x - mean) / np.sqrt(var + 1e-5) * scale + shift) @ kernel + bias


def test_training_normalises_by_the_batch(normed_task, precise, batch):
    variables = precise(normed_task)
    x = batch["x"]
    outputs, _ = applier(normed_task)(variables, {**batch, "weight": np.ones(6)}, jax.random.key(0))
    np.testing.assert_allclose(outputs, normalised_by_hand(variables, x, x.mean(0), x.var(0)), rtol=1e-6)


def updated(normed_task, variables, batch):
    _, tracked, _ = value_and_gradient(normed_task, variables, batch)
    return unflatten_like(variables, {**flatten(variables), **tracked})


def unflatten_like(variables, leaves):
    return jax.tree.unflatten(jax.tree.structure(variables), [leaves[path] for path in flatten(variables)])


def test_evaluation_normalises_by_the_running_statistics(normed_task, x64, batch):
    variables = jax.tree.map(
        lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x, starter(normed_task)(jax.random.key(0))
    )
    trained = updated(normed_task, variables, {**batch, "weight": np.ones(6)})
    x, new = batch["x"], np.random.default_rng(5).normal(size=(6, 3))
    # Flax starts its averages at 0 and 1; Haiku and Equinox correct the first average for its start.
    corrected = "state" in trained
    mean = x.mean(0) if corrected else 0.1 * x.mean(0)
    var = x.var(0) if corrected else 0.9 + 0.1 * x.var(0)
    outputs, _ = normed_task.apply(trained, {**batch, "x": new}, None)
    np.testing.assert_allclose(outputs, normalised_by_hand(trained, new, mean, var), rtol=1e-6)
    one_by_one = [normed_task.apply(trained, {"x": new[i : i + 1], "y": batch["y"][:1]}, None)[0] for i in range(6)]
    np.testing.assert_allclose(outputs, np.concatenate(one_by_one), rtol=1e-9)


def test_padding_is_left_out_of_masked_statistics(masked_tasks, precise, batch):
    counts = batch["weight"] > 0
    kept = batch["x"][counts]
    for task in masked_tasks:
        variables = precise(task)
        before = flatten(variables)
        outputs, tracked = applier(task)(variables, batch, jax.random.key(0))
        np.testing.assert_allclose(
            tracked["batch_stats/odd/mean"], 0.9 * before["batch_stats/odd/mean"] + 0.1 * kept.mean(0), rtol=1e-6
        )
        np.testing.assert_allclose(
            tracked["batch_stats/odd/var"], 0.9 * before["batch_stats/odd/var"] + 0.1 * kept.var(0), rtol=1e-6
        )
        expected = normalised_by_hand(variables, kept, kept.mean(0), kept.var(0))
        np.testing.assert_allclose(outputs[counts], expected, rtol=1e-6)


def test_the_content_of_padding_is_not_seen_by_masked_statistics(masked_tasks, batch):
    padded = (batch["weight"] == 0)[:, None]
    other = {**batch, "x": np.where(padded, 1e3, batch["x"])}
    for task in masked_tasks:
        variables = starter(task)(jax.random.key(0))
        ours, theirs = (value_and_gradient(task, variables, b) for b in (batch, other))
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_parameters_of_half_width(normed_task, batch):
    variables = starter(normed_task)(jax.random.key(0))
    fixed = normed_task.statistics.select(flatten(variables))
    leaves = {path: x if path in fixed else x.astype(jnp.bfloat16) for path, x in flatten(variables).items()}
    half = unflatten_like(variables, leaves)
    loss, tracked, gradient = value_and_gradient(normed_task, half, batch)
    assert loss.dtype == jnp.float32 and np.isfinite(loss)
    assert all(x.dtype == leaves[path].dtype for path, x in tracked.items())
    by_path = {path: g for path, g in flatten(gradient).items() if path not in fixed}
    assert all(g.dtype == jnp.bfloat16 and np.isfinite(np.asarray(g, np.float32)).all() for g in by_path.values())
