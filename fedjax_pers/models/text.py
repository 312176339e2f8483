"""Models of sequences of characters or words ``[batch, time]``."""

from __future__ import annotations

import jax.numpy as jnp
from flax import linen as nn

from fedjax_pers.base import Array, Example
from fedjax_pers.checks import positive_int, require
from fedjax_pers.models.layers import Lstm
from fedjax_pers.models.wants import texts, tokens, widths

PADDING = 0
"""The token that fills up short texts where a text has one class."""


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


def _embedded(x: Array, vocabulary: int, size: int) -> tuple[Array, Array]:
    """``[batch, time, size]`` with zeros where there is padding, and ``[batch, time, 1]``: 1 where there is a token."""
    there = (x != PADDING)[..., None].astype(jnp.float32)
    return nn.Embed(vocabulary, size, name="embedding")(x) * there, there


class FastText(nn.Module):
    """``embedding``, its mean over the tokens of a text, ``head``; ``[batch, time] -> [batch, classes]``."""

    num_classes: int
    vocabulary: int = 10_000
    embedding: int = 32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Scores before the softmax; a text without tokens has the mean 0."""
        x, there = _embedded(x, self.vocabulary, self.embedding)
        return nn.Dense(self.num_classes, name="head")(x.sum(1) / jnp.maximum(there.sum(1), 1))


class TextCnn(nn.Module):
    """``embedding``, side by side ``conv3``, ``conv4``, ``conv5``, each one's maximum over the tokens, ``head``."""

    num_classes: int
    vocabulary: int = 10_000
    embedding: int = 64
    windows: tuple[int, ...] = (3, 4, 5)
    channels: int = 64

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Scores before the softmax, ``[batch, classes]``."""
        x, there = _embedded(x, self.vocabulary, self.embedding)
        seen = [nn.relu(nn.Conv(self.channels, (window,), name=f"conv{window}")(x)) for window in self.windows]
        # A window around padding would be worth the ReLU of the bias; ReLU's least value, 0, never counts.
        found = jnp.concatenate([(y * there).max(axis=1) for y in seen], axis=-1)
        return nn.Dense(self.num_classes, name="head")(found)


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


def fasttext(example: Example, num_classes: int, *, vocabulary: int = 10_000, embedding: int = 32) -> FastText:
    """The class of a text from the mean of its tokens' embeddings: the smallest model of text.

    Args:
      example: field, shape and dtype of one example; ``x`` is tokens 1 .. ``vocabulary`` - 1, and 0 fills up short
        texts: any number of zeros, before or after, changes nothing.
      num_classes: width of the output.
      vocabulary: number of tokens, that of padding included.
      embedding: numbers for each token.

    Source: Joulin et al., "Bag of Tricks for Efficient Text Classification", EACL 2017. Differences: no n-grams beside
    the tokens given, no hierarchical softmax.
    """
    texts("fasttext", example)
    for name, value in (("vocabulary", vocabulary), ("embedding", embedding)):
        positive_int(name, value)
    return FastText(num_classes, vocabulary, embedding)


def text_cnn(
    example: Example,
    num_classes: int,
    *,
    vocabulary: int = 10_000,
    embedding: int = 64,
    windows: tuple[int, ...] = (3, 4, 5),
    channels: int = 64,
) -> TextCnn:
    """The class of a text from the strongest answer of each of many detectors of phrases.

    Args:
      example: field, shape and dtype of one example; ``x`` is tokens 1 .. ``vocabulary`` - 1, and 0 fills up short
        texts: any number of zeros at the end changes nothing.
      num_classes: width of the output.
      vocabulary: number of tokens, that of padding included.
      embedding: numbers for each token.
      windows: lengths of phrases in tokens, all different.
      channels: detectors for each length.

    Source: Kim, "Convolutional Neural Networks for Sentence Classification", EMNLP 2014 (CNN-rand). Differences:
    narrower by default, no dropout and no bound on the head's weights.
    """
    texts("text_cnn", example)
    windows = widths("windows", windows)
    require(len(set(windows)) == len(windows), f"windows: found {windows}; allowed are lengths that all differ")
    for name, value in (("vocabulary", vocabulary), ("embedding", embedding), ("channels", channels)):
        positive_int(name, value)
    return TextCnn(num_classes, vocabulary, embedding, windows, channels)
