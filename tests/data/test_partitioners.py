"""Partitioners: counts by hand, and what must hold for every table."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_pers.data import dirichlet, iid, lognormal, natural, partition, quantity, shards, sized
from fedjax_pers.data.partitioners import parse

EVERY = (iid(), dirichlet(0.5), dirichlet(0.3, balanced=True), shards(2), quantity(0.7), lognormal(0.8))


def table(labels, first=0):
    labels = np.asarray(labels)
    return {"x": first + np.arange(len(labels), dtype=np.float32)[:, None], "y": labels}


def rows_of(federation, split):
    """The set of rows of each client, by their (unique) feature."""
    return [sorted(federation.split(split).client(k)["x"][:, 0].tolist()) for k in range(federation.num_clients)]


@st.composite
def cases(draw):
    classes = draw(st.integers(2, 5))
    counts = draw(st.lists(st.integers(8, 25), min_size=classes, max_size=classes))
    labels = np.random.default_rng(draw(st.integers(0, 99))).permutation(np.repeat(np.arange(classes), counts))
    tests = np.random.default_rng(draw(st.integers(0, 99))).integers(0, classes, draw(st.integers(0, 30)))
    clients = draw(st.integers(-(-classes // 2), 6))
    return table(labels), table(tests, 1000), clients, draw(st.integers(0, 2**40))


@pytest.mark.parametrize("partitioner", EVERY, ids=str)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(cases())
def test_every_row_is_dealt_once_whatever_the_order_of_the_rows(partitioner, case):
    train, test, clients, seed = case
    options = {"num_clients": clients, "seed": seed, "num_classes": 5}
    federation = partition(train, test, partitioner, **options)
    assert sorted(sum(rows_of(federation, "train"), [])) == train["x"][:, 0].tolist()
    assert sorted(sum(rows_of(federation, "test"), [])) == test["x"][:, 0].tolist()
    again = partition(train, {key: values[::-1] for key, values in test.items()}, partitioner, **options)
    assert rows_of(again, "train") == rows_of(federation, "train")
    assert rows_of(again, "test") == rows_of(federation, "test")


@pytest.mark.parametrize("partitioner", EVERY, ids=str)
def test_the_same_seed_gives_the_same_deal_and_another_one_another(partitioner, assert_same):
    train = table(np.arange(200) % 5)
    first, second, other = (partition(train, None, partitioner, num_clients=6, seed=seed) for seed in (1, 1, 2))
    assert_same(first, second)
    assert rows_of(first, "train") != rows_of(other, "train")


def test_equal_rows_are_spread_like_others():
    labels = np.arange(400) % 2
    federation = partition({"x": np.zeros((400, 1)), "y": labels}, None, iid(), num_clients=4)
    ones = [federation.train.client(k)["y"].sum() for k in range(4)]
    assert federation.sizes().tolist() == [100] * 4 and sum(ones) == 200 and min(ones) > 30 and max(ones) < 70


def test_iid_clients_are_of_equal_size():
    assert sorted(partition(table([0] * 11), None, num_clients=3).sizes().tolist()) == [3, 4, 4]


def test_sized_by_hand():
    federation = partition(table([0] * 20), table([0] * 8, 100), sized([1, 2, 5, 0]), num_clients=4)
    assert federation.sizes("train").tolist() == [3, 5, 12, 0]  # cut at 2.5, 7.5 and 20, halves upwards: 3, 8, 20
    assert federation.sizes("test").tolist() == [1, 2, 5, 0]


def test_dirichlet_gives_the_same_mix_in_both_splits_and_small_alpha_means_few_classes():
    labels = np.arange(10_000) % 10
    skewed = partition(table(labels), table(labels, 20_000), dirichlet(0.05), num_clients=10)
    even = partition(table(labels), None, dirichlet(1e5), num_clients=10)
    counts = [np.bincount(skewed.train.client(k)["y"], minlength=10) for k in range(10)]
    tests = [np.bincount(skewed.test.client(k)["y"], minlength=10) for k in range(10)]
    assert np.array_equal(counts, tests)
    assert np.mean([(c.max() / max(c.sum(), 1)) for c in counts]) > 0.5
    shares = [np.bincount(even.train.client(k)["y"], minlength=10) / 100 for k in range(10)]
    assert np.abs(np.asarray(shares) - 1).max() < 0.05


def test_dirichlet_min_size_is_kept_or_refused():
    labels = np.arange(500) % 10
    small = partition(table(labels), None, dirichlet(0.1), num_clients=10)
    redrawn = partition(table(labels), None, dirichlet(0.1, min_size=20), num_clients=10)
    assert small.sizes().min() < 20 <= redrawn.sizes().min()
    with pytest.raises(ValueError, match="min_size: found .* expected 51"):
        partition(table(labels), None, dirichlet(0.1, min_size=51), num_clients=10)


def test_balanced_dirichlet_has_no_giant():
    labels = np.arange(1000) % 10
    plain, balanced = (
        partition(table(labels), None, dirichlet(0.1, balanced=flag), num_clients=10, seed=5).sizes().max()
        for flag in (False, True)
    )
    assert balanced <= 200 < plain  # at most its equal part of 100 and then one class of 100 on top


@pytest.mark.parametrize(("clients", "classes"), [(5, 2), (7, 3), (3, 4), (20, 2), (10, 1)])
def test_shards_gives_exactly_so_many_classes(clients, classes):
    train, test = table(np.arange(600) % 10), table(np.arange(300) % 10, 1000)
    federation = partition(train, test, shards(classes), num_clients=clients)
    takers = np.zeros(10, int)
    for k in range(clients):
        found, tested = (set(federation.split(s).client(k)["y"].tolist()) for s in ("train", "test"))
        assert len(found) == classes and tested == found
        takers[list(found)] += 1
    assert takers.max() - takers.min() <= 1


@pytest.mark.parametrize(
    ("labels", "clients", "classes", "message"),
    [
        (np.arange(20) % 10, 4, 2, "4 clients with 2 cannot hold 10 classes"),
        (np.arange(20) % 4, 4, 5, "found 5, but there are 4 classes"),
        ([0, 0, 0, 1], 4, 1, "class 1: found 1 training rows, expected 2, one for each client"),
    ],
)
def test_shards_refuses_what_cannot_be(labels, clients, classes, message):
    with pytest.raises(ValueError, match=message):
        partition(table(labels), None, shards(classes), num_clients=clients)


def test_quantity_skews_sizes_not_labels():
    labels = np.arange(3000) % 3
    federation = partition(table(labels), None, quantity(0.5), num_clients=5, seed=1)
    assert federation.sizes().max() > 3 * federation.sizes().min()
    large = federation.train.client(int(federation.sizes().argmax()))["y"]
    assert np.abs(np.bincount(large) / len(large) - 1 / 3).max() < 0.06


def test_lognormal_without_spread_is_equal():
    assert partition(table([0] * 40), None, lognormal(0.0), num_clients=4).sizes().tolist() == [10] * 4


def test_natural_takes_the_column_out_and_keeps_clients_together():
    train = {**table([0, 1, 0]), "writer": ["w2", "w1", "w2"]}
    test = {**table([1, 1], 10), "writer": ["w1", "w3"]}
    federation = partition(train, test, natural("writer"))
    assert federation.client_ids == ("w1", "w2", "w3") and set(federation.train.data) == {"x", "y"}
    assert rows_of(federation, "train") == [[1.0], [0.0, 2.0], []] and rows_of(federation, "test") == [
        [10.0],
        [],
        [11.0],
    ]
    assert any("in train only" in note and "'w2'" in note for note in federation.notes)
    assert any("in test only" in note and "'w3'" in note for note in federation.notes)


@pytest.mark.parametrize(
    ("partitioner", "clients", "message"),
    [
        (iid(), None, "num_clients: found None"),
        (iid(), 0, "num_clients: found 0"),
        (natural("writer"), None, "column: found 'writer'"),
        (natural("y"), 3, "num_clients: found 3, but natural"),
        (sized([1, 2]), 3, "shares: found 2, expected num_clients = 3"),
        ("dirichlet(alpha=0.1, min_siz=3)", 3, "unexpected keyword argument 'min_siz'.*alpha, min_size, balanced"),
        ("dirchlet(0.1)", 3, "partitioner: found 'dirchlet', did you mean 'dirichlet'"),
        ("dirichlet(0.1", 3, r"expected a call such as 'dirichlet\(alpha=0.1\)'"),
        ("__import__('os')", 3, "partitioner: found '__import__'"),
        ("iid(open('x'))", 3, "expected a call such as"),
    ],
)
def test_refuses(partitioner, clients, message):
    with pytest.raises(ValueError, match=message):
        partition(table([0, 1, 2]), None, partitioner, num_clients=clients)


@pytest.mark.parametrize("factory", [dirichlet, quantity])
@pytest.mark.parametrize("alpha", [0, -1, float("nan"), float("inf"), "much"])
def test_refuses_a_concentration(factory, alpha):
    with pytest.raises(ValueError, match="alpha: found"):
        factory(alpha)


@pytest.mark.parametrize("shares", [[-1, 2], [0, 0], [float("nan")], [[1, 2]]])
def test_refuses_shares(shares):
    with pytest.raises(ValueError, match="shares: found"):
        sized(shares)


@pytest.mark.parametrize("y", [np.zeros(4, np.float32), np.zeros((4, 2), int)])
@pytest.mark.parametrize("partitioner", [dirichlet(), shards()])
def test_label_skew_needs_labels(partitioner, y):
    with pytest.raises(ValueError, match="field 'y': found .*expected one integer label"):
        partition({"x": np.zeros((4, 1)), "y": y}, None, partitioner, num_clients=2)


@pytest.mark.parametrize(
    "partitioner", [*EVERY, natural("user"), sized(range(1, 4)), dirichlet(np.float64(0.25))], ids=str
)
def test_the_text_of_a_partitioner_gives_it_back(partitioner):
    assert parse(partitioner.text) == partitioner and str(partitioner) == partitioner.text


def test_a_partitioner_prints_its_settings():
    assert str(dirichlet(0.1, min_size=3)) == "dirichlet(alpha=0.1, min_size=3, balanced=False)"
    assert parse("iid") == iid()
