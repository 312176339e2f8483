"""The sets that come with the package, against their files read with NumPy alone."""

from importlib import resources

import numpy as np
import pytest
from sklearn.datasets import load_digits

from fedjax_pers.data import digits, digits_domains, from_clients, names, shakespeare_roles, vowel_speakers

BUNDLE = resources.files("fedjax_pers.data") / "bundle"


def test_every_bundled_file_has_its_licence_beside_it():
    files = sorted(one.name for one in BUNDLE.iterdir())
    assert files == sorted(f"{name}.{end}" for name in names() if name != "digits" for end in ("README.md", "npz"))


def test_vowel_speakers():
    content = np.load(BUNDLE / "vowel_speakers.npz")
    federation = vowel_speakers(validation=0.0)
    assert federation.num_clients == 15 and federation.num_classes == 11 and federation.class_names[0] == "hid"
    assert federation.sizes().tolist() == [44] * 15 and federation.sizes("test").tolist() == [22] * 15
    mine = (content["client"] == 4) & (content["split"] == 1)
    assert federation.client_ids[4] == "speaker_04"
    assert np.array_equal(federation.test.client(4)["x"], content["x"][mine])
    assert np.array_equal(federation.test.client(4)["y"], content["y"][mine])
    with_validation = vowel_speakers()
    assert with_validation.sizes("validation").tolist() == [9] * 15
    assert "CC BY 4.0" in federation.licence and "Deterding" in federation.licence
    seen = [
        str(name)
        for k, name in enumerate(content["client_ids"])
        if not content["original_test_speaker"][content["client"] == k].any()
    ]
    assert seen == [f"speaker_{k:02}" for k in range(8)]


def test_digits_domains():
    federation = digits_domains()
    assert federation.client_ids == ("mnist", "optdigits", "pendigits")
    assert federation.example == (("x", (16, 16, 1), "float32"), ("y", (), "int32"))
    rows = [sum(federation.split(s).sizes[k] for s in ("train", "validation", "test")) for k in range(3)]
    assert rows == [2000, 1797, 2000]
    assert federation.train.data["x"].min() == 0 and federation.train.data["x"].max() == 1
    means = [federation.train.client(k)["x"].mean() * 255 for k in range(3)]
    np.testing.assert_allclose(means, [34, 78, 43], atol=2)


def test_digits():
    federation = digits()
    images, labels = load_digits(return_X_y=True)
    assert federation.num_clients == 20 and federation.example[0] == ("x", (8, 8, 1), "float32")
    assert sum(federation.split(s).num_rows for s in ("train", "validation", "test")) == 1797
    for k in range(20):
        assert len(set(federation.train.client(k)["y"].tolist())) == 2
    whole = np.concatenate([federation.split(s).data["x"] for s in ("train", "validation", "test")]) * 16
    assert np.array_equal(np.sort(whole.reshape(-1, 64).sum(axis=1)), np.sort(images.sum(axis=1)))
    zeros = images[labels == 0]
    dealt = federation.test.data["x"][federation.test.data["y"] == 0].reshape(-1, 64) * 16
    assert sorted(map(tuple, dealt)) == sorted(map(tuple, zeros[-44:]))  # 178 zeros: the last quarter is 44
    assert digits(partitioner="dirichlet(alpha=1.0)", num_clients=3).num_clients == 3
    assert "shards(classes_per_client=2)" in federation.description


def test_shakespeare_roles():
    content = np.load(BUNDLE / "shakespeare_roles.npz")
    federation = shakespeare_roles(max_roles=3)
    text = content["text"].tobytes().decode("ascii")
    letters = federation.class_names
    start, test, end = content["offsets"][1], content["test_start"][1], content["offsets"][2]
    train, tail, held = (federation.split(s).client(1) for s in ("train", "validation", "test"))
    spell = lambda rows: "".join(letters[place] for place in rows.ravel())  # noqa: E731
    windows = (test - start - 1) // 80
    count = windows - round(0.2 * windows)
    assert len(train["x"]) == count and len(tail["x"]) == windows - count
    assert spell(train["x"]) == text[start : start + 80 * count]
    assert spell(train["y"]) == text[start + 1 : start + 80 * count + 1]
    assert spell(tail["x"]) == text[start + 80 * count : start + 80 * windows]
    assert spell(held["y"]) == text[test + 1 : test + 1 + 80 * ((end - test - 1) // 80)]
    assert federation.example == (("x", (80,), "int32"), ("y", (80,), "int32")) and federation.num_classes == 72


def test_all_roles_and_other_windows():
    federation = shakespeare_roles(window=20, validation=0.0)
    assert federation.num_clients == 165 and federation.validation.num_rows == 0
    content = np.load(BUNDLE / "shakespeare_roles.npz")
    assert federation.sizes().tolist() == ((content["test_start"] - content["offsets"][:-1] - 1) // 20).tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window: found 0"),
        ({"window": 5000}, "window: found 5000, expected at most 799"),
        ({"max_roles": -1}, "max_roles: found -1"),
        ({"validation": 1.0}, "validation: found the share 1.0"),
    ],
)
def test_shakespeare_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        shakespeare_roles(**options)


@pytest.mark.parametrize("loader", [vowel_speakers, digits_domains])
def test_the_validation_share_is_checked(loader):
    with pytest.raises(ValueError, match="validation: found the share -0.2"):
        loader(validation=-0.2)


def test_a_bundled_set_given_client_by_client_is_the_same(assert_same):
    federation = vowel_speakers(validation=0.0)
    clients = {
        client_id: {split: federation.split(split).client(k) for split in ("train", "test")}
        for k, client_id in reversed(list(enumerate(federation.client_ids)))
    }
    about = {name: getattr(federation, name) for name in ("name", "class_names", "description", "licence")}
    assert_same(from_clients(clients, **about), federation)
