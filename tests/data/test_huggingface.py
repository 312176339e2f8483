"""Tables with columns, as dicts, as data frames' cousins, and written by the datasets library."""

import numpy as np
import pytest

from fedjax_pers.data import huggingface, load

TRAIN = {"image": [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]], "label": [0, 1, 1], "user": ["b", "a", "b"]}
TEST = {"image": [[6.0, 7.0]], "label": [1], "user": ["a"]}


def test_reads_dicts_of_lists():
    federation = huggingface({"train": TRAIN, "test": TEST}, client_key="user")
    assert federation.client_ids == ("a", "b") and federation.train.client(1)["x"].tolist() == [[0, 1], [4, 5]]
    assert federation.test.client(0)["x"].tolist() == [[6, 7]] and federation.sizes("test").tolist() == [1, 0]
    dealt = huggingface({"train": TRAIN}, partitioner="iid", num_clients=3, test=None, class_names=["no", "yes"])
    assert dealt.sizes().tolist() == [1, 1, 1] and dealt.class_names == ("no", "yes")


def test_reads_what_the_library_wrote(tmp_path):
    datasets = pytest.importorskip("datasets")
    images = [np.full((2, 2), value, np.uint8) for value in (0, 51, 255)]
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["no", "yes"]), "user": datasets.Value("string")}
    )
    train = datasets.Dataset.from_dict({**TRAIN, "image": images}, features=features)
    datasets.DatasetDict({"train": train}).save_to_disk(str(tmp_path / "set"))
    federation = load(tmp_path / "set", client_key="user", test=None)
    assert federation.class_names == ("no", "yes") and federation.example[0] == ("x", (2, 2), "float32")
    np.testing.assert_array_equal(federation.train.client(1)["x"][:, 0, 0], np.float32([0, 1]))
    assert federation.train.client(0)["y"].tolist() == [1]
    in_memory = huggingface({"train": train}, client_key="user", test=None)
    assert np.array_equal(in_memory.train.data["x"], federation.train.data["x"])


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (
            {"train": TRAIN},
            {"client_key": "usr", "test": None},
            "split 'train', column: found 'usr', did you mean 'user'",
        ),
        ({"train": TRAIN}, {"client_key": "user"}, "split: found 'test'. Allowed: 'train'"),
        ({"train": TRAIN}, {}, "huggingface: found neither of client_key and partitioner"),
        ([1, 2], {"client_key": "user"}, "source: found list, expected tables by split"),
    ],
)
def test_refuses(source, options, message):
    with pytest.raises(ValueError, match=message):
        huggingface(source, **options)


def test_no_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        huggingface(tmp_path / "none", client_key="user")
