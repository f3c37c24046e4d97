"""A bound on bytes per second that work in the background keeps to."""

import threading
import time
from collections.abc import Callable


class Rate:
    """Lets work wait after each block for as long as the block may take.

    Several threads share the rate. Time that passes without work is not saved up, so no
    more than a block for each thread goes at once.

    Args:
      bytes_per_second: of all work together.
      clock: seconds.

    Example:
      >>> waits = []
      >>> rate = Rate(1000, clock=lambda: 0.0)
      >>> for size in (100, 300):
      ...     rate.spend(size, waits.append)
      >>> waits
      [0.1, 0.4]
    """

    def __init__(
        self, bytes_per_second: int, clock: Callable[[], float] = time.monotonic
    ):
        self._bytes_per_second = bytes_per_second
        self._clock = clock
        self._until = clock()  # what has been spent takes until then
        self._lock = threading.Lock()

    @property
    def block_bytes(self) -> int:
        """How much work to do between two calls of `spend`: a tenth of a second's."""
        return max(self._bytes_per_second // 10, 1)

    def spend(self, size: int, wait: Callable[[float], object]) -> None:
        """Waits until bytes have been paid for.

        Args:
          size: bytes that have been read or written.
          wait: called with seconds.
        """
        with self._lock:
            now = self._clock()
            self._until = max(self._until, now) + size / self._bytes_per_second
            seconds = self._until - now
        wait(seconds)
