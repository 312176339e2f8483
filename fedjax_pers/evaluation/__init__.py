"""Per-client numbers and what they sum up to."""

from fedjax_pers.evaluation.evaluate import evaluate
from fedjax_pers.evaluation.statistics import over_seeds, summarize

__all__ = ["evaluate", "over_seeds", "summarize"]
