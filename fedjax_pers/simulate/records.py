"""What a run writes down: a row for each round, a row for each client, and the numbers they sum up to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pers.base import Metrics, State
from fedjax_pers.config import Config
from fedjax_pers.data import Federation
from fedjax_pers.evaluation.statistics import summarize
from fedjax_pers.masks import personal_shares
from fedjax_pers.simulate.retention import Retention
from fedjax_pers.simulate.run import Block, Table
from fedjax_pers.traffic import Traffic, crossed

_MEGABYTE = 10**6
Row = dict[str, Any]


class Ledger:
    """Makes the rows of a run, one a round, and counts the bytes that were sent so far."""

    def __init__(self, method: str, costs: Traffic, federation: Federation, last: Row | None) -> None:
        self._method, self._costs, self._federation = method, costs, federation
        self._round = last["round"] if last else 0
        self._total = {way: _bytes(last[f"total_megabytes_{way}"]) if last else 0 for way in ("up", "down")}

    def rows(self, block: Block) -> list[Row]:
        """The rows of a block's rounds; the last one has the evaluation, where there was one."""
        rows = [self._row(_of_round(block.metrics, place)) for place in range(len(block.metrics.update_norm))]
        if block.table is not None:
            rows[-1] |= means(block.table) | clusters(block.state) | personal(block.state)
        return rows

    def _row(self, metrics: Metrics) -> Row:
        self._round += 1
        here = metrics.ids < self._federation.num_clients
        trained = here & ~metrics.rejected & ~metrics.empty
        up, down = crossed(self._costs, metrics)
        moved = {"up": int(up.sum()), "down": int(down.sum())}
        self._total = {way: self._total[way] + moved[way] for way in moved}
        loss = means_of(metrics.loss[trained], metrics.examples[trained])
        return {
            "round": self._round,
            "method": self._method,
            "participants": int(here.sum()),
            "sampled": None if here.sum() == self._federation.num_clients else self._names(metrics.ids[here]),
            "rejected": self._names(metrics.ids[metrics.rejected]),
            "empty": self._names(metrics.ids[metrics.empty]),
            "communicated": int(metrics.transmitted.sum()),
            "skipped": None if trained.any() else _reason(metrics),
            "train_loss_weighted_mean": loss[0],
            "train_loss_unweighted_mean": loss[1],
            "update_norm": metrics.update_norm,
            **self._said(metrics, here),
            **{f"megabytes_{way}": moved[way] / _MEGABYTE for way in moved},
            **{f"total_megabytes_{way}": self._total[way] / _MEGABYTE for way in moved},
        }

    def _said(self, metrics: Metrics, here: np.ndarray) -> Row:
        """Where clients say something that the server goes by: who, how much they count, and what they said."""
        if not metrics.said:
            return {}
        said = {name: values[here].tolist() for name, values in metrics.said.items()}
        return {"clients": self._names(metrics.ids[here]), "weights": metrics.weight[here].tolist(), "said": said}

    def _names(self, ids: np.ndarray) -> list[Any]:
        return [self._federation.client_ids[index] for index in ids]


def _bytes(megabytes: float) -> int:
    return round(megabytes * _MEGABYTE)


def _of_round(metrics: Metrics, place: int) -> Metrics:
    return jax.tree.map(lambda x: x[place], metrics)


def _reason(metrics: Metrics) -> str:
    rejected, empty = int(metrics.rejected.sum()), int((metrics.empty & ~metrics.rejected).sum())
    if not rejected and not empty:
        return "nobody took part"
    cases = ((rejected, "sent something not finite"), (empty, "had nothing to train on"))
    return "no upload was accepted: " + ", ".join(f"{count} {what}" for count, what in cases if count)


