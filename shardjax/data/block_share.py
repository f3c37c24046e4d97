"""A process's part of each global batch by how fast it is: as many blocks as it can do.

A batch is the same, row by row, as without; what differs is where it is cut. A block is
`block_size` rows on each device of a process. With 2 processes of 2 devices and blocks of 2
rows a device, of which the first process is expected to do twice as many as the second::

    rows      0 1 2 3 | 4 5 6 7 | 8 9 10 11
    block     0       | 1       | 2
    process   0                 | 1            counts 2, 1
    device    0 0 0 0 1 1 1 1   | 0 0 1 1      room for `most` blocks on each

Batches are cut ahead of the training that measures the processes. So that all cut them
equally, they tell each other what they have measured every so many batches, in the thread
that reads, and all go by what process 0 makes of it.
"""

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from shardjax.data.batch import Batch
from shardjax.data.blocks import block_ranges, check_times
from shardjax.data.schedule import Balance, BlockSchedule
from shardjax.data.share import Part, Share
from shardjax.data.shuffling import check_count
from shardjax.processes import Channel
from shardjax.together import agree_on

_names = itertools.count()


class Agreement(Protocol):
    """Gives all processes values in rounds, such as `shardjax.processes.Channel`."""

    def exchange(self, value: bytes) -> list[bytes]: ...

    def close(self) -> None: ...


