"""Sets on this machine that are not part of the package."""

import numpy as np
import pytest

from fedjax_pers.data import digits_4domains, heart_hospitals, load, shapes_drawers, spoken_digits_speakers


@pytest.mark.parametrize(
    ("loader", "clients", "rows", "classes", "shape"),
    [
        (shapes_drawers, 36, 13784, 4, (28, 28, 1)),
        (spoken_digits_speakers, 6, 3000, 10, (32, 24, 1)),
        (digits_4domains, 4, 7390, 10, (16, 16, 1)),
        (heart_hospitals, 4, 920, 2, (13,)),
    ],
)
def test_reads(local_directory, loader, clients, rows, classes, shape):
    federation = loader(directory=local_directory)
    assert (federation.num_clients, federation.num_classes) == (clients, classes)
    assert sum(federation.split(s).num_rows for s in ("train", "validation", "test")) == rows
    assert federation.example == (("x", shape, "float32"), ("y", (), "int32"))
    assert federation.name == loader.__name__ and "CC BY" in federation.licence
    assert np.isfinite(federation.train.data["x"]).all()


def test_heart_hospitals_without_a_column(local_directory):
    raw = np.load(local_directory / "heart_hospitals.npz")
    chol = raw["feature_names"].tolist().index("chol")
    mean, marked, kept = (
        heart_hospitals(directory=local_directory, impute=how, validation=0.0) for how in ("mean", "indicator", "keep")
    )
    train = raw["split"] == 0
    values = raw["x"][train, chol].astype(np.float64)
    known = ~np.isnan(values)
    site = raw["client"][train]
    assert not known[site == 2].any()  # Switzerland never measured it
    assert (mean.train.client(2)["x"][:, chol] == 0).all() and np.isnan(kept.train.client(2)["x"][:, chol]).all()
    scaled = (values - values[known].mean()) / values[known].std()
    va = scaled[site == 3]
    expected = np.where(np.isnan(va), va[~np.isnan(va)].mean(), va)
    np.testing.assert_allclose(mean.train.client(3)["x"][:, chol], expected, rtol=1e-4, atol=1e-6)
    assert marked.example[0] == ("x", (26,), "float32")
    assert np.array_equal(marked.train.client(3)["x"][:, 13 + chol], np.isnan(va))
    with pytest.raises(ValueError, match="impute: found 'drop'"):
        heart_hospitals(directory=local_directory, impute="drop")


def test_the_folder_is_found_by_the_variable(local_directory, monkeypatch):
    monkeypatch.setenv("FEDJAX_PERS_DATA", str(local_directory))
    assert load("spoken_digits_speakers", validation=0.0).train.num_rows == 2700


def test_says_where_it_looked(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDJAX_PERS_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="pass directory=..., or set FEDJAX_PERS_DATA"):
        load("heart_hospitals")
    with pytest.raises(FileNotFoundError, match=r"found no .*heart_hospitals.npz \(directory names the folder\)"):
        load("heart_hospitals", directory=tmp_path)
    monkeypatch.setenv("FEDJAX_PERS_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"\(FEDJAX_PERS_DATA names the folder\)"):
        shapes_drawers()
