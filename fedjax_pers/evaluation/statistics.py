"""Statistics over clients: one accuracy (or any other score) a client in, numbers with unambiguous names out.

Two means are in use, and a table must say which one it shows: the mean *weighted* by test examples answers "how many
examples are right", the *unweighted* one "how well is a client served". Deviations are over clients, each counted once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

ArrayLike = Any
GAIN_QUANTILES = {"gain_p10": 0.1, "gain_median": 0.5, "gain_p90": 0.9}


def bottom_mean(values: ArrayLike, percent: int = 10) -> float:
    """Mean of the ``ceil(percent / 100 * clients)`` smallest values; NaN where there are none.

    This is not the percentile of that name: the percentile is one value, this the mean of all values up to about there.

    Example:
      >>> bottom_mean([0.9, 0.2, 0.8, 0.4], percent=50)
      0.30000000000000004

    Args:
      values: ``[clients]``, higher is better.
      percent: size of the tail, a whole number in 1 .. 100 (so that 10 % of 70 clients is 7, not 8 after rounding).

    Raises:
      ValueError: ``percent`` is not a whole number in 1 .. 100, or ``values`` is not one-dimensional.
    """
    if not isinstance(percent, int | np.integer) or not 1 <= percent <= 100:
        raise ValueError(f"percent: found {percent!r}; allowed are whole numbers from 1 to 100")
    ordered = np.sort(_one_dimensional("values", values))
    return _or_nan(np.mean, ordered[: -(-len(ordered) * int(percent) // 100)])


def top_mean(values: ArrayLike, percent: int = 10) -> float:
    """Mean of the ``ceil(percent / 100 * clients)`` largest values; NaN where there are none.

    Example:
      >>> top_mean([0.9, 0.2, 0.8, 0.4], percent=25)
      0.9

    Args:
      values: ``[clients]``, higher is better.
      percent: size of the tail, a whole number in 1 .. 100.
    """
    return -bottom_mean(-_one_dimensional("values", values), percent)


def summarize(values: ArrayLike, counts: ArrayLike, baseline: ArrayLike | None = None) -> dict[str, float | int]:
    r"""Summary of one score a client, in numbers whose names say what they are.

    .. math::
      \text{weighted\_mean} = \frac{\sum_i n_i a_i}{\sum_i n_i}, \qquad
      \text{unweighted\_mean} = \frac{1}{N} \sum_i a_i, \qquad
      \text{population\_std}^2 = \frac{1}{N} \sum_i (a_i - \text{unweighted\_mean})^2

    Clients without test examples are left out of every number and counted in ``clients_without_test``; their values
    are not looked at. Where no client has test examples, the statistics are NaN (``null`` in files).

    Example:
      >>> numbers = summarize([1.0, 0.0], [90, 10])
      >>> numbers["weighted_mean"], numbers["unweighted_mean"], numbers["population_std"]
      (0.9, 0.5, 0.5)

    Args:
      values: ``[clients]``, the score of each client (a share in 0 .. 1 for accuracies), higher is better.
      counts: ``[clients]``, its number of test examples, 0 allowed.
      baseline: ``[clients]``, the score of the model without personalisation on the same examples.

    Returns:
      ``weighted_mean`` (by test examples), ``unweighted_mean``, ``population_std`` and ``population_variance``
      (over clients, each counted once), ``worst``, ``best``, ``median``, ``bottom_decile_mean`` and
      ``top_decile_mean`` (mean of the ceil(N/10) smallest, largest), ``percentile_10`` (linear interpolation),
      ``clients`` (those the numbers are over) and ``clients_without_test``. With a baseline also ``hurt`` (share of
      clients *strictly* below it) and quantiles of ``values - baseline``: ``gain_p10``, ``gain_median``, ``gain_p90``.

    Raises:
      ValueError: shapes differ, counts are negative or not whole, or a client with test examples has a value that is
        not finite (the message names the positions).

    Reference:
      Wu et al., *Motley: Benchmarking Heterogeneity and Personalization in Federated Learning*, 2022, arXiv:2206.09262;
      Chen et al., *pFL-Bench*, NeurIPS 2022, arXiv:2206.03655.
    """
    values = _one_dimensional("values", values)
    counts = _whole_counts(counts, len(values))
    tested = counts > 0
    scores, weights = _finite("values", values, tested).astype(np.float64), counts[tested].astype(np.float64)
    numbers: dict[str, float | int] = {
        "weighted_mean": _or_nan(lambda scores: np.average(scores, weights=weights), scores),
        "unweighted_mean": _or_nan(np.mean, scores),
        "population_std": _or_nan(np.std, scores),
        "population_variance": _or_nan(np.var, scores),
        "worst": _or_nan(np.min, scores),
        "best": _or_nan(np.max, scores),
        "median": _or_nan(np.median, scores),
        "bottom_decile_mean": bottom_mean(scores),
        "top_decile_mean": top_mean(scores),
        "percentile_10": _or_nan(lambda scores: np.quantile(scores, 0.1), scores),
        "clients": int(tested.sum()),
        "clients_without_test": int((~tested).sum()),
    }
    if baseline is not None:
        numbers |= _against_baseline(values, _one_dimensional("baseline", baseline), tested)
    return numbers


def over_seeds(summaries: Sequence[Mapping[str, float | int | None]]) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of each number over repeated runs.

    The deviation is the sample form (divisor ``seeds - 1``), unlike the one over clients: seeds are a sample of all
    possible runs. It is NaN for a single run.

    Example:
      >>> over_seeds([{"worst": 0.5}, {"worst": 0.75}, {"worst": 1.0}])
      {'worst': (0.75, 0.25)}

    Args:
      summaries: one result of :func:`summarize` a seed. ``None`` (as read from a file) counts as NaN.

    Raises:
      ValueError: there are no summaries, or they do not hold the same names.
    """
    if not summaries:
        raise ValueError("summaries: found an empty list; one summary for each seed is needed")
    names = list(summaries[0])
    for seed, summary in enumerate(summaries):
        if different := sorted(set(names) ^ set(summary)):
            raise ValueError(f"summaries[{seed}]: {', '.join(different)} not in both this and summaries[0]")
    columns = {name: np.array([math.nan if s[name] is None else s[name] for s in summaries], float) for name in names}
    return {
        name: (float(np.mean(column)), float(np.std(column, ddof=1)) if len(column) > 1 else math.nan)
        for name, column in columns.items()
    }


