"""Layers that several models use, and that Flax does not have in this form."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from fedjax_pers.base import Array

NORMS = ("batch", "group", "layer")
_GROUPS = 8


def normalised(x: Array, norm: str | None, name: str, train: bool, mask: Array | None) -> Array:
    """``x`` through the normalisation layer of that name; ``None`` is no layer at all.

    To be called inside the compact method of a module, whose submodule the layer becomes.

    Args:
      x: ``[batch, ..., channels]``.
      norm: ``"batch"`` (Ioffe & Szegedy 2015), ``"group"`` (Wu & He 2018; 8 groups, or as many as divide both 8 and
        the channels), ``"layer"`` (Ba et al. 2016; over all but the batch, with a scale for each channel).
      name: of the submodule.
      train: with the batch's own statistics rather than the running ones.
      mask: ``[batch]``, true for the rows that count in the statistics of a batch; all by default.
    """
    if norm is None:
        return x
    if norm == "batch":
        rows = None if mask is None else mask.reshape(-1, *[1] * (x.ndim - 1))
        # Two passes: the one-pass variance cancels on features far from zero, which is what clients differ by.
        layer = nn.BatchNorm(not train, momentum=0.9, epsilon=1e-5, use_fast_variance=False, name=name)
        return layer(x, mask=rows)
    if norm == "group":
        return nn.GroupNorm(math.gcd(_GROUPS, x.shape[-1]), use_fast_variance=False, name=name)(x)
    return nn.LayerNorm(reduction_axes=tuple(range(1, x.ndim)), use_fast_variance=False, name=name)(x)


def _forget_gate_open(key: Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> Array:
    """Bias 1 for the forget gate, 0 for the others (Jozefowicz et al. 2015), so that early training remembers."""
    return jnp.zeros(shape, dtype).at[shape[0] // 4 : shape[0] // 2].set(1)


class Lstm(nn.Module):
    """A long short-term memory over a sequence, ``[batch, time, in] -> [batch, time, features]``.

    ``i, f, g, o = x_t W + h_(t-1) U + b``; ``c_t = sigmoid(f) c_(t-1) + sigmoid(i) tanh(g)``;
    ``h_t = sigmoid(o) tanh(c_t)``. The inputs of all positions are multiplied at once, so the loop over time holds one
    matrix product rather than two.

    Source: Hochreiter & Schmidhuber, "Long Short-Term Memory", Neural Computation 1997, with the forget gate of Gers et
    al. 2000.
    """

    features: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """The hidden state at every position, from a state of zeros."""
        inputs = nn.Dense(4 * self.features, bias_init=_forget_gate_open, name="input")(x)
        recurrent = self.param("recurrent", nn.initializers.orthogonal(), (self.features, 4 * self.features))

        def step(carry: tuple[Array, Array], gates: Array) -> tuple[tuple[Array, Array], Array]:
            hidden, cell = carry
            i, f, g, o = jnp.split(gates + hidden @ recurrent, 4, axis=-1)
            cell = nn.sigmoid(f) * cell + nn.sigmoid(i) * jnp.tanh(g)
            hidden = nn.sigmoid(o) * jnp.tanh(cell)
            return (hidden, cell), hidden

        zero = jnp.zeros((x.shape[0], self.features), jnp.result_type(inputs, recurrent))
        _, hidden = jax.lax.scan(step, (zero, zero), inputs.swapaxes(0, 1))
        return hidden.swapaxes(0, 1)
