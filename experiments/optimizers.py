"""Optimizers of a program: of the network's parameters and of the embedding rows."""

from dataclasses import dataclass
from typing import Literal

import optax

from shardjax import embed

DENSE_OPTIMIZERS = {
    "sgd": optax.sgd,
    "momentum": lambda rate: optax.sgd(rate, momentum=0.9),
    "adagrad": optax.adagrad,
    "adam": optax.adam,
    "adamw": optax.adamw,
    "lion": optax.lion,
}
ROW_OPTIMIZERS = {
    **DENSE_OPTIMIZERS,
    "adagrad": lambda rate, start: optax.adagrad(
        rate, initial_accumulator_value=start, eps=1e-16
    ),
    "rowwise_adagrad": lambda rate, start: embed.rowwise_adagrad(
        rate, initial_accumulator=start
    ),
}
DENSE_RATES = {
    "sgd": 0.1,
    "momentum": 0.01,
    "adagrad": 0.02,
    "adam": 1.5e-3,
    "adamw": 1.5e-3,
    "lion": 2e-4,
}
ROW_RATES = {
    "sgd": 1.0,
    "momentum": 0.1,
    "adagrad": 0.2,
    "rowwise_adagrad": 0.2,
    "adam": 1.5e-3,
    "adamw": 1.5e-3,
    "lion": 2e-4,
}


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizers."""

    dense: Literal["sgd", "momentum", "adagrad", "adam", "adamw", "lion"] = "adam"
    """Optimizer of the network's parameters."""
    dense_lr: float | None = None
    """Its learning rate; without it, one that suits the optimizer."""
    rows: Literal[
        "sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "adamw", "lion"
    ] = "adagrad"
    """Optimizer of the embedding rows; a step moves only the rows it uses."""
    rows_lr: float | None = None
    """Its learning rate; without it, one that suits the optimizer."""
    rows_damping: float = 5.0
    """Accumulators of Adagrad begin at (rows_damping / batch_size) ** 2, as if a new row
    had seen gradients of that size: rare keys move less. 0 moves each by its full rate at
    first sight."""
    rows_l2: float = 0.2
    """L2 regularization: adds rows_l2 / batch_size times the row to the gradient of each
    row that a step uses."""
    decay: Literal["linear", "none"] = "linear"
    """Learning rates fall to zero over the run, or stay as they are."""

    def __post_init__(self):
        for name in ("dense_lr", "rows_lr", "rows_damping", "rows_l2"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"`{name}` must not be negative, got {value}")

    def _schedule(self, rate: float, steps: int) -> float | optax.Schedule:
        return rate if self.decay == "none" else optax.linear_schedule(rate, 0.0, steps)

    def dense_optimizer(self, steps: int) -> optax.GradientTransformation:
        """The optimizer of the network, in a run of so many steps."""
        rate = DENSE_RATES[self.dense] if self.dense_lr is None else self.dense_lr
        return DENSE_OPTIMIZERS[self.dense](self._schedule(rate, steps))

    def row_optimizer(
        self, steps: int, batch_size: int
    ) -> optax.GradientTransformation:
        """The optimizer of the rows, in a run of so many steps."""
        name = self.rows
        rate = ROW_RATES[name] if self.rows_lr is None else self.rows_lr
        rate = self._schedule(rate, steps)
        # A step's gradient is a mean over the batch: one example's is of size 1 / batch.
        if "adagrad" in name:
            start = (self.rows_damping / batch_size) ** 2
            tx = ROW_OPTIMIZERS[name](rate, start)
        else:
            tx = ROW_OPTIMIZERS[name](rate)
        if not self.rows_l2:
            return tx
        return optax.chain(optax.add_decayed_weights(self.rows_l2 / batch_size), tx)
