"""Wide & Deep."""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from shardjax.models.inputs import check_arguments, stack_rows
from shardjax.models.logistic import LinearTerm
from shardjax.models.mlp import MLP


class WideDeep(nnx.Module):
    """A linear model and an MLP over the vectors, trained together.

    Cheng et al., "Wide & Deep Learning for Recommender Systems", 2016,
    arXiv:1606.07792. Each feature is in both parts; a crossed feature of the paper's
    wide part is a feature like any other. One row optimizer trains both parts, where
    the paper uses FTRL for the wide one.

    Attributes:
      features: names of the features, in order.
      n_dense: number of dense features.
      dim: width of the vectors; a row is one float longer.

    Example:
      >>> model = WideDeep(features=("user",), n_dense=2, dim=4, rngs=nnx.Rngs(0))
      >>> model(jnp.ones((3, 2)), {"user": jnp.ones((3, 5))}).shape
      (3,)
    """

    def __init__(
        self,
        *,
        features: Sequence[str],
        n_dense: int,
        dim: int,
        hidden: Sequence[int] = (256, 128, 64),
        rngs: nnx.Rngs,
    ):
        """Makes the linear part and the MLP.

        Args:
          features: names of the features, in order.
          n_dense: number of dense features, may be 0.
          dim: width of the vectors.
          hidden: widths of the hidden layers of the deep part.
          rngs: where the initial weights come from.

        Raises:
          TypeError: if `features` is a single string.
          ValueError: if a name repeats or a size is out of range.
        """
        self.features = check_arguments("WideDeep", features, n_dense, dim)
        self.n_dense = n_dense
        self.dim = dim
        self.linear = LinearTerm(n_dense, rngs=rngs)
        self.deep = MLP(
            n_dense + len(self.features) * dim,
            (*hidden, 1),
            relu_last=False,
            rngs=rngs,
        )

    @staticmethod
    def row_dim(dim: int) -> int:
        """Floats per embedding row.

        Args:
          dim: width of the vectors.

        Returns:
          ``dim + 1``: the weight of the key, then its vector.

        Example:
          >>> WideDeep.row_dim(16)
          17
        """
        return dim + 1

    def __call__(
        self,
        dense: Float[Array, "batch n_dense"],
        embeddings: Mapping[str, Float[Array, "batch row_dim"]],
    ) -> Float[Array, " batch"]:
        """Gives the logit of each example.

        Args:
          dense: dense features.
          embeddings: pooled rows by feature, ``dim + 1`` floats each.

        Returns:
          The logits.

        Raises:
          TypeError: if a feature is a padded sequence and not pooled.
          ValueError: if a feature is missing or unknown, or a shape does not fit.
        """
        rows = stack_rows(
            "WideDeep",
            self.features,
            self.n_dense,
            self.row_dim(self.dim),
            dense,
            embeddings,
        )
        vectors = rows[:, :, 1:].reshape(rows.shape[0], len(self.features) * self.dim)
        deep = self.deep(jnp.concatenate([dense, vectors], axis=1))
        return self.linear(dense, rows[:, :, 0]) + deep[:, 0]
