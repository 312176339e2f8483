"""Parts to an algorithm: which leaves, how a client trains, how the server aggregates."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_pers.aggregators import Aggregator, Collected, Sender, Server, mean
from fedjax_pers.aggregators.base import finished, seen_of_one, taken
from fedjax_pers.base import Array, Cohort, Context, Leaves, Metrics, Parts, Report, State, Task
from fedjax_pers.checks import one_of, require
from fedjax_pers.executors import Executor
from fedjax_pers.executors.default import default_executor, overridden
from fedjax_pers.executors.lanes import map_reduce, padding
from fedjax_pers.keys import as_key, client_key, fold_name, round_key
from fedjax_pers.layouts import Layout, LayoutMaker, by_role
from fedjax_pers.local import ClientUpdate, train
from fedjax_pers.paths import everything
from fedjax_pers.trees import NOWHERE, all_finite, gather_rows, scatter_rows, stack_rows, where

Sampling = Literal["uniform", "examples"]
SAID = "said/"
"""What a client says beside its leaves goes by these names in an upload."""


class Recipe(NamedTuple):
    """How an algorithm was made, so that it can be made again with float settings as traced values."""

    factory: Callable[..., Any]
    task: Task
    static: tuple[tuple[str, Any], ...]
    floats: dict[str, float]
    executor: Executor | None = None

    def build(self, floats: dict[str, Any]) -> Algorithm:
        """The algorithm with other values of its float settings (traced ones are welcome)."""
        algorithm = self.factory(self.task, **dict(self.static), **floats)
        return algorithm if self.executor is None else with_executor(algorithm, self.executor)


class Algorithm(NamedTuple):
    """A whole method. The first three functions are the contract; the rest is what tools need.

    Attributes:
      init: ``init(params, key, *, num_clients) -> State``; ``params`` are the task's variables.
      step: ``step(state, cohort, key) -> (State, Metrics)``; ``key`` is the run's key, the same in every round.
      personalize: ``personalize(state, cohort, key) -> variables [clients, ...]`` that ``task.metrics`` can read.
      task: the task whose metrics judge the personalised variables.
      common: ``common(state) -> variables`` of the global model, or ``None`` where the method has none.
      exchange: ``exchange(state, cohort, key, tamper) -> (download, upload, row)`` of the cohort's first client: the
        trees that cross, by which traffic is counted. ``tamper`` changes the personal leaves between training and
        upload, by which the firewall is checked.
      layout: who owns which leaf.
      participation: ``"any"``, or ``"everyone"`` where a round needs all clients.
      sampling: how a cohort of a given size is drawn, ``"uniform"`` or in proportion to ``"examples"``.
      at_least: for how many clients a round must have places.
      executor: the one that its parts named; ``None`` for the default.
      sees: what the server must know of a single client, in words; ``""`` where sums over clients are enough.
      unadapted: ``personalize`` without the fine-tuning with which it ends; ``None`` where it ends without any.
      recipe: set by the registry.
    """

    init: Callable[..., State]
    step: Callable[[State, Cohort, Array], tuple[State, Metrics]]
    personalize: Callable[[State, Cohort, Array], Any]
    task: Task
    common: Callable[[State], Any] | None = None
    exchange: Callable[..., tuple[Leaves, Leaves, Leaves]] | None = None
    layout: Layout | None = None
    participation: str = "any"
    sampling: Sampling = "uniform"
    at_least: int = 0
    executor: Executor | None = None
    sees: str = ""
    unadapted: Callable[[State, Cohort, Array], Any] | None = None
    recipe: Recipe | None = None


class Outcome(NamedTuple):
    """What the loop over clients keeps of each (besides its summand)."""

    row: Leaves
    report: Report
    said: dict[str, Array]
    weight: Array
    rejected: Array
    empty: Array
    kept: Any


def compose(
    task: Task,
    *,
    layout: LayoutMaker | None = None,
    client: ClientUpdate | None = None,
    aggregator: Aggregator | None = None,
    adapt: ClientUpdate | None = None,
    newcomer: ClientUpdate | None = None,
    executor: Executor | None = None,
    participation: str = "any",
    sampling: Sampling = "uniform",
    at_least: int = 0,
    secure_aggregation: bool = False,
) -> Algorithm:
    """An algorithm from its parts. With the defaults of all of them it is FedAvg.

    Example:
      >>> import fedjax_pers as fp
      >>> task = fp.tasks.from_model(fp.data.load("vowel_speakers"), "mlp")
      >>> fedper = fp.compose(task, layout=fp.by_role(personal=fp.head(1)), client=fp.train(0.1, epochs=1))

    Args:
      task: the model and what it is trained for.
      layout: which leaves are shared, personal, frozen (all shared).
      client: how a client trains (one epoch of SGD on everything it may train).
      aggregator: how uploads change the server (mean weighted by examples).
      adapt: how every client fine-tunes the model that predicts, on its training data (not at all). All its leaves are
        ``"personal"`` there; the result is never written back.
      newcomer: what a client does first if it was never seen in training (nothing).
      executor: how clients are mapped onto the machine (chosen by device and model size).
      participation: ``"everyone"`` where a round is wrong unless all clients take part.
      sampling: how a run draws a cohort of a given size: uniformly, or in proportion to ``"examples"``.
      at_least: for how many clients a round must have places; runs with smaller cohorts are refused.
      secure_aggregation: the server is to know sums over clients alone; an aggregator that needs more is refused.
    """
    bound, alone = (layout or by_role())(task), by_role(personal=everything)(task)
    update, aggregator = client or train(), aggregator or mean()
    one_of("sampling", sampling, ("uniform", "examples"))
    if secure_aggregation:
        require_sums(seen_of_one(aggregator))

    def init(params: Any, key: Array | int, *, num_clients: int) -> State:
        parts, shared = _starting(bound, aggregator, params, key)
        parts = bound.grown(parts, num_clients)
        server = aggregator.init(shared, bound.trainable & frozenset(shared), num_clients)
        server = aggregator.draw(server, fold_name(as_key(key), "server"))
        return State(
            shared=server.shared,
            rows=stack_rows(parts.personal, num_clients),
            fresh=parts.personal,
            frozen=parts.frozen,
            opt=server.opt,
            aux=server.aux,
            seen=jnp.zeros(num_clients, jnp.int32),
            round=jnp.zeros((), jnp.int32),
        )

    def step(state: State, cohort: Cohort, key: Array | int) -> tuple[State, Metrics]:
        key = as_key(key)
        server = server_of(state, fold_name(key, "common"))
        cohort = aggregator.invite(server, ordered(cohort))
        chosen = executor or default_executor((state.shared, state.fresh, state.frozen))
        items = items_of(state, cohort, key, "train", padding(chosen, cohort.ids.shape[0]))

        def one(common: tuple[State, Cohort], item: Item) -> tuple[Any, Outcome]:
            state, cohort = common
            visit = _visit(bound, update, aggregator, state, cohort, item)
            parts, report, sender = visit.parts, visit.report, visit.sender
            accepted = item.valid & all_finite((parts.shared, parts.personal, sender.said))
            counts = accepted & (report.steps > 0)
            weight = jnp.where(counts, aggregator.weigh(server_of(state, item.common), sender), 0.0)
            summand, kept = taken(aggregator, weight, counts, visit.received, parts.shared, sender)
            rejected, empty = item.valid & ~accepted, item.valid & (report.steps == 0)
            row = where(counts, parts.personal, item.row)
            said = {name: x for name, x in sender.said.items() if x.ndim == 0}  # arrays would fill the record of a run
            return summand, Outcome(row, report, said, weight, rejected, empty, kept)

        total, out = map_reduce(chosen, one, (state._replace(rows={}), cohort), items, items.size)
        out = jax.tree.map(lambda x: x[: cohort.ids.shape[0]], out)
        trainable = bound.trainable & frozenset(state.shared)
        took_part = cohort.valid & ~out.rejected & ~out.empty
        after = finished(aggregator, server, Collected(total, out.kept, out.weight, cohort.ids, took_part), trainable)
        new = state._replace(
            shared=after.shared,
            opt=after.opt,
            aux=after.aux,
            rows=scatter_rows(state.rows, _places(cohort), out.row),
            seen=state.seen.at[cohort.ids].add(took_part.astype(jnp.int32), mode="drop"),
            round=state.round + 1,
        )
        return new, _metrics(cohort, out, state.shared, after.shared)

    def personalize(adapt: ClientUpdate | None, state: State, cohort: Cohort, key: Array | int) -> Any:
        chosen = executor or default_executor((state.shared, state.fresh, state.frozen))
        count = cohort.ids.shape[0]
        items = items_of(state, cohort, as_key(key), "personalize", padding(chosen, count))

        def one(common: tuple[State, Cohort], item: Item) -> tuple[tuple, Any]:
            state, cohort = common
            download = (aggregator.deliver or aggregator.render)(server_of(state, item.common), item.id)
            parts, context = _settled(bound, aggregator, download, state, cohort, item)
            if newcomer is not None:
                parts = _if_unseen(newcomer, bound, parts, context)
            variables = bound.view("model").read(parts)
            return (), variables if adapt is None else fine_tuned(adapt, alone, variables, context)

        _, models = map_reduce(chosen, one, (state._replace(rows={}), cohort), items, items.size)
        return jax.tree.map(lambda x: x[:count], models)

    def common(state: State) -> Any:
        server = Server(state.shared, state.opt, state.aux)
        return bound.view(bound.common).read(Parts(aggregator.whole(server), state.fresh, state.frozen))

    def exchange(
        state: State, cohort: Cohort, key: Array | int, tamper: Callable[[Leaves], Leaves] = lambda row: row
    ) -> tuple[Leaves, Leaves, Leaves]:
        items = items_of(state, ordered(cohort), as_key(key), "train", 0)
        first = jax.tree.map(lambda x: x[0], items)
        visit = _visit(bound, update, aggregator, state, cohort, first)
        parts = visit.parts._replace(personal=tamper(visit.parts.personal))
        return visit.download, _upload(parts, visit.sender.said), parts.personal

    whole = common if bound.common and aggregator.whole else None
    return Algorithm(
        init,
        step,
        functools.partial(personalize, adapt),
        task,
        whole,
        exchange,
        bound,
        participation,
        sampling,
        at_least,
        executor,
        seen_of_one(aggregator),
        None if adapt is None else functools.partial(personalize, None),
    )


def require_sums(sees: str) -> None:
    """ValueError where a server must know more than sums over clients."""
    require(not sees, f"secure_aggregation: found true; this method cannot have it, since the server must see {sees}")


def with_executor(algorithm: Algorithm, executor: Executor) -> Algorithm:
    """The same algorithm, mapped onto the machine in another way; where its parts named an executor, that one stays.

    Example:
      >>> import fedjax_pers as fp
      >>> task = fp.tasks.from_model(fp.data.load("vowel_speakers"), "linear")
      >>> one_by_one = fp.with_executor(fp.method("fedavg").make(task), fp.looped())
    """

    def under(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with overridden(executor):
                return function(*args, **kwargs)

        return call

    recipe = algorithm.recipe and algorithm.recipe._replace(executor=executor)
    return algorithm._replace(
        step=under(algorithm.step),
        personalize=under(algorithm.personalize),
        unadapted=algorithm.unadapted and under(algorithm.unadapted),
        executor=algorithm.executor or executor,
        recipe=recipe,
    )


def _starting(layout: Layout, aggregator: Aggregator, params: Any, key: Array | int) -> tuple[Parts, Leaves]:
    """First parts, and the server's shared leaves: those, or stacked with those of further random starts."""
    parts = jax.tree.map(jnp.array, layout.init(layout.task.adopt(params, as_key(key))))
    if aggregator.starts == 1:
        return parts, parts.shared
    keys = [fold_name(as_key(key), f"start {number}") for number in range(1, aggregator.starts)]
    others = [layout.init(layout.task.init(key)).shared for key in keys]
    return parts, jax.tree.map(lambda *x: jnp.stack(x), parts.shared, *others)


