"""Models of a flat feature vector."""

from __future__ import annotations

from flax import linen as nn

from fedjax_pers.base import Array, Example
from fedjax_pers.checks import one_of
from fedjax_pers.models.layers import NORMS, normalised
from fedjax_pers.models.wants import features, widths


class Mlp(nn.Module):
    """Hidden layers ``hidden1``, ``norm1``, ``hidden2``, ... and a ``head``; ``[batch, ...] -> [batch, classes]``."""

    num_classes: int
    hidden: tuple[int, ...] = (64,)
    norm: str | None = None

    @nn.compact
    def __call__(self, x: Array, train: bool = False, mask: Array | None = None) -> Array:
        """Scores before the softmax; ``mask [batch]`` is true for the rows that count in a batch's statistics."""
        x = x.reshape(x.shape[0], -1)
        for place, width in enumerate(self.hidden, start=1):
            # A bias before a normalisation is subtracted again.
            x = nn.Dense(width, use_bias=self.norm is None, name=f"hidden{place}")(x)
            x = nn.relu(normalised(x, self.norm, f"norm{place}", train, mask))
        return nn.Dense(self.num_classes, name="head")(x)


def linear(example: Example, num_classes: int) -> Mlp:
    """Softmax regression: one layer, ``head``."""
    features("linear", example)
    return Mlp(num_classes, hidden=())


def mlp(example: Example, num_classes: int, *, hidden: tuple[int, ...] = (64,)) -> Mlp:
    """Dense layers with ReLU, ``hidden1``, ``hidden2``, ..., and a ``head``.

    Args:
      example: field, shape and dtype of one example.
      num_classes: width of the output.
      hidden: widths of the hidden layers.
    """
    features("mlp", example)
    return Mlp(num_classes, widths("hidden", hidden))


def mlp_norm(example: Example, num_classes: int, *, hidden: tuple[int, ...] = (64,), norm: str = "batch") -> Mlp:
    """:func:`mlp` with a normalisation ``norm1``, ``norm2``, ... before each ReLU.

    Args:
      example: field, shape and dtype of one example.
      num_classes: width of the output.
      hidden: widths of the hidden layers.
      norm: ``"batch"``, ``"group"`` or ``"layer"``.
    """
    features("mlp_norm", example)
    one_of("norm", norm, NORMS)
    return Mlp(num_classes, widths("hidden", hidden), norm)
