"""Models of images ``[batch, height, width, channels]``."""

from __future__ import annotations

import itertools

from flax import linen as nn

from fedjax_pers.base import Array, Example
from fedjax_pers.checks import one_of, positive_int
from fedjax_pers.models.layers import NORMS, normalised
from fedjax_pers.models.wants import images, widths


class Cnn(nn.Module):
    """``conv1``, ``norm1``, pool, ``conv2``, ``norm2``, pool, ..., ``hidden``, ``norm_hidden``, ``head``."""

    num_classes: int
    channels: tuple[int, ...] = (32, 64)
    hidden: int = 512
    norm: str | None = None

    @nn.compact
    def __call__(self, x: Array, train: bool = False, mask: Array | None = None) -> Array:
        """Scores before the softmax; ``mask [batch]`` is true for the rows that count in a batch's statistics."""
        bias = self.norm is None  # A bias before a normalisation is subtracted again.
        for place, width in enumerate(self.channels, start=1):
            x = nn.Conv(width, (5, 5), use_bias=bias, name=f"conv{place}")(x)
            x = nn.relu(normalised(x, self.norm, f"norm{place}", train, mask))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.Dense(self.hidden, use_bias=bias, name="hidden")(x.reshape(x.shape[0], -1))
        x = nn.relu(normalised(x, self.norm, "norm_hidden", train, mask))
        return nn.Dense(self.num_classes, name="head")(x)


class Block(nn.Module):
    """``relu(shortcut(x) + norm2(conv2(relu(norm1(conv1(x))))))``; the shortcut is ``x`` where the shapes agree."""

    width: int
    stride: int
    norm: str

    @nn.compact
    def __call__(self, x: Array, train: bool, mask: Array | None) -> Array:
        """``[batch, height, width, channels]`` to ``[batch, height / stride, width / stride, self.width]``."""
        stride = (self.stride, self.stride)
        y = nn.Conv(self.width, (3, 3), stride, use_bias=False, name="conv1")(x)
        y = nn.relu(normalised(y, self.norm, "norm1", train, mask))
        y = nn.Conv(self.width, (3, 3), use_bias=False, name="conv2")(y)
        y = normalised(y, self.norm, "norm2", train, mask)
        if x.shape != y.shape:
            x = nn.Conv(self.width, (1, 1), stride, use_bias=False, name="conv_shortcut")(x)
            x = normalised(x, self.norm, "norm_shortcut", train, mask)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """``stem``, ``norm_stem``, ``block1``, ``block2``, ..., the mean over all places, ``head``.

    There are ``repeats`` blocks of each width; the first of a further width halves height and width.
    """

    num_classes: int
    channels: tuple[int, ...] = (16, 32, 64)
    repeats: int = 1
    norm: str = "batch"

    @nn.compact
    def __call__(self, x: Array, train: bool = False, mask: Array | None = None) -> Array:
        """Scores before the softmax; ``mask [batch]`` is true for the rows that count in a batch's statistics."""
        x = nn.Conv(self.channels[0], (3, 3), use_bias=False, name="stem")(x)
        x = nn.relu(normalised(x, self.norm, "norm_stem", train, mask))
        for place, width in enumerate(width for width in self.channels for _ in range(self.repeats)):
            stride = 2 if place and place % self.repeats == 0 else 1
            x = Block(width, stride, self.norm, name=f"block{place + 1}")(x, train, mask)
        return nn.Dense(self.num_classes, name="head")(x.mean(axis=(1, 2)))


class SeparableBlock(nn.Module):
    """``relu(norm2(pointwise(relu(norm1(depthwise(x))))))``: 3x3 in each channel alone, then 1x1 over channels."""

    width: int
    stride: int
    norm: str

    @nn.compact
    def __call__(self, x: Array, train: bool, mask: Array | None) -> Array:
        """``[batch, height, width, channels]`` to ``[batch, height / stride, width / stride, self.width]``."""
        stride, channels = (self.stride, self.stride), x.shape[-1]
        x = nn.Conv(channels, (3, 3), stride, feature_group_count=channels, use_bias=False, name="depthwise")(x)
        x = nn.relu(normalised(x, self.norm, "norm1", train, mask))
        x = nn.Conv(self.width, (1, 1), use_bias=False, name="pointwise")(x)
        return nn.relu(normalised(x, self.norm, "norm2", train, mask))


