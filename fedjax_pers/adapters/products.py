"""What is added where a weight is multiplied: adapters of any model, by the operations that it consists of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fedjax_pers.base import Array, Leaves
from fedjax_pers.per_example import Opened, Step, evaluated

SAME = ("convert_element_type", "copy", "optimization_barrier")
"""Operations after which a weight is still that weight."""


class Product(NamedTuple):
    """A step that multiplies a weight: the step, and which operand is the weight."""

    step: Step
    weight: int

    @property
    def entering(self) -> Any:
        """The number of what is multiplied with the weight."""
        return self.step.operands[1 - self.weight]


Change = Callable[[Leaves, Array, Array], Array]
"""``change(leaves, entering, product) -> product``, of what is multiplied with a weight and what comes out."""


def products_of(whole: Opened, weight: int) -> list[Product] | None:
    """The products in which the weight of this number is multiplied; ``None`` where it is used in any other way."""
    same, found = {weight}, []
    for step in whole.steps:
        places = [place for place, x in enumerate(step.operands) if isinstance(x, int) and x in same]
        if not places:
            continue
        name = step.equation.primitive.name
        if name in SAME:
            same.update(step.results)
        elif name in ("dot_general", "conv_general_dilated") and len(places) == 1:
            found.append(Product(step, places[0]))
        else:
            return None
    return None if same & {x for x in whole.outputs if isinstance(x, int)} else found


def with_changes(whole: Opened, arguments: Any, leaves: Leaves, changes: list[tuple[Product, Change]]) -> Any:
    """The result of an opened function whose products are changed before anything else reads them."""
    of_step = {product.step.results[0]: (product, change) for product, change in changes}
    values = whole.consts | dict(zip(whole.inputs, jax.tree.leaves(arguments), strict=True))
    for step in whole.steps:
        values = evaluated([step], values)
        if (made := step.results[0]) in of_step:
            product, change = of_step[made]
            values[made] = change(leaves, values[product.entering], values[made])
    return whole.result(values)
