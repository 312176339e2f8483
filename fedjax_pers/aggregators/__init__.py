"""How uploads change the server: pure, jitted transforms, one file a family."""

from fedjax_pers.aggregators.agnostic import fair, minimax, tilted
from fedjax_pers.aggregators.base import Aggregator, Collected, Sender, Server, Survey, aggregate
from fedjax_pers.aggregators.choice import layer_choice
from fedjax_pers.aggregators.clustered import hypotheses
from fedjax_pers.aggregators.collaboration import collaborating_heads, collaboration
from fedjax_pers.aggregators.critical import critical_collaboration
from fedjax_pers.aggregators.distributional import distributionally_robust
from fedjax_pers.aggregators.factors import of_ranks, residual, sparsity_weighted, stacking
from fedjax_pers.aggregators.grouping import decomposed_cosines, fedgroup
from fedjax_pers.aggregators.hypernetworks import hypernetwork
from fedjax_pers.aggregators.layer_weights import layer_weights
from fedjax_pers.aggregators.masked import masked_mean
from fedjax_pers.aggregators.mean import mean
from fedjax_pers.aggregators.measures import Crowd, input_moments, of_leaves, of_models, of_moments, of_updates
from fedjax_pers.aggregators.pairwise import cosines, squared_distances
from fedjax_pers.aggregators.peers import core_models, first_order
from fedjax_pers.aggregators.robust import by_rule, geometric_median, krum, median, norm_clipping, trimmed_mean
from fedjax_pers.aggregators.similarity import by_similarity, fedamp, heurfedamp, mixing, mixing_all, pfedgraph
from fedjax_pers.aggregators.splitting import cfl, hierarchical

__all__ = [
    "Aggregator",
    "Collected",
    "Crowd",
    "Sender",
    "Server",
    "Survey",
    "aggregate",
    "by_rule",
    "by_similarity",
    "cfl",
    "collaborating_heads",
    "collaboration",
    "core_models",
    "cosines",
    "critical_collaboration",
    "decomposed_cosines",
    "distributionally_robust",
    "fair",
    "fedamp",
    "fedgroup",
    "first_order",
    "geometric_median",
    "heurfedamp",
    "hierarchical",
    "hypernetwork",
    "hypotheses",
    "input_moments",
    "krum",
    "layer_choice",
    "layer_weights",
    "masked_mean",
    "mean",
    "median",
    "minimax",
    "mixing",
    "mixing_all",
    "norm_clipping",
    "of_leaves",
    "of_models",
    "of_moments",
    "of_ranks",
    "of_updates",
    "pfedgraph",
    "residual",
    "sparsity_weighted",
    "squared_distances",
    "stacking",
    "tilted",
    "trimmed_mean",
]
