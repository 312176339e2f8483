"""How uploads change the server: pure, jitted transforms, one file a family."""

from fedjax_pers.aggregators.base import Aggregator, Collected, Server, aggregate
from fedjax_pers.aggregators.mean import mean
from fedjax_pers.aggregators.robust import by_rule, geometric_median, krum, median, norm_clipping, trimmed_mean

__all__ = [
    "Aggregator",
    "Collected",
    "Server",
    "aggregate",
    "by_rule",
    "geometric_median",
    "krum",
    "mean",
    "median",
    "norm_clipping",
    "trimmed_mean",
]
