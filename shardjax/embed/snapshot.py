"""The rows of a collection as they are at one moment, read while training goes on.

The rows of an `Outline` are read where they are: from files, from RAM, and from the devices
a part at every step. A step that is about to overwrite rows on the devices which have not
been read has them gathered first; its plan says which. So each row is read once, no memory
is needed but for what is on its way, and training stands still for nothing::

    main thread          step | protect, sweep | step | protect, sweep | step ...
                                     └──▶ [parts] ◀──┘
    thread of `records`                     └──▶ table records, with those in RAM, on disk
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from shardjax.embed.changes import Mark
from shardjax.embed.host_rows import FREE
from shardjax.embed.moves import Move, SlabState
from shardjax.embed.outline import Outline, TierOutline

# (group, slab, slots by owner) to records, int32 [owners * n, words], on the devices
Gather = Callable[[int, SlabState, Sequence[np.ndarray]], jax.Array]
# keys that users know, uint64 [n], and numbers of tables in their group, int32 [n]
Removed = tuple[np.ndarray, np.ndarray]
_SWEEP_BYTES = 4 << 20  # of rows that a step reads besides those in its way


class SnapshotError(RuntimeError):
    """A snapshot that cannot be completed."""


class _Part:
    """Records of one group on their way from the devices."""

    def __init__(self, group: int, slots: Sequence[np.ndarray], records: jax.Array):
        self.group = group
        self.slots = slots
        self.records = records
        records.copy_to_host_async()

    @property
    def bytes(self) -> int:
        """Of RAM, until it has been read."""
        return self.records.nbytes

    def read(self, outline: TierOutline) -> Iterator[np.ndarray]:
        """Table records; waits for the devices."""
        n = len(self.records) // len(self.slots)
        for shard in self.records.addressable_shards:
            o = (shard.index[0].start or 0) // n
            if o < len(self.slots) and len(self.slots[o]) and not shard.replica_id:
                words = np.asarray(shard.data)[: len(self.slots[o])]
                yield outline.device.records(o, self.slots[o], words)


class Snapshot:
    """Reads the rows of an outline.

    Args:
      outline: of the moment that is now.
      gather: reads rows on the devices.
      removed: of each group, if the outline is of changed rows only: the keys that have
        left. A key may be there again.
      most_bytes: of rows that may wait for `records` to give them; then `protect` waits.

    Attributes:
      waited: whether a step has had to wait for the reader.
    """

    def __init__(
        self,
        outline: Outline,
        gather: Gather,
        removed: list[Removed] | None = None,
        most_bytes: int = 64 << 20,
    ):
        self.outline = outline
        self.removed = removed
        self.waited = False
        self._gather = gather
        self._most_bytes = most_bytes
        # slots with a row that has not been gathered, by group: bool [owners, slots]
        self._unread = [t.device.tables != FREE for t in outline.tiers]
        self._left = [t.device.count for t in outline.tiers]
        self._hands = [0] * len(outline.tiers)
        self._parts: deque[_Part] = deque()
        self._bytes = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def mark(self) -> Mark:
        """Its moment, for changes to be counted from."""
        return self.outline.mark

    @property
    def is_closed(self) -> bool:
        """Whether it has been given up, or has ended."""
        return self._closed

    @property
    def left(self) -> int:
        """Rows on the devices that have not been gathered."""
        return sum(self._left)

    def protect(
        self,
        slabs: Sequence[SlabState],
        moves: Sequence[Move],
        slots: Sequence[np.ndarray],
    ) -> None:
        """Has the rows gathered that a step is about to overwrite, and some more.

        Args:
          slabs: before anything is changed.
          moves: of rows, to be carried out.
          slots: by group, those that the step updates, int32 [devices, n].
        """
        if not self.left or self._closed:
            return
        for g, slab in enumerate(slabs):
            if not self._left[g]:
                continue
            unread = self._unread[g]
            touched = [slots[g]]
            for move in (m for m in moves if m.group == g):
                touched += [fill.slots for fill in move.fills]
                if move.stored is not None:
                    touched.append(move.stored.slots)
            parts = []
            for o in range(len(unread)):
                own = np.concatenate([x[o] for x in touched])
                own = own[own < unread.shape[1]]
                own = own[unread[o, own]]
                unread[o, own] = False
                parts.append(np.unique(own).astype(np.int32))
            self._read(g, slab, parts)
            self._sweep(g, slab)

    def complete(self, slabs: Sequence[SlabState]) -> None:
        """Has all rows gathered that have not been; nothing may change them meanwhile."""
        for g, slab in enumerate(slabs):
            while self._left[g] and not self._closed:
                self._sweep(g, slab)

    def _sweep(self, g: int, slab: SlabState) -> None:
        """Has the next rows gathered that nothing is about to overwrite."""
        unread = self._unread[g]
        owners = len(unread)
        most = max(_SWEEP_BYTES // (4 * self.outline.tiers[g].words * owners), 512)
        most = 1 << most.bit_length() - 1  # as many as a gather takes anyway
        while self._left[g]:
            start = self._hands[g]
            stop, counts = start + most, unread[:, start : start + most].sum(1)
            while stop < unread.shape[1]:  # few rows are left of an increment
                counts = counts + unread[:, stop : stop + most].sum(1)
                if counts.max() > most:
                    break
                stop += most
            self._hands[g] = stop
            part = unread[:, start:stop]
            if part.any():
                slots = [start + np.flatnonzero(x).astype(np.int32) for x in part]
                part[:] = False
                self._read(g, slab, slots)
                return

    def _read(self, g: int, slab: SlabState, slots: list[np.ndarray]) -> None:
        count = sum(map(len, slots))
        if not count:
            return
        part = _Part(g, slots, self._gather(g, slab, slots))
        with self._changed:
            while self._bytes > self._most_bytes and not self._closed:
                self.waited = True
                self._changed.wait()
            self._bytes += part.bytes
            self._left[g] -= count
            self._parts.append(part)
            self._changed.notify_all()

    def records(self) -> Iterator[tuple[int, np.ndarray]]:
        """The number of a group and table records, int32 [n, 5 + words], with the keys
        that users know; until each row has been given once.

        Raises:
          SnapshotError: if the snapshot is closed before.
          CorruptSegmentError, OSError: for files that cannot be read.
        """
        given = [0] * len(self.outline.tiers)
        for g, records in self._records():
            given[g] += len(records)
            yield g, self.outline.tiers[g].unsalted(records)
        counts = [tier.count for tier in self.outline.tiers]
        if given != counts:
            raise SnapshotError(
                f"a snapshot of {counts} rows by group has read {given}: it is not of"
                " one moment. This is an error in shardjax; please report it"
            )

    def _records(self) -> Iterator[tuple[int, np.ndarray]]:
        others = self._others()
        while True:
            part = self._next(wait=others is None)
            if part is not None:
                for records in part.read(self.outline.tiers[part.group]):
                    yield part.group, records
                with self._changed:
                    self._bytes -= part.bytes
                    self._changed.notify_all()
            elif others is None:
                return
            else:
                found = next(others, None)
                if found is None:
                    others = None
                else:
                    yield found

    def _others(self) -> Iterator[tuple[int, np.ndarray]]:
        """Table records of the rows that are not on the devices."""
        for g, tier in enumerate(self.outline.tiers):
            if tier.host is not None:
                for records in tier.host.landed():
                    yield g, records
                while (records := tier.host.next()) is not None:
                    yield g, records
        for g, tier in enumerate(self.outline.tiers):
            if tier.disk is not None:
                for records in tier.disk.records():
                    yield g, records

    def _next(self, wait: bool) -> _Part | None:
        """What comes from the devices next; None if nothing does."""
        with self._changed:
            while True:
                if self._closed:
                    raise SnapshotError("the snapshot has been given up")
                if self._parts:
                    return self._parts.popleft()
                if not wait or not self.left:
                    return None
                self._changed.wait()

    def close(self) -> None:
        """Gives it up, or ends it: nobody waits for it, and what it holds is free."""
        with self._changed:
            self._closed = True
            self._parts.clear()
            self._changed.notify_all()
        self.outline.close()
