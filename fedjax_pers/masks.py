"""Masks: which leaves (or which of their elements) a client shares, decided while a run goes on.

A mask is a shared leaf ``mask/<path>`` beside the leaf that it is of: a scalar, or elementwise. In an upload it says
what the client shares; in a download, what everybody must share this round, whatever a client has kept. A client has a
copy of each leaf (``own/<path>``) and remembers what it kept to itself (``kept/<path>``). Where it kept an element and
nobody asks for it, it trains and predicts with its own copy; everywhere else with what the server holds, so an element
that has just become personal begins at the server's value.

What a mask leaves out is not sent: a client reports how many bytes these are (``Report.spared_up``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from fedjax_pers.base import Array, Context, Leaves, Parts, Report, State, Task
from fedjax_pers.checks import require
from fedjax_pers.layouts import OWN, Layout, LayoutMaker, Statistics, View, by_role, shared_shapes
from fedjax_pers.local import ClientUpdate
from fedjax_pers.paths import SelectorLike, as_selector
from fedjax_pers.presets import layers, places
from fedjax_pers.trees import num_bytes, wire_bytes

MASK, KEPT = "mask/", "kept/"
ALL_SENT = "all_sent"
"""A shared leaf beside the masks, where there is one: everything is uploaded this round, personal or not."""

Masks = dict[str, Array]
"""Masks by the path of the leaf that they are of."""
Choice = Callable[[Layout, Parts, Parts, Context], Masks]
"""``choice(layout, before, after, context) -> {path: personal}``, from the parts before and after training."""


def masks_of(leaves: Leaves) -> Masks:
    """The masks among leaves, by the path of what they are of."""
    return {name.removeprefix(MASK): x for name, x in leaves.items() if name.startswith(MASK)}


def values_of(leaves: Leaves) -> Leaves:
    """The leaves without masks."""
    return {name: x for name, x in leaves.items() if not name.startswith(MASK) and name != ALL_SENT}


def with_masks(leaves: Leaves, *, elementwise: bool = False) -> Leaves:
    """The leaves, each with a mask that is false.

    Example:
      >>> {name: x.shape for name, x in with_masks({"w": jnp.ones((2, 3))}, elementwise=True).items()}
      {'w': (2, 3), 'mask/w': (2, 3)}
    """
    return leaves | {MASK + name: jnp.zeros(x.shape if elementwise else (), bool) for name, x in leaves.items()}


def masked(*, elementwise: bool = False, statistics: Statistics = "average") -> LayoutMaker:
    """Everything shared, with masks beside it; clients keep nothing."""

    def bind(task: Task) -> Layout:
        base = by_role(statistics=statistics)(task)
        taken = sorted(name for name in _shapes(base) if name.startswith((MASK, KEPT, OWN)) or name == ALL_SENT)
        require(not taken, f"task: found leaves {taken}; {MASK!r}, {KEPT!r}, {OWN!r} and {ALL_SENT!r} have a meaning")

        def init(variables: Any) -> Parts:
            parts = base.init(variables)
            return parts._replace(shared=with_masks(parts.shared, elementwise=elementwise))

        return base._replace(init=init)

    return bind


def masked_copies(*, elementwise: bool = False, statistics: Statistics = "average") -> LayoutMaker:
    """Everything shared, with masks beside it, and a client's own copy of all, of which masks pick.

    ``view("shared")`` reads the shared leaves, ``view("model")`` the client's choice.
    """

    def bind(task: Task) -> Layout:
        base = masked(elementwise=elementwise, statistics=statistics)(task)
        whole = base.view("model")

        def init(variables: Any) -> Parts:
            parts = base.init(variables)
            own = {OWN + path: jnp.array(x) for path, x in values_of(parts.shared).items()}
            kept = {KEPT + path: jnp.array(x) for path, x in masks_of(parts.shared).items()}
            return parts._replace(personal={**parts.personal, **own, **kept})

        views = {"shared": whole, "model": View(lambda parts: whole.read(begun(parts)), whole.keys)}
        return base._replace(init=init, views=views, common="shared" if base.common else None)

    return bind


def _shapes(layout: Layout) -> Mapping[str, Any]:
    return layout.view("model").keys


def in_use(parts: Parts) -> Masks:
    """Where a client's own copy counts: it kept that, and nobody asks for it."""
    return {path: parts.personal[KEPT + path] & ~mask for path, mask in masks_of(parts.shared).items()}


def begun(parts: Parts) -> Parts:
    """The parts with which a client begins: its own copy, where it counts, in the place of what was received."""
    own = {
        path: jnp.where(mask, parts.personal[OWN + path], parts.shared[path]) for path, mask in in_use(parts).items()
    }
    return parts._replace(shared=parts.shared | own)


