"""Figures of weights, clusters and mixtures: drawn to the colour, and refused with the reason."""

from __future__ import annotations

import matplotlib
import numpy as np
import pytest
from PIL import Image
from scipy.cluster.hierarchy import linkage

from fedjax_pers.report import relations
from fedjax_pers.report.plots import COLOURS

MEMBERS = np.array([[0, 1, -1, 2], [0, 1, 2, 2], [0, -1, 2, 1]])
WEIGHTS = np.array([[0.25, 0.25, 0.5], [0.2, np.nan, 0.8]])
MIXTURE = np.array([[0.5, 0.5, 0.0], [0.1, 0.9, 0.0], [0.0, 0.0, 0.0]])
TREE = linkage(np.array([[0.0], [5.0], [0.1], [5.2], [0.3], [9.0]]), "average")
SPLITS = {
    "made": np.array([0, 3, 5, -1]),
    "parent": np.array([-1, 0, 0, -1]),
    "members": np.array([0, 0, 1, 2, 2]),
    "rounds": np.array(8),
}
FIGURES = [
    (relations.members_over_rounds, MEMBERS),
    (relations.weights_over_rounds, WEIGHTS),
    (relations.weights_over_rounds, WEIGHTS[:1]),
    (relations.who_learns_from_whom, MIXTURE),
    (relations.who_learns_from_whom, np.ones((1, 1))),
    (relations.who_learns_from_whom, np.full((60, 60), 1 / 60)),
    (relations.dendrogram, TREE),
    (relations.dendrogram, linkage(np.arange(60.0)[:, None] ** 2, "ward")),
    (relations.splits_over_rounds, SPLITS),
    (relations.splits_over_rounds, SPLITS | {"parent": np.full(4, -1), "rounds": np.array(0)}),
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


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved."""
    figures = []
    monkeypatch.setattr(relations, "save", lambda figure, path: figures.append(figure) or path)
    return figures


def lines(figure):
    """What is drawn: ``(colour, xs, ys)`` of each line."""
    return [(line.get_color(), list(line.get_xdata()), list(line.get_ydata())) for line in figure.axes[0].get_lines()]


def test_a_dendrogram_merges_where_the_tree_does_and_has_the_colours_of_clusters(drawn):
    leaves = np.array([0, 1, 2, 4, 5, 7, -1, -1])
    padded = np.concatenate([TREE, np.zeros((3, 4))])
    relations.dendrogram(padded, "", leaves=leaves, cut=1.0, names=list("abcdefgh"))
    (figure,) = drawn
    blue, red, green = COLOURS[:3]  # a, c, f; then b, e; then h alone
    # By hand: 0 and 0.1 are 0.1 apart, 0.3 is 0.25 from them; 5 and 5.2; 9 is 3.9 from those; at last the two halves.
    halves = np.mean([[b - a for b in (5, 5.2, 9)] for a in (0, 0.1, 0.3)])
    found = sorted((float(max(xs)), colour) for colour, xs, _ in lines(figure) if len(xs) == 4)
    expected = [(0.1, blue), (0.2, red), (0.25, blue), (3.9, "0.6"), (halves, "0.6")]
    np.testing.assert_allclose([x for x, _ in found], [x for x, _ in expected])
    assert [colour for _, colour in found] == [colour for _, colour in expected]
    named = sorted((text.get_text(), text.get_color()) for text in figure.axes[0].get_yticklabels())
    assert named == [("a", blue), ("b", red), ("c", blue), ("e", red), ("f", blue), ("h", green)]
    assert [xs for _, xs, _ in lines(figure) if len(xs) == 2] == [[1, 1]]  # the cut


def test_splits_hang_below_the_cluster_that_was_cut_and_cross_none(drawn):
    relations.splits_over_rounds(SPLITS, "")
    (figure,) = drawn
    along = {colour: (xs, ys[0]) for colour, xs, ys in lines(figure) if ys[0] == ys[1]}
    down = {colour: (xs[0], ys) for colour, xs, ys in lines(figure) if ys[0] != ys[1]}
    assert along == {COLOURS[0]: ([0, 8], 0), COLOURS[2]: ([5, 8], 1), COLOURS[1]: ([3, 8], 2)}
    assert down == {COLOURS[1]: (3, [0, 2]), COLOURS[2]: (5, [0, 1])}
    said = {text.get_text().strip() for text in figure.axes[0].texts}
    assert said == {"0: 2 clients", "1: 1 client", "2: 2 clients", "3", "5"}


BAD = [
    (relations.dendrogram, np.ones((2, 3)), {}, r"tree: found shape \(2, 3\)"),
    (relations.dendrogram, np.zeros((4, 4)), {}, r"tree: found shape \(0, 4\)"),
    (relations.dendrogram, TREE, {"leaves": [0, 1, -1]}, "leaves: found 2; expected 6"),
    (relations.dendrogram, TREE, {"names": ["a"]}, "names: found 1; expected one for each of 6"),
    (relations.splits_over_rounds, {"members": MEMBERS}, {}, r"aux: \['made', 'parent', 'rounds'\] are missing"),
    (relations.splits_over_rounds, SPLITS | {"made": np.full(4, -1)}, {}, "none was made yet"),
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
