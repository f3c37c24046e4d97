"""How the learning rate of a network moves over a run, and its optimizers that need one."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import optax


@dataclass(frozen=True, kw_only=True)
class NetworkOptimConfig:
    """The optimizer."""

    name: Literal["adamw", "lamb", "adafactor", "sgd"] = "adamw"
    """Which; lamb is for large batches, sgd has a momentum of 0.9."""
    lr: float | None = None
    """Its highest learning rate; without it, one that suits the optimizer."""
    schedule: Literal["cosine", "one_cycle", "linear", "constant"] = "cosine"
    """Of the learning rate. cosine, linear and constant begin with --optim.warmup;
    one_cycle climbs for the first 30 % of the run and falls to almost nothing."""
    warmup: float = 0.05
    """Share of the steps in which the learning rate climbs from 0."""
    final: float = 0.0
    """What the learning rate ends with, as a share of the highest: cosine and linear."""
    base_batch_size: int | None = None
    """The learning rate is for batches of this size and grows in proportion to the batch
    (Goyal et al. 2017); without it, it is as given. Wants a warm-up."""
    weight_decay: float = 0.1
    """Decoupled weight decay: adamw, lamb, adafactor."""
    clip: float = 1.0
    """The gradient of all parameters is scaled down to this norm; 0 for not."""

    def __post_init__(self):
        for name in ("lr", "weight_decay", "clip"):
            value = getattr(self, name)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ValueError(
                    f"`{name}` must be a number of at least 0, got {value}"
                )
        for name in ("warmup", "final"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"`{name}` must lie in [0, 1], got {value}")
        if self.base_batch_size is not None and self.base_batch_size < 1:
            raise ValueError(
                f"`base_batch_size` must be positive, got {self.base_batch_size}"
            )

    def optimizer(self, steps: int, batch_size: int) -> optax.GradientTransformation:
        """The optimizer of a run of so many steps with batches of this size."""
        rate = RATES[self.name] if self.lr is None else self.lr
        if self.base_batch_size is not None:
            rate = scaled_rate(rate, batch_size, self.base_batch_size)
        schedule = make_schedule(
            self.schedule, rate, steps, warmup=self.warmup, final=self.final
        )
        tx = OPTIMIZERS[self.name](schedule, self.weight_decay)
        return (
            optax.chain(optax.clip_by_global_norm(self.clip), tx) if self.clip else tx
        )


def make_schedule(
    kind: str, rate: float, steps: int, *, warmup: float = 0.0, final: float = 0.0
) -> optax.Schedule:
    """A learning rate over the steps of a run.

    Args:
      kind: "cosine", "linear" or "constant" after a warm-up, or "one_cycle" (Smith and
        Topin 2018).
      rate: the highest.
      steps: of the run.
      warmup: share of the steps in which the rate climbs from 0, at least one step if it
        is not 0; one_cycle has its own.
      final: share of the rate that cosine and linear end with.

    Returns:
      The rate as a function of the step.

    Raises:
      ValueError: for another kind, or one_cycle in a run of fewer than 4 steps.

    Example:
      >>> schedule = make_schedule("linear", 1.0, 10, warmup=0.2)
      >>> [round(float(schedule(step)), 3) for step in (0, 1, 2, 6, 10)]
      [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if kind == "one_cycle":
        if steps < 4:
            raise ValueError(
                f"a one_cycle schedule needs at least 4 steps, got {steps}. Train longer,"
                " or choose another"
            )
        return optax.cosine_onecycle_schedule(steps, rate)
    first = math.ceil(warmup * steps)
    rest = max(steps - first, 1)
    falls: dict[str, Callable[[], optax.Schedule]] = {
        "cosine": lambda: optax.cosine_decay_schedule(rate, rest, final),
        "linear": lambda: optax.linear_schedule(rate, rate * final, rest),
        "constant": lambda: optax.constant_schedule(rate),
    }
    if kind not in falls:
        raise ValueError(
            f"a schedule must be one of {[*falls, 'one_cycle']}, got {kind!r}"
        )
    if not first:
        return falls[kind]()
    climb = optax.linear_schedule(0.0, rate, first)
    return optax.join_schedules([climb, falls[kind]()], [first])


def scaled_rate(rate: float, batch_size: int, base_batch_size: int) -> float:
    """The linear scaling rule: k times the batch, k times the learning rate.

    Goyal et al., "Accurate, Large Minibatch SGD", 2017, with a warm-up.

    Args:
      rate: that suits batches of `base_batch_size`.
      batch_size: of the run.
      base_batch_size: what `rate` was found with.

    Example:
      >>> scaled_rate(0.1, 1024, 256)
      0.4
    """
    return rate * batch_size / base_batch_size


OPTIMIZERS = {
    "adamw": lambda rate, decay: optax.adamw(rate, b2=0.99, weight_decay=decay),
    "lamb": lambda rate, decay: optax.lamb(rate, b2=0.99, weight_decay=decay),
    # its decay is not scaled by the rate: of the size that it has on average in adamw
    "adafactor": lambda rate, decay: optax.adafactor(
        rate, weight_decay_rate=1e-3 * decay or None
    ),
    "sgd": lambda rate, decay: optax.sgd(rate, momentum=0.9, nesterov=True),
}
RATES = {"adamw": 4e-3, "lamb": 1e-2, "adafactor": 3e-2, "sgd": 0.3}
