"""Local generators: what they come down to where they ignore their code, and that what they make stays unmade."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_pers as fp
from fedjax_pers.adapters import starting_from
from fedjax_pers.generators import CODE_LEAF, GENERATOR_LEAVES, generated, mlp
from fedjax_pers.mixtures import inputs_of, linear_gate, mixture
from tests import toys

HEAD = ("params/head/kernel", "params/head/bias")
LOCAL = {"batch_size": 4, "epochs": 2}


def states_of(algorithm, rounds=3):
    state, step = toys.start(algorithm, 3), jax.jit(algorithm.step)
    for _ in range(rounds):
        state, _ = step(state, toys.labelled_clients(), jax.random.key(0))
    return state


def test_a_network_against_float64():
    """Two codes of two numbers, one hidden layer, by hand."""
    network = mlp((2,))
    made = network.init(jax.random.key(0), {"w": jnp.array([[1.0, -1.0, 0.5]])}, 2)
    values = jax.tree.map(lambda x: np.asarray(x, np.float64), made)
    code = np.array([0.3, -0.7])
    hidden = np.maximum(code @ values["hidden"][0]["kernel"] + values["hidden"][0]["bias"], 0)
    kernel = values["outputs"]["w"]["kernel"]
    expected = np.einsum("h,hij->ij", hidden, kernel) + np.array([[1.0, -1.0, 0.5]])
    np.testing.assert_allclose(network.apply(made, jnp.float32(code))["w"], expected, rtol=1e-6)


def test_what_is_generated_starts_near_the_ordinary_start():
    """The deviation is a tenth of that of weights of variance 1 / inputs, for a code of unit size."""
    like = {"w": jnp.zeros((200, 300))}
    network = mlp((64,))
    found = [
        network.apply(network.init(jax.random.key(seed), like, 8), jax.random.normal(jax.random.key(seed), (8,)))["w"]
        for seed in range(6)
    ]
    deviations = [float(np.std(x) * np.sqrt(200)) for x in found]
    assert 0.05 < np.mean(deviations) < 0.2


@pytest.mark.parametrize(
    ("path", "shape", "inputs"),
    [
        ("l/kernel", (4, 300), 4),
        ("l/weight", (300, 4), 4),
        ("c/kernel", (3, 3, 4, 100), 36),
        ("c/weight", (100, 4, 3, 3), 36),
        ("l/bias", (900,), 1),
    ],
)
def test_the_spread_is_that_of_the_inputs_of_the_leaf(path, shape, inputs):
    """Standard deviation 0.1 / sqrt(8 inputs), wherever a library keeps outputs."""
    kernel = mlp().init(jax.random.key(0), {path: jnp.zeros(shape)}, 8)["outputs"][path]["kernel"]
    assert float(jnp.std(kernel)) == pytest.approx(0.1 / np.sqrt(8 * inputs), rel=0.05)


def test_a_network_that_ignores_its_code_is_fedper():
    """Its code being zero, its outputs are its biases: the same bits as a personal head under plain SGD."""
    task = toys.classifier(norm=True)
    made = generated(task, fp.head(1), generator=mlp(), code=2)
    made = starting_from(made, {"code": np.zeros(2)})
    layout = fp.by_role(personal=GENERATOR_LEAVES, frozen=CODE_LEAF)
    ours = states_of(fp.compose(made, layout=layout, client=fp.train(0.2, **LOCAL)))
    fedper = states_of(fp.compose(task, layout=fp.by_role(personal=fp.head(1)), client=fp.train(0.2, **LOCAL)))
    toys.same_bits(ours.shared, fedper.shared)
    for name in HEAD:
        toys.same_bits(ours.rows[f"generator/outputs/{name}/bias"], fedper.rows[name])
        toys.same_bits(
            ours.rows[f"generator/outputs/{name}/kernel"],
            np.repeat(ours.fresh[f"generator/outputs/{name}/kernel"][None], 3, 0),
        )


def test_a_linear_network_of_a_fixed_code_is_fedsim_with_a_larger_step():
    """G = z K + b: one step on K and b moves G by (1 + |z|^2) times the gradient of G."""
    made = fp.method("private_generator").make(toys.classifier(), lr=0.02, personal_lr=0.02, batch_size=4)
    start, cohort = toys.start(made, 3), toys.labelled_clients()
    first = made.task.plain({**start.shared, **start.fresh, **start.frozen})
    factor = 1 + np.sum(np.asarray(start.frozen["code"], np.float64) ** 2)
    fedsim = fp.method("fedsim").make(toys.classifier(), lr=0.02, personal_lr=0.02 * float(factor), batch_size=4)
    ours, theirs = start, fedsim.init(first, 0, num_clients=3)
    for _ in range(2):
        (ours, _), (theirs, _) = made.step(ours, cohort, 0), fedsim.step(theirs, cohort, 0)
    models = jax.vmap(lambda row: fp.flatten(made.task.plain({**ours.shared, **row, **ours.frozen})))(ours.rows)
    for name in HEAD:
        np.testing.assert_allclose(models[name], theirs.rows[name], rtol=1e-5, atol=1e-6)


def test_equal_codes_that_stay_are_fedavg_of_the_rest():
    task = toys.classifier()
    made = generated(task, fp.head(1), generator=mlp((4,)), code=2)
    kept = fp.train(0.2, roles="shared", **LOCAL)
    ours = states_of(fp.compose(made, layout=fp.by_role(personal=CODE_LEAF), client=kept))
    fedavg = states_of(fp.compose(made, layout=fp.by_role(frozen=CODE_LEAF), client=fp.train(0.2, **LOCAL)))
    toys.same_bits(ours.shared, fedavg.shared)
    toys.same_bits(ours.rows["code"], np.repeat(np.asarray(fedavg.frozen["code"])[None], 3, 0))


def test_the_gradient_passes_through_the_network():
    """d loss / d code = K^T d loss / d G for a linear network."""
    task = toys.classifier()
    made = generated(task, "**/head/bias", code=3)
    variables, data = made.init(jax.random.key(0)), toys.labelled((5,))
    batch = {name: x[0] for name, x in data.items()}
    key = jax.random.key(1)
    found = jax.grad(lambda v: made.loss(v, batch, key)[0])(variables)
    of_leaf = fp.flatten(jax.grad(lambda v: task.loss(v, batch, key)[0])(made.plain(variables)))["params/head/bias"]
    kernel = variables["generator/outputs/params/head/bias/kernel"]
    np.testing.assert_allclose(found["code"], kernel @ of_leaf, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found["generator/outputs/params/head/bias/bias"], of_leaf, rtol=1e-6)


@pytest.mark.parametrize("name", ["private_generator", "shared_generator"])
@pytest.mark.parametrize("training", ["joint", "alternating"])
def test_neither_codes_nor_what_is_generated_leave(name, training):
    algorithm = fp.method(name).make(toys.classifier(), training=training, batch_size=4)
    state = toys.start(algorithm, 3)
    after, _ = algorithm.step(state, toys.labelled_clients(), 0)
    _, upload, row = algorithm.exchange(state, toys.labelled_clients().at(jnp.array([0])), 0)
    assert not set(HEAD) & set(upload) and "code" not in upload and not set(HEAD) & set(row)
    assert any("generator/" in leaf for leaf in (row if name == "private_generator" else upload))
    changed = {leaf: bool((np.asarray(after.rows[leaf]) != np.asarray(x)).any()) for leaf, x in state.rows.items()}
    assert changed and all(changed.values())
    models = algorithm.personalize(after, toys.labelled_clients(), 0)
    heads = fp.flatten(jax.vmap(algorithm.task.plain)(models))["params/head/kernel"]
    assert (np.asarray(heads[0]) != np.asarray(heads[1])).any()


def test_a_new_client_fits_its_code_alone():
    algorithm = fp.method("shared_generator").make(toys.classifier(), batch_size=4, newcomer_epochs=3)
    state = toys.start(algorithm, 2)
    variables = algorithm.personalize(state, toys.labelled_clients((7,))._replace(ids=jnp.array([2], jnp.int32)), 0)
    assert (variables["code"][0] != state.fresh["code"]).all()
    for name, x in state.shared.items():
        toys.same_bits(variables[name][0], x)


def test_scales_and_shifts_of_norms_can_be_generated():
    task = toys.classifier(norm=True)
    made = generated(task, "**/norm1/{scale,bias}", code=2)
    algorithm = fp.compose(made, layout=fp.by_role(personal=CODE_LEAF), client=fp.train(0.1, **LOCAL))
    state = states_of(algorithm, 1)
    assert "batch_stats/norm1/mean" in state.shared and "params/norm1/scale" not in state.shared


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"on": "**/nowhere"}, "nowhere"),
        ({"on": "batch_stats/**"}, "running statistics"),
        ({"on": "**/head/bias", "code": 0}, "code: found 0"),
        ({"on": fp.lora()}, "selects no leaf of this model, so there is nothing to generate"),
    ],
)
def test_what_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        generated(toys.classifier(norm=True), **settings)


def test_what_is_private_is_not_generated():
    gated = mixture(toys.classifier(), linear_gate(inputs_of(toys.classifier()), experts=2))
    with pytest.raises(ValueError, match="on: .*gate/.* are private to a client"):
        generated(gated, "gate/**")


def test_a_shared_code_is_refused():
    made = generated(toys.classifier(), fp.head(1))
    with pytest.raises(ValueError, match="code.* would be shared, which this task keeps private"):
        fp.compose(made)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"training": "both"}, "training: found 'both'"),
        ({"hidden": (0,)}, "hidden: found 0"),
        ({"hidden": 32}, "hidden: found 32; allowed is a list"),
        ({"code": -1}, "code: "),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        fp.method("shared_generator").make(toys.classifier(), **settings)
