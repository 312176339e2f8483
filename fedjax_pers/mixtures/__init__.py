"""Mixtures: a task made of a task, whose model is several models, the experts, and a gate that says whom to believe.

The variables are ``{"experts": [variables, variables, ...], "gate": ...}``, so that selectors say what of a mixture is
shared: ``"gate/**"``, ``"experts/1/**"``. Methods are then compositions like all others.
"""

from fedjax_pers.mixtures.gates import (
    EXPERTS,
    GATE,
    GATE_LEAVES,
    Gate,
    Reading,
    constant_gate,
    features_of,
    inputs_of,
    linear_gate,
    logistic_gate,
)
from fedjax_pers.mixtures.mixture import (
    Answer,
    Level,
    class_scores,
    losses_of,
    mixture,
    path_of,
    require_cross_entropy,
    statistics_below,
    task_of,
    tracked_of,
)
from fedjax_pers.mixtures.training import (
    balance_of,
    evaluated_loss,
    expert_loss,
    in_common,
    mean_responsibilities,
    paths_in_common,
    responsibilities,
)

__all__ = [
    "EXPERTS",
    "GATE",
    "GATE_LEAVES",
    "Answer",
    "Gate",
    "Level",
    "Reading",
    "balance_of",
    "class_scores",
    "constant_gate",
    "evaluated_loss",
    "expert_loss",
    "features_of",
    "in_common",
    "inputs_of",
    "linear_gate",
    "logistic_gate",
    "losses_of",
    "mean_responsibilities",
    "mixture",
    "path_of",
    "paths_in_common",
    "require_cross_entropy",
    "responsibilities",
    "statistics_below",
    "task_of",
    "tracked_of",
]
