"""The best of several random starts, for methods whose result depends on where they start."""

from __future__ import annotations

import jax
import numpy as np

from fedjax_pers.base import Array, State
from fedjax_pers.checks import positive_int
from fedjax_pers.compose import Algorithm
from fedjax_pers.data import Federation
from fedjax_pers.keys import as_key, fold_name
from fedjax_pers.simulate.run import run, start
from fedjax_pers.simulate.sampling import Sampler


def best_start(
    algorithm: Algorithm,
    federation: Federation,
    key: Array | int = 0,
    *,
    restarts: int = 5,
    rounds: int = 10,
    cohort_size: int | None = None,
    sampler: Sampler | None = None,
) -> State:
    """Several random starts, some rounds of each, and the state of that with the least training loss.

    What IFCA does against clusters that collapse. Test examples are not looked at. The state has done ``rounds``
    rounds; :func:`run` goes on from there.

    Example:
      >>> import fedjax_pers as fp
      >>> federation = fp.data.load("vowel_speakers")
      >>> ifca = fp.method("ifca").make(fp.tasks.from_model(federation, "linear"), clusters=2)
      >>> int(fp.best_start(ifca, federation, 0, restarts=2, rounds=3).round)
      3

    Args:
      algorithm: what to run.
      federation: the clients.
      key: the run's key; starts are folded from it by their number.
      restarts: number of starts.
      rounds: of each.
      cohort_size: as in :func:`run`.
      sampler: as in :func:`run`.

    Returns:
      The state whose last round had the least mean loss of clients, weighted by examples. A loss that is not finite
      never is; of equal ones the first start is taken.
    """
    positive_int("restarts", restarts)
    losses, states = [], []
    for number in range(restarts):
        first = start(algorithm, federation, fold_name(as_key(key), f"restart {number}"))
        options = {"cohort_size": cohort_size, "sampler": sampler, "evaluate_every": 0}
        state, history = run(algorithm, first, federation, rounds, key, **options)
        loss, examples = history.metrics.loss[-1], history.metrics.examples[-1]
        trained = np.isfinite(loss)
        losses.append(np.average(loss[trained], weights=examples[trained]) if trained.any() else np.inf)
        states.append(jax.tree.map(np.asarray, state))
    return jax.tree.map(jax.numpy.asarray, states[int(np.argmin(losses))])
