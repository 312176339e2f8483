"""How uploads change the server: pure, jitted transforms, one file a family."""

from fedjax_pers.aggregators.agnostic import fair, minimax, tilted
from fedjax_pers.aggregators.base import Aggregator, Collected, Sender, Server, aggregate
from fedjax_pers.aggregators.clustered import hypotheses
from fedjax_pers.aggregators.grouping import decomposed_cosines, fedgroup
from fedjax_pers.aggregators.mean import mean
from fedjax_pers.aggregators.pairwise import cosines, squared_distances
from fedjax_pers.aggregators.robust import by_rule, geometric_median, krum, median, norm_clipping, trimmed_mean
from fedjax_pers.aggregators.similarity import Crowd, by_similarity, fedamp, heurfedamp, mixing, mixing_all, pfedgraph
from fedjax_pers.aggregators.splitting import cfl, hierarchical

__all__ = [
    "Aggregator",
    "Collected",
    "Crowd",
    "Sender",
    "Server",
    "aggregate",
    "by_rule",
    "by_similarity",
    "cfl",
    "cosines",
    "decomposed_cosines",
    "fair",
    "fedamp",
    "fedgroup",
    "geometric_median",
    "heurfedamp",
    "hierarchical",
    "hypotheses",
    "krum",
    "mean",
    "median",
    "minimax",
    "mixing",
    "mixing_all",
    "norm_clipping",
    "pfedgraph",
    "squared_distances",
    "tilted",
    "trimmed_mean",
]
