"""What clients' models have forgotten: how good each is on everybody's examples, and on its own, against before."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pers.adaptation import without_adaptation
from fedjax_pers.base import Array, State
from fedjax_pers.checks import positive_int, require
from fedjax_pers.compose import Algorithm
from fedjax_pers.data import Federation
from fedjax_pers.keys import as_key, fold_name
from fedjax_pers.simulate.placement import devices_for, everywhere
from fedjax_pers.simulate.pools import pool_for_all
from fedjax_pers.simulate.run import Table, evaluate_clients, judge


class Retention(NamedTuple):
    """Numbers of every client's model against the model before personalisation; all of them kept, ``[clients]``.

    Attributes:
      client_ids: the clients' own names.
      against: what that model is: ``"the global model"``, or ``"the client's model before it adapted"`` (fine-tuned)
        where the method has no global one.
      examples: pooled examples that every model was judged on.
      pooled: ``{metric: [clients]}`` of each client's model on the pooled examples.
      retained: that minus the number of the model before: below 0 in accuracy where a client's model has forgotten.
      gain: the same difference on the client's own examples of the split; NaN where it has none.
    """

    client_ids: tuple[Any, ...]
    against: str
    examples: int
    pooled: dict[str, np.ndarray]
    retained: dict[str, np.ndarray]
    gain: dict[str, np.ndarray]


def retention(
    algorithm: Algorithm,
    state: State,
    federation: Federation,
    split: str = "test",
    key: Array | int = 0,
    *,
    most: int = 2000,
    group: int | None = None,
    data_on: str = "auto",
) -> Retention:
    r"""Judges the personalised model of every client on the examples of all clients together.

    .. math:: r_i = A(\theta_i;\, \text{pooled}) - A(w_i;\, \text{pooled}), \qquad g_i = A(\theta_i; D_i) - A(w_i; D_i)

    ``w_i`` is the global model, or in methods without one the client's model before it fine-tunes. A client adapts on
    its own training examples as before it predicts; nothing is written back. Each of N models sees all pooled examples,
    which is why there is a bound on them.

    Example:
      >>> import fedjax_pers as fp
      >>> federation = fp.data.load("vowel_speakers")
      >>> algorithm = fp.method("fedavg_ft").make(fp.tasks.from_model(federation, "linear"))
      >>> state, _ = fp.run(algorithm, None, federation, 3)
      >>> found = fp.retention(algorithm, state, federation)
      >>> found.examples, found.retained["accuracy"].shape
      (330, (15,))

    Args:
      algorithm: what to judge.
      state: its state.
      federation: the clients in training.
      split: ``"test"``, ``"validation"`` or ``"train"``.
      key: the run's key.
      most: pooled examples; where there are more, so many are drawn from the key, without replacement.
      group: models held at once; as many as fit by default.
      data_on: as in :func:`fedjax_pers.run`.

    Raises:
      ValueError: the split has no rows, ``most`` is no whole number of at least 1, or the method has neither a global
        model nor an adaptation, so that there is nothing to have forgotten.

    Source: the differences are those of backward transfer in Lopez-Paz, Ranzato, "Gradient Episodic Memory for
    Continual Learning", NeurIPS 2017, arXiv:1706.08840, the earlier task being the federation's.
    """
    positive_int("most", most)
    require_before(algorithm)
    rows = federation.split(split).num_rows
    require(rows > 0, f"split: found {split!r}, which has no rows in {federation.name!r}; retention is judged on them")
    pool = pool_for_all(federation, split, _drawn(key, rows, most))
    shared, plain = everywhere(pool, devices_for(algorithm)), without_adaptation(algorithm)

    def on_all(algorithm: Algorithm) -> Table:
        return judge(algorithm, state, federation, lambda clients: shared, key, group=group, data_on=data_on)

    def on_own(algorithm: Algorithm) -> Table:
        return evaluate_clients(algorithm, state, federation, split, key, group=group, data_on=data_on)

    pooled, own = on_all(algorithm), on_own(algorithm)
    if algorithm.common is None:
        against, before = "the client's model before it adapted", (on_all(plain).personal, on_own(plain).personal)
    else:
        against, before = "the global model", (pooled.common, own.common)
    retained, gain = (
        {name: x - then[name] for name, x in now.personal.items()}
        for now, then in zip((pooled, own), before, strict=True)
    )
    return Retention(federation.client_ids, against, min(rows, most), pooled.personal, retained, gain)


def require_before(algorithm: Algorithm) -> None:
    """ValueError where a method has no model to compare a client's with."""
    require(
        algorithm.common is not None or algorithm.unadapted is not None,
        "retention: this method has neither a global model nor a model before a client adapts, so there is nothing to "
        "compare a client's model with",
    )


def _drawn(key: Array | int, rows: int, most: int) -> np.ndarray:
    """Which rows, in ascending order; the same for all methods of a key."""
    if rows <= most:
        return np.arange(rows)
    order = jax.random.permutation(fold_name(as_key(key), "pooled examples"), rows)
    return np.sort(np.asarray(order[:most]))
