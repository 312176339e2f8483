"""npz files of the common form, and PFLlib's folders, written here with NumPy."""

import numpy as np
import pytest

from fedjax_pers.data import load, npz

ROWS = {
    "x": np.arange(10, dtype=np.float32).reshape(5, 2),
    "y": np.array([0, 1, 1, 0, 2], np.int32),
    "client": np.array([1, 0, 1, 1, 0], np.int32),
    "client_ids": np.array(["ann", "bob"]),
    "split": np.array([0, 0, 0, 1, 1], np.uint8),
    "class_names": np.array(["a", "b", "c"]),
}


@pytest.fixture
def path(tmp_path):
    np.savez(tmp_path / "set.npz", **ROWS)
    return tmp_path / "set.npz"


def test_reads_a_file(path):
    federation = load(path)
    assert (
        federation.name == "set"
        and federation.client_ids == ("ann", "bob")
        and federation.class_names == ("a", "b", "c")
    )
    assert federation.train.client(1)["x"].tolist() == [[0, 1], [4, 5]] and federation.train.client(1)[
        "y"
    ].tolist() == [0, 1]
    assert federation.test.client(0)["x"].tolist() == [[8, 9]] and federation.test.client(1)["x"].tolist() == [[6, 7]]


def test_options(path, tmp_path):
    federation = load(path, validation=0.5, seed=1, name="mine", licence="none")
    assert federation.validation.num_rows == 1 and federation.name == "mine" and federation.licence == "none"
    np.savez(tmp_path / "more.npz", **ROWS, age=np.arange(5, dtype=np.float32))
    assert npz(tmp_path / "more.npz", fields=("x", "y", "age")).train.client(0)["age"].tolist() == [1]
    np.savez(tmp_path / "images.npz", **{**ROWS, "x": np.full((5, 2, 2), 51, np.uint8)})
    assert npz(tmp_path / "images.npz").train.data["x"][0].tolist() == [[np.float32(0.2)] * 2] * 2
    np.savez(tmp_path / "train.npz", **{key: value for key, value in ROWS.items() if key != "split"})
    assert npz(tmp_path / "train.npz").train.num_rows == 5


@pytest.mark.parametrize("kept", [0.3, 0.9])
def test_a_truncated_file_is_named(path, kept):
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(ValueError, match="set.npz: found no readable npz file"):
        load(path)


@pytest.mark.parametrize("content", [b"", b"not an archive", b"PK\x03\x04rubbish"])
def test_another_file_is_named(path, content):
    path.write_bytes(content)
    with pytest.raises(ValueError, match="set.npz: found no readable npz file"):
        load(path)


def test_damage_inside_is_named(path):
    content = bytearray(path.read_bytes())
    content[content.index(b"x.npy") + 150] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(ValueError, match="set.npz: found no readable npz file"):
        load(path)


def test_objects_are_never_unpickled(path):
    np.savez(path, **{**ROWS, "x": np.array([{}] * 5, object)})
    with pytest.raises(ValueError, match="set.npz: found no readable npz file of plain arrays"):
        load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": None}, "found the arrays .* expected 'y' among them"),
        ({"y": np.zeros(4, int)}, "array 'y': found 4 rows, expected 5"),
        ({"split": np.zeros(3, int)}, "array 'split': found 3 rows, expected 5"),
        ({"client": np.array([0, 0, 0, 0, 2])}, r"array 'client': found int64 0 .. 2, expected integers 0 .. 1"),
        ({"client": np.array([0, 0, 0, 0, -1])}, "array 'client': found int64 -1"),
        ({"client": np.zeros(5)}, "array 'client': found float64"),
        ({"split": np.array([0, 1, 2, 0, 0])}, r"array 'split': found 0, 1, 2, expected 0 \(train\) and 1"),
        ({"y": np.array([0, 1, 3, 0, 0])}, "client 'bob', split 'train', field 'y', row 1: found 3"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(path, change, message):
    np.savez(path, **{key: value for key, value in {**ROWS, **change}.items() if value is not None})
    with pytest.raises(ValueError, match=message):
        load(path)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.npz: no such file"):
        load(tmp_path / "none.npz")


def write_pfllib(folder, split, client, content):
    (folder / split).mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / split / f"{client}.npz", data=content)


def test_reads_a_folder_of_pfllib(tmp_path):
    for client in (10, 9):
        x = np.arange(36, dtype=np.float32).reshape(2, 3, 2, 3) + client
        write_pfllib(tmp_path, "train", client, {"x": x, "y": np.array([0, 1])})
    write_pfllib(tmp_path, "test", 9, {"x": np.zeros((1, 3, 2, 3), np.float32), "y": [np.int64(1)]})
    federation = load(tmp_path)
    assert federation.client_ids == (9, 10) and federation.example[0] == ("x", (2, 3, 3), "float32")
    assert federation.train.client(0)["x"][0, 0, 0].tolist() == [9, 15, 21]
    assert federation.train.client(0)["x"][0, 1, 0].tolist() == [12, 18, 24]
    assert federation.sizes("test").tolist() == [1, 0] and "no test data: 10" in federation.notes[0]
    assert load(tmp_path, channels_first=False).example[0] == ("x", (3, 2, 3), "float32")


class Harmful:
    def __reduce__(self):
        return (open, ("harm.txt", "w"))


def test_a_folder_cannot_run_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_pfllib(tmp_path / "set", "train", 0, {"x": Harmful(), "y": [0]})
    with pytest.raises(ValueError, match=r"0.npz: found no readable dict.*io.open is not allowed"):
        load(tmp_path / "set")
    assert not (tmp_path / "harm.txt").exists()


@pytest.mark.parametrize("content", [{"x": [1]}, [1, 2], np.zeros(3)])
def test_a_folder_without_the_dict_is_refused(tmp_path, content):
    write_pfllib(tmp_path, "train", 0, content)
    with pytest.raises(ValueError, match="0.npz: found no readable dict 'data' with 'x' and 'y'"):
        load(tmp_path)


def test_a_folder_with_other_names_is_refused(tmp_path):
    write_pfllib(tmp_path, "train", "all", {"x": np.zeros((1, 1)), "y": [0]})
    with pytest.raises(ValueError, match="found the name 'all', expected the number of a client"):
        load(tmp_path)
