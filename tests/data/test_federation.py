"""The federation: cohorts, pools, unseen clients, validation splits."""

import jax
import numpy as np
import pytest

from fedjax_pers.data import Federation, Split, from_clients


def client(size, tests=0, first=0.0):
    def table(count, start):
        return {"x": start + np.arange(count, dtype=np.float32)[:, None], "y": np.arange(count) % 2}

    return {"train": table(size, first), "test": table(tests, first + 500)}


@pytest.fixture
def five():
    """The sizes of a hard case: 0, 1, 3, 32 and 33 training examples, 0, 1, 1, 8 and 8 test examples."""
    sizes = zip((0, 1, 3, 32, 33), (0, 1, 1, 8, 8), strict=True)
    return from_clients({f"c{k}": client(n, t, 1000.0 * k) for k, (n, t) in enumerate(sizes)}, num_classes=2)


def test_a_cohort_points_into_the_pool(five):
    cohort = five.cohort([3, 0, 2])
    assert cohort.ids.tolist() == [3, 0, 2] and cohort.valid.tolist() == [True] * 3
    assert cohort.start.tolist() == [4, 0, 1] and cohort.size.tolist() == [32, 0, 3]
    assert cohort.tags.tolist() == five.tags[[3, 0, 2]].tolist()
    assert [str(one.dtype) for one in cohort[:5]] == ["int32", "uint32", "int32", "int32", "bool"]
    start, size = int(cohort.start[2]), int(cohort.size[2])
    assert cohort.data["x"][start : start + size, 0].tolist() == [2000, 2001, 2002]
    test = five.cohort([4], "test")
    assert test.data["x"][int(test.start[0]), 0] == 4500 and test.size.tolist() == [8]


def test_every_cohort_of_a_split_has_the_same_pool(five):
    assert five.cohort([1]).data["x"] is five.cohort([2, 3]).data["x"] is five.pool()["x"]
    assert five.cohort().ids.tolist() == [0, 1, 2, 3, 4]
    assert five.cohort(np.array([1, 2])).ids.tolist() == five.cohort(jax.numpy.array([1, 2])).ids.tolist() == [1, 2]


def test_the_pool_of_an_empty_split_can_be_indexed(five):
    cohort = five.cohort([1], "validation")
    assert cohort.size.tolist() == [0] and cohort.data["x"].shape == (1, 1) and cohort.data["y"].tolist() == [0]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([5], r"found \[5\], allowed are 0 .. 4"),
        ([-1], r"found \[-1\], allowed are 0 .. 4"),
        ([1, 2, 1], r"found \[1\] more than once"),
        ([], "found none"),
        ([0.0], "expected a list of integers"),
        (["c1"], r"federation.index\(client_id\)"),
        ([True, False], "expected a list of integers"),
        ([[1]], "expected a list of integers"),
    ],
)
def test_a_cohort_refuses_ids(five, ids, message):
    with pytest.raises(ValueError, match=message):
        five.cohort(ids)


def test_unknown_names_give_the_nearest(five):
    with pytest.raises(ValueError, match="split: found 'tests', did you mean 'test'"):
        five.cohort([1], "tests")
    with pytest.raises(ValueError, match="client: found 'c_1', did you mean 'c1'"):
        five.index("c_1")
    with pytest.raises(ValueError, match="client: found 'c9'"):
        five.select(["c1", "c9"])


def test_sizes_and_text(five):
    assert five.sizes("test").tolist() == [0, 1, 1, 8, 8] and five.largest == 33 and five.num_clients == 5
    assert repr(five) == "Federation('clients', 5 clients, train 69, validation 0, test 18)"
    assert five.example == (("x", (1,), "float32"), ("y", (), "int32"))


def test_select_keeps_tags_and_rows(five):
    some = five.select(["c4", "c2"])
    assert some.client_ids == ("c2", "c4") and some.tags.tolist() == five.tags[[2, 4]].tolist()
    assert some.train.data["x"][:4, 0].tolist() == [2000, 2001, 2002, 4000] and some.sizes().tolist() == [3, 33]
    assert some.sizes("test").tolist() == [1, 8]
    with pytest.raises(ValueError, match="found none"):
        five.select([])


