"""How uploads change the server: pure, jitted transforms, one file a family."""

from fedjax_pers.aggregators.base import Aggregator, Server, aggregate
from fedjax_pers.aggregators.mean import mean

__all__ = ["Aggregator", "Server", "aggregate", "mean"]
