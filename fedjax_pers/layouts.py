"""Layouts: which leaves of a model are shared, personal and frozen, and which models can be read from them.

A layout maker (``by_role(...)``, ``twin(...)``, ``interpolate(...)``) is a function of a task; calling it resolves the
selectors against the task's real leaves. Ownership only: what *trains* in a phase is said by the phase.

Names of leaves are unique over the three roles. A second copy of the model is called ``own/...``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from rich.table import Table

from fedjax_pers.base import Leaves, Parts, Task
from fedjax_pers.checks import number, require
from fedjax_pers.paths import SelectorLike, as_selector, assign, flatten, nothing, unflattener
from fedjax_pers.presets import Model, model_of
from fedjax_pers.trees import num_bytes

Statistics = Literal["average", "local", "ignore"]
OWN = "own/"


class View(NamedTuple):
    """A model that can be read from a client's parts.

    Attributes:
      read: ``read(parts) -> variables``.
      keys: where each path of the model lies in the parts.
    """

    read: Callable[[Parts], Any]
    keys: Mapping[str, str]

    def tracked(self, parts: Parts, tracked: Any) -> Leaves:
        """A loss's ``tracked`` leaves under their names in the parts; what is frozen there, or of nobody, stays."""
        found = flatten(tracked) if jax.tree.leaves(tracked) else {}
        named = {self.keys[path]: x for path, x in found.items() if path in self.keys}
        return {name: x for name, x in named.items() if name not in parts.frozen}


def as_they_are(parts: Parts, num_clients: int) -> Parts:
    """Most layouts do not depend on how many clients there are."""
    return parts


class Layout(NamedTuple):
    """A layout resolved for a task.

    Attributes:
      task: the task.
      model: order and kinds of its layers, for selectors.
      init: ``init(variables) -> Parts``.
      views: models by name: ``"model"`` is the one that predicts; ``"shared"`` and ``"own"`` where they exist.
      trainable: names of leaves that an optimiser may change: floating, not frozen, no running statistics.
      common: the view that is a whole model of the server's alone, or ``None`` (there is no global model).
      grown: ``grown(parts, num_clients) -> Parts`` adds leaves whose shape depends on the number of clients.
    """

    task: Task
    model: Model
    init: Callable[[Any], Parts]
    views: Mapping[str, View]
    trainable: frozenset[str]
    common: str | None
    grown: Callable[[Parts, int], Parts] = as_they_are

    def view(self, name: str) -> View:
        """The view of that name; ValueError where the layout has none."""
        if name not in self.views:
            raise ValueError(f"view: found {name!r}; this layout has {sorted(self.views)}")
        return self.views[name]


LayoutMaker = Callable[[Task], Layout]


def shared_shapes(layout: Layout) -> Leaves:
    """Shapes of the leaves that travel, by name."""
    return jax.eval_shape(lambda: layout.init(layout.task.init(jax.random.key(0)))).shared


def shared_or_refused(make: LayoutMaker, task: Task) -> LayoutMaker:
    """The same layout; ValueError where it leaves nothing shared, for methods whose server works on shared leaves."""
    layout = make(task)
    require(
        bool(shared_shapes(layout)), "personal: nothing is left to be shared, and this method's server works on that"
    )
    return make


def leaves_of(parts: Parts, role: str = "all") -> Leaves:
    """The leaves of a role: ``"shared"``, ``"personal"``, or ``"all"`` (both)."""
    if role == "all":
        return {**parts.shared, **parts.personal}
    if role not in ("shared", "personal"):
        raise ValueError(f"role: found {role!r}; allowed are 'shared', 'personal', 'all'")
    return getattr(parts, role)


def trainable_leaves(layout: Layout, parts: Parts, role: str = "all") -> Leaves:
    """The leaves of a role that an optimiser may change."""
    return {name: x for name, x in leaves_of(parts, role).items() if name in layout.trainable}


def replace(parts: Parts, new: Leaves) -> Parts:
    """``parts`` with some shared or personal leaves replaced, by name."""
    unknown = sorted(set(new) - set(parts.shared) - set(parts.personal))
    if unknown:
        raise ValueError(f"leaves: {unknown} are neither shared nor personal")
    return parts._replace(
        shared={name: new.get(name, x) for name, x in parts.shared.items()},
        personal={name: new.get(name, x) for name, x in parts.personal.items()},
    )


class _Resolved(NamedTuple):
    model: Model
    leaves: Leaves  # shapes by path
    roles: Mapping[str, str]  # path -> role
    unflatten: Callable[[Leaves], Any]
    trainable: frozenset[str]


