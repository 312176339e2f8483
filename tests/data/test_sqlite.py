"""SQLite files of FedJAX and TensorFlow Federated, written here with sqlite3, msgpack and zlib alone."""

import sqlite3
import struct
import zlib
from contextlib import closing

import msgpack
import numpy as np
import pytest

from fedjax_pers.data import from_clients, load, sqlite, write_sqlite

CREATE = """CREATE TABLE federated_data
(client_id BLOB NOT NULL PRIMARY KEY, data BLOB NOT NULL, num_examples INTEGER NOT NULL)"""


def numbers(array):
    array = np.asarray(array)
    return msgpack.ExtType(1, msgpack.packb((array.shape, array.dtype.name, array.tobytes()), use_bin_type=True))


def texts(strings):
    return msgpack.ExtType(4, msgpack.packb(([len(strings)], strings), use_bin_type=True))


def write_fedjax(path, clients, counts=None):
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(CREATE)
        for k, (client_id, features) in enumerate(clients.items()):
            data = zlib.compress(msgpack.packb(features, use_bin_type=True))
            count = counts[k] if counts else 2
            connection.execute("INSERT INTO federated_data VALUES (?, ?, ?)", (client_id, data, count))


@pytest.fixture
def path(tmp_path):
    pixels = np.arange(8, dtype=np.float32).reshape(2, 4)
    clients = {b"f2": {"pixels": numbers(pixels), "label": numbers(np.array([3, 1]))}}
    clients[b"f1"] = {"pixels": numbers(pixels + 100), "label": numbers(np.array([0, 2]))}
    write_fedjax(tmp_path / "train.sqlite", clients)
    return tmp_path / "train.sqlite"


def test_reads_fedjax(path):
    federation = load(path, x="pixels", y="label", shape=(2, 2, 1))
    assert federation.client_ids == ("f1", "f2") and federation.num_classes == 4
    assert federation.example == (("x", (2, 2, 1), "float32"), ("y", (), "int32"))
    assert federation.train.client(1)["x"].ravel().tolist() == list(range(8))
    assert federation.train.client(0)["y"].tolist() == [0, 2] and federation.test.num_rows == 0
    both = load(path, test=path, x="pixels", y="label", validation=0.5)
    assert both.sizes("test").tolist() == [2, 2] and both.sizes("validation").tolist() == [1, 1]


def test_text_goes_through_preprocess(tmp_path):
    write_fedjax(tmp_path / "text.sqlite", {b"HAMLET": {"snippets": texts([b"to be", b"or not"])}})
    lengths = lambda features: {"x": [[len(one)] for one in features["snippets"]], "y": [0, 1]}  # noqa: E731
    assert sqlite(tmp_path / "text.sqlite", preprocess=lengths).train.data["x"].tolist() == [[5], [6]]
    with pytest.raises(ValueError, match="client 'HAMLET', feature: found 'x'. Allowed: 'snippets'"):
        sqlite(tmp_path / "text.sqlite")
    with pytest.raises(ValueError, match="client 'HAMLET', split 'train', field 'x': found dtype object"):
        sqlite(tmp_path / "text.sqlite", x="snippets", y="snippets")


def test_written_files_are_what_fedjax_reads(tmp_path):
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    federation = from_clients({12: {"x": x, "y": [0, 1, 2]}, 5: {"x": x[:1] + 50, "y": [2]}, 7: {"x": [], "y": []}})
    write_sqlite(federation, tmp_path / "out.sqlite")
    with closing(sqlite3.connect(tmp_path / "out.sqlite")) as connection:
        rows = connection.execute("SELECT client_id, data, num_examples FROM federated_data ORDER BY rowid").fetchall()
        statement = connection.execute("SELECT sql FROM sqlite_master").fetchone()[0]
    assert [(one[0], one[2]) for one in rows] == [(b"5", 1), (b"7", 0), (b"12", 3)]
    assert statement.split() == CREATE.split()
    fields = msgpack.unpackb(zlib.decompress(rows[2][1]))
    assert {name: value.code for name, value in fields.items()} == {"x": 1, "y": 1}
    shape, dtype, content = msgpack.unpackb(fields["x"].data)
    assert (shape, dtype) == ([3, 2], "float32") and content == x.tobytes()
    again = sqlite(tmp_path / "out.sqlite")
    assert again.client_ids == ("12", "5", "7") and again.train.client(0)["x"].tolist() == x.tolist()
    with pytest.raises(FileExistsError, match="out.sqlite: found a file"):
        write_sqlite(federation, tmp_path / "out.sqlite")