class Item(NamedTuple):
    """One client of a cohort, without the pool of examples."""

    id: Array
    start: Array
    size: Array
    valid: Array
    key: Array
    common: Array
    row: Leaves

    def context(self, cohort: Cohort, state: State, received: Parts) -> Context:
        """What the client knows."""
        unseen, pool, room = self.id >= state.seen.shape[0], cohort.data, cohort.room
        return Context(pool, self.start, self.size, self.key, self.common, unseen, state.round, received, room)


def ordered(cohort: Cohort) -> Cohort:
    """By ascending id, padding last: sums over clients do not depend on the order in which they were named."""
    return cohort.at(jnp.argsort(cohort.ids))


def _places(cohort: Cohort) -> Array:
    """Where the clients' rows lie in ``State.rows``; what is no client has none, whatever its other fields say."""
    return cohort.ids if cohort.slots is None else jnp.where(cohort.valid, cohort.slots, NOWHERE)


def items_of(state: State, cohort: Cohort, key: Array, purpose: str, extra: int) -> Item:
    """The clients of a cohort, ``[clients + extra, ...]``, with their rows and their keys for a purpose."""

    def pad(x: Array, value: int) -> Array:
        return jnp.concatenate([x, jnp.full((extra,), value, x.dtype)]) if extra else x

    ids, valid = pad(cohort.ids, state.seen.shape[0]), pad(cohort.valid, False)
    keys = jax.vmap(lambda tag: client_key(key, purpose, state.round, tag))(pad(cohort.tags, 0))
    size = jnp.where(valid, pad(cohort.size, 0), 0)
    common = jnp.broadcast_to(fold_name(key, "common"), ids.shape)
    rows = gather_rows(state.rows, pad(_places(cohort), NOWHERE), state.fresh)
    return Item(ids, pad(cohort.start, 0), size, valid, keys, common, rows)