def _resolve(task: Task, personal: SelectorLike, frozen: SelectorLike, statistics: Statistics) -> _Resolved:
    variables = jax.eval_shape(task.init, jax.random.key(0))
    leaves = flatten(variables)
    if not leaves:
        raise ValueError("task: init returns no leaves; a model needs at least one array")
    model = model_of(task, variables)
    chosen = {}
    for role, selector in (("personal", as_selector(personal)), ("frozen", as_selector(frozen))):
        chosen[role] = selector.select(leaves, model)
        require(
            bool(chosen[role]) or selector == nothing,
            f"{role}: {selector} selects no leaf of this model; where that is meant, say {role}=nothing",
        )
    tracked = task.statistics.select(leaves, model)
    # The treatment of statistics applies to those that no selector has claimed.
    rest = tracked - chosen["personal"] - chosen["frozen"]
    treatment = {"average": None, "local": "personal", "ignore": "frozen"}
    if statistics not in treatment:
        raise ValueError(f"statistics: found {statistics!r}; allowed are {sorted(treatment)}")
    if (role := treatment[statistics]) is not None:
        chosen[role] = chosen[role] | rest
    roles = assign(chosen, leaves, default="shared")
    private = task.private.select(leaves, model)
    given_away = sorted(path for path in private if roles[path] == "shared")
    require(not given_away, f"personal: {given_away} would be shared, which this task keeps private; name them here")
    floating = {name for name, x in leaves.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    trainable = frozenset(name for name in floating - tracked if roles[name] != "frozen")
    if not trainable:
        raise ValueError(f"frozen: {as_selector(frozen)} leaves nothing that can be trained of {sorted(leaves)}")
    return _Resolved(model, leaves, roles, unflattener(variables), trainable)


def _of_role(resolved: _Resolved, leaves: Leaves, role: str) -> Leaves:
    return {name: jnp.array(x) for name, x in leaves.items() if resolved.roles[name] == role}


def _view(resolved: _Resolved, keys: Mapping[str, str]) -> View:
    def read(parts: Parts) -> Any:
        leaves = _everything(parts)
        return resolved.unflatten({path: leaves[key] for path, key in keys.items()})

    return View(read, keys)


def _everything(parts: Parts) -> Leaves:
    return {**parts.frozen, **parts.shared, **parts.personal}


def by_role(
    *, personal: SelectorLike = nothing, frozen: SelectorLike = nothing, statistics: Statistics = "average"
) -> LayoutMaker:
    """One model whose leaves are shared, except those that selectors make personal or frozen.

    Example:
      >>> import fedjax_pers as fp
      >>> federation = fp.data.load("vowel_speakers")
      >>> task = fp.tasks.from_model(federation, "mlp")
      >>> layout = fp.by_role(personal=fp.head(1))(task)
      >>> sorted(layout.init(task.init(jax.random.key(0))).personal)
      ['params/head/bias', 'params/head/kernel']

    Args:
      personal: leaves that stay with the client.
      frozen: leaves that never change; kept once, never sent.
      statistics: running statistics that no selector claims: ``"average"`` them with the rest, keep them ``"local"``
        (SiloBN), or ``"ignore"`` what clients compute (they stay at their initial value).
    """

    def bind(task: Task) -> Layout:
        resolved = _resolve(task, personal, frozen, statistics)

        def init(variables: Any) -> Parts:
            leaves = flatten(variables)
            return Parts(*(_of_role(resolved, leaves, role) for role in Parts._fields))

        view = _view(resolved, {path: path for path in resolved.leaves})
        alone = "personal" not in resolved.roles.values()
        return Layout(task, resolved.model, init, {"model": view}, resolved.trainable, "model" if alone else None)

    return bind


def _copies(task: Task, frozen: SelectorLike, statistics: Statistics) -> tuple[_Resolved, Callable[[Any], Parts], dict]:
    """A shared model and a client's own copy of it: the parts, and the two views."""
    resolved = _resolve(task, nothing, frozen, statistics)
    taken = sorted(path for path in resolved.leaves if path.startswith(OWN))
    require(not taken, f"task: found leaves {taken}; {OWN!r} marks a client's own copies, rename the key")
    moving = [path for path in resolved.leaves if resolved.roles[path] != "frozen"]
    # A statistic that stays local has no shared twin: both models of the client read its own.
    twinned = [path for path in moving if resolved.roles[path] == "shared"]

    def init(variables: Any) -> Parts:
        leaves = flatten(variables)
        shared = {path: jnp.array(leaves[path]) for path in twinned}
        local = {path: jnp.array(leaves[path]) for path in moving if path not in twinned}
        own = {OWN + path: jnp.array(leaves[path]) for path in moving}
        return Parts(shared, {**own, **local}, _of_role(resolved, leaves, "frozen"))

    def view(prefix: str) -> View:
        return _view(resolved, {path: prefix + path if path in moving else path for path in resolved.leaves})

    return resolved, init, {"shared": view(""), "own": view(OWN)}


def twin(*, frozen: SelectorLike = nothing, statistics: Statistics = "average") -> LayoutMaker:
    """Two whole models: one shared, one the client's own (``own/...``), which predicts (Ditto, pFedMe, L2GD)."""

    def bind(task: Task) -> Layout:
        resolved, init, views = _copies(task, frozen, statistics)
        trainable = resolved.trainable | {OWN + path for path in resolved.trainable}
        common = None if statistics == "local" else "shared"
        return Layout(task, resolved.model, init, {**views, "model": views["own"]}, trainable, common)

    return bind


def interpolate(
    weight: Any, *, frozen: SelectorLike = nothing, statistics: Statistics = "average", name: str = "alpha"
) -> LayoutMaker:
    """Two models that predict by the mixture of their *parameters*: ``alpha * own + (1 - alpha) * shared`` (APFL).

    ``alpha`` is a personal scalar that starts at ``weight``, in 0 .. 1; ``name`` is what its leaf is called.
    """
    number("weight", weight, 0, 1)

    def bind(task: Task) -> Layout:
        resolved, init_copies, views = _copies(task, frozen, statistics)
        taken = {*views["shared"].keys.values(), *views["own"].keys.values()}
        require(name not in taken, f"name: found {name!r}, which is a leaf of the models; choose another")

        def init(variables: Any) -> Parts:
            parts = init_copies(variables)
            return parts._replace(personal={**parts.personal, name: jnp.asarray(weight, jnp.float32)})

        def read(parts: Parts) -> Any:
            alpha, everything = parts.personal[name], _everything(parts)

            def mix(path: str, key: str) -> Any:
                own = everything[key]
                if path not in parts.shared or not jnp.issubdtype(own.dtype, jnp.floating):
                    return own
                a = alpha.astype(own.dtype)
                return a * own + (1 - a) * parts.shared[path]

            return resolved.unflatten({path: mix(path, key) for path, key in views["own"].keys.items()})

        trainable = resolved.trainable | {OWN + path for path in resolved.trainable}
        common = None if statistics == "local" else "shared"
        return Layout(task, resolved.model, init, {**views, "model": View(read, views["own"].keys)}, trainable, common)

    return bind


def without(layout: Layout, made: Callable[[Leaves], Leaves]) -> Layout:
    """A layout with one model, of which some leaves have no owner: they are made of the others when it is read.

    Args:
      layout: of one model, such as :func:`by_role` makes.
      made: ``made(leaves) -> leaves``, by path. What it makes neither travels nor is kept, and is not trained.
    """
    shapes = jax.eval_shape(lambda: layout.init(layout.task.init(jax.random.key(0))))
    dropped = frozenset(jax.eval_shape(made, _everything(shapes)))
    whole = layout.view("model")

    def init(variables: Any) -> Parts:
        parts = layout.init(variables)
        return Parts(*({name: x for name, x in leaves.items() if name not in dropped} for leaves in parts))

    def read(parts: Parts) -> Any:
        return whole.read(parts._replace(frozen={**parts.frozen, **made(_everything(parts))}))

    view = View(read, {path: key for path, key in whole.keys.items() if path not in dropped})
    return layout._replace(init=init, views={"model": view}, trainable=layout.trainable - dropped, common=None)


class Description(NamedTuple):
    """What :func:`describe` finds: one row a leaf ``(role, path, shape, bytes)``, and totals in bytes."""

    rows: tuple[tuple[str, str, tuple[int, ...], int], ...]
    shared: int
    personal: int
    frozen: int
    model: int

    @property
    def uplink(self) -> float:
        """Bytes sent, as a share of the model's (what FedAvg sends): with one model, 1 - personal - frozen fraction."""
        return self.shared / self.model if self.model else 0.0

    def __str__(self) -> str:
        return (
            f"shared {self.shared:,} B, personal {self.personal:,} B, frozen {self.frozen:,} B; "
            f"uplink {self.shared:,} B a client and round, {self.uplink:.2%} of the model"
        )

    def __rich__(self) -> Table:
        table = Table(title="Layout", caption=str(self))
        for column in ("role", "leaf"):
            table.add_column(column, overflow="fold")
        for column in ("shape", "bytes"):
            table.add_column(column, justify="right")
        for role, path, shape, size in self.rows:
            table.add_row(role, path, "x".join(map(str, shape)) or "scalar", f"{size:,}")
        return table


def describe(layout: Layout, variables: Any = None) -> Description:
    """Role, path, shape and bytes of every leaf, and the honest share of the uplink.

    A head of 5 % of the parameters that stays personal saves 5 % of the uplink, not 95 %.

    Example:
      >>> import fedjax_pers as fp
      >>> task = fp.tasks.from_model(fp.data.load("vowel_speakers"), "linear")
      >>> print(describe(fp.by_role(personal="bias")(task)))
      shared 440 B, personal 44 B, frozen 0 B; uplink 440 B a client and round, 90.91% of the model
    """
    init = layout.init if variables is not None else lambda key: layout.init(layout.task.init(key))
    parts = jax.eval_shape(init, variables if variables is not None else jax.random.key(0))
    rows = tuple(
        (role, path, tuple(x.shape), num_bytes(x)) for role in Parts._fields for path, x in getattr(parts, role).items()
    )
    shared, personal, frozen = (num_bytes(leaves) for leaves in parts)
    model = num_bytes(jax.eval_shape(layout.view("model").read, parts))
    return Description(rows, shared, personal, frozen, model)