def varint(number):
    out = b""
    while number > 0x7F:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


def message(field, content):
    """A length-delimited field of a protocol buffer."""
    return varint(field << 3 | 2) + varint(len(content)) + content


def example(pixels, label):
    """A serialized tf.train.Example with a list of floats and one integer, byte by byte."""
    floats = message(2, message(1, b"".join(struct.pack("<f", one) for one in pixels)))
    integer = message(3, message(1, varint(label)))
    entries = [
        message(1, message(1, name) + message(2, value)) for name, value in ((b"pixels", floats), (b"label", integer))
    ]
    return message(1, b"".join(entries))


def test_reads_tensorflow_federated(tmp_path):
    with closing(sqlite3.connect(tmp_path / "tff.sqlite")) as connection, connection:
        connection.execute("CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)")
        connection.execute("CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER)")
        for split, client, pixels, label in (
            ("train", "b", [1.5, 2], 3),
            ("train", "a", [4, 5], 0),
            ("train", "b", [6, 7], 1),
            ("test", "a", [8, 9], 2),
        ):
            connection.execute("INSERT INTO examples VALUES (?, ?, ?)", (split, client, example(pixels, label)))
        for client, split, count in (("b", "train", 2), ("a", "train", 1), ("a", "test", 1)):
            connection.execute("INSERT INTO client_metadata VALUES (?, ?, ?)", (client, split, count))
    federation = load(tmp_path / "tff.sqlite", x="pixels", y="label")
    assert federation.client_ids == ("a", "b") and federation.num_classes == 4
    assert federation.train.client(1)["x"].tolist() == [[1.5, 2], [6, 7]] and federation.train.client(1)[
        "y"
    ].tolist() == [3, 1]
    assert federation.test.client(0)["x"].tolist() == [[8, 9]] and federation.sizes("test").tolist() == [1, 0]


@pytest.mark.parametrize("content", [b"", b"this is no database" * 100])
def test_another_file_is_named(tmp_path, content):
    (tmp_path / "x.sqlite").write_bytes(content)
    with pytest.raises(ValueError, match="x.sqlite: found"):
        load(tmp_path / "x.sqlite")


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="x.sqlite: no such file"):
        load(tmp_path / "x.sqlite")
    assert not (tmp_path / "x.sqlite").exists()


def test_other_tables_are_refused(tmp_path):
    with closing(sqlite3.connect(tmp_path / "x.db")) as connection, connection:
        connection.execute("CREATE TABLE other (a TEXT)")
    with pytest.raises(ValueError, match="found the tables 'other', expected 'federated_data'"):
        load(tmp_path / "x.db")


def test_a_bad_client_is_named(path, tmp_path):
    with pytest.raises(ValueError, match="client 'f2', feature: found 'pixel', did you mean 'pixels'"):
        load(path, x="pixel", y="label")
    with pytest.raises(
        ValueError, match=r"client 'f2', feature 'pixels': found \(2, 4\), expected examples that fill \(3, 3\)"
    ):
        load(path, x="pixels", y="label", shape=(3, 3))
    good = {"x": numbers(np.zeros((2, 1))), "y": numbers(np.zeros(2, int))}
    write_fedjax(tmp_path / "count.sqlite", {b"u": good}, counts=[3])
    with pytest.raises(ValueError, match="client 'u': found {'x': 2, 'y': 2} rows, expected num_examples = 3"):
        load(tmp_path / "count.sqlite")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE federated_data SET data = ? WHERE client_id = ?", (b"broken", b"f1"))
    with pytest.raises(ValueError, match="client 'f1': found no readable arrays"):
        load(path, x="pixels", y="label")
