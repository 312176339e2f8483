"""Mixtures with gates against their formulas in float64, gradients by finite differences of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import approx_fprime
from scipy.special import entr, log_softmax, logsumexp, softmax

import fedjax_pers as fp
from fedjax_pers.mixtures import constant_gate, inputs_of, linear_gate, mixture
from fedjax_pers.simulate.pools import pool_of
from tests import toys

LR, GATE_LR, EXAMPLES = 0.3, 0.2, 6
ONE_STEP = {"steps": 1, "batch_size": EXAMPLES}
LINEAR = toys.softmax_regression()


@pytest.fixture(scope="module")
def clients():
    return toys.labelled_clients((EXAMPLES, EXAMPLES))


def examples_of(cohort, client):
    rows = slice(client * EXAMPLES, (client + 1) * EXAMPLES)
    return np.asarray(cohort.data["x"][rows], np.float64), np.asarray(cohort.data["y"][rows])


def spread(leaves, seed=3):
    """Leaves of the same shapes with random numbers."""
    draw = np.random.default_rng(seed)
    return {name: jnp.asarray(draw.normal(size=np.shape(x)), jnp.float32) for name, x in leaves.items()}


def somewhere(algorithm):
    """A first state whose leaves are random, those of clients too."""
    state = toys.start(algorithm, 2)
    return state._replace(shared=spread(state.shared), rows=spread(state.rows, 4))


def leaves_of(state, client):
    both = {**state.shared, **{name: x[client] for name, x in state.rows.items()}}
    return {name: np.asarray(x, np.float64) for name, x in both.items()}


def gradient(loss, leaves):
    """Of ``loss(leaves)`` in float64, by finite differences, for each leaf."""
    names = sorted(leaves)
    sizes = np.cumsum([leaves[name].size for name in names])[:-1]

    def shaped(vector):
        parts = np.split(vector, sizes)
        return {name: part.reshape(leaves[name].shape) for name, part in zip(names, parts, strict=True)}

    return shaped(approx_fprime(np.concatenate([leaves[name].ravel() for name in names]), lambda v: loss(shaped(v))))


def scores(leaves, number, x):
    return x @ leaves[f"experts/{number}/kernel"] + leaves[f"experts/{number}/bias"]


def gate_of(leaves, x):
    """Weights of a linear gate, or of a logistic one between two experts, ``[examples, experts]``."""
    score = x @ leaves["gate/kernel"] + leaves["gate/bias"]
    return softmax(score, axis=1) if score.ndim == 2 else softmax(np.stack([score, 0 * score], axis=1), axis=1)


def log_probabilities(leaves, x, level="probability"):
    g, outputs = gate_of(leaves, x), np.stack([scores(leaves, number, x) for number in range(2)], axis=1)
    if level == "logit":
        return log_softmax(np.einsum("nk,nkc->nc", g, outputs), axis=1)
    return np.log(np.einsum("nk,nkc->nc", g, softmax(outputs, axis=2)))


def loss_of(leaves, x, y, level="probability", balance=0.0):
    usage = gate_of(leaves, x).mean(axis=0)
    penalty = balance * (len(usage) * np.square(usage).sum() - 1)
    return -log_probabilities(leaves, x, level)[np.arange(len(y)), y].mean() + penalty


def check_rows(after, state, client, slope, rates):
    """Personal leaves of one client took one step; ``rates`` by the beginning of their names."""
    for name, x in after.rows.items():
        rate = next(rate for prefix, rate in rates.items() if name.startswith(prefix))
        np.testing.assert_allclose(x[client], state.rows[name][client] - rate * slope[name], atol=2e-6, err_msg=name)


@pytest.mark.parametrize("level", ["probability", "logit"])
def test_metrics_of_a_mixture(clients, level):
    task = mixture(LINEAR, linear_gate(inputs_of(LINEAR), 2), level=level)
    leaves = spread(fp.flatten(task.init(jax.random.key(0))))
    x, y = examples_of(clients, 0)
    variables = fp.paths.unflattener(task.init(jax.random.key(0)))(leaves)
    found = task.metrics(variables, {"x": x.astype(np.float32), "y": y, "weight": np.ones(EXAMPLES, np.float32)})
    leaves = {name: np.asarray(value, np.float64) for name, value in leaves.items()}
    expected = log_probabilities(leaves, x, level)
    np.testing.assert_allclose(found["loss"], -expected[np.arange(EXAMPLES), y], rtol=1e-5)
    np.testing.assert_array_equal(found["accuracy"], expected.argmax(axis=1) == y)
    g = gate_of(leaves, x)
    np.testing.assert_allclose(found["routing_entropy"], entr(g).sum(axis=1), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose([found["usage_0"], found["usage_1"]], g.T, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("balance", [0.0, 0.7])
def test_one_round_of_fedmix(clients, balance):
    """Experts are means by how far each client's examples are theirs, under the experts as received."""
    algorithm = fp.method("fedmix").make(LINEAR, lr=LR, gate_lr=GATE_LR, balance=balance, **ONE_STEP)
    state = somewhere(algorithm)
    after, metrics = jax.jit(algorithm.step)(state, clients, jax.random.key(0))
    moves, mass = [], []
    for client in range(2):
        leaves, (x, y) = leaves_of(state, client), examples_of(clients, client)
        slope = gradient(lambda leaves, x=x, y=y: loss_of(leaves, x, y, balance=balance), leaves)
        check_rows(after, state, client, slope, {"gate/": GATE_LR})
        right = [log_softmax(scores(leaves, k, x), axis=1)[np.arange(len(y)), y] for k in range(2)]
        mass.append(softmax(np.log(gate_of(leaves, x)) + np.stack(right, axis=1), axis=1).sum(axis=0))
        moves.append(slope)
        if balance == 0:  # by hand: an expert's slope is that of its own loss, example by example times r
            r = softmax(np.log(gate_of(leaves, x)) + np.stack(right, axis=1), axis=1)
            own = softmax(scores(leaves, 1, x), axis=1) - np.eye(3)[y]
            np.testing.assert_allclose(slope["experts/1/kernel"], x.T @ (r[:, 1:] * own) / EXAMPLES, atol=1e-6)
    for name, x in after.shared.items():
        number = int(name.split("/")[1])
        share = [m[number] / sum(m[number] for m in mass) for m in mass]
        moved = state.shared[name] - LR * sum(s * move[name] for s, move in zip(share, moves, strict=True))
        np.testing.assert_allclose(x, moved, atol=2e-6, err_msg=name)
    np.testing.assert_allclose(metrics.weight, [0.5, 0.5])