def _against_baseline(values: np.ndarray, baseline: np.ndarray, tested: np.ndarray) -> dict[str, float | int]:
    if baseline.shape != values.shape:
        raise ValueError(f"baseline: found shape {baseline.shape}, expected {values.shape}, one for each client")
    scores, references = _finite("values", values, tested), _finite("baseline", baseline, tested)
    # Compared at the coarser precision, so that float32(0.7) against 0.7 is the tie that it stands for.
    coarser = min(scores.dtype, references.dtype, key=lambda dtype: dtype.itemsize)
    gains = scores.astype(np.float64) - references.astype(np.float64)
    hurt = _or_nan(np.mean, scores.astype(coarser) < references.astype(coarser))
    return {"hurt": hurt} | {
        name: _or_nan(lambda gains, q=q: np.quantile(gains, q), gains) for name, q in GAIN_QUANTILES.items()
    }


def _one_dimensional(name: str, values: ArrayLike) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name}: found shape {array.shape}, expected [clients]")
    if array.dtype == object or array.dtype.kind not in "fiub":
        raise ValueError(f"{name}: found dtype {array.dtype}, expected numbers")
    return array if array.dtype.kind == "f" else array.astype(np.float64)


def _whole_counts(counts: ArrayLike, clients: int) -> np.ndarray:
    array = _one_dimensional("counts", counts)
    if array.shape != (clients,):
        raise ValueError(f"counts: found shape {array.shape}, expected ({clients},), one for each client")
    wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0) & (array == np.floor(array))))
    if len(wrong):
        raise ValueError(
            f"counts: found {array[wrong[:5]].tolist()} at clients {_listed(wrong)}; allowed are whole numbers from 0"
        )
    return array


def _finite(name: str, values: np.ndarray, tested: np.ndarray) -> np.ndarray:
    wrong = np.flatnonzero(tested & ~np.isfinite(values))
    if len(wrong):
        raise ValueError(
            f"{name}: found {values[wrong[0]]} at clients {_listed(wrong)}, which have test examples; "
            "a score must be finite (only clients with count 0 are left out)"
        )
    return values[tested]


def _listed(positions: np.ndarray) -> str:
    shown = ", ".join(map(str, positions[:10].tolist()))
    return f"[{shown}{', ...' if len(positions) > 10 else ''}] ({len(positions)} in all)"


def _or_nan(statistic: Any, values: np.ndarray) -> float:
    return float(statistic(values)) if len(values) else math.nan
