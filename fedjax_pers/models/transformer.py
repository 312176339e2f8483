"""A transformer that reads characters or words ``[batch, time]`` from left to right."""

from __future__ import annotations

import jax.numpy as jnp
from flax import linen as nn

from fedjax_pers.base import Array, Example
from fedjax_pers.checks import positive_int, require
from fedjax_pers.models.wants import tokens


def _norm(name: str) -> nn.LayerNorm:
    """At each position alone: a norm over time would tell a position what comes later."""
    return nn.LayerNorm(use_fast_variance=False, name=name)


class FeedForward(nn.Module):
    """``down(gelu(up(x)))``."""

    hidden: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """``[batch, time, width]`` to the same."""
        return nn.Dense(x.shape[-1], name="down")(nn.gelu(nn.Dense(self.hidden, name="up")(x)))


class Block(nn.Module):
    """``x = x + attention(norm1(x))``, then ``x + feed_forward(norm2(x))``; attention sees no later position."""

    heads: int
    hidden: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """``[batch, time, width]`` to the same."""
        earlier = jnp.tri(x.shape[1], dtype=bool)
        x = x + nn.MultiHeadDotProductAttention(self.heads, name="attention")(_norm("norm1")(x), mask=earlier)
        return x + FeedForward(self.hidden, name="feed_forward")(_norm("norm2")(x))


class CharTransformer(nn.Module):
    """``embedding``, ``position``, ``block1``, ``block2``, ..., ``norm``, ``head``; also for words."""

    num_classes: int
    width: int = 64
    heads: int = 4
    blocks: int = 2
    hidden: int = 256

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Scores of the next token at every position, before the softmax: ``[batch, time, classes]``."""
        place = jnp.arange(x.shape[1])
        x = nn.Embed(self.num_classes, self.width, name="embedding")(x)
        x = x + nn.Embed(len(place), self.width, name="position")(place)
        for number in range(1, self.blocks + 1):
            x = Block(self.heads, self.hidden, name=f"block{number}")(x)
        return nn.Dense(self.num_classes, name="head")(_norm("norm")(x))


def char_transformer(
    example: Example, num_classes: int, *, width: int = 64, heads: int = 4, blocks: int = 2, hidden: int = 256
) -> CharTransformer:
    """Predicts at each position the next token from those before: 116,826 parameters for 80 characters of 90.

    Modules are named for masks: ``block1/attention/{query,key,value,out}``, ``block1/feed_forward/{up,down}``,
    ``block1/norm1``, ``block1/norm2``.

    Args:
      example: field, shape and dtype of one example; tokens are 0 .. ``num_classes`` - 1, and positions those of ``x``.
      num_classes: width of the output, and number of tokens.
      width: numbers for each position; a multiple of ``heads``.
      heads: of attention.
      blocks: of attention and feed-forward layer.
      hidden: width within a feed-forward layer.

    Source: Vaswani et al., "Attention Is All You Need", NeurIPS 2017, as a decoder alone with learnt positions, norms
    before each layer and GELU (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019).
    Differences: no dropout; the head's weights are its own.
    """
    tokens("char_transformer", example)
    for name, value in (("width", width), ("heads", heads), ("blocks", blocks), ("hidden", hidden)):
        positive_int(name, value)
    require(width % heads == 0, f"width: found {width}; allowed is a multiple of heads ({heads})")
    return CharTransformer(num_classes, width, heads, blocks, hidden)
