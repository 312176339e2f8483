"""Who owns what where a backbone stays as it is and adapters learn."""

from __future__ import annotations

import jax

from fedjax_pers.adapters.low_rank import Slot
from fedjax_pers.base import Task
from fedjax_pers.layouts import Layout, LayoutMaker, Statistics, by_role
from fedjax_pers.paths import SelectorLike, as_selector, flatten, nothing, where
from fedjax_pers.presets import adapter, model_of


def on_backbone(
    *,
    also: SelectorLike,
    personal: SelectorLike = nothing,
    frozen: SelectorLike = nothing,
    statistics: Statistics = "ignore",
) -> LayoutMaker:
    """Adapters and what trains in full beside them are shared, unless they are personal; all else is frozen.

    Args:
      also: leaves of the model itself that train: usually a new head.
      personal: which of all these stay with the client.
      frozen: which of them do not train after all.
      statistics: running statistics stay as the backbone has them (``"ignore"``), or are treated as in ``by_role``.
    """

    def bind(task: Task) -> Layout:
        moving = adapter() | as_selector(also) | task.statistics
        leaves, model = flatten(jax.eval_shape(task.init, jax.random.key(0))), model_of(task)
        backbone = nothing if set(leaves) == moving.select(leaves, model) else ~moving
        return by_role(personal=personal, frozen=backbone | as_selector(frozen), statistics=statistics)(task)

    return bind


def with_weights_on_server(
    places: tuple[Slot, ...], *, also: SelectorLike, statistics: Statistics = "ignore"
) -> LayoutMaker:
    """As :func:`on_backbone`, but the adapted weights are the server's to change: it sends them, nobody trains them."""
    held = frozenset(place.path for place in places)

    def bind(task: Task) -> Layout:
        sent = as_selector(also) | where(lambda path, leaf: path in held)
        layout = on_backbone(also=sent, statistics=statistics)(task)
        return layout._replace(trainable=layout.trainable - held)

    return bind
