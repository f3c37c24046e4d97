"""A stack of linear layers with ReLU between them."""

from collections.abc import Sequence

import jax
from flax import nnx
from jaxtyping import Array, Float


class MLP(nnx.Module):
    """Linear layers, each followed by a ReLU.

    Attributes:
      layers: the linear layers, in order.
      relu_last: whether the last layer has its ReLU too.

    Example:
      >>> import jax.numpy as jnp
      >>> mlp = MLP(13, (64, 16), rngs=nnx.Rngs(0))
      >>> mlp(jnp.ones((2, 13))).shape
      (2, 16)
    """

    def __init__(
        self,
        n_in: int,
        sizes: Sequence[int],
        *,
        relu_last: bool = True,
        rngs: nnx.Rngs,
    ):
        """Makes the layers.

        Args:
          n_in: width of the input.
          sizes: width of each layer's output, in order; may be empty.
          relu_last: whether the last layer has its ReLU too.
          rngs: where the initial weights come from.

        Raises:
          ValueError: if a width is not positive.
        """
        widths = (n_in, *sizes)
        if min(widths) < 1:
            raise ValueError(
                f"the widths of an MLP must be positive, got {n_in} -> {tuple(sizes)}."
                " Leave a layer out rather than giving it width 0."
            )
        self.relu_last = relu_last
        self.layers = nnx.List(
            nnx.Linear(a, b, rngs=rngs)
            for a, b in zip(widths[:-1], widths[1:], strict=True)
        )

    def __call__(self, x: Float[Array, "batch n_in"]) -> Float[Array, "batch n_out"]:
        """Applies the layers.

        Args:
          x: the input.

        Returns:
          The output of the last layer; the input if there is none.
        """
        for number, layer in enumerate(self.layers, start=1):
            x = layer(x)
            if self.relu_last or number < len(self.layers):
                x = jax.nn.relu(x)
        return x
