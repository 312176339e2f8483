"""Models of series of numbers ``[batch, time, ...]``: sensors, speech."""

from __future__ import annotations

from flax import linen as nn

from fedjax_pers.base import Array, Example
from fedjax_pers.checks import one_of, positive_int
from fedjax_pers.models.layers import NORMS, normalised
from fedjax_pers.models.wants import series, widths


class Cnn1d(nn.Module):
    """``conv1``, ``norm1``, pool, ``conv2``, ``norm2``, pool, ..., the mean over time, ``head``."""

    num_classes: int
    channels: tuple[int, ...] = (32, 64, 64)
    window: int = 5
    norm: str = "batch"

    @nn.compact
    def __call__(self, x: Array, train: bool = False, mask: Array | None = None) -> Array:
        """Scores before the softmax; ``mask [batch]`` is true for the rows that count in a batch's statistics."""
        x = x.reshape(*x.shape[:2], -1)
        for place, width in enumerate(self.channels, start=1):
            x = nn.Conv(width, (self.window,), use_bias=False, name=f"conv{place}")(x)
            x = nn.relu(normalised(x, self.norm, f"norm{place}", train, mask))
            x = nn.max_pool(x, (2,), strides=(2,))
        return nn.Dense(self.num_classes, name="head")(x.mean(axis=1))


def cnn1d(
    example: Example,
    num_classes: int,
    *,
    channels: tuple[int, ...] = (32, 64, 64),
    window: int = 5,
    norm: str = "batch",
) -> Cnn1d:
    """Convolutions over time, each with a max-pool that halves it, the mean over what is left, a head.

    Args:
      example: field, shape and dtype of one example; the first axis of ``x`` is time, all others are channels:
        ``(time, sensors)``, ``(time, bands, 1)`` of a spectrogram, ``(time,)``.
      num_classes: width of the output.
      channels: of the convolutions, which pad so that only the pools halve the time.
      window: steps that a convolution sees.
      norm: ``"batch"``, ``"group"`` or ``"layer"``.

    Source: the form of Wang, Yan, Oates, "Time Series Classification from Scratch with Deep Neural Networks", IJCNN
    2017 (their FCN). Differences: narrower, with pools between.
    """
    channels = widths("channels", channels)
    series("cnn1d", example, shortest=2 ** len(channels))
    positive_int("window", window)
    one_of("norm", norm, NORMS)
    return Cnn1d(num_classes, channels, window, norm)
