from __future__ import annotations

import itertools
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from PIL import Image

from fedjax_pers.report import plots


def runs(last: float, seeds: int = 3, megabytes: float = 1.0) -> list[dict]:
    rounds = np.arange(1, 11)
    return [
        {"round": rounds, "accuracy": last - 0.5 / rounds + 0.01 * seed, "megabytes": rounds * megabytes}
        for seed in range(seeds)
    ]


HISTORIES = {"fedavg": runs(0.9), "ditto": runs(0.95), "local_only": runs(0.94, megabytes=0.0)}
PER_CLIENT = {"fedavg": [[0.5, 0.75, np.nan], [0.5, 1.0, 0.25]], "ditto": [[0.75, 0.75, 1.0], [1.0, 1.0, 1.0]]}
FIGURES = [
    (plots.learning_curves, HISTORIES),
    (plots.accuracy_against_traffic, HISTORIES),
    (plots.accuracy_against_traffic, {"local_only": HISTORIES["local_only"]}),
    (plots.learning_curves, {"one seed, one point": [{"round": [1], "accuracy": [0.5]}]}),
    (plots.accuracy_ecdf, PER_CLIENT),
    (plots.accuracy_ecdf, {"one client": [[0.5]]}),
]


@pytest.mark.parametrize(("draw", "data"), FIGURES)
def test_a_figure_is_drawn_without_touching_the_process(draw, data, tmp_path):
    settings = dict(matplotlib.rcParams)
    path = draw(data, tmp_path / "figure.png")
    assert dict(matplotlib.rcParams) == settings
    with Image.open(path) as image:
        assert image.size[0] >= 1000
        pixels = np.asarray(image.convert("RGB"))[:, : image.size[0] * 9 // 20]  # the curves, without their names
    wanted = [plots.method_styles(data)[method].colour for method in data]
    for colour in wanted:
        rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert (np.abs(pixels.astype(int) - rgb).max(axis=2) < 12).sum() > 20, colour


@pytest.mark.parametrize(("draw", "data"), [FIGURES[0], FIGURES[1], FIGURES[4]])
def test_the_same_data_gives_the_same_bytes(draw, data, tmp_path):
    for ending in (".png", ".svg"):
        first, second = (draw(data, tmp_path / f"{name}{ending}").read_bytes() for name in "ab")
        assert first == second


@pytest.mark.parametrize("draw", [plots.learning_curves, plots.accuracy_against_traffic])
def test_every_method_is_named_with_its_last_score(draw, tmp_path):
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        text = "".join(ElementTree.parse(draw(HISTORIES, tmp_path / "figure.svg")).getroot().itertext())
    # the last mean over the seeds: last - 0.05 + 0.01
    for words in ("fedavg  0.860", "ditto  0.910", "local_only  0.900", "mean over 3 seeds"):
        assert words in text
    assert ("sends nothing" in text) == (draw is plots.accuracy_against_traffic)


def test_the_spread_says_who_was_left_out(tmp_path):
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        path = plots.accuracy_ecdf(PER_CLIENT, tmp_path / "figure.svg")
        text = "".join(ElementTree.parse(path).getroot().itertext())
    assert "fedavg  0.250, 0.600, 1 without test examples" in text
    assert "ditto  0.750, 0.917" in text
    assert "3 clients, 2 seeds pooled" in text


def test_styles_are_distinct_and_do_not_depend_on_order():
    names = [f"method{i}" for i in range(32)]
    styles = plots.method_styles(names)
    assert styles == plots.method_styles(reversed(names))
    assert len(set(styles.values())) == 32
    assert {styles[name].line for name in plots.method_styles(names[:8])} <= set(plots.LINES)
    assert len({style.colour for style in plots.method_styles(names[:8]).values()}) == 8
    with pytest.raises(ValueError, match="found 33"):
        plots.method_styles([*names, "one more"])


def test_a_method_keeps_its_colour_in_figures_of_other_methods():
    alone = {name: plots.method_styles([name])[name] for name in ("fedavg", "ditto")}
    assert alone["fedavg"] != alone["ditto"]
    assert plots.method_styles(["fedavg", "ditto"]) == alone


def lightness_and_colour(colour: str, blindness: np.ndarray) -> np.ndarray:
    """CIELAB (D65) of a colour as seen with one kind of colour blindness."""
    encoded = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(blindness @ linear, 0, 1) / [0.9505, 1.0, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize(
    "blindness",
    [  # Machado, Oliveira and Fernandes, 2009, severity 1: none, protan, deutan, tritan
        np.eye(3),
        np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
        np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
        np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
    ],
)
def test_colours_can_be_told_apart(blindness):
    seen = [lightness_and_colour(colour, blindness) for colour in plots.COLOURS]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) >= 16


@pytest.mark.parametrize(
    ("histories", "words"),
    [
        ({}, "no methods"),
        ({"fedavg": []}, "fedavg: found no runs"),
        ({"fedavg": [{"round": [1]}]}, "fedavg, seed 0: 'accuracy' is missing"),
        ({"fedavg": [{"round": [1, 2], "accuracy": [0.5]}]}, r"fedavg, seed 0: 'accuracy' has shape \(1,\)"),
        ({"fedavg": [{"round": [1], "accuracy": [np.nan]}]}, "fedavg, seed 0: 'accuracy' is nan"),
        (
            {"fedavg": [{"round": [1], "accuracy": [0.5]}, {"round": [2], "accuracy": [0.5]}]},
            "fedavg: the seeds have different rounds",
        ),
    ],
)
def test_bad_histories_are_named(histories, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        plots.learning_curves(histories, tmp_path / "figure.png")


def test_traffic_cannot_shrink(tmp_path):
    with pytest.raises(ValueError, match="fedavg: 'megabytes' shrinks"):
        plots.accuracy_against_traffic(
            {"fedavg": [{"round": [1, 2], "accuracy": [0.5, 0.6], "megabytes": [2, 1]}]}, tmp_path / "figure.png"
        )


@pytest.mark.parametrize("scores", [[0.5, 0.6], [[np.inf]], [[np.nan]]])
def test_bad_scores_are_named(scores, tmp_path):
    with pytest.raises(ValueError, match="ditto: found shape"):
        plots.accuracy_ecdf({"ditto": scores}, tmp_path / "figure.png")
