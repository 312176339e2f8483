"""FC-20: bad data fails before any training, with a message that names the client, the field, and both sides."""

import numpy as np
import pytest

from fedjax_pers.data import from_clients


def good(rows=5, features=3):
    return {"x": np.ones((rows, features), np.float32), "y": np.arange(rows) % 10}


def bad(field, index, value):
    data = good()
    data[field] = data[field].copy()
    data[field][index] = value
    return data


@pytest.mark.parametrize(
    ("client", "where", "found", "expected"),
    [
        ({"x": np.ones((5, 3)), "y": [0, 1, 2, 3]}, "field 'y'", "found 4 rows", "expected 5"),
        (bad("y", 2, 12), "field 'y', row 2", "found 12", "expected integers 0 .. 9"),
        (bad("y", 4, -1), "field 'y', row 4", "found -1", "expected integers 0 .. 9"),
        (bad("x", (3, 1), np.nan), "field 'x', row 3", "found nan", "expected finite numbers"),
        (bad("x", (0, 0), np.inf), "field 'x', row 0", "found inf", "expected finite numbers"),
        (good(features=4), "field 'x'", "found shape (4,)", "expected (3,) as at client 'ann', split 'train'"),
    ],
)
@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_bad_arrays(client, where, found, expected, split):
    clients = {"ann": good(), "bob": {"train": good(), split: client}, "cy": good()}
    with pytest.raises(ValueError) as caught:
        from_clients(clients, num_classes=10)
    message = str(caught.value)
    for part in (f"client 'bob', split '{split}'", where, found, expected):
        assert part in message, message


def test_labels_of_minus_one_without_a_number_of_classes():
    with pytest.raises(
        ValueError, match="client 'bob', split 'train', field 'y', row 4: found -1 .*a label of 0 or more"
    ):
        from_clients({"ann": good(), "bob": bad("y", 4, -1)})


def test_an_id_that_is_not_hashable():
    with pytest.raises(
        ValueError, match=r"client id \['bob'\]: found a value of type list, expected an integer or text"
    ):
        from_clients([("ann", good()), (["bob"], good())])


@pytest.mark.parametrize("clients", [{}, []])
def test_an_empty_set_of_clients(clients):
    with pytest.raises(ValueError, match="clients: found an empty set of clients, expected at least one"):
        from_clients(clients)


def test_good_data_passes():
    assert from_clients({"ann": good(), "bob": good()}, num_classes=10).num_classes == 10
