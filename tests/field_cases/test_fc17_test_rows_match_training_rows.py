"""FC-17: a client's test data does not match its training data."""

import numpy as np
import pytest

from fedjax_pers.data import dirichlet, natural, partition

CLIENTS, CLASSES = 10, 10


def table(rows, seed):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(rows, 3)).astype(np.float32), "y": rng.integers(0, CLASSES, rows)}


def counts(federation, split):
    labels = [federation.split(split).client(k)["y"] for k in range(CLIENTS)]
    return np.stack([np.bincount(one, minlength=CLASSES) for one in labels])


@pytest.mark.parametrize("seed", range(5))
def test_label_mixes_agree_and_do_not_depend_on_the_order_of_rows(seed):
    train, test = table(5000, 1), table(1000, 2)
    federation = partition(train, test, dirichlet(0.1), num_clients=CLIENTS, seed=seed)
    in_train, in_test = counts(federation, "train"), counts(federation, "test")
    large = in_test.sum(axis=1) >= 100
    assert large.any()
    mixes = [table[large] / table[large].sum(axis=1, keepdims=True) for table in (in_train, in_test)]
    assert (0.5 * np.abs(mixes[0] - mixes[1]).sum(axis=1)).max() <= 0.1
    assert in_train.sum() == 5000 and in_test.sum() == 1000

    for rows_of_train, rows_of_test in ((slice(None), slice(None, None, -1)), (slice(None, None, -1), slice(None))):
        again = partition(
            {name: values[rows_of_train] for name, values in train.items()},
            {name: values[rows_of_test] for name, values in test.items()},
            dirichlet(0.1),
            num_clients=CLIENTS,
            seed=seed,
        )
        assert np.array_equal(counts(again, "train"), in_train) and np.array_equal(counts(again, "test"), in_test)


def test_classes_that_come_first_elsewhere_in_the_test_split_change_nothing():
    train, test = table(5000, 1), table(1000, 2)
    by_label = np.argsort(-test["y"], kind="stable")
    in_order, turned = (
        partition(train, {k: v[rows] for k, v in test.items()}, dirichlet(0.1), num_clients=CLIENTS, seed=3)
        for rows in (np.arange(1000), by_label)
    )
    assert np.array_equal(counts(in_order, "test"), counts(turned, "test"))


def test_natural_ids_are_the_same_client_in_both_splits():
    writers = np.array(["w7", "w1", "w3", "w9"])
    train = {**table(400, 1), "writer": np.repeat(writers[[0, 1, 2]], [100, 200, 100])}
    test = {**table(60, 2), "writer": np.repeat(writers[[3, 2, 1]], 20)}
    federation = partition(train, test, natural("writer"))
    assert federation.client_ids == ("w1", "w3", "w7", "w9")
    assert federation.sizes("train").tolist() == [200, 100, 100, 0]
    assert federation.sizes("test").tolist() == [20, 20, 0, 20]
    for writer in ("w1", "w3"):
        k = federation.index(writer)
        for split, rows in (("train", train), ("test", test)):
            assert np.array_equal(federation.split(split).client(k)["x"], rows["x"][rows["writer"] == writer])
    assert "1 of 4 clients: in train only, no test data: 'w7'" in federation.notes
    assert "1 of 4 clients: in test only, no training data: 'w9'" in federation.notes