def crossing(leaves: Leaves, masks: Masks) -> Array:
    """Bytes of the elements under masks, ``int32``."""
    require(num_bytes(leaves) < 2**31, f"masks: found leaves of {num_bytes(leaves):,} B; allowed are less than 2^31")
    total = jnp.int32(0)
    for path, mask in masks.items():
        each = leaves[path].dtype.itemsize * (leaves[path].size // mask.size)
        total += jnp.sum(mask, dtype=jnp.int32) * each
    return total


def chosen_by_server(training: ClientUpdate) -> ClientUpdate:
    """A client update for :func:`masked_copies` in which the server says what is shared: its masks come down.

    Where :data:`ALL_SENT` is true, the upload has all leaves, also those that stay personal.
    """

    def update(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
        asked = masks_of(parts.shared)
        trained, report = training(layout, begun(parts), context)
        sends = {path: mask | parts.shared[ALL_SENT] for path, mask in asked.items()}
        personal = {path: ~mask for path, mask in asked.items()}
        told = wire_bytes([*asked.values(), parts.shared[ALL_SENT]])  # what the server knows already
        spared_up = left_out(trained.shared, sends) + told
        spared_down = left_out(parts.shared, inverse(in_use(parts)))
        return remembered(parts, trained, personal, sends), with_spared(report, spared_up, spared_down)

    return update


def chosen_by_client(training: ClientUpdate, choice: Choice) -> ClientUpdate:
    """A client update for :func:`masked_copies` in which the client chooses after training; its masks go up.

    Args:
      training: trains the shared leaves.
      choice: what is personal from now on; it is not in this round's upload any more.
    """

    def update(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
        before = begun(parts)
        trained, report = training(layout, before, context)
        personal = choice(layout, before, trained, context)
        sends = inverse(personal)
        spared_up = left_out(trained.shared, sends)
        spared_down = left_out(parts.shared, inverse(in_use(parts))) + wire_bytes(sends)
        return remembered(parts, trained, personal, sends), with_spared(report, spared_up, spared_down)

    return update


def newly_chosen(choice: Choice, training_of: Callable[[Masks], ClientUpdate]) -> ClientUpdate:
    """What a client does that was never seen: it chooses, and trains what is personal, from the server's values."""

    def update(layout: Layout, parts: Parts, context: Context) -> tuple[Parts, Report]:
        personal = choice(layout, parts, parts, context)
        trained, report = training_of(personal)(layout, parts, context)
        return remembered(parts, trained, personal, inverse(personal)), report

    return update


def sent(parts: Parts, trained: Parts, sends: Masks) -> Leaves:
    """The upload: trained leaves under the masks, what was received elsewhere, and the masks."""
    upload = {path: jnp.where(mask, trained.shared[path], parts.shared[path]) for path, mask in sends.items()}
    return parts.shared | upload | {MASK + path: mask for path, mask in sends.items()}


def remembered(parts: Parts, trained: Parts, personal: Masks, sends: Masks) -> Parts:
    """The parts after a round: the upload, and a copy of all trained leaves for the client itself."""
    own = {OWN + path: trained.shared[path] for path in sends}
    kept = {KEPT + path: mask for path, mask in personal.items()}
    return parts._replace(shared=sent(parts, trained, sends), personal=trained.personal | own | kept)


def only(masks: Masks, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """An optimiser that sees and moves only what is under the masks."""
    keep = optax.stateless(lambda updates, _: {name: jnp.where(masks[name], x, 0) for name, x in updates.items()})
    return optax.chain(keep, optimizer, keep)


def inverse(masks: Masks) -> Masks:
    """True where the masks are false."""
    return {path: ~mask for path, mask in masks.items()}


def left_out(leaves: Leaves, masks: Masks) -> Array:
    """Bytes of the elements that are not under masks, ``int32``."""
    values = {path: leaves[path] for path in masks}
    return num_bytes(values) - crossing(values, masks)


def with_spared(report: Report, up: Array | int, down: Array | int) -> Report:
    """A report that also says which bytes did not cross."""
    return report._replace(spared_up=report.spared_up + up, spared_down=report.spared_down + down)


def largest(x: Array, count: Array) -> Array:
    """A mask of the ``count`` largest elements; of equal ones the first.

    Example:
      >>> largest(jnp.array([[1.0, 3.0], [3.0, 2.0]]), 2).tolist()
      [[False, True], [True, False]]
    """
    rank = jnp.argsort(jnp.argsort(-x.reshape(-1), stable=True), stable=True)
    return (rank < count).reshape(x.shape)


def layer_groups(layout: Layout, selectors: Sequence[SelectorLike] = ()) -> dict[str, frozenset[str]]:
    """Leaves that have a mask, by what is chosen together: the model's layers in order of use, or what selectors say.

    Raises:
      ValueError: selectors have leaves in common.
    """
    require(not isinstance(selectors, str), f"groups: found {selectors!r}; expected selectors, ({selectors!r},)")
    shared, leaves = frozenset(masks_of(shared_shapes(layout))), dict.fromkeys(layout.view("model").keys)
    if selectors:
        chosen = [as_selector(each).select(leaves, layout.model) & shared for each in selectors]
        twice = sum(map(len, chosen)) - len(frozenset().union(*chosen))
        require(not twice, f"groups: {twice} leaves are in more than one of {list(selectors)}; make these disjoint")
        found = dict(zip(map(str, map(as_selector, selectors)), chosen, strict=True))
    else:
        found = {name: members & shared for name, members in layers(leaves, layout.model).items()}
    return {name: members for name, members in found.items() if members}


def personal_shares(state: State) -> dict[str, np.ndarray]:
    """How much of each layer each client keeps to itself (in FedCAC: is critical to it), by layer ``[clients]``.

    Of the state of a method that decides in the run; ``{}`` for others.
    """
    kept = {name.removeprefix(KEPT): x for name, x in state.rows.items() if name.startswith(KEPT)}
    if isinstance(state.aux, dict):
        kept |= state.aux.get("critical", {})
    by_layer: dict[str, list[str]] = {}
    for path, place in places(kept).items():
        by_layer.setdefault(place.layer or place.name, []).append(path)
    sizes = {path: state.shared[path].size for path in kept}
    shares = {path: np.asarray(x).reshape(len(x), -1).mean(1) for path, x in kept.items()}
    return {
        layer: sum(shares[path] * sizes[path] for path in paths) / max(sum(sizes[path] for path in paths), 1)
        for layer, paths in by_layer.items()
    }
