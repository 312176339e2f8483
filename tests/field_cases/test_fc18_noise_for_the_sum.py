"""FC-18: noise sized for the sum of clipped updates is added to the sum, not to the mean."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pers.privacy import private_mean

CLIENTS, PARAMETERS = 50, 100_000


@pytest.mark.parametrize(("clip_norm", "multiplier", "std"), [(1.0, 1.0, 0.02), (2.0, 1.0, 0.04), (1.0, 0.0, 0.0)])
def test_the_noise_of_the_mean(clip_norm, multiplier, std):
    zeros = {"body": jnp.zeros((CLIENTS, PARAMETERS - 10)), "head": jnp.zeros((CLIENTS, 10))}
    mean, noise = private_mean(zeros, jax.random.key(0), clip_norm=clip_norm, noise_multiplier=multiplier)
    values = np.concatenate([np.asarray(mean[name], np.float64) for name in ("body", "head")])
    if multiplier == 0:
        assert (values == 0).all()
    else:
        assert abs(values.mean()) < 3e-4 * clip_norm
        np.testing.assert_allclose(values.std(), std, rtol=0.02)
    np.testing.assert_allclose(noise.std_of_mean, std, rtol=1e-6)
    np.testing.assert_allclose(noise.std_of_sum, std * CLIENTS, rtol=1e-6)


def test_one_norm_over_all_leaves_of_a_client():
    # Client 0 has norm 5 over both leaves and is scaled to 1; client 1 has norm 0.5 and is left.
    differences = {"a": jnp.array([[3.0], [0.3]]), "b": jnp.array([[4.0], [0.4]])}
    mean, _ = private_mean(differences, jax.random.key(0), clip_norm=1.0, noise_multiplier=0.0)
    np.testing.assert_allclose([mean["a"][0], mean["b"][0]], [(0.6 + 0.3) / 2, (0.8 + 0.4) / 2], rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"clip_norm": 0.0, "noise_multiplier": 1.0}, "clip_norm: found 0"),
        ({"clip_norm": 1.0, "noise_multiplier": -1.0}, "noise_multiplier: found -1"),
    ],
)
def test_impossible_settings(settings, words):
    with pytest.raises(ValueError, match=words):
        private_mean({"w": jnp.zeros((2, 3))}, jax.random.key(0), **settings)
