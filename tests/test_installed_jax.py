"""Does the installed JAX compute right numbers?

Releases 0.9.1 to 0.10.2 do not on the CPU: a product of a small matrix with many vectors, reduced at once, becomes one
fused kernel that reads the wrong rows from position 32768 on (https://github.com/jax-ml/jax/issues/39103 tells of the
last of them). The answers look like numbers, so every result built on them is silently wrong.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

POINTS = 40_000
REDUCTIONS = {
    "sum": (jnp.sum, lambda product: product.sum(axis=1)),
    "max": (jnp.max, lambda product: product.max(axis=1)),
    "sum of squares": (lambda product: jnp.sum(product**2), lambda product: (product**2).sum(axis=1)),
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(2, 3), (3, 3), (4, 4), (10, 5), (1, 8)])
def test_a_product_with_many_vectors_then_a_reduction(shape, reduction):
    draw = np.random.default_rng(0)
    matrix = draw.normal(size=shape).astype(np.float32)
    vectors = draw.normal(size=(POINTS, shape[1])).astype(np.float32)
    reduce, by_hand = REDUCTIONS[reduction]

    found = jax.jit(jax.vmap(lambda matrix, vector: reduce(matrix @ vector), in_axes=(None, 0)))(matrix, vectors)

    expected = by_hand(vectors.astype(np.float64) @ matrix.astype(np.float64).T)
    wrong = ~np.isclose(found, expected, rtol=1e-4, atol=1e-4)
    assert not wrong.any(), (
        f"jax {jax.__version__}: {wrong.sum()} of {POINTS} values are wrong, the first at {np.flatnonzero(wrong)[0]}; "
        "install a release that pyproject.toml allows"
    )


@pytest.mark.parametrize("shape", [(3, 3), (10, 5)])
def test_a_matrix_for_each_client(shape):
    draw = np.random.default_rng(1)
    matrices = draw.normal(size=(POINTS, *shape)).astype(np.float32)
    vectors = draw.normal(size=(POINTS, shape[1])).astype(np.float32)

    found = jax.jit(jax.vmap(lambda matrix, vector: jnp.sum((matrix @ vector) ** 2)))(matrices, vectors)

    products = np.einsum("nij,nj->ni", matrices.astype(np.float64), vectors.astype(np.float64))
    np.testing.assert_allclose(found, (products**2).sum(axis=1), rtol=1e-4, atol=1e-4)
