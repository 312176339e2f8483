"""TensorFlow Datasets, prepared here as array_record without TensorFlow."""

import sys

import numpy as np
import pytest

from fedjax_pers.data import load, tfds

library = pytest.importorskip("tensorflow_datasets")
pytest.importorskip("array_record")


def example(k, split):
    return {
        "image": np.full((2, 2, 1), 51 * (k % 6), np.uint8),
        "label": k % 3,
        "speaker": f"s{k % 4}",
        "place": k % 2,
        "age": np.float32(k + (100 if split == "test" else 0)),
    }


class TinySpeakers(library.core.GeneratorBasedBuilder):
    """Twelve training examples of four speakers, three test examples of three."""

    VERSION = library.core.Version("1.0.0")

    def _info(self):
        features = {
            "image": library.features.Tensor(shape=(2, 2, 1), dtype=np.uint8),
            "label": library.features.ClassLabel(names=["no", "yes", "perhaps"]),
            "speaker": library.features.Text(),
            "place": library.features.ClassLabel(names=["north", "south"]),
            "age": library.features.Scalar(np.float32),
        }
        return library.core.DatasetInfo(
            builder=self,
            description="Speech of a few people.\nMore about it.",
            features=library.features.FeaturesDict(features),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples("train", 12), "test": self._generate_examples("test", 3)}

    def _generate_examples(self, split, count):
        for k in range(count):
            yield k, example(k, split)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    TinySpeakers(data_dir=folder, file_format="array_record").download_and_prepare()
    return folder


def test_reads_by_client(directory):
    federation = load("tfds:tiny_speakers", directory=directory, client_key="speaker")
    assert federation.client_ids == ("s0", "s1", "s2", "s3") and federation.class_names == ("no", "yes", "perhaps")
    assert federation.sizes().tolist() == [3, 3, 3, 3] and federation.sizes("test").tolist() == [1, 1, 1, 0]
    assert federation.name == "tiny_speakers" and federation.description == "Speech of a few people."
    own = federation.train.client(1)
    assert own["y"].tolist() == [1, 2, 0]  # rows 1, 5 and 9
    np.testing.assert_array_equal(own["x"][:, 0, 0, 0], np.float32([0.2, 1.0, 0.6]))
    assert "tensorflow" not in sys.modules


def test_other_clients_features_and_splits(directory):
    by_class = load("tfds:tiny_speakers", directory=directory, client_key="place", x="age", test=None)
    assert by_class.client_ids == ("north", "south") and by_class.train.client(1)["x"].tolist() == [1, 3, 5, 7, 9, 11]
    by_function = tfds(
        "tiny_speakers",
        directory=directory,
        client_key=lambda one: int(one["age"]) // 6,
        train="train[:50%]",
        test=None,
        preprocess=lambda one: {"image": one["image"].ravel(), "label": one["label"]},
    )
    assert by_function.client_ids == (0,) and by_function.train.num_rows == 6
    assert by_function.example[0] == ("x", (4,), "uint8")
    dealt = load(
        "tfds:tiny_speakers", directory=directory, partitioner="iid", num_clients=2, validation=0.5, name="mine"
    )
    assert dealt.sizes().tolist() == [3, 3] and dealt.name == "mine"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "found neither of client_key and partitioner"),
        ({"client_key": "speaker", "partitioner": "iid"}, "found both of client_key and partitioner"),
        ({"client_key": "speeker"}, "client_key: found 'speeker', did you mean 'speaker'"),
        ({"client_key": "speaker", "x": "images"}, "feature: found 'images', did you mean 'image'"),
        ({"client_key": "speaker", "test": "tests"}, "split: found 'tests', did you mean 'test'"),
        ({"client_key": "speaker", "x": "speaker"}, "field 'x': found dtype object|field 'x': found dtype |S2"),
        ({"client_kee": "speaker"}, r"option: found 'client_kee', did you mean 'client_key'"),
    ],
)
def test_refuses(directory, options, message):
    with pytest.raises(ValueError, match=message):
        load("tfds:tiny_speakers", directory=directory, **options)


def test_a_missing_set_is_named(directory, tmp_path):
    with pytest.raises(ValueError, match="data set: found 'tiny_speekers', did you mean"):
        load("tfds:tiny_speekers", directory=directory, client_key="speaker")
    with pytest.raises(
        FileNotFoundError, match=r"found nothing prepared at .*download_and_prepare\(file_format='array_record'\)"
    ):
        load("tfds:tiny_speakers", directory=tmp_path, client_key="speaker")


def test_parquet_is_refused_with_the_fix(directory, tmp_path):
    made = directory / "tiny_speakers" / "1.0.0"
    copy = tmp_path / "tiny_speakers" / "1.0.0"
    copy.mkdir(parents=True)
    for file in made.iterdir():
        content = file.read_bytes()
        (copy / file.name).write_bytes(content.replace(b'"fileFormat": "array_record"', b'"fileFormat": "parquet"'))
    with pytest.raises(ValueError, match="in the format parquet, expected array_record.*empty directory"):
        load("tfds:tiny_speakers", directory=tmp_path, client_key="speaker")
