"""Deep Q-learning with embedding tables: the objective of a training step.

The network of a recommender that plans ahead says what each thing that it may show is worth,
now and after. `QLearning` is what `shardjax.train.make_train_step` trains it for, with a
target of the network and of its tables (`keep_target`) that lie wherever rows lie.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardjax.rl.target import HardCopy, TargetRule, check_rule


class QValues(NamedTuple):
    """What a network returns for items of a replay."""

    q_tm1: jax.Array  # [batch], of the action that was taken
    q_t: (
        jax.Array
    )  # [batch, actions], of those there were next; -inf where there was none


@dataclass(frozen=True)
class QLearning:
    """The objective of Q-learning: `make_train_step(..., objective=QLearning(rule))`.

    The network is called as any other, `model(dense, embeddings)`, and returns `QValues`: its
    features are those of an item of a replay, the state and the action taken in it, and the
    state after with the actions that there are. Of a batch, `labels` are the rewards r_t, the
    last column of `dense` is discount_t, 0 where the episode has terminated, and `weights` are
    the importance weights. Predictions are |TD errors|, what priorities are to be made of.

    Attributes:
      target: how the target follows, of the network and of each table. `HardCopy(1)` is the
        network itself, which learning is seldom stable with.
      double: the online network chooses the next action, the target says what it is worth
        (van Hasselt et al. 2016); False for the target's largest value.
      huber: TD errors beyond it count linearly; None for squares alone (halved).

    Raises:
      TypeError, ValueError: for something else than a rule, or a `huber` out of its range.

    Example:
      >>> objective = QLearning(HardCopy(100), huber=None)
      >>> now = QValues(jnp.array([1.0]), jnp.array([[5.0, 7.0]]))
      >>> lagged = QValues(jnp.array([0.0]), jnp.array([[4.0, 2.0]]))
      >>> losses, errors = objective(now, lagged, jnp.array([0.5]), jnp.array([[0.5]]))
      >>> errors, losses  # 0.5 + 0.5 * 2 - 1
      (Array([0.5], dtype=float32), Array([0.125], dtype=float32))
    """

    target: TargetRule = HardCopy(100)
    double: bool = True
    huber: float | None = 1.0

    def __post_init__(self):
        check_rule(self.target)
        if self.huber is not None and not self.huber > 0:
            raise ValueError(f"`huber` must be positive or None, got {self.huber}")

    def __call__(
        self, outputs: QValues, lagged: QValues, labels: jax.Array, dense: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Losses and |TD errors| of some items, [batch] each; see `Objective`.

        Raises:
          TypeError: if the network returns something else than `QValues`.
          ValueError: for other shapes of them, or if there is no discount.
        """
        for values in (outputs, lagged):
            _check_values(values, len(labels))
        if not dense.shape[-1]:
            raise ValueError(
                "the last column of `dense` must be the discounts, but a batch has none."
                " Append `discount_t` to what the network gets"
            )
        discount_t = dense[:, -1]
        chosen_by = outputs.q_t if self.double else lagged.q_t
        best = jnp.argmax(chosen_by, axis=-1)[:, None]
        v_t = jnp.take_along_axis(lagged.q_t, best, axis=-1)[:, 0]
        # what comes after the end is worth 0, also where there is no action any more
        v_t = jnp.where(discount_t != 0, v_t.astype(jnp.float32), 0)
        wanted = jax.lax.stop_gradient(labels + discount_t * v_t)
        td = wanted - outputs.q_tm1.astype(jnp.float32)
        if self.huber is None:
            return 0.5 * jnp.square(td), jnp.abs(td)
        return optax.huber_loss(td, delta=self.huber), jnp.abs(td)


def _check_values(values: QValues, items: int) -> None:
    if not isinstance(values, QValues):
        raise TypeError(
            "the network of a QLearning must return `QValues(q_tm1, q_t)`, got a"
            f" {type(values).__name__}"
        )
    if values.q_tm1.shape != (items,) or values.q_t.shape[:-1] != (items,):
        raise ValueError(
            f"`QValues` must have shapes [batch] and [batch, actions] with batch {items},"
            f" got {values.q_tm1.shape} and {values.q_t.shape}"
        )
