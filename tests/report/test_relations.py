"""Figures of weights, clusters and mixtures: drawn to the colour, and refused with the reason."""

from __future__ import annotations

import matplotlib
import numpy as np
import pytest
from PIL import Image

from fedjax_pers.report import relations
from fedjax_pers.report.plots import COLOURS

MEMBERS = np.array([[0, 1, -1, 2], [0, 1, 2, 2], [0, -1, 2, 1]])
WEIGHTS = np.array([[0.25, 0.25, 0.5], [0.2, np.nan, 0.8]])
MIXTURE = np.array([[0.5, 0.5, 0.0], [0.1, 0.9, 0.0], [0.0, 0.0, 0.0]])
FIGURES = [
    (relations.members_over_rounds, MEMBERS),
    (relations.weights_over_rounds, WEIGHTS),
    (relations.weights_over_rounds, WEIGHTS[:1]),
    (relations.who_learns_from_whom, MIXTURE),
    (relations.who_learns_from_whom, np.ones((1, 1))),
    (relations.who_learns_from_whom, np.full((60, 60), 1 / 60)),
]


@pytest.mark.parametrize(("draw", "data"), FIGURES)
def test_a_figure_is_drawn_without_touching_the_process(draw, data, tmp_path):
    settings = dict(matplotlib.rcParams)
    first, second = (draw(data, tmp_path / f"{name}.png").read_bytes() for name in "ab")
    assert first == second and dict(matplotlib.rcParams) == settings
    with Image.open(tmp_path / "a.png") as image:
        assert min(image.size) > 300


def test_every_cluster_has_its_colour(tmp_path):
    with Image.open(relations.members_over_rounds(MEMBERS, tmp_path / "figure.png")) as image:
        pixels = np.asarray(image.convert("RGB"))[:, : image.size[0] * 7 // 10].reshape(-1, 3)
    counts = []
    for colour in COLOURS[:3]:
        rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        counts.append((np.abs(pixels.astype(int) - rgb).max(axis=1) < 6).sum())
    # Three cells of the first cluster, three of the second, four of the third.
    np.testing.assert_allclose(np.array(counts) / counts[2], [3 / 4, 3 / 4, 1], atol=0.05)


BAD = [
    (relations.who_learns_from_whom, np.ones((2, 3)), {}, r"weights: found shape \(2, 3\)"),
    (relations.who_learns_from_whom, np.full((2, 2), np.nan), {}, "not finite"),
    (relations.who_learns_from_whom, MIXTURE, {"names": ["a"]}, "names: found 1; expected one for each of 3"),
    (relations.members_over_rounds, MEMBERS / 2, {}, "members: found float64"),
    (relations.members_over_rounds, np.full((2, 2), -1), {}, "everybody is absent"),
    (relations.weights_over_rounds, np.ones(3), {}, r"weights: found shape \(3,\)"),
    (relations.weights_over_rounds, np.full((2, 2), np.nan), {}, "client 0 has none"),
]


@pytest.mark.parametrize(("draw", "data", "options", "message"), BAD)
def test_what_cannot_be_drawn_is_refused(draw, data, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        draw(data, tmp_path / "figure.png", **options)
    assert not (tmp_path / "figure.png").exists()
