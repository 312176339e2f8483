"""Bytes that cross: what is counted, the formulas of the papers, and the trees that are really sent."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import linen as nn

import fedjax_pers as fp
from fedjax_pers.simulate.pools import pool_of
from fedjax_pers.traffic import megabytes
from tests import toys

# Scalars of the little classifier: hidden 4 x 5 without a bias, scale and bias of its normalisation, head 5 x 3 and 3.
HIDDEN, AFFINE, HEAD = 4 * 5, 5 + 5, 5 * 3 + 3
MODEL, STATISTICS = HIDDEN + AFFINE + HEAD, 5 + 5
WHOLE = MODEL + STATISTICS
BACKBONE, FACTORS = WHOLE - HEAD, 4 * 2 + 2 * 5

# By method: scalars that travel each way, scalars that a client keeps, scalars sent once before the first round.
FORMULAS = {
    **{
        name: (WHOLE, 0, 0)
        for name in (
            "fedavg",
            "fedavg_ft",
            "fedavg_ft_early",
            "fedavg_l2sp",
            "fedavg_ewc",
            "fedavg_kd",
            "fedprox",
            "fedavgm",
            "fedadagrad",
            "fedadam",
            "fedyogi",
            "perfedavg",
            "perfedavg_fo",
            "perfedavg_hf",
            "afl",
            "agnostic_fedavg",
            "qffl",
            "term",
            "ifca",
            "cfl",
            "fl_hc",
            "fedgroup",
            "fedamp",
            "heurfedamp",
            "pfedgraph",
            "similarity",
            "fedfomo",
            "fedmedian",
            "trimmed_mean",
            "krum",
            "rfa",
            "norm_clipping",
        )
    },  # fmt: skip
    "apple": (WHOLE, 3, 0),  # relations to three clients
    "drfa": (2 * WHOLE, 0, 0),  # the model and the snapshot: up together, down to one cohort each
    "scaffold": (2 * MODEL + STATISTICS, MODEL, 0),
    **{name: (WHOLE - HEAD, HEAD, 0) for name in ("fedper", "fedrep", "fedsim", "fedalt")},
    "lg_fedavg": (HEAD, WHOLE - HEAD, 0),
    "fedbabu": (WHOLE - HEAD, 0, HEAD),
    "fedrod": (WHOLE, HEAD, 0),
    # A network with 32 hidden units makes the second head of the shares of 3 classes.
    "fedrod_hyper": (WHOLE + 3 * 32 + 32 + (32 + 1) * HEAD, 3, 0),
    "fedbn": (WHOLE - AFFINE - STATISTICS, AFFINE + STATISTICS, 0),
    "silobn": (MODEL, STATISTICS, 0),
    **{name: (WHOLE, WHOLE, 0) for name in ("ditto", "pfedme", "l2gd")},
    "apfl": (WHOLE, WHOLE + 1, 0),  # and the mixing weight
    "local_only": (0, WHOLE, 0),
    "centralised": (0, 0, 0),
    "fedpac": (WHOLE + 3 * 5 + 3, 0, 0),  # and a centroid of 5 features for each of 3 classes, and their counts
    # Factors of rank 2 beside the hidden layer, and the head.
    "fedit": (FACTORS + HEAD, 0, BACKBONE),
    "ffa_lora": (2 * 5 + HEAD, 0, BACKBONE + 4 * 2),
    "fedsa_lora": (4 * 2, 2 * 5 + HEAD, BACKBONE),
    "local_lora": (0, FACTORS + HEAD, BACKBONE),
    "pfedlora": (FACTORS + 5 * 2 + 2 * 3, WHOLE, 0),  # the head is adapted too
    "fedex_lora": (FACTORS + HEAD, 0, BACKBONE - HIDDEN),
    "flora": (FACTORS + HEAD, 0, BACKBONE - HIDDEN),
    "hetlora": (FACTORS + HEAD, 0, BACKBONE),
    "fed_adapter": (5 * 2 + 2 + 2 * 5 + HEAD, 0, BACKBONE),
    "bitfit": (5 + HEAD, 0, BACKBONE - 5),
    "fedala": (WHOLE, 2 * HEAD + 1, 0),  # the last head, the shares taken over, a counter
    "fedem": (3 * WHOLE, 3, 0),  # three models, and in which proportions they are mixed
    "fedmix": (2 * WHOLE, 2 * (4 + 1), 0),  # two experts; the gate has a bias and 4 weights for each
    "pfl_moe": (WHOLE, 4 + 1, 0),
    "domain_experts": (WHOLE, WHOLE + 4 + 1, 0),
    "knn_per": (WHOLE, 0, 0),
    # A linear network makes the head of 8 numbers; with a hidden layer of 32 it is shared, and the code is not.
    "private_generator": (WHOLE - HEAD, (8 + 1) * HEAD, 8),
    "shared_generator": (WHOLE - HEAD + 8 * 32 + 32 + (32 + 1) * HEAD, 8, 0),
    "pfedla": (WHOLE, 0, 0),
    "pfedhn": (WHOLE, 0, 0),  # neither the generator nor embeddings
    "pfedmoe": (WHOLE - HEAD, WHOLE + 2 * (4 + 1), 0),
    **{name: (WHOLE, WHOLE, 0) for name in ("conditional_layers", "layers_by_client", "fedselect")},  # copies
    **{name: (WHOLE, 0, 0) for name in ("fedcac", "fedlp")},
}
SAID = {
    **dict.fromkeys(("afl", "agnostic_fedavg", "qffl", "term", "drfa"), 1),
    "ifca": 2,
    "fedfomo": 3,
    "fedpac": 3 * 5 + 1,
    "fedmix": 2,
}
"""Scalars that go up besides: losses, the number of a cluster, shares of three models, the usage of two experts, mean
features by class and their variance."""
LEAVES = 7
MASKS = {
    "conditional_layers": (LEAVES + 1, LEAVES),
    "layers_by_client": (LEAVES, LEAVES),
    "fedselect": (WHOLE, WHOLE),
    "fedcac": (WHOLE, 0),
    "fedlp": (LEAVES, 0),
}
"""Bits that travel each way beside what FORMULAS says, in whole bytes, and bytes that are kept: masks."""
MODELS_DOWN = {"ifca": 2, "fedfomo": 3, "apple": 3}
TOLD = {"apple": 3 + 1 + 1, "fedex_lora": HIDDEN, "flora": HIDDEN + 1, "hetlora": 1}
"""Scalars that come down besides: shares of three clients, the client's own number, and that of the round; the weights
that a server changes and nobody trains, the rank of a client's factors."""