def server_of(state: State, common: Array) -> Server:
    """The server in a round; its key is folded from the one that all clients of the run share."""
    return Server(state.shared, state.opt, state.aux, round_key(common, "server", state.round))


class _Visit(NamedTuple):
    """A client's round: what was sent to it, the leaves that it trained, its parts afterwards, and what it says."""

    download: Leaves
    received: Leaves
    parts: Parts
    report: Report
    sender: Sender


def _received(
    layout: Layout, aggregator: Aggregator, download: Leaves, state: State, cohort: Cohort, item: Item
) -> tuple[Parts, dict[str, Array], Context]:
    """A client's parts before it trains, what it says of its download, and what it knows.

    What it was sent and does not pick is frozen: it uses that, and sends nothing of it back.
    """
    parts = Parts(download, item.row, state.frozen)
    said = aggregator.ask(layout, parts, item.context(cohort, state, parts))
    picked = aggregator.pick(download, said)
    lent = {name: x for name, x in download.items() if name not in picked}
    parts = Parts(picked, item.row, state.frozen | lent)
    return parts, said, item.context(cohort, state, parts)._replace(download=download)


def _settled(
    layout: Layout, aggregator: Aggregator, download: Leaves, state: State, cohort: Cohort, item: Item
) -> tuple[Parts, Context]:
    """A client's parts and what it knows, before it predicts."""
    if aggregator.settle is None:
        parts, _, context = _received(layout, aggregator, download, state, cohort, item)
        return parts, context
    parts = Parts(download, item.row, state.frozen)
    parts = parts._replace(shared=aggregator.settle(layout, parts, item.context(cohort, state, parts)))
    return parts, item.context(cohort, state, parts)