@pytest.mark.parametrize("level", ["probability", "logit"])
def test_one_round_of_domain_experts(clients, level):
    algorithm = fp.method("domain_experts").make(LINEAR, lr=LR, private_lr=GATE_LR, level=level, **ONE_STEP)
    state = somewhere(algorithm)
    after, _ = jax.jit(algorithm.step)(state, clients, jax.random.key(0))
    slopes = []
    for client in range(2):
        x, y = examples_of(clients, client)
        slopes.append(gradient(lambda leaves, x=x, y=y: loss_of(leaves, x, y, level), leaves_of(state, client)))
        check_rows(after, state, client, slopes[-1], {"": GATE_LR})
    assert set(after.shared) == {"experts/0/kernel", "experts/0/bias"}
    for name, x in after.shared.items():
        moved = state.shared[name] - LR * np.mean([slope[name] for slope in slopes], axis=0)
        np.testing.assert_allclose(x, moved, atol=2e-6, err_msg=name)


def test_what_a_client_of_pfl_moe_does_before_it_predicts(clients):
    """One step of the copy on its own loss, then one of the gate on the loss of the mixture."""
    settings = {"tune_lr": LR, "gate_lr": GATE_LR, "tune_epochs": 1, "gate_epochs": 1, "batch_size": EXAMPLES}
    algorithm = fp.method("pfl_moe").make(LINEAR, **settings)
    state = toys.start(algorithm, 2)
    state = state._replace(shared=spread(state.shared))
    models = jax.jit(algorithm.personalize)(state, clients, jax.random.key(0))
    for client in range(2):
        x, y = examples_of(clients, client)
        found = {name: np.asarray(value[client], np.float64) for name, value in fp.flatten(models).items()}
        first = {name: np.asarray(value, np.float64) for name, value in state.shared.items()}
        own = softmax(scores(first, 0, x), axis=1) - np.eye(3)[y]
        tuned = {
            "experts/1/kernel": first["experts/0/kernel"] - LR * x.T @ own / EXAMPLES,
            "experts/1/bias": first["experts/0/bias"] - LR * own.mean(axis=0),
        }
        gate = {"gate/kernel": np.zeros(toys.FEATURES), "gate/bias": np.zeros(())}
        slope = gradient(lambda gate, x=x, y=y, experts=first | tuned: loss_of(experts | gate, x, y), gate)
        expected = first | tuned | {name: value - GATE_LR * slope[name] for name, value in gate.items()}
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, atol=2e-6, err_msg=name)


