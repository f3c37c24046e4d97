"""DCN-v2."""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from shardjax.models.inputs import check_arguments, stack_rows
from shardjax.models.interaction import cross
from shardjax.models.mlp import MLP


class DCN(nnx.Module):
    """Cross layers over all inputs, then an MLP.

    Wang et al., "DCN V2: Improved Deep & Cross Network", 2021, arXiv:2008.13535, in its
    stacked form. The cross layers start from the dense features and all vectors, one
    after the other; each raises the degree of the polynomial by one.

    Attributes:
      features: names of the features, in order.
      n_dense: number of dense features.
      dim: width of the vectors.

    Example:
      >>> model = DCN(features=("user",), n_dense=2, dim=4, rngs=nnx.Rngs(0))
      >>> model(jnp.ones((3, 2)), {"user": jnp.ones((3, 4))}).shape
      (3,)
    """

    def __init__(
        self,
        *,
        features: Sequence[str],
        n_dense: int,
        dim: int,
        cross_layers: int = 3,
        rank: int | None = None,
        hidden: Sequence[int] = (256, 128),
        rngs: nnx.Rngs,
    ):
        """Makes the cross layers and the MLP.

        Args:
          features: names of the features, in order.
          n_dense: number of dense features, may be 0.
          dim: width of the vectors.
          cross_layers: number of cross layers; 0 leaves the MLP alone.
          rank: rank of the cross layers' matrices, as a product of two thin ones
            (equation 2 of the paper, one expert); None for full matrices.
          hidden: widths of the hidden layers of the MLP.
          rngs: where the initial weights come from.

        Raises:
          TypeError: if `features` is a single string.
          ValueError: if a name repeats or a size is out of range.
        """
        self.features = check_arguments("DCN", features, n_dense, dim)
        if cross_layers < 0:
            raise ValueError(
                f"`cross_layers` of DCN must not be negative, got {cross_layers}. Give"
                " 0 for the MLP alone."
            )
        if rank is not None and rank < 1:
            raise ValueError(
                f"`rank` of DCN must be positive, got {rank}. Give None for full"
                " matrices."
            )
        self.n_dense = n_dense
        self.dim = dim
        width = n_dense + len(self.features) * dim
        self.reduce = nnx.List()
        self.expand = nnx.List()
        for _ in range(cross_layers):
            if rank is not None:
                self.reduce.append(nnx.Linear(width, rank, use_bias=False, rngs=rngs))
            self.expand.append(nnx.Linear(rank or width, width, rngs=rngs))
        self.deep = MLP(width, (*hidden, 1), relu_last=False, rngs=rngs)

    @staticmethod
    def row_dim(dim: int) -> int:
        """Floats per embedding row.

        Args:
          dim: width of the vectors.

        Returns:
          `dim`.

        Example:
          >>> DCN.row_dim(16)
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
            "DCN", self.features, self.n_dense, self.dim, dense, embeddings
        )
        flat = vectors.reshape(vectors.shape[0], len(self.features) * self.dim)
        x0 = jnp.concatenate([dense, flat], axis=1)
        x = x0
        for layer, expand in enumerate(self.expand):
            reduced = self.reduce[layer](x) if self.reduce else x
            x = cross(x0, x, expand(reduced))
        return self.deep(x)[:, 0]
