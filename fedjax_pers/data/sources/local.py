"""Sets that are not part of the package: read from a folder of npz files on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from fedjax_pers.checks import one_of
from fedjax_pers.data.federation import Federation
from fedjax_pers.data.sources.npz import npz
from fedjax_pers.data.transforms import impute as fill_in
from fedjax_pers.data.transforms import standardise

VARIABLE = "FEDJAX_PERS_DATA"
"""The environment variable that names the folder, where no ``directory`` is given."""

_CC_BY = "CC BY 4.0 (https://creativecommons.org/licenses/by/4.0/)"


def find(name: str, directory: str | Path | None = None) -> Path:
    """The npz file of a local set.

    Raises:
      FileNotFoundError: says where it was looked for and how to name another place.
    """
    chosen = directory if directory is not None else os.environ.get(VARIABLE)
    if chosen is None:
        raise FileNotFoundError(
            f"{name}: this set is not part of the package; pass directory=..., or set {VARIABLE} to the folder that "
            f"holds {name}.npz"
        )
    path = Path(chosen) / f"{name}.npz"
    if not path.is_file():
        origin = "directory" if directory is not None else VARIABLE
        raise FileNotFoundError(f"{name}: found no {path} ({origin} names the folder)")
    return path


def shapes_drawers(*, directory: str | Path | None = None, validation: float = 0.2, seed: int = 0) -> Federation:
    """Shapes drawn by hand by 36 people: ``[rows, 28, 28, 1]`` floats in 0 .. 1, 4 classes, natural label skew.

    Args:
      directory: the folder of ``shapes_drawers.npz``; by default what FEDJAX_PERS_DATA says.
      validation: share of each drawer's training rows that becomes the validation split; 0 for none.
      seed: of the draw of the validation rows.

    Source: Hand-drawn Shapes (HDS) Dataset, Francois Robert, 2022.
    """
    return npz(
        find("shapes_drawers", directory),
        validation=validation,
        seed=seed,
        description="hand-drawn shapes by drawer: 28x28 grey images, 4 classes, 36 natural clients",
        licence=f"{_CC_BY}; (c) 2022 Francois Robert",
    )


def spoken_digits_speakers(
    *, directory: str | Path | None = None, validation: float = 0.2, seed: int = 0
) -> Federation:
    """Digits spoken by 6 people: log-mel pictures ``[rows, 32, 24, 1]`` (time, band), floats in 0 .. 1.

    Args:
      directory: the folder of ``spoken_digits_speakers.npz``; by default what FEDJAX_PERS_DATA says.
      validation: share of each speaker's training rows that becomes the validation split; 0 for none.
      seed: of the draw of the validation rows.

    Source: Free Spoken Digit Dataset, Zohar Jackson and contributors.
    """
    return npz(
        find("spoken_digits_speakers", directory),
        validation=validation,
        seed=seed,
        description="spoken digits by speaker: log-mel pictures, 10 classes, 6 natural clients",
        licence="CC BY-SA 4.0 (https://creativecommons.org/licenses/by-sa/4.0/); Zohar Jackson and contributors",
    )


def digits_4domains(*, directory: str | Path | None = None, validation: float = 0.2, seed: int = 0) -> Federation:
    """Handwritten digits in four domains, one a client: as ``digits_domains``, with semeion as the fourth.

    Args:
      directory: the folder of ``digits_4domains.npz``; by default what FEDJAX_PERS_DATA says.
      validation: share of each domain's training rows that becomes the validation split; 0 for none.
      seed: of the draw of the validation rows.
    """
    return npz(
        find("digits_4domains", directory),
        validation=validation,
        seed=seed,
        description="digits in four domains (mnist, optdigits, pendigits, semeion): 16x16 grey images, 10 classes",
        licence=(
            f"optdigits, pendigits, semeion: {_CC_BY}; E. Alpaydin, C. Kaynak, F. Alimoglu, Semeion Research Center, "
            "Tattile, via the UCI repository. mnist: CC BY-SA 3.0; Y. LeCun, C. Cortes, C. Burges; file MIT, (c) 2015 "
            "Juan Cazala"
        ),
    )


def heart_hospitals(
    *,
    impute: str = "mean",
    directory: str | Path | None = None,
    validation: float = 0.2,
    seed: int = 0,
) -> Federation:
    """Heart disease at 4 hospitals: 13 features, 2 classes; whole columns are missing at a site.

    Features are brought to mean 0 and deviation 1 over the training rows of all hospitals (:func:`standardise`).

    Args:
      impute: what takes the place of a missing value. ``"mean"``: the mean over the hospital's own training rows or,
        where it never measured the feature, the mean over all hospitals (0). ``"indicator"``: the same, and 13 further
        columns that say what was missing. ``"keep"``: NaN stays.
      directory: the folder of ``heart_hospitals.npz``; by default what FEDJAX_PERS_DATA says.
      validation: share of each hospital's training rows that becomes the validation split; 0 for none.
      seed: of the draw of the validation rows.

    Source: A. Janosi, W. Steinbrunn, M. Pfisterer, R. Detrano, UCI Heart Disease.
    """
    one_of("impute", impute, ("mean", "indicator", "keep"))
    federation = standardise(
        npz(
            find("heart_hospitals", directory),
            validation=validation,
            seed=seed,
            allow_missing=True,
            description=f"heart disease at four hospitals: 13 features, 2 classes; missing values: {impute}",
            licence=(
                f"{_CC_BY}; Andras Janosi, M.D. (Hungarian Institute of Cardiology, Budapest), William Steinbrunn, "
                "M.D. (University Hospital, Zurich), Matthias Pfisterer, M.D. (University Hospital, Basel), Robert "
                "Detrano, M.D., Ph.D. (V.A. Medical Center, Long Beach, and Cleveland Clinic Foundation), via the UCI "
                "repository"
            ),
        )
    )
    return federation if impute == "keep" else fill_in(federation, indicator=impute == "indicator")
