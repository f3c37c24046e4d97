"""DLRM."""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from shardjax.models.inputs import check_arguments, stack_rows
from shardjax.models.interaction import dot_interaction
from shardjax.models.mlp import MLP


class DLRM(nnx.Module):
    """Dot products of all pairs of vectors between two MLPs.

    Naumov et al., "Deep Learning Recommendation Model for Personalization and
    Recommendation Systems", 2019, arXiv:1906.00091. The bottom MLP turns the dense
    features into one more vector; the top MLP reads that vector and the dot products.
    Without dense features there is no bottom MLP and the top one reads the products
    alone.

    Attributes:
      features: names of the features, in order.
      n_dense: number of dense features.
      dim: width of the vectors.

    Example:
      >>> model = DLRM(features=("user", "item"), n_dense=2, dim=4, rngs=nnx.Rngs(0))
      >>> rows = {"user": jnp.ones((3, 4)), "item": jnp.ones((3, 4))}
      >>> model(jnp.ones((3, 2)), rows).shape
      (3,)
    """

    def __init__(
        self,
        *,
        features: Sequence[str],
        n_dense: int,
        dim: int,
        bottom: Sequence[int] = (64,),
        top: Sequence[int] = (256, 128),
        rngs: nnx.Rngs,
    ):
        """Makes the two MLPs.

        Args:
          features: names of the features, in order.
          n_dense: number of dense features, may be 0.
          dim: width of the vectors.
          bottom: widths of the hidden layers of the bottom MLP, whose output has `dim`.
          top: widths of the hidden layers of the top MLP.
          rngs: where the initial weights come from.

        Raises:
          TypeError: if `features` is a single string.
          ValueError: if a name repeats, a size is out of range, or there are fewer than
            two vectors to pair.
        """
        self.features = check_arguments("DLRM", features, n_dense, dim)
        self.n_dense = n_dense
        self.dim = dim
        vectors = len(self.features) + (n_dense > 0)
        if vectors < 2:
            raise ValueError(
                "DLRM must have at least two vectors to pair (one per feature, one for"
                f" the dense features), got {len(self.features)} features and `n_dense`"
                f" {n_dense}. Add a feature, or use WideDeep."
            )
        pairs = vectors * (vectors - 1) // 2
        self.bottom = MLP(n_dense, (*bottom, dim), rngs=rngs) if n_dense else None
        self.top = MLP(
            pairs + (dim if n_dense else 0), (*top, 1), relu_last=False, rngs=rngs
        )

    @staticmethod
    def row_dim(dim: int) -> int:
        """Floats per embedding row.

        Args:
          dim: width of the vectors.

        Returns:
          `dim`.

        Example:
          >>> DLRM.row_dim(16)
          16
        """
        return dim

    def __call__(
        self,
        dense: Float[Array, "batch n_dense"],
        embeddings: Mapping[str, Float[Array, "batch dim"]],
    ) -> Float[Array, " batch"]:
        """Gives the logit of each example.

        Args:
          dense: dense features.
          embeddings: pooled vectors by feature.

        Returns:
          The logits.

        Raises:
          TypeError: if a feature is a padded sequence and not pooled.
          ValueError: if a feature is missing or unknown, or a shape does not fit.
        """
        vectors = stack_rows(
            "DLRM", self.features, self.n_dense, self.dim, dense, embeddings
        )
        if self.bottom is None:
            return self.top(dot_interaction(vectors))[:, 0]
        bottom = self.bottom(dense)
        vectors = jnp.concatenate([bottom[:, None, :], vectors], axis=1)
        products = dot_interaction(vectors)
        return self.top(jnp.concatenate([bottom, products], axis=1))[:, 0]
