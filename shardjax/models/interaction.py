"""How the vectors of the features of one example are combined."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


@jax.custom_vjp
def dot_interaction(
    vectors: Float[Array, "batch n dim"],
) -> Float[Array, "batch pairs"]:
    """The dot products of all pairs of vectors, each pair once.

    The interaction of DLRM (Naumov et al., 2019, arXiv:1906.00091). Its backward pass
    is one batched product, since the products form a symmetric matrix: reverse-mode
    differentiation of ``x @ x.T`` would do two.

    Args:
      vectors: `n` vectors per example.

    Returns:
      The ``n * (n - 1) / 2`` products per example: the strict lower triangle of
      ``x @ x.T``, row by row: (1, 0), (2, 0), (2, 1), (3, 0), ...

    Example:
      >>> dot_interaction(jnp.array([[[1., 0.], [2., 1.], [0., 3.]]]))
      Array([[2., 0., 3.]], dtype=float32)
    """
    batch, n, _ = vectors.shape
    products = jnp.einsum("bid,bjd->bij", vectors, vectors)
    rows, columns = np.tril_indices(n, -1)
    return products.reshape(batch, n * n)[:, rows * n + columns]


def _dot_interaction_forward(vectors):
    return dot_interaction(vectors), vectors


def _dot_interaction_backward(vectors, gradient):
    # d(x_i . x_j) gives x_j to x_i and x_i to x_j: gradient = S @ x, where S is
    # symmetric, with the gradient of pair (i, j) at both places and a zero diagonal.
    batch, n, _ = vectors.shape
    rows, columns = np.tril_indices(n, -1)
    pair = np.full((n, n), len(rows))  # the diagonal reads the zero appended below
    pair[rows, columns] = pair[columns, rows] = np.arange(len(rows))
    padded = jnp.pad(gradient, ((0, 0), (0, 1)))
    symmetric = padded[:, pair.reshape(-1)].reshape(batch, n, n)
    return (jnp.einsum("bij,bjd->bid", symmetric, vectors),)


dot_interaction.defvjp(_dot_interaction_forward, _dot_interaction_backward)


def pairwise_interaction(
    vectors: Float[Array, "batch n dim"],
) -> Float[Array, " batch"]:
    """The sum of the dot products of all pairs of vectors.

    The second-order term of a factorization machine (Rendle, 2010), in time linear in
    `n`: half of the square of the sum less the sum of the squares.

    Args:
      vectors: `n` vectors per example.

    Returns:
      One sum per example.

    Example:
      >>> pairwise_interaction(jnp.array([[[1., 0.], [2., 1.], [0., 3.]]]))
      Array([5.], dtype=float32)
    """
    square_of_sum = jnp.square(jnp.sum(vectors, axis=1))
    sum_of_squares = jnp.sum(jnp.square(vectors), axis=1)
    return 0.5 * jnp.sum(square_of_sum - sum_of_squares, axis=-1)


def cross(
    x0: Float[Array, "batch width"],
    x: Float[Array, "batch width"],
    projected: Float[Array, "batch width"],
) -> Float[Array, "batch width"]:
    """One cross layer of DCN-v2 (Wang et al., 2021, arXiv:2008.13535, equation 1).

    Args:
      x0: input of the first layer.
      x: input of this layer.
      projected: ``W x + b`` of this layer.

    Returns:
      ``x0 * projected + x``: each layer raises the degree of the polynomial in `x0`
      by one.

    Example:
      >>> cross(jnp.array([[2.0]]), jnp.array([[3.0]]), jnp.array([[5.0]]))
      Array([[13.]], dtype=float32)
    """
    return x0 * projected + x