def test_a_gate_on_features_of_the_copy(clients):
    """Features are those of the copy once it is tuned, and do not move with the gate."""
    settings = {"tune_lr": LR, "gate_lr": GATE_LR, "tune_epochs": 1, "gate_epochs": 1, "batch_size": EXAMPLES}
    algorithm = fp.method("pfl_moe").make(toys.classifier(), gate_reads="features", **settings)
    state = toys.start(algorithm, 2)
    models = jax.jit(algorithm.personalize)(state._replace(shared=spread(state.shared)), clients, jax.random.key(0))
    for client in range(2):
        x, y = examples_of(clients, client)
        found = {name: np.asarray(value[client], np.float64) for name, value in fp.flatten(models).items()}
        z, p = [], []
        for number in range(2):
            w1, b1, w2, b2 = (
                found[f"experts/{number}/params/{layer}/{name}"]
                for layer in ("hidden1", "head")
                for name in ("kernel", "bias")
            )
            z.append(np.maximum(x @ w1 + b1, 0))
            p.append(softmax(z[-1] @ w2 + b2, axis=1)[np.arange(EXAMPLES), y])
        slope = -0.5 * (p[0] - p[1]) / (p[0] + p[1])  # of each loss in the gate's score, where the gate is one half
        np.testing.assert_allclose(found["gate/kernel"], -GATE_LR * z[1].T @ slope / EXAMPLES, atol=2e-6)
        np.testing.assert_allclose(found["gate/bias"], -GATE_LR * slope.mean(), atol=2e-6)


def test_experts_that_are_heads_on_one_body(clients):
    """One body travels; it moves by both heads and counts by examples, heads count by their usage."""
    algorithm = fp.method("fedmix").make(toys.classifier(), body=~fp.head(1), lr=LR, gate_lr=GATE_LR, **ONE_STEP)
    state = somewhere(algorithm)
    body = {f"experts/0/params/hidden1/{name}" for name in ("kernel", "bias")}
    heads = {f"experts/{k}/params/head/{name}" for k in range(2) for name in ("kernel", "bias")}
    assert set(state.shared) == body | heads

    def outputs(leaves, number, x):
        z = np.maximum(x @ leaves["experts/0/params/hidden1/kernel"] + leaves["experts/0/params/hidden1/bias"], 0)
        return z @ leaves[f"experts/{number}/params/head/kernel"] + leaves[f"experts/{number}/params/head/bias"]

    def right(leaves, x, y):
        each = [softmax(outputs(leaves, k, x), axis=1)[np.arange(len(y)), y] for k in range(2)]
        return gate_of(leaves, x) * np.stack(each, axis=1)

    after, _ = jax.jit(algorithm.step)(state, clients, jax.random.key(0))
    moves, mass = [], []
    for client in range(2):
        leaves, (x, y) = leaves_of(state, client), examples_of(clients, client)
        moves.append(gradient(lambda leaves, x=x, y=y: -np.log(right(leaves, x, y).sum(axis=1)).mean(), leaves))
        odds = right(leaves, x, y)
        mass.append((odds / odds.sum(axis=1, keepdims=True)).sum(axis=0))
    for name, x in after.shared.items():
        weights = np.ones(2) if name in body else np.array(mass)[:, int(name.split("/")[1])]
        moved = state.shared[name] - LR * np.average([move[name] for move in moves], axis=0, weights=weights)
        np.testing.assert_allclose(x, moved, atol=2e-6, err_msg=name)


def test_one_round_of_pfedmoe(clients):
    """The head reads a mixture of features; the common extractor has no head."""
    algorithm = fp.method("pfedmoe").make(toys.classifier(), lr=LR, own_lr=GATE_LR, **ONE_STEP)
    state = somewhere(algorithm)
    assert set(state.shared) == {"experts/0/params/hidden1/kernel", "experts/0/params/hidden1/bias"}

    def features(leaves, number, x):
        kernel, bias = (leaves[f"experts/{number}/params/hidden1/{name}"] for name in ("kernel", "bias"))
        return np.maximum(x @ kernel + bias, 0)

    def loss(leaves, x, y):
        g = gate_of(leaves, x)
        z = g[:, :1] * features(leaves, 0, x) + g[:, 1:] * features(leaves, 1, x)
        outputs = z @ leaves["experts/1/params/head/kernel"] + leaves["experts/1/params/head/bias"]
        return -log_softmax(outputs, axis=1)[np.arange(len(y)), y].mean()

    after, _ = jax.jit(algorithm.step)(state, clients, jax.random.key(0))
    slopes = []
    for client in range(2):
        x, y = examples_of(clients, client)
        slopes.append(gradient(lambda leaves, x=x, y=y: loss(leaves, x, y), leaves_of(state, client)))
        check_rows(after, state, client, slopes[-1], {"": GATE_LR})
    for name, x in after.shared.items():
        moved = state.shared[name] - LR * np.mean([slope[name] for slope in slopes], axis=0)
        np.testing.assert_allclose(x, moved, atol=2e-6, err_msg=name)


