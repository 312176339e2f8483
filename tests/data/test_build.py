"""from_clients and from_rows: what they build, and what they refuse."""

import jax
import numpy as np
import pytest

from fedjax_pers.data import SPLITS, from_clients, from_rows


def rows(count, features=2, first=0):
    return {
        "x": np.arange(first, first + count * features, dtype=np.float32).reshape(count, features),
        "y": np.arange(count) % 3,
    }


def test_rows_of_a_client_are_contiguous_and_in_order():
    federation = from_clients(
        {"bob": {"train": rows(2), "test": rows(1, first=50)}, "ann": {"train": rows(3, first=10)}}
    )
    assert federation.client_ids == ("ann", "bob")
    assert federation.train.offsets.tolist() == [0, 3, 5] and federation.train.offsets.dtype == np.int64
    assert federation.train.data["x"][:, 0].tolist() == [10, 12, 14, 0, 2]
    assert federation.test.offsets.tolist() == [0, 0, 1] and federation.test.data["x"].tolist() == [[50, 51]]
    assert federation.validation.num_rows == 0 and federation.validation.data["x"].shape == (0, 2)
    assert federation.num_classes == 3
    assert federation.notes == ("1 of 2 clients: in train only, no test data: 'ann'",)


def test_the_order_in_which_clients_are_given_changes_nothing(assert_same):
    clients = {k: {"train": rows(3, first=k), "test": rows(1, first=k)} for k in (3, 1, 20)}
    assert_same(from_clients(clients), from_clients(dict(reversed(clients.items()))))


def test_empty_and_single_example_clients_are_allowed():
    federation = from_clients({0: {"x": [], "y": []}, 1: rows(1), 2: {"x": np.zeros((0, 2)), "y": np.zeros(0, int)}})
    assert federation.sizes().tolist() == [0, 1, 0] and federation.largest == 1
    assert "neither training nor test data: 0, 2" in federation.notes[0]


def test_further_fields_and_dtypes():
    one = {"x": np.zeros((2, 3)), "y": np.array([0, 1], np.uint8), "age": np.array([3, 4]), "ok": [True, False]}
    federation = from_clients({"a": one})
    float_now, int_now = (jax.dtypes.canonicalize_dtype(d).name for d in ("float64", "int64"))
    assert federation.example == (("x", (3,), float_now), ("y", (), "int32"), ("age", (), int_now), ("ok", (), "bool"))


def test_the_input_is_copied_and_the_federation_read_only():
    x = np.zeros((2, 2), np.float32)
    federation = from_clients({"a": {"x": x, "y": [0, 1]}})
    x[:] = 7
    assert not federation.train.data["x"].any()
    with pytest.raises(ValueError, match="read-only"):
        federation.train.data["x"][0] = 1


def test_a_float_target_is_no_class_and_a_sequence_may_have_classes():
    assert from_clients({"a": {"x": [[0.0]], "y": [0.5]}}).num_classes is None
    sequence = {"a": {"x": [[0, 1]], "y": [[1, 2]]}}
    assert from_clients(sequence).num_classes is None
    assert from_clients(sequence, num_classes=3).num_classes == 3
    assert from_clients(sequence, class_names="abc").class_names == ("a", "b", "c")


