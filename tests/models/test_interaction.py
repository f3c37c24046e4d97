"""The interactions against their definitions in NumPy, and their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from shardjax.models import cross, dot_interaction, pairwise_interaction


def _vectors(batch, n, dim, seed=0):
    return np.random.default_rng(seed).normal(size=(batch, n, dim)).astype(np.float32)


def _all_pairs(vectors):
    """Each pair once, as the definition says, in float64."""
    x = vectors.astype(np.float64)
    n = x.shape[1]
    pairs = [(x[:, i] * x[:, j]).sum(-1) for i in range(n) for j in range(i)]
    return np.stack(pairs, axis=1) if pairs else np.zeros((len(x), 0))


def _plain_dot_interaction(vectors):
    """The same in JAX, differentiated by JAX."""
    products = jnp.einsum("bid,bjd->bij", vectors, vectors)
    rows, columns = np.tril_indices(vectors.shape[1], -1)
    return products[:, rows, columns]


SHAPES = [(5, 27, 16), (1, 2, 1), (3, 1, 4), (0, 4, 3), (7, 8, 5)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dot_interaction_is_each_pair_once(shape):
    vectors = _vectors(*shape)
    got = jax.jit(dot_interaction)(vectors)
    assert got.shape == (shape[0], shape[1] * (shape[1] - 1) // 2)
    np.testing.assert_allclose(got, _all_pairs(vectors), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dot_interaction_gradient_is_that_of_autodiff(shape):
    vectors = jnp.asarray(_vectors(*shape))
    pairs = shape[1] * (shape[1] - 1) // 2
    weights = jnp.asarray(_vectors(shape[0], pairs, 1, seed=1)[..., 0])

    def loss(f, x):
        return jnp.sum(jnp.sin(f(x)) * weights)

    ours = jax.jit(jax.grad(lambda x: loss(dot_interaction, x)))(vectors)
    autodiff = jax.grad(lambda x: loss(_plain_dot_interaction, x))(vectors)
    np.testing.assert_allclose(ours, autodiff, rtol=1e-5, atol=1e-5)


def test_dot_interaction_gradient_against_finite_differences():
    def f(x):
        return dot_interaction(jnp.asarray(x))

    check_grads(f, (_vectors(3, 4, 5),), order=1, modes=["rev"])


def test_dot_interaction_backward_is_one_batched_product():
    vectors = jnp.asarray(_vectors(4, 6, 8))
    _, backward = jax.vjp(dot_interaction, vectors)
    text = str(jax.make_jaxpr(backward)(jnp.ones((4, 15))))
    assert text.count("dot_general") == 1


def test_pairwise_interaction_is_the_sum_of_all_pairs():
    vectors = _vectors(6, 9, 5)
    np.testing.assert_allclose(
        pairwise_interaction(jnp.asarray(vectors)),
        _all_pairs(vectors).sum(1),
        rtol=1e-4,
        atol=1e-4,
    )


def test_pairwise_interaction_of_one_vector_is_zero():
    one = jnp.asarray(_vectors(4, 1, 5))
    np.testing.assert_allclose(pairwise_interaction(one), np.zeros(4), atol=1e-6)


def test_cross_is_equation_1_of_the_paper():
    x0, x, projected = (jnp.asarray(_vectors(3, 1, 4, seed=s)[:, 0]) for s in range(3))
    got = cross(x0, x, projected)
    for b in range(3):
        for i in range(4):
            expected = float(x0[b, i]) * float(projected[b, i]) + float(x[b, i])
            assert float(got[b, i]) == pytest.approx(expected, rel=1e-6)