class MobileNet(nn.Module):
    """``stem``, ``norm_stem``, ``block1``, ``block2``, ..., the mean over all places, ``head``."""

    num_classes: int
    channels: tuple[int, ...] = (16, 32, 64, 64, 128, 128)
    norm: str = "batch"

    @nn.compact
    def __call__(self, x: Array, train: bool = False, mask: Array | None = None) -> Array:
        """Scores before the softmax; ``mask [batch]`` is true for the rows that count in a batch's statistics."""
        x = nn.Conv(self.channels[0], (3, 3), use_bias=False, name="stem")(x)
        x = nn.relu(normalised(x, self.norm, "norm_stem", train, mask))
        for place, (before, width) in enumerate(itertools.pairwise(self.channels), start=1):
            x = SeparableBlock(width, 2 if width > before else 1, self.norm, name=f"block{place}")(x, train, mask)
        return nn.Dense(self.num_classes, name="head")(x.mean(axis=(1, 2)))


def cnn(example: Example, num_classes: int, *, channels: tuple[int, ...] = (32, 64), hidden: int = 512) -> Cnn:
    """Two 5x5 convolutions, each with a 2x2 max-pool, a hidden layer and a head: 1,663,370 parameters on 28x28x1.

    Args:
      example: field, shape and dtype of one example.
      num_classes: width of the output.
      channels: of the convolutions, which pad so that only the pools halve height and width.
      hidden: width of the dense layer.

    Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
    """
    channels = widths("channels", channels)
    images("cnn", example, smallest=2 ** len(channels))
    positive_int("hidden", hidden)
    return Cnn(num_classes, channels, hidden)


def cnn_norm(
    example: Example,
    num_classes: int,
    *,
    channels: tuple[int, ...] = (32, 64),
    hidden: int = 512,
    norm: str = "batch",
) -> Cnn:
    """:func:`cnn` with a normalisation before each ReLU: ``norm1``, ``norm2``, ``norm_hidden``.

    Args:
      example: field, shape and dtype of one example.
      num_classes: width of the output.
      channels: of the convolutions, which pad so that only the pools halve height and width.
      hidden: width of the dense layer.
      norm: ``"batch"``, ``"group"`` or ``"layer"``.
    """
    one_of("norm", norm, NORMS)
    return cnn(example, num_classes, channels=channels, hidden=hidden).clone(norm=norm)


def resnet8(
    example: Example, num_classes: int, *, channels: tuple[int, ...] = (16, 32, 64), norm: str = "batch"
) -> ResNet:
    """A residual network of 8 layers: a stem, a block at each of three widths, a head.

    Args:
      example: field, shape and dtype of one example.
      num_classes: width of the output.
      channels: of the blocks; each after the first halves height and width.
      norm: ``"batch"``, ``"group"`` or ``"layer"``.

    Source: He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, section 4.2 with n = 1 and projection
    shortcuts (their option B).
    """
    return _resnet("resnet8", example, num_classes, channels, 1, norm)


def resnet20(
    example: Example, num_classes: int, *, channels: tuple[int, ...] = (16, 32, 64), norm: str = "batch"
) -> ResNet:
    """A residual network of 20 layers, three blocks at each width: 272,474 parameters on 32x32x3 and 10 classes.

    Args:
      example: field, shape and dtype of one example.
      num_classes: width of the output.
      channels: widths, with three blocks each; each after the first halves height and width.
      norm: ``"batch"``, ``"group"`` (Hsieh et al. 2020, for clients that differ) or ``"layer"``.

    Source: He et al., CVPR 2016, section 4.2 with n = 3. Differences: projection shortcuts (their option B) where they
    pad with zeros (A), which adds 2,752 parameters to their 0.27 million.
    """
    return _resnet("resnet20", example, num_classes, channels, 3, norm)


def _resnet(
    model: str, example: Example, num_classes: int, channels: tuple[int, ...], repeats: int, norm: str
) -> ResNet:
    images(model, example, smallest=1)
    one_of("norm", norm, NORMS)
    return ResNet(num_classes, widths("channels", channels), repeats, norm)


def mobilenet(
    example: Example,
    num_classes: int,
    *,
    channels: tuple[int, ...] = (16, 32, 64, 64, 128, 128),
    norm: str = "batch",
) -> MobileNet:
    """Depthwise-separable convolutions, small: 37,162 parameters on 32x32x3 and 10 classes.

    Args:
      example: field, shape and dtype of one example.
      num_classes: width of the output.
      channels: of the stem and of a block each; a block that is wider than what it gets halves height and width.
      norm: ``"batch"``, ``"group"`` or ``"layer"``.

    Source: Howard et al., "MobileNets: Efficient Convolutional Neural Networks for Mobile Vision Applications", 2017,
    arXiv:1704.04861: the first blocks with width multiplier 0.5. Differences: the stem keeps height and width and the
    first block halves them, as images are small.
    """
    images("mobilenet", example, smallest=1)
    one_of("norm", norm, NORMS)
    return MobileNet(num_classes, widths("channels", channels), norm)
