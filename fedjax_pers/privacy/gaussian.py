"""The Gaussian mechanism on clients' differences: clip each, sum, add noise to the sum, then divide."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_pers.base import Array, Leaves
from fedjax_pers.checks import number, require


class Noise(NamedTuple):
    """The noise of a private mean, a coordinate.

    Attributes:
      std_of_sum: standard deviation added to the sum of clipped differences, ``noise_multiplier * clip_norm``.
      std_of_mean: what that is after dividing by the clients, in the units of what is returned.
    """

    std_of_sum: Array
    std_of_mean: Array


def private_mean(differences: Leaves, key: Array, *, clip_norm: Any, noise_multiplier: Any) -> tuple[Leaves, Noise]:
    """``(sum_i clip(d_i, C) + N(0, (z C)^2 I)) / clients``: uniform weights, one norm over all leaves of a client.

    Example:
      >>> mean, noise = private_mean({"w": jnp.zeros((50, 3))}, jax.random.key(0), clip_norm=1.0, noise_multiplier=1.0)
      >>> mean["w"].shape, round(float(noise.std_of_sum), 3), round(float(noise.std_of_mean), 3)
      ((3,), 1.0, 0.02)

    Args:
      differences: leaves ``[clients, ...]``, shared leaves only: personal ones must not count in the norm.
      key: of the noise.
      clip_norm: C, the largest L2 norm of a client's difference, above 0.
      noise_multiplier: z, at least 0.

    Source: McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018.

    Differences from the paper: the denominator is the number of clients given. With Poisson sampling it must be the
    expected cohort, a constant: rescale by ``clients / expected``. No accountant is included.
    """
    number("clip_norm", clip_norm, low=1e-12)
    number("noise_multiplier", noise_multiplier, low=0)
    sizes = {x.shape[:1] for x in jax.tree.leaves(differences)}
    require(
        len(sizes) == 1 and sizes != {(0,)}, f"differences: found leading axes {sizes}; expected one, [clients, ...]"
    )
    clients = next(iter(sizes))[0]
    mechanism = optax.contrib.differentially_private_aggregate(clip_norm, noise_multiplier, key)
    mean, _ = mechanism.update(differences, mechanism.init(differences))
    std = jnp.float32(noise_multiplier) * clip_norm
    return mean, Noise(std, std / clients)