def test_unseen_clients_leave_training_and_come_after_it(five):
    federation = five.with_unseen(["c3", "c1"])
    assert federation.client_ids == ("c0", "c2", "c4") and federation.unseen.client_ids == ("c1", "c3")
    assert federation.train.num_rows == 36 and federation.unseen.sizes().tolist() == [1, 32]
    cohort = federation.unseen.cohort([1], "test")
    assert cohort.ids.tolist() == [4] and cohort.valid.tolist() == [True] and cohort.tags[0] == five.tags[3]
    assert cohort.data["x"][int(cohort.start[0]), 0] == 3500
    assert federation.select(["c0", "c2"]).unseen.first_id == 2
    assert "2 unseen clients" in repr(federation) and federation.unseen.name == "clients/unseen"


def test_a_share_of_unseen_clients_is_drawn_by_tag():
    ids = [f"c{k}" for k in range(40)]
    federation = from_clients({k: client(2) for k in ids})
    moved = set(federation.with_unseen(0.25, seed=1).unseen.client_ids)
    assert len(moved) == 10 and moved != set(federation.with_unseen(0.25, seed=2).unseen.client_ids)
    fewer = from_clients({k: client(2) for k in ids if k != "c0"}).with_unseen(10 / 39, seed=1)
    assert len(moved & set(fewer.unseen.client_ids)) >= 9


@pytest.mark.parametrize("clients", [0.0, 1.0, -0.1, 1.5, [], ["c0", "c1", "c2", "c3", "c4"], "c1", ["nobody"]])
def test_refuses_unseen_clients(five, clients):
    with pytest.raises(ValueError, match="found"):
        five.with_unseen(clients)


def test_unseen_twice_is_refused(five):
    with pytest.raises(ValueError, match="found 1 unseen clients already"):
        five.with_unseen(["c1"]).with_unseen(["c2"])


def test_validation_rows_come_from_the_clients_own_training_rows(five):
    federation = five.with_validation(0.2)
    assert federation.sizes("validation").tolist() == [0, 0, 1, 6, 7]
    assert federation.sizes("train").tolist() == [0, 1, 2, 26, 26] and federation.sizes("test").tolist() == [
        0,
        1,
        1,
        8,
        8,
    ]
    for index in range(5):
        kept, moved = (federation.split(s).client(index)["x"][:, 0].tolist() for s in ("train", "validation"))
        assert kept == sorted(kept) and moved == sorted(moved)
        assert sorted(kept + moved) == five.train.client(index)["x"][:, 0].tolist()


def test_validation_rows_of_a_client_do_not_depend_on_the_others(five, assert_same):
    alone = five.select(["c3"]).with_validation(0.5, seed=3)
    assert_same(alone, five.with_validation(0.5, seed=3).select(["c3"]))
    twins = from_clients({k: client(30) for k in "ab"}).with_validation(0.5).validation
    assert twins.client(0)["x"].tolist() != twins.client(1)["x"].tolist()
    other = five.with_validation(0.5, seed=4).select(["c3"])
    assert other.validation.data["x"].tolist() != alone.validation.data["x"].tolist()


def test_a_client_keeps_a_training_row(five):
    assert five.with_validation(0.99).sizes("train").tolist() == [0, 1, 1, 1, 1]


def test_unseen_clients_get_validation_rows_too(five, assert_same):
    assert_same(five.with_unseen(["c3"]).with_validation(0.2), five.with_validation(0.2).with_unseen(["c3"]))


@pytest.mark.parametrize("share", [0, 1, -0.5, 20])
def test_refuses_a_validation_share(five, share):
    with pytest.raises(ValueError, match="validation: found the share"):
        five.with_validation(share)


def test_validation_twice_is_refused(five):
    with pytest.raises(ValueError, match="found 14 validation rows already"):
        five.with_validation(0.2).with_validation(0.2)


def test_a_federation_checks_its_parts(five):
    with pytest.raises(ValueError, match="offsets"):
        Split({"x": np.zeros(3)}, np.array([0, 2, 1, 3]))
    with pytest.raises(ValueError, match="found {'x': 3} rows, expected 2"):
        Split({"x": np.zeros(3)}, np.array([0, 2]))
    parts = {"train": five.train, "validation": five.validation, "test": five.test}
    with pytest.raises(ValueError, match="train: found 5 clients, expected 1"):
        Federation("f", ("a",), np.zeros(1, np.uint32), **parts)
    with pytest.raises(ValueError, match="tags"):
        Federation("f", five.client_ids, np.zeros(5, np.uint32), **parts)
