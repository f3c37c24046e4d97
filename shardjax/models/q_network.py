"""A network of the values of actions, for Q-learning on observations that are vectors."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from shardjax.models.mlp import MLP


def dueling(
    value: Float[Array, "batch 1"], advantages: Float[Array, "batch actions"]
) -> Float[Array, "batch actions"]:
    """Values of actions, of the two streams of a dueling network.

    The mean advantage is taken off, equation 9 of Wang et al. 2016: only the sum of the two
    streams is learned from, which leaves a constant between them open.

    Args:
      value: of the state.
      advantages: of the actions in it.

    Example:
      >>> dueling(jnp.ones((1, 1)), jnp.array([[1.0, 3.0]]))
      Array([[0., 2.]], dtype=float32)
    """
    return value + advantages - jnp.mean(advantages, axis=-1, keepdims=True)


class QNetwork(nnx.Module):
    """Layers with ReLU, and a linear one of a value per action.

    Attributes:
      body: the layers before the last.
      advantages: the linear layer of the actions: of their values, or of their advantages.
      value: the linear layer of the state's value in a dueling network, else None.

    Example:
      >>> network = QNetwork(4, 2, (32,), dueling=True, rngs=nnx.Rngs(0))
      >>> network(jnp.ones((3, 4))).shape
      (3, 2)
    """

    def __init__(
        self,
        n_in: int,
        n_actions: int,
        sizes: Sequence[int] = (256, 256),
        *,
        dueling: bool = False,
        rngs: nnx.Rngs,
    ):
        """Makes the layers.

        Args:
          n_in: width of an observation.
          n_actions: how many actions there are.
          sizes: width of each layer before the last.
          dueling: whether the state has a value of its own (Wang et al. 2016).
          rngs: where the initial weights come from.

        Raises:
          ValueError: if a width is not positive.
        """
        if n_actions < 1:
            raise ValueError(f"`n_actions` must be positive, got {n_actions}")
        self.body = MLP(n_in, sizes, rngs=rngs)
        width = (n_in, *sizes)[-1]
        self.advantages = nnx.Linear(width, n_actions, rngs=rngs)
        self.value = nnx.Linear(width, 1, rngs=rngs) if dueling else None

    def __call__(
        self, obs: Float[Array, "batch n_in"]
    ) -> Float[Array, "batch actions"]:
        """The value of each action.

        Args:
          obs: the observations.
        """
        x: jax.Array = self.body(obs)
        if self.value is None:
            return self.advantages(x)
        return dueling(self.value(x), self.advantages(x))
