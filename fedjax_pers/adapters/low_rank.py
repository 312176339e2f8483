"""LoRA: a trained product of two thin matrices beside weights that stay as they are."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pers.adapters.adapting import adapted, beside, weights_at
from fedjax_pers.adapters.products import Change, Product, products_of, with_changes
from fedjax_pers.base import Array, Leaves, Task
from fedjax_pers.checks import one_of, positive, positive_int, require
from fedjax_pers.keys import fold_name
from fedjax_pers.paths import SelectorLike, as_selector, flatten
from fedjax_pers.per_example import opened

FACTOR_A, FACTOR_B = as_selector("**/lora_a/**"), as_selector("**/lora_b/**")
"""Selectors of the two factors: what comes first, on the side of the inputs, and what comes second."""
SCALINGS = ("standard", "rank_stabilized")


class Slot(NamedTuple):
    """A leaf that is adapted, seen as a matrix ``[rows, columns]``.

    Attributes:
      path: of the leaf.
      shape: of the leaf.
      rows: how many of its axes are rows.
      outputs_first: whether rows are outputs (``weight`` of Equinox and PyTorch) rather than inputs.
      dtype: of the leaf.
    """

    path: str
    shape: tuple[int, ...]
    rows: int
    outputs_first: bool
    dtype: Any

    @property
    def names(self) -> tuple[str, str]:
        """Those of the two factors, A and B."""
        return beside(self.path, "lora_a"), beside(self.path, "lora_b")

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns."""
        return math.prod(self.shape[: self.rows]), math.prod(self.shape[self.rows :])

    def fresh(self, key: Array, rank: int) -> Leaves:
        """Factors at their start: A normal with variance 1 / inputs, B zero, so that their product is zero."""
        rows, columns = self.size
        thin, wide = (rows, rank), (rank, columns)
        a, b = (wide, thin) if self.outputs_first else (thin, wide)
        inputs = columns if self.outputs_first else rows
        drawn = jax.random.normal(fold_name(key, self.path), a, self.dtype) / math.sqrt(inputs)
        return dict(zip(self.names, (drawn.astype(self.dtype), jnp.zeros(b, self.dtype)), strict=True))

    def product(self, leaves: Leaves) -> Array:
        """The product of the factors, of the shape of the leaf."""
        a, b = (leaves[name] for name in self.names)
        return (b @ a if self.outputs_first else a @ b).reshape(self.shape)

    def truncated(self, leaves: Leaves, rank: Array) -> Leaves:
        """The factors, with zeros beyond a rank."""
        a, b = (leaves[name] for name in self.names)
        kept = jnp.arange(a.shape[0 if self.outputs_first else 1]) < rank
        rows, columns = kept[:, None], kept[None, :]
        of_a, of_b = (rows, columns) if self.outputs_first else (columns, rows)
        return dict(zip(self.names, (jnp.where(of_a, a, 0), jnp.where(of_b, b, 0)), strict=True))

    def is_met_by(self, product: Product) -> bool:
        """Whether inputs are multiplied with all rows of the matrix at once, as dense layers do."""
        if product.step.equation.primitive.name != "dot_general" or self.outputs_first or product.weight != 1:
            return False
        (_, contracted), (_, batched) = product.step.equation.params["dimension_numbers"]
        return tuple(contracted) == tuple(range(self.rows)) and not batched


