"""A rival of `BlockSchedule` in the simulation: processes ask for blocks one by one.

A split that is made beforehand pays for what nobody could know: a process that turns slow
has its blocks already. Here a process asks for the next block when it has finished one, and
gets it unless the others are expected to have finished all that is left before this
process would: it then goes on to the collective at the end. That is the heap of
`shardjax.data.blocks.assign`, looked at again with each block, with the times of this
minibatch.

One place must answer all processes, and each question takes a moment; a block must take
much longer than that. The answers depend on the clock.
"""

from dataclasses import InitVar, dataclass

import numpy as np
from numpy.typing import ArrayLike

from shardjax.data.schedule import BlockSchedule
from shardjax.data.shuffling import check_count


@dataclass(eq=False)
class Handout:
    """Hands out the blocks of one minibatch.

    Attributes:
      schedule: what is known of the processes; not changed.
      blocks: how many blocks there are.
      limits: the most that each process can take, such as 0 of one without data.
      counts: how many each process has had.
      left: how many nobody has had.

    Raises:
      TypeError, ValueError: as of `BlockSchedule.next`.

    Example:
      >>> handout = Handout(BlockSchedule(processes=2), blocks=4)
      >>> handout.take(0, now=0.0), handout.take(1, now=0.0)
      (True, True)
      >>> handout.take(0, now=1.0)  # 1 is not back yet
      True
      >>> handout.take(0, now=2.0), handout.take(0, now=3.0)
      (True, False)
      >>> handout.counts
      [3, 1]
    """

    schedule: BlockSchedule
    blocks: int
    limits: InitVar[ArrayLike | None] = None

    def __post_init__(self, limits: ArrayLike | None):
        processes = self.schedule.processes
        self.counts = [0] * processes
        self.left = self.blocks
        self._room = self.schedule.room(self.blocks, limits)
        # has one block for those that are due
        self._planned = self.schedule.next(self.blocks, limits=limits)
        self._seconds = self.schedule.expected().tolist()  # per block
        if not self.schedule.speeds.minibatches:
            self._seconds = [np.nan] * processes  # a first block will tell
        self._pace = sum(1 / x for x in self._seconds)  # blocks per second, of all
        self._began = [0.0] * processes  # its first block
        self._since = [0.0] * processes  # it has the block that it has now
        self._out = [False] * processes  # gets none any more
        self._now = -np.inf

    def take(self, process: int, now: float) -> bool:
        """Gives a process its next block, or sends it on to the end of the minibatch.

        Args:
          process: which asks; it has finished the block that it had.
          now: seconds, by a clock that is one for all and never goes back.

        Returns:
          Whether it gets a block. One that got none must not ask again.

        Raises:
          TypeError, ValueError: if there is no such process, it has been sent on, or the
            clock goes back.
        """
        self._check(process, now)
        self._now = now
        if had := self.counts[process]:
            before = self._seconds[process]
            self._seconds[process] = max(now - self._began[process], 1e-9) / had
            if np.isnan(before):
                self._pace = sum(1 / x for x in self._seconds)
            else:
                self._pace += 1 / self._seconds[process] - 1 / before
        else:
            self._began[process] = now
        if not self._is_first(process, now):
            self._out[process] = True
            return False
        self.left -= 1
        self.counts[process] += 1
        self._since[process] = now
        return True

    def _is_first(self, process: int, now: float) -> bool:
        """Whether the others will have left a block when this process has finished it."""
        own, had = self._seconds[process], self.counts[process]
        if not self.left or had >= self._room[process]:
            return False
        if (not had and self._planned[process]) or np.isnan(own):
            return True
        if self.left > own * self._pace:  # more than all together can in that time
            return True
        counts, since = np.array(self.counts), np.array(self._since)
        seconds = np.array(self._seconds)
        seconds[np.isnan(seconds)] = own
        # a block that is late takes at least as long as it has
        seconds = np.where(counts > 0, np.maximum(seconds, now - since), seconds)
        starts = np.where(counts > 0, since + seconds, now)
        can = np.ceil((now + own - starts) / seconds) - 1  # before, not as early
        can = np.clip(can, 0, self._room - counts)
        can[self._out] = can[process] = 0
        return can.sum() < self.left

    def _check(self, process: int, now: float) -> None:
        check_count("process", process, least=0)
        if process >= len(self.counts):
            raise ValueError(
                f"`process` must be one of {len(self.counts)}, from 0, got {process}."
                " Make the BlockSchedule for as many as there are"
            )
        if self._out[process]:
            raise ValueError(
                f"process {process} must not ask again: it was sent on to the end of the"
                f" minibatch, with {self.counts[process]} blocks. Make a Handout for each"
                " minibatch"
            )
        if not self._now <= now < np.inf:
            raise ValueError(
                f"`now` must not go back, got {now} of process {process} after {self._now}."
                " Take the time where the question is answered"
            )
