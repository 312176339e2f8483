"""A small decoder transformer whose attention has low-rank adapters: what workload W5 trains, all else being frozen."""

from __future__ import annotations

import jax.numpy as jnp
from flax import linen as nn

from fedjax_pers.base import Array


class Adapted(nn.Module):
    """``x kernel + (x lora_a) lora_b``, without a bias."""

    width: int
    rank: int = 0

    @nn.compact
    def __call__(self, x: Array) -> Array:
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], self.width))
        if not self.rank:
            return x @ kernel
        a = self.param("lora_a", nn.initializers.lecun_normal(), (x.shape[-1], self.rank))
        b = self.param("lora_b", nn.initializers.zeros, (self.rank, self.width))
        return x @ kernel + (x @ a) @ b


class Layer(nn.Module):
    """Causal attention and a feed-forward part, each on what comes in normalised."""

    width: int
    heads: int
    rank: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        batch, time, _ = x.shape
        h = nn.RMSNorm(name="norm1")(x)
        ranks = {"query": self.rank, "key": 0, "value": self.rank}
        parts = [Adapted(self.width, rank, name=name)(h) for name, rank in ranks.items()]
        query, key, value = (y.reshape(batch, time, self.heads, -1) for y in parts)
        scores = jnp.einsum("bthd,bshd->bhts", query, key) * (self.width // self.heads) ** -0.5
        weights = nn.softmax(jnp.where(jnp.tril(jnp.ones((time, time), bool)), scores, -1e9))
        mixed = jnp.einsum("bhts,bshd->bthd", weights, value).reshape(batch, time, self.width)
        x = x + Adapted(self.width, name="out")(mixed)
        wide = nn.relu(Adapted(4 * self.width, name="up")(nn.RMSNorm(name="norm2")(x)))
        return x + Adapted(self.width, name="down")(wide)


class Transformer(nn.Module):
    """``[batch, time] -> [batch, time, characters]``."""

    characters: int = 128
    layers: int = 4
    width: int = 128
    heads: int = 4
    rank: int = 8

    @nn.compact
    def __call__(self, x: Array) -> Array:
        places = self.param("places", nn.initializers.normal(0.02), (x.shape[1], self.width))
        x = nn.Embed(self.characters, self.width, name="embedding")(x) + places
        for place in range(1, self.layers + 1):
            x = Layer(self.width, self.heads, self.rank, name=f"layer{place}")(x)
        return Adapted(self.characters, name="head")(nn.RMSNorm(name="norm")(x))
