"""Personalised federated learning as compositions of pure functions, simulated over many clients at once.

The rooms: :mod:`~fedjax_pers.tasks` and :mod:`~fedjax_pers.models` (what is trained), :mod:`~fedjax_pers.data` (on
whose data), layouts and selectors (what is shared), :mod:`~fedjax_pers.aggregators` (how the server averages),
:mod:`~fedjax_pers.algorithms` (the methods of the literature), :mod:`~fedjax_pers.simulate` (running them) and
:mod:`~fedjax_pers.testing` (checking one of your own).
"""

from fedjax_pers import (
    adapters,
    aggregators,
    data,
    evaluation,
    executors,
    masks,
    mixtures,
    models,
    objectives,
    simulate,
    tasks,
)
from fedjax_pers.adaptation import with_adaptation, without_adaptation
from fedjax_pers.aggregators import Aggregator, aggregate, mean
from fedjax_pers.algorithms import Method, method, methods, register
from fedjax_pers.base import Cohort, Context, Metrics, Parts, Report, State, Task, cohort_of
from fedjax_pers.compose import Algorithm, compose, with_executor
from fedjax_pers.data import Federation
from fedjax_pers.evaluation import evaluate, summarize
from fedjax_pers.executors import Executor, chunked, looped, sharded, use_cores, vectorised
from fedjax_pers.fisher import with_fisher
from fedjax_pers.layouts import Layout, by_role, describe, interpolate, twin
from fedjax_pers.local import copy_shared, full_step, phases, reestimate, train
from fedjax_pers.parsing import parse
from fedjax_pers.paths import Selector, everything, flatten, nothing, select, where
from fedjax_pers.presets import (
    adapter,
    attention,
    bias,
    deep,
    depth,
    embedding,
    feed_forward,
    head,
    lora,
    norm,
    norm_statistics,
    shallow,
)
from fedjax_pers.simulate import History, Table, evaluate_clients, run, start
from fedjax_pers.simulate.restarts import best_start
from fedjax_pers.simulate.retention import Retention, retention
from fedjax_pers.simulate.sampling import dropouts, everyone, poisson, uniform, weighted
from fedjax_pers.simulate.sweep import Sweep, sweep, sweep_runs
from fedjax_pers.traffic import Traffic, traffic
from fedjax_pers.tuning import fine_tune

__version__ = "0.1.0"

__all__ = [
    "Aggregator",
    "Algorithm",
    "Cohort",
    "Context",
    "Executor",
    "Federation",
    "History",
    "Layout",
    "Method",
    "Metrics",
    "Parts",
    "Report",
    "Retention",
    "Selector",
    "State",
    "Sweep",
    "Table",
    "Task",
    "Traffic",
    "adapters",
    "adapter",
    "aggregate",
    "aggregators",
    "attention",
    "best_start",
    "bias",
    "by_role",
    "chunked",
    "cohort_of",
    "compose",
    "copy_shared",
    "data",
    "deep",
    "depth",
    "describe",
    "dropouts",
    "embedding",
    "evaluate",
    "evaluate_clients",
    "evaluation",
    "everyone",
    "everything",
    "executors",
    "fine_tune",
    "feed_forward",
    "flatten",
    "full_step",
    "head",
    "interpolate",
    "looped",
    "lora",
    "masks",
    "mean",
    "method",
    "methods",
    "mixtures",
    "models",
    "norm",
    "norm_statistics",
    "nothing",
    "objectives",
    "parse",
    "phases",
    "poisson",
    "reestimate",
    "register",
    "retention",
    "run",
    "select",
    "shallow",
    "sharded",
    "simulate",
    "start",
    "summarize",
    "sweep",
    "sweep_runs",
    "tasks",
    "traffic",
    "train",
    "twin",
    "uniform",
    "use_cores",
    "vectorised",
    "weighted",
    "where",
    "with_adaptation",
    "with_executor",
    "with_fisher",
    "without_adaptation",
]