def means_of(values: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """The mean weighted by ``counts`` and the plain one, ``(NaN, NaN)`` over nobody."""
    if not len(values):
        return float("nan"), float("nan")
    values = np.asarray(values, np.float64)
    return float(np.average(values, weights=counts)), float(values.mean())


def means(table: Table) -> Row:
    """Means over the clients that have examples: of their personalised models, and of the global one where there is."""
    tested = table.examples > 0
    row: Row = {}
    for model, columns in (("personal", table.personal), ("global", table.common)):
        for name, values in columns.items():
            weighted, plain = means_of(values[tested], table.examples[tested])
            row |= {f"{model}_{name}_weighted_mean": weighted, f"{model}_{name}_unweighted_mean": plain}
    return row


def clusters(state: State) -> Row:
    """How many members each cluster has, and which have none, where the server keeps whose member each client is."""
    if not isinstance(state.aux, dict) or "members" not in state.aux:
        return {}
    members = np.asarray(state.aux["members"])
    count = len(state.aux["counts"]) if "counts" in state.aux else int(state.aux["clusters"])
    sizes = [int((members == cluster).sum()) for cluster in range(count)]
    empty = [cluster for cluster, size in enumerate(sizes) if not size]
    return {"clusters": {"members": sizes, "empty": empty, "clients_without": int((members < 0).sum())}}


def personal(state: State) -> Row:
    """How much of each layer is personal, on average over clients that took part, where that is decided in the run."""
    there = np.asarray(state.seen) > 0
    shares = personal_shares(state) if there.any() else {}
    return {"personal_share": {layer: float(x[there].mean()) for layer, x in shares.items()}} if shares else {}


def accuracy(row: Mapping[str, Any]) -> float | None:
    """The unweighted mean accuracy of the personalised models, where the row has an evaluation."""
    return row.get("personal_accuracy_unweighted_mean")


def curve(rows: Iterable[Row], clients: int) -> dict[str, list[float]]:
    """Rounds, accuracy and megabytes of one client (up and down since the start), at the evaluations."""
    judged = [row for row in rows if accuracy(row) is not None]
    return {
        "round": [row["round"] for row in judged],
        "accuracy": [accuracy(row) for row in judged],
        "megabytes": [(row["total_megabytes_up"] + row["total_megabytes_down"]) / clients for row in judged],
    }


class Newcomers(NamedTuple):
    """Two evaluations of the clients that never were in training: before and after they adapted on their own data."""

    before: Table
    after: Table


def client_columns(
    federation: Federation, trained: Table, unseen: Newcomers | None, kept: Retention | None = None
) -> dict[str, list[Any]]:
    """The columns of ``clients.csv``: clients in training, then those never there, with ``unadapted_...`` numbers.

    ``pooled_...``, ``retention_...`` and ``gain_...`` are those of :class:`~fedjax_pers.simulate.retention.Retention`.
    """
    adapted = {} if kept is None else _retention_columns(kept)
    parts: list[tuple[Any, Table, int, dict[str, np.ndarray]]] = [(federation, trained, 0, adapted)]
    if unseen is not None:
        nobody = {f"unadapted_{name}": np.full_like(x, np.nan) for name, x in trained.personal.items()}
        parts[0] = (federation, trained, 0, nobody | adapted)
        before = {f"unadapted_{name}": values for name, values in unseen.before.personal.items()}
        strangers = {name: np.full(federation.unseen.num_clients, np.nan) for name in adapted}
        parts.append((federation.unseen, unseen.after, 1, before | strangers))
    columns: dict[str, list[Any]] = {}
    for part, table, never, further in parts:
        columns_of_part = {
            "client": table.client_ids,
            "unseen": [never] * part.num_clients,
            "train_examples": part.sizes("train"),
            "test_examples": table.examples,
            "rounds_taken_part": table.rounds_taken_part,
            **table.personal,
            **{f"global_{name}": values for name, values in table.common.items()},
            **further,
        }
        for name, values in columns_of_part.items():
            columns.setdefault(name, []).extend(values)
    return columns


def _retention_columns(kept: Retention) -> dict[str, np.ndarray]:
    tables = {"pooled": kept.pooled, "retention": kept.retained, "gain": kept.gain}
    return {f"{what}_{name}": values for what, table in tables.items() for name, values in table.items()}


def summary(
    config: Config,
    rows: list[Row],
    costs: Traffic,
    trained: Table,
    unseen: Newcomers | None,
    kept: Retention | None = None,
) -> dict[str, Any]:
    """The numbers of ``summary.json``. ``hurt`` is against this run's own global model, where it has one."""
    clients, last = len(trained.client_ids), rows[-1]
    rejected = sorted({name for row in rows for name in row["rejected"]})
    return {
        "method": config.method,
        "rounds": last["round"],
        "judged_on": config.split,
        "clients": clients,
        "clients_that_took_part": int((trained.rounds_taken_part > 0).sum()),
        **_scores(trained),
        "unseen": None if unseen is None else _newcomers(unseen),
        "retention": None if kept is None else _retention(kept, trained.examples),
        "rejected_uploads": sum(len(row["rejected"]) for row in rows),
        "rejected_clients": rejected,
        "skipped_rounds": [row["round"] for row in rows if row["skipped"]],
        "clusters": last.get("clusters"),
        "personal_share": last.get("personal_share"),
        "traffic": {
            "bytes_up_per_client_and_round": costs.up + costs.metadata_up,
            "bytes_down_per_client_and_round": costs.down,
            "bytes_down_per_client_once": costs.first_down,
            "bytes_kept_per_client": costs.row,
            **{f"total_megabytes_{way}": last[f"total_megabytes_{way}"] for way in ("up", "down")},
            **{f"megabytes_{way}_per_client": last[f"total_megabytes_{way}"] / clients for way in ("up", "down")},
        },
    }


def _newcomers(unseen: Newcomers) -> dict[str, Any]:
    before = summarize(unseen.before.personal["accuracy"], unseen.before.examples)
    return {"clients": len(unseen.after.client_ids), "unadapted_accuracy": before, **_scores(unseen.after)}


def _retention(kept: Retention, examples: np.ndarray) -> dict[str, Any]:
    """Every client counts once, whatever its number of examples."""
    changes = {"accuracy": (kept.retained, np.ones_like(examples)), "local_gain": (kept.gain, examples)}
    statistics = ("unweighted_mean", "population_std", "worst", "median", "best", "clients")
    return {"against": kept.against, "pooled_examples": kept.examples} | {
        what: {name: summarize(table["accuracy"], counts)[name] for name in statistics}
        for what, (table, counts) in changes.items()
    }


def _scores(table: Table) -> dict[str, Any]:
    own, common = table.personal["accuracy"], table.common.get("accuracy")
    return {
        "personal_accuracy": summarize(own, table.examples, common),
        "global_accuracy": None if common is None else summarize(common, table.examples),
    }
