"""Who owns what where a backbone stays as it is and adapters learn."""

from __future__ import annotations

from fedjax_pers.adapters.low_rank import Slot
from fedjax_pers.base import Task
from fedjax_pers.layouts import Layout, LayoutMaker, by_role
from fedjax_pers.paths import SelectorLike, as_selector, nothing, where
from fedjax_pers.presets import lora


def on_backbone(*, also: SelectorLike, personal: SelectorLike = nothing, frozen: SelectorLike = nothing) -> LayoutMaker:
    """Adapters and what trains in full beside them are shared, unless they are personal; all else is frozen.

    Args:
      also: leaves of the model itself that train: usually a new head.
      personal: which of all these stay with the client.
      frozen: which of them do not train after all.
    """
    adapters = lora() | where(lambda path, leaf: "/bottleneck_" in f"/{path}")
    return by_role(personal=personal, frozen=~(adapters | as_selector(also)) | as_selector(frozen))


def with_weights_on_server(places: tuple[Slot, ...], *, also: SelectorLike) -> LayoutMaker:
    """As :func:`on_backbone`, but the adapted weights are the server's to change: it sends them, nobody trains them."""
    held = frozenset(place.path for place in places)

    def bind(task: Task) -> Layout:
        layout = by_role(frozen=~(lora() | as_selector(also) | where(lambda path, leaf: path in held)))(task)
        return layout._replace(trainable=layout.trainable - held)

    return bind