@pytest.mark.parametrize(
    ("clients", "options", "message"),
    [
        (
            {"a": rows(2), "b": {"train": {"x": [[1.0, 2.0]]}}},
            {},
            "client 'b', split 'train'.*fields 'x', expected 'y'",
        ),
        ({"a": {"trian": rows(2)}}, {}, "client 'a', split: found 'trian', did you mean 'train'"),
        ({"a": {"train": rows(2), "tset": rows(2)}}, {}, "found 'tset', did you mean 'test'"),
        ({"a": rows(2), "b": None}, {}, "client 'b': found NoneType"),
        ({"a": rows(2), "b": {}}, {}, "client 'b': found an empty dict"),
        ({"a": {"train": 3}}, {}, "client 'a', split 'train': found int"),
        ({"a": {**rows(2), "weight": [1, 1]}}, {}, "'weight', which batches use"),
        ({"a": {**rows(2), "age": [1]}}, {}, "field 'age': found 1 rows, expected 2 as field 'x' has"),
        ({"a": {**rows(2), "age": [1, 2]}, "b": rows(2)}, {}, "client 'b'.*expected 'age' too, as at client 'a'"),
        ({"a": rows(2), "b": {**rows(2), "age": [1, 2]}}, {}, "client 'b', split 'train', field: found 'age'"),
        ({"a": {"x": [[1, 2], [3]], "y": [0, 1]}}, {}, "client 'a'.*field 'x': found rows of different shapes"),
        ({"a": {"x": np.array([{}, {}]), "y": [0, 1]}}, {}, "field 'x': found dtype object"),
        ({"a": {"x": ["one", "two"], "y": [0, 1]}}, {}, "field 'x': found dtype <U3"),
        ({"a": {"x": np.ones((1, 1), complex), "y": [0]}}, {}, "field 'x': found dtype complex128"),
        ({"a": {"x": 3.0, "y": [0]}}, {}, "field 'x': found a single number"),
        (
            {"a": {"x": [[2**40]], "y": [0]}},
            {},
            "found 1099511627776 .. 1099511627776, expected integers that fit into int32",
        ),
        (
            {"a": rows(2), "b": {"x": np.ones((1, 2), int), "y": [0]}},
            {},
            "field 'x': found dtype int.*expected float32 as at",
        ),
        (
            {"a": {"x": [[0.0]], "y": [0.0]}},
            {"num_classes": 2},
            "field 'y', row 0: found 0.0.*integers 0 .. 1, not dtype float",
        ),
        ({"a": {"x": [[0.0]], "y": [np.nan]}}, {}, "field 'y', row 0: found nan"),
        ({"a": rows(3)}, {"num_classes": 0}, "num_classes: found 0"),
        (
            {"a": rows(3)},
            {"num_classes": 3, "class_names": ["a"]},
            "class_names: found 1 names, expected num_classes = 3",
        ),
        ({"a": rows(3)}, {"class_names": ["a", "b"]}, "row 2: found 2 .*expected integers 0 .. 1"),
        ({"a": {"x": [[np.inf]], "y": [0]}}, {"allow_missing": True}, "found inf .*finite numbers or NaN"),
    ],
)
def test_refuses(clients, options, message):
    with pytest.raises(ValueError, match=message):
        from_clients(clients, **options)


def test_nan_is_kept_only_when_asked_for():
    clients = {"a": {"x": [[np.nan, 1.0]], "y": [0]}}
    with pytest.raises(ValueError, match="allow_missing=True keeps NaN"):
        from_clients(clients)
    assert np.isnan(from_clients(clients, allow_missing=True).train.data["x"][0, 0])


def test_from_rows_groups_rows_in_their_order(assert_same):
    table = {"x": [[0.0], [1.0], [2.0], [3.0]], "y": [0, 1, 1, 0]}
    other = {"x": [[9.0]], "y": [1]}
    federation = from_rows({"train": table, "test": other}, {"train": ["b", "a", "b", "a"], "test": ["c"]})
    assert federation.client_ids == ("a", "b", "c")
    assert federation.train.data["x"].ravel().tolist() == [1, 3, 0, 2]
    assert federation.sizes("test").tolist() == [0, 0, 1]
    assert "in test only, no training data: 'c'" in federation.notes[1]
    expected = from_clients(
        {
            "c": {"test": other},
            "b": {"train": {"x": [[0.0], [2.0]], "y": [0, 1]}},
            "a": {"train": {"x": [[1.0], [3.0]], "y": [1, 0]}},
        },
        name="rows",
    )
    assert_same(federation, expected)


@pytest.mark.parametrize("owners", [np.array([5, 3]), np.array([b"5", b"3"]), np.array(["5", "3"], object), [5, 3]])
def test_from_rows_takes_owners_of_many_types(owners):
    federation = from_rows({"train": {"x": [[0.0], [1.0]], "y": [0, 1]}}, {"train": owners})
    assert [str(one) for one in federation.client_ids] == ["3", "5"] and federation.train.data["x"][0] == 1


@pytest.mark.parametrize(
    ("owners", "options", "message"),
    [
        ([1], {}, r"found shape \(1,\), expected \(2,\)"),
        ([1, "a"], {}, "text .* and integers"),
        ([1.0, 2.0], {}, "type float"),
        ([1, 12], {"clients": [1, 2]}, "owners, split 'train': found 12"),
    ],
)
def test_from_rows_refuses(owners, options, message):
    with pytest.raises(ValueError, match=message):
        from_rows({"train": {"x": [[0.0], [1.0]], "y": [0, 1]}}, {"train": owners}, **options)


def test_from_rows_refuses_splits_that_do_not_agree():
    table = {"x": [[0.0]], "y": [0]}
    with pytest.raises(ValueError, match="found 'trein', did you mean 'train'"):
        from_rows({"trein": table}, {"trein": [0]})
    with pytest.raises(ValueError, match="owners: found the splits 'test', expected 'train'"):
        from_rows({"train": table}, {"test": [0]})
    wide = {"x": [[0.0, 1.0]], "y": [0]}
    with pytest.raises(
        ValueError, match=r"split 'test', field 'x': found shape \(2,\) of one example, expected \(1,\)"
    ):
        from_rows({"train": table, "test": wide}, {"train": [0], "test": [0]})


def test_all_splits_are_there():
    assert SPLITS == ("train", "validation", "test")
