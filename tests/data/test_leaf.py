"""LEAF's JSON, written here by hand."""

import json

import pytest

from fedjax_pers.data import leaf, load


def write(folder, split, name, users):
    (folder / split).mkdir(parents=True, exist_ok=True)
    content = {"users": list(users), "num_samples": [len(data["y"]) for data in users.values()], "user_data": users}
    (folder / split / name).write_text(json.dumps(content))


def test_reads_users_of_several_files(tmp_path):
    write(tmp_path, "train", "b.json", {"u2": {"x": [[0.0, 1.0], [2.0, 3.0]], "y": [1, 0]}})
    write(tmp_path, "train", "a.json", {"u3": {"x": [[4.0, 5.0]], "y": [1]}, "u1": {"x": [], "y": []}})
    write(tmp_path, "test", "c.json", {"u2": {"x": [[6.0, 7.0]], "y": [1]}, "u9": {"x": [[8.0, 9.0]], "y": [0]}})
    federation = load(tmp_path)
    assert federation.client_ids == ("u1", "u2", "u3", "u9") and federation.sizes().tolist() == [0, 2, 1, 0]
    assert federation.train.client(1)["x"].tolist() == [[0, 1], [2, 3]] and federation.train.client(1)[
        "y"
    ].tolist() == [1, 0]
    assert federation.test.client(3)["x"].tolist() == [[8, 9]]
    assert any("in test only" in note and "'u9'" in note for note in federation.notes)
    assert leaf(tmp_path, shape=(1, 2)).train.client(2)["x"].tolist() == [[[4, 5]]]
    assert leaf(tmp_path, validation=0.5).sizes("validation").tolist() == [0, 1, 0, 0]


def test_text_becomes_places_in_the_alphabet(tmp_path):
    write(tmp_path, "train", "a.json", {"ROMEO": {"x": ["abc", "bcd"], "y": ["d", "a"]}, "NOBODY": {"x": [], "y": []}})
    write(tmp_path, "test", "a.json", {"ROMEO": {"x": ["z a"], "y": ["b"]}})
    federation = leaf(tmp_path)
    assert federation.class_names == (" ", "a", "b", "c", "d", "z") and federation.num_classes == 6
    assert federation.train.client(1)["x"].tolist() == [[1, 2, 3], [2, 3, 4]] and federation.train.client(1)[
        "y"
    ].tolist() == [4, 1]
    assert federation.test.client(1)["x"].tolist() == [[5, 0, 1]] and federation.train.data["x"].dtype == "int32"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "a.json: found no readable JSON"),
        ('{"users": []}', "a.json: found the keys 'users', expected 'num_samples'"),
        ('{"users": ["u"], "num_samples": [1], "user_data": {}}', "user 'u' in 'users', but not in 'user_data'"),
        (
            '{"users": ["u"], "num_samples": [2], "user_data": {"u": {"x": [[1]], "y": [1]}}}',
            "found 1 rows, expected 2",
        ),
        ('{"users": ["u"], "num_samples": [], "user_data": {}}', "found 1 users and 0 numbers of samples"),
        ('{"users": ["u"], "num_samples": [1], "user_data": {"u": {"y": [1]}}}', "user 'u': found the keys 'y'"),
        ("[1]", "a.json: found list, expected a dict"),
    ],
)
def test_a_bad_file_is_named(tmp_path, content, message):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_refuses(tmp_path):
    with pytest.raises(FileNotFoundError, match="found no users"):
        leaf(tmp_path)
    for name in ("a.json", "b.json"):
        write(tmp_path, "train", name, {"u": {"x": [[1.0]], "y": [1]}})
    with pytest.raises(ValueError, match="b.json: found user 'u', who is in another file of train too"):
        leaf(tmp_path)
    write(tmp_path, "train", "b.json", {"v": {"x": [[1.0]], "y": [1]}})
    with pytest.raises(
        ValueError, match=r"client 'u', field 'x': found \(1, 1\), expected examples that fill \(2, 2\)"
    ):
        leaf(tmp_path, shape=(2, 2))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"x": ["abc", "ab"], "y": ["a", "b"]}, "client 'u', field 'x': found texts of length"),
        ({"x": ["abc"], "y": ["ab"]}, "client 'u', field 'y': found 'ab', expected one character"),
        ({"x": ["abc", 3], "y": ["a", "b"]}, "client 'u', field 'x': found texts of length"),
    ],
)
def test_uneven_text_is_refused(tmp_path, data, message):
    write(tmp_path, "train", "a.json", {"u": data})
    with pytest.raises(ValueError, match=message):
        leaf(tmp_path)
