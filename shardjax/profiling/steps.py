"""How long steps take."""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


class StepTimer:
    """Times steps between points at which the devices are done.

    JAX dispatches a step and returns before it has run, so times are taken only at
    `block`, which waits. A point every few steps keeps the devices busy in between; its
    steps then count with their mean time.

    Args:
      warmup: points at the start that are not timed but only waited for: the first
        step compiles. Timing starts at the last of them. At least 1.
      clock: gives the time, seconds.

    Raises:
      ValueError: if `warmup` is not positive.

    Example:
      >>> import jax.numpy as jnp
      >>> timer = StepTimer(warmup=2)
      >>> for i in range(5):
      ...     timer.block(jnp.ones(3) + i)
      >>> timer.steps
      3
      >>> 0 < timer.median <= timer.percentile(90)
      True
    """

    def __init__(
        self, warmup: int = 2, *, clock: Callable[[], float] = time.perf_counter
    ):
        if warmup < 1:
            raise ValueError(
                f"`warmup` must be positive, got {warmup}. Give 1 or more: timing starts"
                " where the last of these steps is done."
            )
        self._warmup = warmup
        self._clock = clock
        self._last = 0.0
        self._seconds: list[float] = []

    def block(self, result: Any, steps: int = 1) -> None:
        """Waits for a result and notes the time of the steps since the last call.

        Args:
          result: arrays of the last step.
          steps: how many steps that were, positive.

        Raises:
          ValueError: if `steps` is not positive.
        """
        if steps < 1:
            raise ValueError(
                f"`steps` must be positive, got {steps}. Give how many steps ran since"
                " the last call."
            )
        jax.block_until_ready(result)
        now = self._clock()
        if self._warmup:
            self._warmup -= 1
        else:
            self._seconds += [(now - self._last) / steps] * steps
        self._last = now

    @property
    def steps(self) -> int:
        """Steps that were timed."""
        return len(self._seconds)

    @property
    def median(self) -> float:
        """The median time of a step, seconds."""
        return self.percentile(50)

    def percentile(self, percent: float) -> float:
        """The time that a share of the steps does not exceed.

        Args:
          percent: from 0 (fastest step) to 100 (slowest).

        Returns:
          Seconds, interpolated between steps.

        Raises:
          ValueError: if `percent` is out of range or no step was timed.
        """
        if not 0 <= percent <= 100:
            raise ValueError(
                f"`percent` must lie between 0 and 100, got {percent}. Give 90 for the"
                " time that 90% of the steps do not exceed."
            )
        return float(np.percentile(self._timed(), percent))

    def per_second(self, amount: float) -> float:
        """The throughput over all timed steps, slow ones included.

        Args:
          amount: tokens or examples of one step.

        Returns:
          Tokens or examples per second.

        Raises:
          ValueError: if no step was timed.
        """
        return amount * self.steps / sum(self._timed())

    def _timed(self) -> list[float]:
        if not self._seconds:
            raise ValueError(
                "a time needs a step after the warm-up, got none: `block` must be called"
                f" {self._warmup + 1} more times. Run more steps or lower `warmup`."
            )
        return self._seconds
