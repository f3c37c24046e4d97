"""What only the thread that takes batches may do."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Errand:
    """A call that whoever takes batches makes between two of them.

    Where there are several processes, all of them must dispatch the programs that exchange
    something between their devices in the same order. A thread that prepares batches ahead
    cannot know it, so it leaves such a program to the main thread, among its batches.

    Attributes:
      run: the call.

    Example:
      >>> done = []
      >>> Errand(lambda: done.append("sent")).run()
      >>> done
      ['sent']
    """

    run: Callable[[], None]