def _visit(
    layout: Layout, update: ClientUpdate, aggregator: Aggregator, state: State, cohort: Cohort, item: Item
) -> _Visit:
    download = aggregator.render(server_of(state, item.common), item.id)
    received, said, context = _received(layout, aggregator, download, state, cohort, item)
    parts, report = update(layout, received, context)
    report = jax.tree.map(jnp.asarray, report)
    sizes = jnp.where(cohort.valid, cohort.size, 0)
    sender = Sender(item.id, item.size, report, said, cohort.ids, sizes)
    return _Visit(download, received.shared, parts, report, sender)


def _upload(parts: Parts, said: dict[str, Array]) -> Leaves:
    """What leaves the client: its shared leaves, whatever the client update did to the others, and what it says."""
    return parts.shared | {f"{SAID}{name}": x for name, x in said.items()}


def _if_unseen(newcomer: ClientUpdate, layout: Layout, parts: Parts, context: Context) -> Parts:
    # Clients known from training have no examples to adapt on here, so their loops take no step.
    adapted, _ = newcomer(layout, parts, context._replace(size=jnp.where(context.unseen, context.size, 0)))
    return where(context.unseen, adapted, parts)


def fine_tuned(adapt: ClientUpdate, alone: Layout, variables: Any, context: Context) -> Any:
    """The variables after fine-tuning, in a layout in which all leaves are the client's own."""
    # Fine-tuning acts on the model that predicts, whoever owned its leaves: frozen ones (FedBABU's head) train too.
    parts = alone.init(variables)
    parts, _ = adapt(alone, parts, context._replace(received=parts))
    return alone.view("model").read(parts)


def _metrics(cohort: Cohort, out: Outcome, before: Leaves, after: Leaves) -> Metrics:
    mass = out.weight.sum()
    floats = [n for n, x in before.items() if jnp.issubdtype(x.dtype, jnp.floating)]
    change = {name: after[name].astype(jnp.float32) - before[name].astype(jnp.float32) for name in floats}
    return Metrics(
        ids=cohort.ids,
        loss=jnp.where(cohort.valid & ~out.rejected, out.report.loss, jnp.nan),
        steps=jnp.where(cohort.valid, out.report.steps, 0),
        examples=jnp.where(cohort.valid, cohort.size, 0),
        weight=out.weight / jnp.where(mass > 0, mass, 1),
        said=out.said,
        rejected=out.rejected,
        empty=out.empty,
        transmitted=cohort.valid & out.report.transmitted,
        update_norm=optax.tree.norm(change) if change else jnp.zeros(()),
        spared_up=jnp.where(cohort.valid, out.report.spared_up, 0),
        spared_down=jnp.where(cohort.valid, out.report.spared_down, 0),
    )
