"""What a step minimizes, per example, and what metrics see of it."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from shardjax.network import finish_logits
from shardjax.rl.target import TargetRule

Loss = Callable[[jax.Array, jax.Array], jax.Array]


class Objective(Protocol):
    """What a model is trained for, where that is more than a loss of logits and labels.

    Attributes:
      target: how a target network follows the model, None for no target.
    """

    @property
    def target(self) -> TargetRule | None: ...

    def __call__(
        self, outputs: Any, lagged: Any, labels: jax.Array, dense: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The losses of some examples.

        Args:
          outputs: what the model returned; each leaf [batch, ...].
          lagged: what it returns with the parameters and the rows of the target; None
            without one. It has no gradient.
          labels: float32 [batch].
          dense: float32 [batch, n_dense].

        Returns:
          Losses, not weighted, and predictions for metrics, float32 [batch] each.
        """
        ...


def binary_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Logistic loss per example; labels in [0, 1]."""
    return optax.sigmoid_binary_cross_entropy(logits, labels)


def example_losses(loss, logits, labels, weights):
    """The loss of each example, zero (and of zero gradient) where its weight is."""
    # inside as well: the gradient of a loss that is not finite is NaN, even times zero
    counts = weights != 0
    losses = loss(jnp.where(counts, logits, 0), jnp.where(counts, labels, 0))
    return jnp.where(counts, losses, 0)


def losses_of_logits(network_loss: Loss, outputs, labels, weights):
    """Losses and logits of a model that gives one per example."""
    logits = finish_logits(outputs, len(labels))
    return example_losses(network_loss, logits, labels, weights), logits


def losses_of(objective: Objective, outputs, lagged, labels, weights, dense):
    """Losses and predictions as an objective says; see `example_losses`."""
    counts = weights != 0
    labels, dense = jnp.where(counts, labels, 0), jnp.where(counts[:, None], dense, 0)
    losses, predictions = objective(outputs, lagged, labels, dense)
    for name, x in (("losses", losses), ("predictions", predictions)):
        if x.shape != labels.shape:
            raise ValueError(
                f"an objective must return {name} of shape [batch] = {labels.shape}, got"
                f" {x.shape}"
            )
    return jnp.where(counts, losses, 0), predictions.astype(jnp.float32)


def update_metrics(metrics, arrays, logits, loss, predict):
    """Local metrics, a leading dim of one each, with this device's examples added."""
    extras = {"groups": arrays["groups"]} if "groups" in arrays else {}

    def update(metric):
        one = jax.tree.map(lambda x: x[0], metric)
        one = one.update(
            labels=arrays["labels"],
            predictions=predict(logits),
            weights=arrays["weights"],
            logits=logits,
            loss=loss,
            **extras,
        )
        return jax.tree.map(lambda x: x[None], one)

    return {name: update(metric) for name, metric in metrics.items()}


def as_it_is(predictions: jax.Array) -> jax.Array:
    """Predictions of an objective: they are what metrics see."""
    return predictions


OF_LOGITS = (binary_cross_entropy, jax.nn.sigmoid)
