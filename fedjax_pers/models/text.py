"""Models of sequences of characters ``[batch, time]``."""

from __future__ import annotations

from flax import linen as nn

from fedjax_pers.base import Array, Example
from fedjax_pers.checks import positive_int
from fedjax_pers.models.layers import Lstm
from fedjax_pers.models.wants import tokens


class CharLstm(nn.Module):
    """``embedding``, ``lstm1``, ``lstm2``, ..., ``head``; ``[batch, time] -> [batch, time, classes]``."""

    num_classes: int
    embedding: int = 8
    hidden: int = 256
    layers: int = 2

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Scores of the next character at every position, before the softmax."""
        x = nn.Embed(self.num_classes, self.embedding, name="embedding")(x)
        for place in range(1, self.layers + 1):
            x = Lstm(self.hidden, name=f"lstm{place}")(x)
        return nn.Dense(self.num_classes, name="head")(x)


def char_lstm(
    example: Example, num_classes: int, *, embedding: int = 8, hidden: int = 256, layers: int = 2
) -> CharLstm:
    """Predicts at each position the next character; 820,522 parameters for an alphabet of 90.

    Args:
      example: field, shape and dtype of one example.
      num_classes: width of the output.
      embedding: numbers for each character.
      hidden: width of an LSTM layer.
      layers: number of LSTM layers.

    Source: McMahan et al., AISTATS 2017 (the Shakespeare model), in the form of Reddi et al., "Adaptive Federated
    Optimization", ICLR 2021, which predicts at every position.
    """
    tokens("char_lstm", example)
    for name, value in (("embedding", embedding), ("hidden", hidden), ("layers", layers)):
        positive_int(name, value)
    return CharLstm(num_classes, embedding, hidden, layers)
