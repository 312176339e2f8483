"""load: names, paths and options."""

import pytest

from fedjax_pers.data import load, names, vowel_speakers


@pytest.mark.parametrize("name", [name for name in names() if name != "shakespeare_roles"])
def test_every_name_loads_with_a_validation_split(name):
    federation = load(name)
    assert federation.name == name and federation.validation.num_rows > 0 and federation.licence
    assert load(name, validation=0.0).validation.num_rows == 0


def test_options_reach_the_set(assert_same):
    assert load("shakespeare_roles", max_roles=2, window=40).example[0] == ("x", (40,), "int32")
    assert_same(load("vowel_speakers", seed=4), vowel_speakers(seed=4))
    assert load("vowel_speakers", seed=4).train.data["x"].tolist() != load("vowel_speakers").train.data["x"].tolist()


def test_unseen_clients(assert_same):
    assert_same(load("vowel_speakers", unseen=0.2, unseen_seed=3), vowel_speakers().with_unseen(0.2, seed=3))
    federation = load("vowel_speakers", unseen=[f"speaker_{k:02}" for k in range(8, 15)])
    assert federation.num_clients == 8 and federation.unseen.client_ids[0] == "speaker_08"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vowel_speaker", {}, "data set: found 'vowel_speaker', did you mean 'vowel_speakers'"),
        ("heart", {}, "data set: found 'heart'"),
        ("tfd:mnist", {}, "data set: found 'tfd:mnist'"),
        (
            "vowel_speakers",
            {"validaton": 0.1},
            r"load\('vowel_speakers'\), option: found 'validaton', did you mean 'validation'",
        ),
        ("vowel_speakers", {"num_classes": 3}, "option: found 'num_classes'"),
        ("digits", {"num_client": 3}, "did you mean 'num_clients'"),
        ("shakespeare_roles", {"seed": 1}, "option: found 'seed'"),
    ],
)
def test_refuses(name, options, message):
    with pytest.raises(ValueError, match=message):
        load(name, **options)


def test_a_path_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        load(tmp_path / "femnist")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty: found a folder of no known form, expected train/\*.json"):
        load(tmp_path / "empty")
