"""Personalised federated learning as compositions of pure functions, simulated over many clients at once."""

from fedjax_pers import aggregators, data, executors, keys, models, objectives, tasks
from fedjax_pers.aggregators import aggregate, mean
from fedjax_pers.algorithms import Method, method, methods, register
from fedjax_pers.base import Cohort, Context, Metrics, Parts, Report, State, Task, cohort_of
from fedjax_pers.compose import Algorithm, compose, with_executor
from fedjax_pers.evaluation import evaluate
from fedjax_pers.executors import chunked, looped, vectorised
from fedjax_pers.layouts import by_role, describe, interpolate, twin
from fedjax_pers.local import phases, reestimate, train
from fedjax_pers.paths import everything, nothing, select, where
from fedjax_pers.presets import bias, depth, embedding, head, lora, norm, norm_statistics
from fedjax_pers.simulate import History, run, start

__version__ = "0.1.0"
