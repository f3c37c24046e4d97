"""How far the host may run ahead of the devices, and how long they have nothing to do."""

import time
from collections import deque
from typing import Any

import jax
import jax.core


class Pace:
    """Lets a limited number of steps be under way at a time.

    A host that dispatches without end gains nothing over one that is two steps ahead,
    holds the inputs of all these steps, and on the CPU may stop for good: jaxlib 0.10
    lets 32 programs per device be in flight, a launch beyond waits on one of the few
    threads that also run the programs, and if the others wait in a collective for the
    device whose launch this is, nothing moves any more.

    A host that is too slow leaves the devices without a step. Neither side is told when a
    step ends, so somebody has to `look`, best all the time while there is no batch: see
    `meanwhile` of `shardjax.data.Loader`.

    Attributes:
      idle_seconds: how long no step was under way, from the first look at which the last
        one was done until the next was about to be dispatched. What passes before that
        look is not in it, so this is a lower bound.

    Example:
      >>> import jax.numpy as jnp
      >>> pace = Pace(limit=2)
      >>> for i in range(5):
      ...     pace.wait()
      ...     pace.add(jnp.ones(3) + i)
      >>> pace.under_way
      2
    """

    def __init__(self, limit: int = 2):
        """Starts with nothing under way; `limit` is how many steps may be."""
        self._limit = limit
        self._steps: deque[Any] = deque()
        self._idle_since: float | None = None
        self.idle_seconds = 0.0

    @property
    def under_way(self) -> int:
        """Steps that nobody has waited for yet."""
        return len(self._steps)

    def look(self) -> None:
        """Notes whether all steps that were dispatched are done; waits for none."""
        if self._idle_since is None and self._steps and self._steps[-1].is_ready():
            self._idle_since = time.perf_counter()

    def wait(self) -> None:
        """Waits until one more step may be dispatched, which is to be done next."""
        if self._idle_since is not None:
            self.idle_seconds += time.perf_counter() - self._idle_since
            self._idle_since = None
        while len(self._steps) >= self._limit:
            jax.block_until_ready(self._steps.popleft())

    def add(self, result: Any) -> None:
        """Notes a dispatched step by an array of its results, not donated later. Inside a
        jit of the user's there is nothing to wait for."""
        if not isinstance(result, jax.core.Tracer):
            self._steps.append(result)
