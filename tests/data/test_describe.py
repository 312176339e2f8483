"""The table and the picture of a federation."""

import io
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from fedjax_pers.data import describe, from_clients, load, picture
from fedjax_pers.data.describe import label_counts


def text_of(renderable, width=100):
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()


def rows(labels):
    return {"x": np.zeros((len(labels), 2), np.float32), "y": np.asarray(labels, int)}


@pytest.fixture
def federation():
    clients = {
        "ann": {"train": rows([0, 0, 0, 1]), "test": rows([0])},
        "bob": {"train": rows([2, 2]), "test": rows([])},
        "cy": {"train": rows([0, 1, 2, 3, 3]), "test": rows([1, 2])},
    }
    return from_clients(clients, class_names=["no", "yes", "both", "none"], description="answers", licence="CC0")


def test_counts(federation):
    assert label_counts(federation).tolist() == [[3, 1, 0, 0], [0, 0, 2, 0], [1, 1, 1, 2]]
    assert label_counts(federation, "test").tolist() == [[1, 0, 0, 0], [0, 0, 0, 0], [0, 1, 1, 0]]


def test_the_table_says_what_is_there(federation):
    lines = [line.split() for line in text_of(describe(federation)).splitlines()]
    assert "3 in training train 11 2 4 5 0".split() in lines
    assert "test 3 0 1 2 1".split() in lines
    assert "ann 4 0 1 no 75%, yes 25%".split() in lines
    assert "cy 5 0 2 none 40%, no 20%, yes 20%, 1 more".split() in lines
    text = text_of(describe(federation), width=200)
    assert "clients: answers" in text and "licence: CC0" in text and "x float32[2], y int32[]" in text
    assert "note: 1 of 3 clients: in train only, no test data: 'bob'" in text


def test_long_lists_are_cut_and_unseen_clients_have_their_rows(federation):
    text = text_of(describe(federation.with_unseen(["bob"]), max_clients=1))
    assert "and 1 more" in text and "1 unseen" in text and "cy" not in text
    with pytest.raises(ValueError, match="max_clients: found 0"):
        describe(federation, max_clients=0)


def test_text_has_sizes_only(tmp_path):
    federation = load("shakespeare_roles", max_roles=3)
    assert "commonest" not in text_of(describe(federation)) and "Bertram" in text_of(describe(federation))
    with pytest.raises(ValueError, match="not one class for each row"):
        label_counts(federation)
    picture(federation, tmp_path / "sizes.png")
    assert all(red == green == blue for red, green, blue in colours(tmp_path / "sizes.png"))


def colours(path):
    """How many dots of each colour a picture has."""
    with Image.open(path) as image:
        return Counter(tuple(pixel) for pixel in np.asarray(image.convert("RGB")).reshape(-1, 3).tolist())


@pytest.mark.parametrize("clients", [1, 3, 165])
def test_the_picture_shows_every_class_and_split(tmp_path, clients):
    federation = from_clients({k: {"train": rows([0, 1, 2]), "test": rows([2])} for k in range(clients)})
    picture(federation, tmp_path / "mix.png")
    dots = colours(tmp_path / "mix.png")
    blue, orange, green = dots[31, 119, 180], dots[255, 127, 14], dots[44, 160, 44]
    assert orange == pytest.approx(blue, rel=0.1) and green == pytest.approx(4 * blue, rel=0.1)  # a third; all of test
    dark, light = dots[64, 64, 64], dots[204, 204, 204]
    assert dark == pytest.approx(3 * light, rel=0.1)
    with Image.open(tmp_path / "mix.png") as image:
        assert image.height > 600 and image.width >= 900


def test_a_federation_without_test_rows_can_be_drawn(tmp_path):
    picture(from_clients({0: rows([0, 1])}), tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 1000
