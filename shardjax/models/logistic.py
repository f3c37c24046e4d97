"""Logistic regression."""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from shardjax.models.inputs import check_arguments, stack_rows


class LogisticRegression(nnx.Module):
    """One weight per key and per dense feature, and a bias.

    The weight of a key is its embedding row of one float. All weights that belong to
    the model itself start at zero: the problem is convex.

    Attributes:
      features: names of the features, in order.
      n_dense: number of dense features.
      dim: accepted as in the other models, unused: rows have one float.

    Example:
      >>> model = LogisticRegression(features=("user",), n_dense=2, rngs=nnx.Rngs(0))
      >>> model(jnp.ones((3, 2)), {"user": jnp.ones((3, 1))})
      Array([1., 1., 1.], dtype=float32)
    """

    def __init__(
        self,
        *,
        features: Sequence[str],
        n_dense: int,
        dim: int = 1,
        rngs: nnx.Rngs,
    ):
        """Makes the weights of the dense features and the bias.

        Args:
          features: names of the features, in order.
          n_dense: number of dense features, may be 0.
          dim: unused; there for a call that is the same for all models.
          rngs: unused, all starts at zero.

        Raises:
          TypeError: if `features` is a single string.
          ValueError: if a name repeats or a size is out of range.
        """
        self.features = check_arguments("LogisticRegression", features, n_dense, dim)
        self.n_dense = n_dense
        self.dim = dim
        self.linear = LinearTerm(n_dense, rngs=rngs)

    @staticmethod
    def row_dim(dim: int) -> int:
        """Floats per embedding row.

        Args:
          dim: any; there is no vector.

        Returns:
          1, the weight of the key.

        Example:
          >>> LogisticRegression.row_dim(16)
          1
        """
        return 1

    def __call__(
        self,
        dense: Float[Array, "batch n_dense"],
        embeddings: Mapping[str, Float[Array, "batch 1"]],
    ) -> Float[Array, " batch"]:
        """Gives the logit of each example.

        Args:
          dense: dense features.
          embeddings: pooled rows by feature.

        Returns:
          The logits.

        Raises:
          TypeError: if a feature is a padded sequence and not pooled.
          ValueError: if a feature is missing or unknown, or a shape does not fit.
        """
        rows = stack_rows(
            "LogisticRegression", self.features, self.n_dense, 1, dense, embeddings
        )
        return self.linear(dense, rows[:, :, 0])


class LinearTerm(nnx.Module):
    """The linear part of a model: weights of dense features, weights of keys, a bias.

    Attributes:
      bias: float32 [].
      weights: float32 [n_dense].

    Example:
      >>> term = LinearTerm(2, rngs=nnx.Rngs(0))
      >>> term(jnp.ones((1, 2)), jnp.array([[0.5, 2.0]]))
      Array([2.5], dtype=float32)
    """

    def __init__(self, n_dense: int, *, rngs: nnx.Rngs):
        """Makes the weights, all zero.

        Args:
          n_dense: number of dense features.
          rngs: unused, all starts at zero.
        """
        del rngs
        self.bias = nnx.Param(jnp.zeros(()))
        self.weights = nnx.Param(jnp.zeros((n_dense,)))

    def __call__(
        self,
        dense: Float[Array, "batch n_dense"],
        key_weights: Float[Array, "batch features"],
    ) -> Float[Array, " batch"]:
        """Sums the linear part.

        Args:
          dense: dense features.
          key_weights: the pooled weight of each feature's keys.

        Returns:
          One sum per example.
        """
        return dense @ self.weights[...] + key_weights.sum(axis=1) + self.bias[...]