class BlockShare:
    """Which process this is, and how many blocks of each batch it gets.

    Give it to a `Loader` as `share`. What trains reports with `observe` how fast this
    process is; the others' figures come by themselves. Until there are any, all get equally
    many blocks.

    All processes make it with the same arguments, and loop over the loader equally often.
    As counts follow from measured times, which process sums which rows differs from run to
    run, and so do the last bits of a sum.

    Args:
      share: which process this is, of how many.
      block_size: rows of a block on each device: the `microbatch_size` of the training
        step, which needs `skip_padding`.
      most: blocks that a process has room for in a batch; twice an equal part if None.
        Arrays have this size in all processes: room costs memory, transfer and the
        pooling of rows, not a pass through the model.
      every: batches between two times that processes tell each other. Rows of no more
        batches are read at once.
      balance: how measurements become expected times; a measurement is what `every`
        batches bring.
      connect: gives an `Agreement` of the processes, for one loop of the loader.

    Attributes:
      counts: the blocks of each process in the batch that was cut last.

    Raises:
      TypeError, ValueError: for a number that is none, or too small.

    Example:
      >>> from shardjax.data import Loader, Synthetic
      >>> alone = BlockShare(Share(process=0, processes=1), block_size=100)
      >>> loader = Loader(Synthetic(rows=1000), 400, share=alone)
      >>> [(part.batch.size, part.dealt, part.examples) for part in loader]
      [(400, 400, 800), (400, 400, 800), (200, 200, 800)]
      >>> alone.counts.tolist()
      [2]
    """

    def __init__(
        self,
        share: Share,
        block_size: int,
        *,
        most: int | None = None,
        every: int = 16,
        balance: Balance | None = None,
        connect: Callable[[], Agreement] | None = None,
    ):
        if not isinstance(share, Share):
            raise TypeError(
                f"`share` must be a Share, got {type(share).__name__}. Give"
                " Share(jax.process_index(), jax.process_count(), devices)"
            )
        self.share = share
        self.block_size = check_count("block_size", block_size)
        self.most = most if most is None else check_count("most", most)
        self.every = check_count("every", every)
        self._schedule = BlockSchedule(share.processes, balance=balance or Balance())
        self._connect = connect or _channels()
        self._lock = threading.Lock()
        self._seconds, self._blocks = 0.0, 0
        self.counts = np.zeros(share.processes, np.int64)

    @property
    def processes(self) -> int:
        """How many processes there are."""
        return self.share.processes

    def observe(self, seconds: float, blocks: int) -> None:
        """Notes how long this process took for blocks; any thread may call it.

        Args:
          seconds: without those in which it waited for other processes, or for data.
          blocks: how many blocks it took them for; they need not be those of a batch. A
            process that reports nothing is expected to be as it was.

        Raises:
          TypeError: if `blocks` is not an integer.
          ValueError: if a number is negative or not finite, or blocks took no time.
        """
        check_count("blocks", blocks, least=0)
        check_times("seconds", [seconds], positive=blocks > 0)
        with self._lock:
            self._seconds += float(seconds)
            self._blocks += int(blocks)

    def expected(self) -> np.ndarray:
        """Seconds per block that each process is expected to need, [processes]; ones
        before anything was measured."""
        with self._lock:
            return self._schedule.expected()

    def room(self, batch_size: int) -> int:
        """Blocks that each process has room for in a batch.

        Args:
          batch_size: rows of a whole batch.

        Raises:
          ValueError: if all together have not enough.

        Example:
          >>> BlockShare(Share(0, 2, devices=4), block_size=16).room(batch_size=1024)
          16
        """
        blocks = self._blocks_of(batch_size)
        most = self.most or 2 * -(-blocks // self.processes)
        if most * self.processes < blocks:
            raise ValueError(
                f"`most` must let {self.processes} processes take the {blocks} blocks of a"
                f" batch of {batch_size}, got {most}. Give"
                f" {-(-blocks // self.processes)} at least, and more for processes to take"
                " blocks of others"
            )
        return most

    def start(self, batch_size: int) -> "BlockDealing":
        """Begins to cut the batches of a loop; all processes do so at the same place."""
        return BlockDealing(self, batch_size, self._connect())

    def _blocks_of(self, rows: int) -> int:
        return -(-rows // (self.block_size * self.share.devices))

    def _agree(self, agreement: Agreement) -> None:
        """Takes in what all processes have measured since they told each other last."""
        with self._lock:
            own = self._seconds, self._blocks
            self._seconds, self._blocks = 0.0, 0
        found = agree_on(agreement.exchange, own)
        seconds, blocks = zip(*found, strict=True)
        with self._lock:
            if any(blocks):
                self._schedule.observe(seconds, blocks)
            state = self._schedule.get_state()
        # A loop that was left early may have left processes with different figures, and
        # processors may differ in the last bit of a power.
        first, *_ = agree_on(agreement.exchange, state)
        with self._lock:
            self._schedule.set_state(first)

    def _split(self, rows: int, most: int) -> tuple[int, int]:
        """The first row of a batch that is this process's, and one past the last."""
        limits = np.full(self.processes, most)
        with self._lock:
            self.counts = self._schedule.next(self._blocks_of(rows), limits=limits)
        own = block_ranges(self.counts)[self.share.process]
        each = self.block_size * self.share.devices
        return min(own.start * each, rows), min(own.stop * each, rows)


class BlockDealing:
    """Cuts as many blocks of each batch of a loop as are this process's; a `Dealing`.

    Args:
      share: whose parts.
      batch_size: rows of a whole batch that is not the last.
      agreement: with the other processes, closed at the end.
    """

    def __init__(self, share: BlockShare, batch_size: int, agreement: Agreement):
        self._share, self._agreement = share, agreement
        self._most = share.room(batch_size)
        self._left = 0

    @property
    def rows(self) -> int:
        """The most rows of a part."""
        share = self._share
        return self._most * share.block_size * share.share.devices

    def ahead(self, wanted: int) -> int:
        """How many batches may be cut now, of so many; first tells the other processes what
        was measured, if it is time."""
        if not self._left:
            self._share._agree(self._agreement)
            self._left = self._share.every
        return min(wanted, self._left)

    def part(self, batch: Batch) -> Part:
        """This process's part of the next batch; not more of them than `ahead` says."""
        self._left -= 1
        start, stop = self._share._split(batch.size, self._most)
        own = batch.slice(start, stop)
        if self._share.share.process:  # those before it may have no rows
            own = replace(own, bad_lines=0)
        return Part(
            own,
            batch.size,
            start,
            self._most * self._share.block_size,
            dealt=-(-(stop - start) // self._share.share.devices),
        )

    def close(self) -> None:
        """Ends the loop: a wait for other processes ends soon, by an error."""
        self._agreement.close()


def _channels() -> Callable[[], Agreement]:
    """Makes channels, with names that are the same in all processes."""
    share, loops = next(_names), itertools.count()
    return lambda: Channel(f"blocks{share}-{next(loops)}")