def lora(
    task: Task, on: SelectorLike = "**/kernel", *, rank: int = 8, alpha: float = 16.0, scaling: str = "standard"
) -> Task:
    """The task with low-rank factors beside chosen weights: ``W + s A B``, ``s = alpha / rank``.

    A leaf is seen as a matrix of inputs by outputs: a dense kernel as it is, a convolution's ``[height * width * in,
    out]``, one of attention with its heads flattened, an embedding ``[words, features]`` (up to three axes are split
    where the matrix is most square). Dense layers are computed as ``x W + s (x A) B``, so that no gradient of W is ever
    made; other weights are summed first. A ``[inputs, rank]`` starts normal with variance 1 / inputs, B ``[rank,
    outputs]`` at zero, so that the model starts as the backbone, to the bit. The variables are a flat dict by path, in
    which ``params/head/kernel`` has ``params/head/lora_a/kernel`` and ``params/head/lora_b/kernel`` beside it.

    What trains is the layout's: freeze ``~fp.lora()`` for the usual fine-tuning, or make the factors personal under a
    backbone that is shared. ``task.plain(variables)`` merges the factors into the model's own weights.

    Example:
      >>> import fedjax_pers as fp
      >>> task = fp.tasks.from_model(fp.data.load("vowel_speakers"), "mlp", hidden=(32,))
      >>> adapted = fp.adapters.lora(task, on="**/hidden1/kernel", rank=4)
      >>> layout = fp.by_role(personal=fp.head(1) & ~fp.lora(), frozen=~(fp.lora() | fp.head(1)))(adapted)
      >>> sorted(layout.init(adapted.init(jax.random.key(0))).shared)
      ['params/hidden1/lora_a/kernel', 'params/hidden1/lora_b/kernel']

    Args:
      task: model and loss; a model of any library.
      on: the weights, or layers whose weights (leaves of at least two axes that are no bias) are adapted.
      rank: of the product, at most the smaller side of each matrix.
      alpha: strength, above 0.
      scaling: ``"standard"``, ``s = alpha / rank``, or ``"rank_stabilized"``, ``s = alpha / sqrt(rank)``.

    Raises:
      ValueError: no weights selected, a rank that is too large, a task that is adapted already.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022; Kalajdzievski, arXiv:2312.03732,
    2023 (rank-stabilised).

    Differences from the paper: no dropout between the factors.
    """
    scale = scale_of(rank, alpha, scaling)
    places = slots(task, on, rank)

    def fresh(key: Array) -> Leaves:
        return {n: x for slot in places for n, x in slot.fresh(key, rank).items()}

    def merged(leaves: Leaves) -> Leaves:
        return _of_model(leaves, places) | {slot.path: summed(slot, leaves) for slot in places}

    def summed(slot: Slot, leaves: Leaves) -> Array:
        return (leaves[slot.path] + scale * slot.product(leaves)).astype(slot.dtype)

    def around(function: Any) -> Any:
        def with_factors(leaves: Leaves, *rest: Any) -> Any:
            model = _of_model(leaves, places)
            whole = opened(function, model, *rest)
            number_of = dict(zip(flatten(model), whole.inputs, strict=False))
            changes: list[tuple[Product, Change]] = []
            for slot in places:
                products = products_of(whole, number_of[slot.path])
                if products is not None and all(map(slot.is_met_by, products)):
                    changes += [(product, _factored(slot, product, scale)) for product in products]
                else:
                    model[slot.path] = summed(slot, leaves)
            return with_changes(whole, (model, *rest), leaves, changes)

        return with_factors

    return adapted(task, fresh, merged, around)


def _of_model(leaves: Leaves, places: tuple[Slot, ...]) -> Leaves:
    factors = {name for slot in places for name in slot.names}
    return {name: x for name, x in leaves.items() if name not in factors}


def _factored(slot: Slot, product: Product, scale: float) -> Change:
    """``x W + s (x A) B`` for a product ``x W`` over all rows of the matrix."""
    params = product.step.equation.params

    def change(leaves: Leaves, entering: Array, made: Array) -> Array:
        a, b = (leaves[name].astype(entering.dtype) for name in slot.names)
        rows = a.reshape(*slot.shape[: slot.rows], a.shape[-1])
        thin = jax.lax.dot_general(entering, rows, params["dimension_numbers"], precision=params["precision"])
        wide = jnp.matmul(thin, b, precision=params["precision"])
        return made + (scale * wide).reshape(made.shape).astype(made.dtype)

    return change


def scale_of(rank: int, alpha: float, scaling: str = "standard") -> float:
    """What the product of the factors is multiplied by."""
    positive_int("rank", rank)
    positive("alpha", alpha)
    one_of("scaling", scaling, SCALINGS)
    return alpha / (rank if scaling == "standard" else math.sqrt(rank))


def slots(task: Task, on: SelectorLike, rank: int) -> tuple[Slot, ...]:
    """The weights that are adapted; ValueError where one cannot have factors of this rank."""
    found = []
    for path, x in weights_at(task, on, "LoRA").items():
        outputs_first = path.rpartition("/")[2] == "weight"
        slot = Slot(path, x.shape, _rows(x.shape, outputs_first), outputs_first, x.dtype)
        least = min(slot.size)
        require(rank <= least, f"rank: found {rank}; {path} {list(x.shape)} allows 1 .. {least}")
        found.append(slot)
    return tuple(found)


def _rows(shape: tuple[int, ...], outputs_first: bool) -> int:
    """How many axes are rows: of an image's convolution all but the outputs, else so that the matrix is most square."""
    if len(shape) > 3:
        return 1 if outputs_first else len(shape) - 1
    return max(range(1, len(shape)), key=lambda n: (min(math.prod(shape[:n]), math.prod(shape[n:])), n))