@pytest.fixture(scope="module")
def federation():
    return toys.federation((4, 3, 5))


@pytest.mark.parametrize("name", list(fp.methods()))
def test_every_method_is_counted_by_its_formula(federation, name):
    algorithm = fp.method(name).make(toys.classifier(norm=True), **toys.small(name))
    found = fp.traffic(algorithm, toys.start(algorithm, 3), pool_of(federation, "train"))
    travels, kept, once = FORMULAS[name]
    bits, kept_masks = MASKS.get(name, (0, 0))
    assert found.up == 4 * (travels + SAID.get(name, 0)) + -(-bits // 8)
    assert found.down == 4 * (travels * MODELS_DOWN.get(name, 1) + TOLD.get(name, 0)) + -(-bits // 8)
    assert (found.row, found.first_down) == (4 * kept + kept_masks, 4 * once)
    assert found.metadata_up == (8 if travels else 0)
    assert set(found.upload_paths).isdisjoint(found.personal_paths)


@pytest.mark.parametrize("name", ["fedper", "scaffold", "apfl"])
def test_the_trees_that_cross_have_as_many_bytes(federation, name):
    algorithm = fp.method(name).make(toys.classifier(norm=True), batch_size=4)
    state = toys.start(algorithm, 3)
    download, upload, row = algorithm.exchange(state, federation.cohort([1]), 0)
    sent, kept, _ = FORMULAS[name]
    bytes_of = [sum(np.asarray(x).nbytes for x in tree.values()) for tree in (download, upload, row)]
    assert bytes_of == [4 * sent, 4 * sent, 4 * kept]
    assert set(upload) == set(state.shared) and set(row) == set(state.rows)


def test_the_ledger_adds_up(federation):
    algorithm = toys.every_method("fedper")  # the kernel, 4 x 3, is shared
    _, history, rows = toys.recorded(algorithm, federation, 3, cohort_size=2, evaluate_every=0)
    up, down = 4 * 12 + 8, 4 * 12
    assert [(row["megabytes_up"], row["megabytes_down"]) for row in rows] == [(2 * up / 1e6, 2 * down / 1e6)] * 3
    assert rows[-1]["total_megabytes_up"] == pytest.approx(6 * up / 1e6)
    assert rows[-1]["total_megabytes_down"] == pytest.approx(6 * down / 1e6)
    np.testing.assert_allclose(megabytes(history.traffic, history.metrics), [[2 * up / 1e6] * 3, [2 * down / 1e6] * 3])


@pytest.mark.parametrize("name", ["local_only", "centralised"])
def test_methods_without_communication_send_nothing(federation, name):
    _, history, rows = toys.recorded(toys.every_method(name), federation, 2, evaluate_every=0)
    assert not history.metrics.transmitted.any()
    assert rows[-1]["total_megabytes_up"] == rows[-1]["total_megabytes_down"] == 0


def test_l2gd_communicates_in_p_times_one_minus_p_of_its_rounds(federation):
    rounds, p = 2000, 0.4
    _, history, rows = toys.recorded(toys.every_method("l2gd", p=p, lr=0.01), federation, rounds, evaluate_every=0)
    sent = history.metrics.transmitted
    assert (sent.all(axis=1) == sent.any(axis=1)).all()
    # A round communicates if its coin and that of the round before differ in one way: 2000 p (1 - p), give or take 4
    # standard deviations (neighbouring rounds exclude each other, which makes it less).
    expected, deviation = rounds * p * (1 - p), np.sqrt(rounds * p * (1 - p) * (1 - p * (1 - p)))
    assert abs(sent.all(axis=1).sum() - expected) < 4 * deviation
    assert rows[-1]["total_megabytes_down"] == pytest.approx(sent.sum() * 4 * 15 / 1e6)


# The worked example: five layers for CIFAR-10, 307,842 parameters.


class CifarCnn(nn.Module):
    """Two convolutions of 64 channels and three dense layers."""

    @nn.compact
    def __call__(self, x):
        for name in ("conv1", "conv2"):
            x = nn.max_pool(nn.relu(nn.Conv(64, (5, 5), padding="VALID", name=name)(x)), (2, 2), (2, 2))
        x = x.reshape(x.shape[0], -1)
        for name, width in (("dense1", 120), ("dense2", 64)):
            x = nn.relu(nn.Dense(width, name=name)(x))
        return nn.Dense(10, name="head")(x)


@pytest.fixture(scope="module")
def images():
    one = {"x": np.zeros((1, 32, 32, 3), np.float32), "y": [0]}
    return fp.data.from_clients({"a": one, "b": one}, num_classes=10)


@pytest.mark.parametrize(
    ("name", "settings", "bytes_each_way", "saved"),
    [
        ("fedavg", {}, 1_231_368, 0.0),
        ("fedper", {"personal": fp.head(1)}, 1_228_768, 0.0021),  # 650 parameters stay
        ("fedbabu", {"frozen": fp.head(1)}, 1_228_768, 0.0021),
        ("lg_fedavg", {"shared": fp.head(2)}, 33_576, 0.9727),  # 8,394 parameters travel
    ],
)
def test_the_five_layers_for_cifar(images, name, settings, bytes_each_way, saved):
    task = fp.tasks.linen(CifarCnn(), images.example)
    algorithm = fp.method(name).make(task, **settings)
    state = jax.eval_shape(lambda: toys.start(algorithm, 2))
    found = fp.traffic(algorithm, state, pool_of(images, "train"))
    assert (found.up, found.down) == (bytes_each_way, bytes_each_way)
    described = fp.describe(algorithm.layout)
    assert described.shared + described.personal + described.frozen == 4 * 307_842
    assert described.shared == bytes_each_way
    assert 1 - described.uplink == pytest.approx(saved, abs=5e-5)


def test_an_algorithm_that_exchanges_nothing_is_counted_as_such(federation):
    algorithm = toys.every_method("fedavg")._replace(exchange=None)
    found = fp.traffic(algorithm, toys.start(algorithm, 3), pool_of(federation, "train"))
    assert (found.up, found.down, found.metadata_up, found.upload_paths) == (0, 0, 0, ())
