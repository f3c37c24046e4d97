"""How many blocks of a minibatch each process gets, where they differ in speed.

A step of data parallel training is over when the slowest process is. Cut into equal parts,
a minibatch takes as long as the slowest process needs for its part; cut into blocks, a slow
process gets fewer of them:

    16 blocks, seconds per block 1, 1, 1, 3

    equal     4 4 4 4    12 s   the last waits for no one, the others 8 s
    balanced  5 5 5 1     5 s   the best there is

`shardjax.data.blocks.assign` hands the blocks out one by one, each to the process that is
expected to have finished it first: a heap of expected finish times. For blocks of equal
size no split takes less time. What to expect is measured: `BlockSchedule.observe` takes the
seconds of each process, without those in which it waited for others, per block.
Measurements are forgotten exponentially, so a process that was slow for a while gets its
share back; large changes count at once. A process so slow that it gets nothing is tried
again: so often that this costs a small part of the time, and at the latest after
`Balance.patience` minibatches.

All is a function of what was measured. Processes that gather the same figures (the
gathered ones, not their own before gathering, which may have more bits) have the same
counts, without a word more.

In SPMD the arrays of all processes have one shape: room for `most` blocks each. Time is saved
only if the others are not computed: `shardjax.data.BlockShare` deals the rows of batches to
processes by these counts, and a training step with `skip_padding` ends its loop after a
device's last real block, with the collectives behind it. A `scan` that multiplies masked
blocks by zero takes as long as the largest count everywhere. The average over all is weighted
by real examples. Which process sums which blocks follows from measured times, so the last bits
of a sum do too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from shardjax.data.blocks import assign, check_counts, check_times
from shardjax.data.shuffling import check_count


@dataclass(frozen=True)
class Balance:
    """How measurements become expected times.

    Attributes:
      half_life: minibatches after which a measurement counts half.
      jump: a time so many times the average, or so many times below it, is no noise: it
        counts alone.
      probe: the part of the time that trying processes again may cost which are too slow
        to get a block.
      patience: the most minibatches that a process may be without a block; one every so
        often is the least share, whatever it costs.

    Raises:
      ValueError: if one of them is out of its range.

    Example:
      >>> Balance(half_life=8).patience
      200
    """

    half_life: float = 4.0
    jump: float = 1.3
    probe: float = 0.02
    patience: int = 200

    def __post_init__(self):
        check_count("patience", self.patience)
        for name, above, below in (
            ("half_life", 0.0, np.inf),
            ("jump", 1.0, np.inf),
            ("probe", 0.0, 1.0),
        ):
            value = getattr(self, name)
            if not above < value < below:
                raise ValueError(
                    f"`{name}` of a Balance must lie between {above:g} and {below:g}, got"
                    f" {value}. The default is {getattr(Balance, name)}"
                )


@dataclass(frozen=True)
class Speeds:
    """What is known of each process; the state of a `BlockSchedule`.

    Attributes:
      minibatches: that have been measured.
      seconds: expected per block, 0 if the process has never had one.
      measured: minibatches in which it had blocks.
      idle: minibatches since.
    """

    minibatches: int
    seconds: tuple[float, ...]
    measured: tuple[int, ...]
    idle: tuple[int, ...]


@dataclass(eq=False)
class BlockSchedule:
    """Counts for each minibatch, by what was measured in those before.

    Every process has one, and gives it the same figures: those of all processes, gathered.

    Attributes:
      processes: how many there are.
      most: the most blocks a process may get in a minibatch, the room for `masks`; any if
        None.
      balance: how measurements become expected times.
      speeds: what is known of the processes.

    Raises:
      TypeError, ValueError: if there are no processes, or no room.

    Example:
      >>> schedule = BlockSchedule(processes=4)
      >>> schedule.next(16).tolist()
      [4, 4, 4, 4]
      >>> schedule.observe([4.0, 4.0, 4.0, 12.0], blocks=[4, 4, 4, 4])
      >>> schedule.next(16).tolist()
      [5, 5, 5, 1]
    """

    processes: int
    most: int | None = None
    balance: Balance = field(default_factory=Balance)

    def __post_init__(self):
        check_count("processes", self.processes)
        if self.most is not None:
            check_count("most", self.most)
        zeros = (0,) * self.processes
        self.speeds = Speeds(0, (0.0,) * self.processes, zeros, zeros)

    def expected(self) -> np.ndarray:
        """Seconds per block that each process is expected to need, [processes].

        Those that have never had a block are taken for average, and all for equal if
        none has.
        """
        seconds = np.array(self.speeds.seconds)
        known = seconds > 0
        if known.any():
            # not a mean, whose last bit depends on the processor
            seconds[~known] = np.median(seconds[known])
            return seconds
        return np.ones(self.processes)

    def next(self, blocks: int, *, limits: ArrayLike | None = None) -> np.ndarray:
        """Splits the blocks of the next minibatch. Changes nothing.

        Args:
          blocks: how many there are, of equal size.
          limits: the most that each process can take, such as 0 of one without data.

        Returns:
          int64 [processes] of sum `blocks`.

        Raises:
          TypeError: if a number of blocks is not an integer.
          ValueError: if there are more blocks than processes can take.
        """
        check_count("blocks", blocks, least=0)
        room = self.room(blocks, limits)
        seconds, order = self.expected(), self._order()
        counts = assign(blocks, seconds, most=room, order=order)
        due = self._due(counts, room)
        if not due:
            return counts
        least = np.zeros(self.processes, np.int64)
        least[due[:blocks]] = 1
        return assign(blocks, seconds, least=least, most=room, order=order)

    def room(self, blocks: int, limits: ArrayLike | None = None) -> np.ndarray:
        """Finds how many of a minibatch's blocks each process can take.

        Args:
          blocks: how many there are.
          limits: as of `next`.

        Returns:
          int64 [processes].

        Raises:
          ValueError: if it is less than `blocks` in all.
        """
        most = blocks if self.most is None else self.most
        room = np.full(self.processes, most)
        if limits is not None:
            room = np.minimum(room, check_counts("limits", limits, self.processes))
        if blocks > room.sum():
            raise ValueError(
                f"`blocks` of a minibatch must not exceed what {self.processes} processes"
                f" can take, got {blocks} and {room.sum()} in all: `most` is {self.most},"
                f" `limits` {limits}. Cut it into fewer blocks, or raise `most`"
            )
        return room

    def observe(
        self, seconds: ArrayLike, blocks: ArrayLike, waited: ArrayLike = 0.0
    ) -> None:
        """Takes in how long a minibatch took.

        Args:
          seconds: that each process took, [processes], gathered from all of them.
          blocks: the number of blocks that each had.
          waited: those of the seconds in which it waited for other processes, as in
            collectives; not those for its own data. One for all, or [processes].

        Raises:
          TypeError: if a number of blocks is not an integer.
          ValueError: if the figures are not those of all processes, or a time is not
            finite, negative, or not longer than `waited` where there were blocks.
        """
        taken = check_times("seconds", seconds, self.processes)
        counts = check_counts("blocks", blocks, self.processes)
        if np.ndim(blocks) == 0:
            raise ValueError(
                f"`blocks` must be those of each of {self.processes} processes, got"
                f" {blocks}. Give what `next` returned"
            )
        waits = np.full(self.processes, waited) if np.ndim(waited) == 0 else waited
        busy = taken - check_times("waited", waits, self.processes)
        had = counts > 0
        if wrong := np.flatnonzero(had & (busy <= 0)).tolist():
            first = wrong[0]
            raise ValueError(
                f"`seconds` of a process with blocks must be longer than it `waited`, got"
                f" {taken[first]:.6g} and {taken[first] - busy[first]:.6g} of process"
                f" {first} with {counts[first]} blocks. Report the time from the start of"
                " the minibatch to the end of its collectives, in every process"
            )
        per_block = (busy / np.maximum(counts, 1)).tolist()
        before, weight = self.speeds, 1 - 0.5 ** (1 / self.balance.half_life)
        after = [
            self._average(p, per_block[p], weight) if had[p] else before.seconds[p]
            for p in range(self.processes)
        ]
        self.speeds = Speeds(
            before.minibatches + 1,
            tuple(after),
            tuple((np.array(before.measured) + had).tolist()),
            tuple(np.where(had, 0, np.array(before.idle) + 1).tolist()),
        )

    def _due(self, counts: np.ndarray, room: np.ndarray) -> list[int]:
        """Who must have a block although the best split has none: who waits the longest
        first."""
        seconds, idle = self.expected(), np.array(self.speeds.idle)
        end = float((counts * seconds).max())
        without = (counts == 0) & (room > 0) & (idle > 0)
        # each costs what it takes longer than the others; all together `probe` of the time
        cost = np.maximum(seconds - end, 0) * without.sum()
        due = without & (cost <= self.balance.probe * end * idle)
        due |= without & (idle >= self.balance.patience)
        return [p for p in self._order() if due[p]]

    def _average(self, process: int, new: float, weight: float) -> float:
        known, jump = self.speeds, self.balance.jump
        average = known.seconds[process]
        # the first minibatch may have compiled
        if known.measured[process] < 2 or not average / jump <= new <= average * jump:
            return new
        return average + weight * (new - average)

    def _order(self) -> list[int]:
        """Who comes first of equals: who waits the longest, then by turns."""
        turn, idle = self.speeds.minibatches, self.speeds.idle
        key = [(-idle[p], (p - turn) % self.processes) for p in range(self.processes)]
        return sorted(range(self.processes), key=key.__getitem__)

    def get_state(self) -> dict[str, Any]:
        """Says what is known of the processes, for `set_state`.

        Returns:
          Values that JSON can hold.

        Example:
          >>> BlockSchedule(2).get_state()["seconds"]
          [0.0, 0.0]
        """
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(self.speeds).items()
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to where `get_state` was taken.

        Args:
          state: what `get_state` returned, with as many processes.

        Raises:
          ValueError: if it is not that.
        """
        names = set(vars(self.speeds))
        if set(state) != names:
            raise ValueError(
                f"the state of a BlockSchedule must have the names {sorted(names)}, got"
                f" {sorted(state)}. Give what get_state returned"
            )
        number = check_count("minibatches", state["minibatches"], least=0)
        found = replace(self.speeds, minibatches=number)
        seconds = check_times("seconds", state["seconds"], self.processes)
        found = replace(found, seconds=tuple(seconds.tolist()))
        for name in ("measured", "idle"):
            counts = check_counts(name, list(state[name]), self.processes)
            found = replace(found, **{name: tuple(counts.tolist())})
        self.speeds = found
