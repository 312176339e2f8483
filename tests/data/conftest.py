"""What the tests of the data room share."""

from pathlib import Path

import pytest

from fedjax_pers.data import SPLITS


def same_bits(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def _assert_same(one, other):
    for name in ("name", "client_ids", "class_names", "num_classes", "description", "licence", "remarks", "first_id"):
        assert getattr(one, name) == getattr(other, name), name
    assert same_bits(one.tags, other.tags)
    for split in SPLITS:
        left, right = one.split(split), other.split(split)
        assert list(left.data) == list(right.data)
        assert same_bits(left.offsets, right.offsets), split
        for field in left.data:
            assert same_bits(left.data[field], right.data[field]), (split, field)
    assert (one.unseen is None) == (other.unseen is None)
    if one.unseen is not None:
        _assert_same(one.unseen, other.unseen)


@pytest.fixture
def assert_same():
    """Asserts that two federations are equal bit for bit, in every public value."""
    return _assert_same


@pytest.fixture
def local_directory():
    """The folder of the sets that are not part of the package; skips where there is none."""
    directory = Path("../shared/data/local")
    if not directory.is_dir():
        pytest.skip(f"no folder {directory} beside the repository")
    return directory
