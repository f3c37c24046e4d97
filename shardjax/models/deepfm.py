"""DeepFM."""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from shardjax.models.inputs import check_arguments, stack_rows
from shardjax.models.interaction import pairwise_interaction
from shardjax.models.logistic import LinearTerm
from shardjax.models.mlp import MLP


class DeepFM(nnx.Module):
    """A factorization machine and an MLP over the same vectors.

    Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR
    Prediction", 2017, arXiv:1703.04247. Difference from the paper: dense features have
    no vectors; they enter the linear term and the MLP. Without the MLP
    (``hidden=None``) it is a plain factorization machine (Rendle, 2010).

    Attributes:
      features: names of the features, in order.
      n_dense: number of dense features.
      dim: width of the vectors; a row is one float longer.

    Example:
      >>> model = DeepFM(features=("user", "item"), n_dense=2, dim=4, rngs=nnx.Rngs(0))
      >>> rows = {"user": jnp.ones((3, 5)), "item": jnp.ones((3, 5))}
      >>> model(jnp.ones((3, 2)), rows).shape
      (3,)
    """

    def __init__(
        self,
        *,
        features: Sequence[str],
        n_dense: int,
        dim: int,
        hidden: Sequence[int] | None = (256, 128, 64),
        rngs: nnx.Rngs,
    ):
        """Makes the linear part and the MLP.

        Args:
          features: names of the features, in order.
          n_dense: number of dense features, may be 0.
          dim: width of the vectors.
          hidden: widths of the hidden layers of the deep part; None for no deep part.
          rngs: where the initial weights come from.

        Raises:
          TypeError: if `features` is a single string.
          ValueError: if a name repeats or a size is out of range.
        """
        self.features = check_arguments("DeepFM", features, n_dense, dim)
        self.n_dense = n_dense
        self.dim = dim
        self.linear = LinearTerm(n_dense, rngs=rngs)
        if hidden is None:
            self.deep = None
        else:
            width = n_dense + len(self.features) * dim
            self.deep = MLP(width, (*hidden, 1), relu_last=False, rngs=rngs)

    @staticmethod
    def row_dim(dim: int) -> int:
        """Floats per embedding row.

        Args:
          dim: width of the vectors.

        Returns:
          ``dim + 1``: the weight of the key, then its vector.

        Example:
          >>> DeepFM.row_dim(16)
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
            "DeepFM",
            self.features,
            self.n_dense,
            self.row_dim(self.dim),
            dense,
            embeddings,
        )
        vectors = rows[:, :, 1:]
        logits = self.linear(dense, rows[:, :, 0]) + pairwise_interaction(vectors)
        if self.deep is None:
            return logits
        flat = vectors.reshape(rows.shape[0], len(self.features) * self.dim)
        return logits + self.deep(jnp.concatenate([dense, flat], axis=1))[:, 0]