def test_a_small_common_extractor_travels_alone():
    federation = toys.federation((4, 3))
    small = fp.tasks.from_model(toys.EXAMPLE, "mlp", num_classes=3, hidden=(7,))
    large = fp.tasks.from_model(toys.EXAMPLE, "mlp", num_classes=3, hidden=(20, 7))
    algorithm = fp.method("pfedmoe").make(large, extractor=small, batch_size=2)
    costs = fp.traffic(algorithm, toys.start(algorithm, 2), pool_of(federation, "train"))
    assert costs.up == costs.down == 4 * (toys.FEATURES + 1) * 7


def test_probabilities_of_zero_weight_and_huge_scores_are_stable():
    """Scores of +-1000, where softmax in the naive form has no logarithm."""
    task = mixture(LINEAR, constant_gate(2))
    experts = [{"kernel": sign * 1000 * jnp.eye(4, 3), "bias": jnp.zeros(3)} for sign in (1, -1)]
    batch = {"x": jnp.eye(4)[:2], "y": jnp.array([1, 1], jnp.int32), "weight": jnp.ones(2)}
    variables = {"experts": experts, "gate": {"weights": jnp.array([1.0, 0.0])}}
    np.testing.assert_allclose(task.metrics(variables, batch)["loss"], [1000, 0])
    slope = jax.grad(lambda experts: task.loss({**variables, "experts": experts}, batch, jax.random.key(0))[0])(experts)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(slope))
    even = {**variables, "gate": {"weights": jnp.array([0.5, 0.5])}}
    np.testing.assert_allclose(
        task.metrics(even, batch)["loss"], [np.log(4), -logsumexp([np.log(0.5), -2000])], rtol=1e-6
    )


def one_output(criterion):
    example = (("x", (2,), "float32"), ("y", (), "float32"))
    return fp.tasks.supervised(
        lambda key: {"w": jnp.zeros((2, 1))},
        lambda v, batch, key: (batch["x"] @ v["w"], {}),
        criterion,
        example=example,
    )


def scaled_cross_entropy():
    return LINEAR._replace(criterion=lambda outputs, batch: 2 * LINEAR.criterion(outputs, batch))


def tokens():
    def apply(variables, batch, key):
        return variables["w"][batch["x"]].sum(axis=1), {}

    example = (("x", (7,), "int32"), ("y", (), "int32"))
    return fp.tasks.supervised(lambda key: {"w": jnp.zeros((20, 5))}, apply, example=example)


def next_characters():
    return fp.tasks.from_model((("x", (7,), "int32"), ("y", (7,), "int32")), "char_lstm", num_classes=5)


def shared_gate():
    return fp.compose(mixture(LINEAR, linear_gate(inputs_of(LINEAR), 2)))


BAD = [
    (lambda: linear_gate(inputs_of(LINEAR), 0), "experts: found 0"),
    (lambda: constant_gate(0), "experts: found 0"),
    (lambda: fp.method("fedmix").make(LINEAR, experts=0), "experts: found 0"),
    (lambda: fp.method("fedmix").make(LINEAR, balance=-1.0), "balance: found -1"),
    (lambda: fp.method("fedmix").make(LINEAR, weights="usages"), "weights: found 'usages'.*Did you mean 'usage'"),
    (lambda: mixture(LINEAR, constant_gate(2), level="logits"), "level: found 'logits'.*Did you mean 'logit'"),
    (lambda: fp.method("pfl_moe").make(one_output("squared_error")), "task: found num_classes None"),
    (lambda: fp.method("fedem").make(one_output("binary_cross_entropy")), "criterion: found outputs of shape"),
    (lambda: fp.method("fedem").make(scaled_cross_entropy()), "criterion: found a criterion that is .* cross-entropy"),
    (lambda: fp.method("fedem").make(next_characters()), r"task: found num_classes 5, labels y of shape \(7,\)"),
    (
        lambda: fp.method("fedmix").make(tokens()),
        r"task: found inputs x \(\(7,\), 'int32'\); a gate on the inputs needs",
    ),
    (lambda: inputs_of(toys.quadratic()), "task: found inputs x None"),
    (lambda: fp.method("fedmix").make(toys.quadratic()), "task: found inputs x None"),
    (lambda: mixture(toys.quadratic(), constant_gate(2), level="logit"), "level: found 'logit'; the task has no apply"),
    (shared_gate, r"personal: \['gate/bias', 'gate/kernel'\] would be shared, which this task keeps private"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_settings_that_make_no_sense(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_features_of_another_width_are_refused():
    narrow = fp.tasks.from_model(toys.EXAMPLE, "mlp", num_classes=3, hidden=(2,))
    with pytest.raises(ValueError, match="extractor: found 2 features for the 5 that enter the head"):
        fp.method("pfedmoe").make(toys.classifier(), extractor=narrow)
