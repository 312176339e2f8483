"""Client ids, their order, and the tags that random keys come from."""

import os
import subprocess
import sys
from hashlib import blake2b

import numpy as np
import pytest

from fedjax_pers.data import identity
from fedjax_pers.data.identity import canonical_ids, generator, tags_of


def test_integers_are_ordered_as_numbers_and_text_by_code_point():
    assert canonical_ids([10, 9, np.int64(-1)]) == (-1, 9, 10)
    assert canonical_ids(["b", "10", "9", "B", "é"]) == ("10", "9", "B", "b", "é")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "empty set of clients"),
        ([1, "a"], r"text \('a'\) and integers \(1\)"),
        ([1, np.int32(1)], "more than once: 1"),
        (["a", np.str_("a")], "more than once: 'a'"),
        ([True, False], "type bool"),
        ([1.0], "type float"),
        ([[1, 2]], "type list"),
        ([None], "type NoneType"),
    ],
)
def test_refuses(ids, message):
    with pytest.raises(ValueError, match=message):
        canonical_ids(ids)


def test_an_integer_is_its_own_tag_and_text_has_its_digest():
    def digest(text):
        return int.from_bytes(blake2b(text.encode(), digest_size=4, salt=bytes(4)).digest(), "little")

    tags, notes = tags_of((0, 7, 2**32 - 1))
    assert tags.dtype == np.uint32 and tags.tolist() == [0, 7, 2**32 - 1] and notes == ()
    assert tags_of(("ann", "bob"))[0].tolist() == [digest("ann"), digest("bob")]
    assert tags_of((-1, 2**32))[0].tolist() == [digest("-1"), digest("4294967296")]


def test_a_tag_does_not_depend_on_the_other_clients():
    few, many = tags_of(("ann", "zoe"))[0], tags_of(("ann", "bob", "eve", "zoe"))[0]
    assert few.tolist() == many[[0, 3]].tolist()


def test_equal_digests_are_told_apart_and_reported(monkeypatch):
    monkeypatch.setattr(identity, "_digest", lambda client_id, attempt: {0: 5, 1: 6, 2: 7}[attempt])
    tags, notes = tags_of(("a", "b", "c"))
    assert tags.tolist() == [5, 6, 7]
    assert "'a' and 'b'" in notes[0] and "'b' and 'c'" in notes[-1]


def test_an_integer_keeps_its_tag_when_another_digest_hits_it(monkeypatch):
    monkeypatch.setattr(identity, "_digest", lambda client_id, attempt: 5 + attempt)
    assert tags_of((-3, 5))[0].tolist() == [6, 5]


def test_tags_are_the_same_in_every_process():
    code = "from fedjax_pers.data.identity import tags_of; print(tags_of(('ann', 'bob', 'zoë'))[0].tolist())"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {f"{tags_of(('ann', 'bob', 'zoë'))[0].tolist()}\n"}


def test_streams_differ_by_seed_purpose_and_client():
    draws = [generator(*of).random() for of in ((0, "a", 1), (1, "a", 1), (0, "b", 1), (0, "a", 2))]
    assert len(set(draws)) == 4 and generator(0, "a", 1).random() == draws[0]


@pytest.mark.parametrize("seed", [-1, 0.5, None, True])
def test_refuses_a_seed(seed):
    with pytest.raises(ValueError, match="seed: found"):
        generator(seed, "a")
