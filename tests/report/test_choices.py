"""Figures of what is personal: drawn cell by cell, and refused with the reason."""

from __future__ import annotations

import matplotlib
import numpy as np
import pytest
from matplotlib import colormaps
from PIL import Image

import fedjax_pers as fp
from fedjax_pers.masks import personal_shares
from fedjax_pers.report import choices
from tests import toys

ROWS = [
    {"round": 1},
    {"round": 2, "personal_share": {"body": 0.0, "head": 0.0}},
    {"round": 4, "personal_share": {"body": 0.25, "head": 1.0}},
]
SHARES = {"body": np.array([0.0, 0.5, 0.0]), "head": np.array([1.0, 1.0, 0.0])}
FIGURES = [
    (choices.personal_over_rounds, ROWS),
    (choices.personal_over_rounds, ROWS[:2]),
    (choices.personal_by_client, SHARES),
    (choices.personal_by_client, {f"block{i}/conv": np.linspace(0, 1, 60) for i in range(30)}),
]


@pytest.mark.parametrize(("draw", "data"), FIGURES)
def test_a_figure_is_drawn_without_touching_the_process(draw, data, tmp_path):
    settings = dict(matplotlib.rcParams)
    first, second = (draw(data, tmp_path / f"{name}.png").read_bytes() for name in "ab")
    assert first == second and dict(matplotlib.rcParams) == settings
    with Image.open(tmp_path / "a.png") as image:
        assert min(image.size) > 300


def test_as_many_cells_are_dark_as_layers_are_shared(tmp_path):
    with Image.open(choices.personal_by_client(SHARES, tmp_path / "figure.png")) as image:
        pixels = np.asarray(image.convert("RGB"))[:, : image.size[0] * 88 // 100].reshape(-1, 3).astype(int)
    counts = []
    for share in (0.0, 0.5, 1.0):
        rgb = 255 * np.array(colormaps["viridis"](share)[:3])
        counts.append((np.abs(pixels - rgb).max(axis=1) < 3).sum())
    np.testing.assert_allclose(np.array(counts) / counts[1], [3, 1, 2], rtol=0.05)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda path: choices.personal_over_rounds(ROWS[:1], path), "rows: none has 'personal_share'"),
        (lambda path: choices.personal_over_rounds(ROWS, path, layers=["neck"]), r"layers: found \['neck'\]"),
        (lambda path: choices.personal_by_client({}, path), r"layers: found \[\]"),
        (lambda path: choices.personal_by_client({"a": [2.0]}, path), "shares: found 2 .. 2; allowed is 0 .. 1"),
        (lambda path: choices.personal_by_client({"a": [np.nan]}, path), "shares: found nan .. nan"),
        (lambda path: choices.personal_by_client({"a": [0.0], "b": [0.0, 1.0]}, path), "shares: found shapes"),
        (lambda path: choices.personal_by_client(SHARES, path, names="ab"), "names: found 2; expected one for each"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        draw(tmp_path / "figure.png")
    assert not list(tmp_path.iterdir())


def test_the_record_of_a_run_says_what_is_personal():
    federation = toys.federation((4, 1, 5), (2, 2, 2))
    algorithm = toys.every_method("layers_by_client", examples=(4,))  # the bias, for two of three
    state, _, rows = toys.recorded(algorithm, federation, 2, evaluate_every=2)
    assert "personal_share" not in rows[0]
    assert rows[1]["personal_share"] == pytest.approx({"bias": 2 / 3, "kernel": 0})
    shares = personal_shares(state)
    assert {name: x.tolist() for name, x in shares.items()} == {"bias": [1, 0, 1], "kernel": [0, 0, 0]}


def test_a_layer_s_share_counts_its_elements():
    """Of a kernel of 5 x 3 and a bias of 3 in one layer, a column of the kernel is critical: 5 of 18."""
    state = toys.start(fp.method("fedcac").make(toys.classifier()), 2)
    critical = {name: np.zeros(x.shape, bool) for name, x in state.aux["critical"].items()}
    critical["params/head/kernel"][1, :, 0] = True
    found = personal_shares(state._replace(aux=state.aux | {"critical": critical}))
    np.testing.assert_allclose(found["head"], [0, 5 / 18])
    assert personal_shares(toys.start(toys.every_method("fedavg"), 2)) == {}
