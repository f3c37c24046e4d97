"""The disk tier of one slab: segments in a folder, and their compaction."""

import errno
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

from shardjax.embed.eviction import Cut, Facts
from shardjax.embed.merging import PART_BYTES, Part, merged_parts, sorted_parts
from shardjax.embed.rate import Rate
from shardjax.embed.records import HEADER_WORDS, hashes_of, keys_of
from shardjax.embed.segments import Change, CorruptSegmentError, Found, Segment
from shardjax.folders import OwnFolder

_PATTERN = "*.shardjax-rows"
_MOST_CHANGES = 16  # of a segment, until it is written anew


class DiskFolder(OwnFolder):
    """A folder that one process uses for its disk tiers.

    The files are good only as long as the process lives, whose devices and RAM have the
    other rows: those of a process that has ended are removed.

    Raises:
      OSError: if the folder cannot be written to, or is in use, by another process or by
        this one.
    """

    def __init__(self, path: str | os.PathLike):
        super().__init__(path, _PATTERN, "the disk tier", "an EmbeddingCollection")


class DiskBudget:
    """What the files of some slabs may take together.

    Args:
      folder: for the files.
      most_bytes: of all of them; None for any number.
      map_bytes: of them, how many may be mapped: a file that is read as memory is read
        about three times as fast while the system has it in its cache, and what is
        there counts as memory of this process, which the system takes back at need.
      merge_rate: that merging in the background keeps to; None for any.
    """

    def __init__(
        self,
        folder: DiskFolder,
        most_bytes: int | None = None,
        map_bytes: int = 2 << 30,
        merge_rate: Rate | None = None,
    ):
        self.folder = folder
        self.most_bytes = most_bytes
        self.map_bytes = map_bytes
        self.merge_rate = merge_rate
        self.members: weakref.WeakSet[DiskRows] = weakref.WeakSet()

    def lacks(self, size: int) -> bool:
        """Whether `size` more bytes are too many."""
        used = sum(x.taken_bytes for x in self.members)
        return self.most_bytes is not None and used + size > self.most_bytes


class DiskRows:
    """Rows of one slab on disk.

    Args:
      budget: and folder for the files.
      name: of the slab; part of the files' names.
      words: 32-bit words per row.
      merge_bytes: how much compaction makes one file of, at least.
      threads: that read.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as path:
      ...     folder = DiskFolder(path)
      ...     disk = DiskRows(DiskBudget(folder), "group0", words=2)
      ...     keys, tables = np.array([7, 9], np.uint64), np.zeros(2, np.int32)
      ...     steps = np.ones(2, np.int32)
      ...     rows = np.array([[1, 2], [3, 4]], np.int32)
      ...     disk.add(keys, tables, steps, steps.astype(np.uint32), rows)
      ...     found = disk.take(np.array([9, 8], np.uint64), tables)
      ...     left = len(disk)
      ...     disk.close()
      ...     folder.close()
      >>> found.mask.tolist(), found.rows[0].tolist(), left
      ([True, False], [3, 4], 1)
    """

    def __init__(
        self,
        budget: DiskBudget,
        name: str,
        words: int,
        merge_bytes: int = 256 << 20,
        threads: int = 4,
    ):
        self.budget = budget
        budget.members.add(self)
        self.name = name
        self.words = words
        self._record_bytes = 4 * (HEADER_WORDS + words)
        self._merge_bytes = merge_bytes
        self._threads = threads
        self.segments: list[Segment] = []
        self._kept: list[Segment] = []  # merged, and still read by `evict`
        self.compactions = 0
        self._files = 0
        self._lock = threading.Lock()
        self._readers = ThreadPoolExecutor(threads, "disk_rows_read")
        self._compactor = ThreadPoolExecutor(1, "disk_rows_compact")
        self._compacting: Future | None = None
        self._hurry = threading.Event()  # somebody waits for the compaction

    def __len__(self) -> int:
        return sum(s.live for s in self.segments)

    @property
    def file_bytes(self) -> int:
        """Bytes of all files."""
        return sum(s.file_bytes for s in self.segments)

    @property
    def taken_bytes(self) -> int:
        """Bytes of all files, with those that are only kept for readers."""
        return self.file_bytes + sum(s.file_bytes for s in self._kept)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the files that are mapped."""
        return sum(s.mapped.nbytes for s in self.segments + self._kept)

    @property
    def live_bytes(self) -> int:
        """Bytes of the records that live."""
        return len(self) * self._record_bytes

    @property
    def ram_bytes(self) -> int:
        """Bytes of RAM that it takes to find records."""
        return sum(s.ram_bytes for s in self.segments)

    def add(self, keys, tables, last_step, tallies, rows) -> None:
        """Writes rows that are not on disk.

        Args:
          keys: uint64 [n], salted; with `tables`, int32 [n], unique.
          last_step, tallies: int32 and uint32 [n].
          rows: int32 [n, words].

        Raises:
          OSError: if they cannot be written, for want of space or otherwise; nothing has
            changed then.
        """
        self._raise_failure()
        if not len(keys):
            return
        self._check_budget(len(keys))
        parts = sorted_parts(keys, tables, last_step, tallies, rows)
        segment = self._write(len(keys), parts)
        with self._lock:
            self._replace([], segment)
        self._start_compaction()
        while self.file_bytes > self._most_bytes:
            compacting = self._compacting
            if compacting is None:
                break
            self._hurry.set()
            if compacting.exception() is not None:  # waits: else dead records pile up
                break
            self._start_compaction()

    def _check_budget(self, rows: int) -> None:
        """Raises if the budget lacks room, also when dead records are cleared away."""
        size = rows * self._record_bytes
        if not self.budget.lacks(size):
            return
        for member in self.budget.members:
            member.wait()
            for segment in [s for s in member.segments if s.dead_count]:
                member._compact([segment])
        if self.budget.lacks(size):
            used = sum(x.taken_bytes for x in self.budget.members)
            raise OSError(
                errno.ENOSPC,
                f"the disk tier is full: `disk_bytes` of the storage is"
                f" {self.budget.most_bytes}, {used} are taken, and {rows} rows need {size}"
                " more. No row is lost: they are still in RAM. Give more, or let rows"
                " leave for good (`evict` of the tables)",
            )

    def take(self, keys: np.ndarray, tables: np.ndarray) -> Found:
        """Reads rows and takes them off the disk; those without a row are not found.

        Args:
          keys: uint64 [n], salted; with `tables`, int32 [n], unique.

        Raises:
          CorruptSegmentError: if a file is not what was written.
        """
        found = self._find(keys, tables, bury=True)
        self._start_compaction()
        return found

    def read(self, keys: np.ndarray, tables: np.ndarray) -> Found:
        """Reads rows, as `take`, and leaves them where they are."""
        return self._find(keys, tables, bury=False)

    def facts(self, table: int) -> Iterator[Facts]:
        """What is known of all rows of a table, in parts."""
        with self._lock:
            for segment in self.segments:
                for _, facts in segment.facts(table):
                    yield facts

    def evict(self, table: int, cut: Cut) -> list[tuple[Segment, np.ndarray, Facts]]:
        """Takes the rows of a table off the disk that leave for good.

        They can be read with `Segment.read` until `let_go` is called for the segments.

        Returns:
          Segments, numbers of their records (int64 [n]) and what is known of them.
        """
        oldest = cut.oldest()
        found = []
        with self._lock:
            for segment in self.segments:
                if oldest is not None and segment.oldest >= oldest:
                    continue
                for numbers, facts in segment.facts(table):
                    leaves = cut(facts)
                    if leaves.any():
                        segment.bury(numbers[leaves])
                        segment.readers += 1
                        own = facts[0][leaves], facts[1][leaves], facts[2][leaves]
                        found.append((segment, numbers[leaves], own))
        return found

    def let_go(self, segments: Iterable[Segment]) -> None:
        """Ends the use of segments after `evict` or `hold`, once for each returned."""
        with self._lock:
            for segment in segments:
                segment.readers -= 1
            unused = [s for s in self._kept if not s.readers]
            self._kept = [s for s in self._kept if s.readers]
        for segment in unused:
            segment.delete()
        self._start_compaction()

    def hold(self) -> list[tuple[Segment, np.ndarray, list[Change]]]:
        """Keeps the files as they are now until `let_go` is called for the segments.

        Returns:
          Segments, which of their records are dead now (a copy of `dead`) and the changes
          to be made in the others.
        """
        with self._lock:
            held = [s for s in self.segments if s.live]
            for segment in held:
                segment.readers += 1
            return [(s, s.dead.copy(), list(s.changes)) for s in held]

    def change(self, table: int, change: Callable[[np.ndarray], np.ndarray]) -> None:
        """Changes the tallies, uint32 [n], of all rows of a table; writes nothing."""
        made = False
        while not made:
            self._hurry.set()
            compacting = self._compacting
            if compacting is not None:
                wait([compacting])  # it reads; what it has met is for the next `add`
            with self._lock:  # under which no other one starts
                if self._compacting is None or self._compacting.done():
                    for segment in self.segments:
                        segment.changes.append((table, change))
                    made = True
        self._start_compaction()

    def keys(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """All keys and their tables, uint64 and int32 [n], a part at a time."""
        with self._lock:
            for segment in self.segments:
                chunk = max((4 << 20) // self._record_bytes, 1)
                for start in range(0, segment.count, chunk):
                    stop = min(start + chunk, segment.count)
                    _, records = segment.live_records(start, stop)
                    keys = keys_of(records)
                    yield keys, records[:, 2]

    def _find(self, keys, tables, bury: bool) -> Found:
        hashes = hashes_of(keys)
        records = np.empty((len(keys), HEADER_WORDS + self.words), np.int32)
        out = np.full(len(keys), -1, np.int64)

        def search(wanted):
            found = []
            for segment in reversed(self.segments):
                here, wanted = segment.find(wanted, keys, tables, hashes, out, records)
                found.append((segment, here))
            return found

        order = np.argsort(hashes)  # once: so are the records of each segment
        run, parts = map, [order]
        if len(keys) > 512:
            run, parts = self._readers.map, np.array_split(order, self._threads)
        with self._lock:
            found = list(run(search, parts))
            if bury:
                for segment, here in itertools.chain(*found):
                    segment.bury(out[here])
        return Found(
            out >= 0, records[:, 3], records[:, 4].view(np.uint32), records[:, 6:]
        )

    def _write(self, count: int, parts: Iterable[Part]) -> Segment:
        self._files += 1
        path = self.budget.folder.path / f"{self.name}-{self._files:06d}{_PATTERN[1:]}"
        try:
            return Segment.write(path, HEADER_WORDS + self.words, count, parts)
        except CorruptSegmentError:  # of what is read for it
            raise
        except OSError as error:
            raise OSError(
                error.errno,
                f"the disk tier cannot write {count} rows"
                f" ({count * self._record_bytes} bytes) to {str(path)!r}:"
                f" {error.strerror}. No row is lost: they are where they were. Free space, or"
                " give another folder",
            ) from error

    def _replace(self, old: list[Segment], new: Segment | None) -> None:
        """Puts a segment, if any, in the place of some; with the lock held."""
        segments = [s for s in self.segments if s not in old]
        if new is not None:
            kept = sum(s.mapped.nbytes for s in [*segments, *self._kept])
            others = sum(x.mapped_bytes for x in self.budget.members if x is not self)
            if kept + others + new.file_bytes <= self.budget.map_bytes:
                new.map()
            segments.append(new)
        self.segments = segments  # at once: others count rows without the lock

    @property
    def _most_merged(self) -> int:
        """What a compaction may make: a quarter of all, as each look-up that finds no row
        asks every segment."""
        return max(self._merge_bytes, self.live_bytes // 4)

    @property
    def _most_bytes(self) -> int:
        """What the files may take: twice what lives, and what compaction works on."""
        return 2 * self.live_bytes + self._merge_bytes

    def _start_compaction(self) -> None:
        with self._lock:  # who plans and who writes a checkpoint may both come here
            if self._compacting is not None:
                if not self._compacting.done():
                    return
                if self._compacting.exception() is not None:
                    return  # to be raised by the next `add`, which tries again
                self._compacting = None
            chosen = self._choose()
            if chosen:
                self._hurry.clear()
                spend = self._spend if self.budget.merge_rate is not None else None
                self._compacting = self._compactor.submit(
                    self._compact, chosen, spend=spend
                )

    def _spend(self, size: int) -> None:
        """Waits as the rate of merging asks for, unless somebody waits for the merge."""
        rate = self.budget.merge_rate
        if rate is not None and not self._hurry.is_set():
            rate.spend(size, self._hurry.wait)

    def _choose(self) -> list[Segment]:
        """Segments to make one of: many changes, many dead records, or many small files."""
        empty = [s for s in self.segments if not s.live]
        if empty:
            return empty
        behind = [s for s in self.segments if len(s.changes) >= _MOST_CHANGES]
        if behind:
            return self._upto_limit(behind)
        live, total = self.live_bytes, self.file_bytes
        by_waste = sorted(self.segments, key=lambda s: s.live / s.count)
        if total > 1.5 * live + self._merge_bytes // 8:
            return self._upto_limit(by_waste)
        small = [s for s in self.segments if 4 * s.file_bytes <= self._most_merged]
        if len(small) > 6:
            return self._upto_limit(sorted(small, key=lambda s: s.file_bytes))
        return []

    def _upto_limit(self, segments: Iterable[Segment]) -> list[Segment]:
        chosen, size = [], 0
        for s in segments:
            size += s.live * self._record_bytes
            if chosen and size > self._most_merged:
                break
            chosen.append(s)
        return chosen

    def _compact(
        self,
        chosen: list[Segment],
        spend: Callable[[int], None] | None = None,
    ) -> None:
        """Makes one segment of what lives in some; in the background.

        Args:
          chosen: segments.
          spend: told of the bytes that have been read or are about to be written.
        """
        with self._lock:
            before = [s.dead.copy() for s in chosen]
            count = sum(s.live for s in chosen)
        merged = None
        if count:
            rate = self.budget.merge_rate
            most = PART_BYTES if rate is None else min(PART_BYTES, rate.block_bytes)
            parts = merged_parts(chosen, before, spend, most)
            merged = self._write(count, parts)
        with self._lock:
            if merged is not None:
                # what has been taken out meanwhile is dead here too
                for segment, dead in zip(chosen, before, strict=True):
                    self._bury_again(merged, segment, segment.dead & ~dead)
            self._replace(chosen, merged)
            self.compactions += 1
            self._kept += [s for s in chosen if s.readers]
            unused = [s for s in chosen if not s.readers]
        for segment in unused:
            segment.delete()

    def _bury_again(self, merged: Segment, segment: Segment, gone: np.ndarray) -> None:
        """Marks records as dead in a copy, by the bits of the original, uint8."""
        numbers = np.flatnonzero(np.unpackbits(gone, bitorder="little"))
        if not len(numbers):
            return
        records = segment.read(numbers)
        keys = keys_of(records)
        hashes = hashes_of(keys)
        places = np.full(len(keys), -1, np.int64)
        tables = records[:, 2].copy()
        wanted = np.arange(len(keys))
        merged.find(wanted, keys, tables, hashes, places, np.empty_like(records))
        merged.bury(places)

    def _raise_failure(self) -> None:
        """Raises what a compaction has met."""
        compacting = self._compacting
        if compacting is not None and compacting.done():
            self._end(compacting)

    def wait(self) -> None:
        """Waits for a compaction that is under way."""
        self._hurry.set()
        compacting = self._compacting
        if compacting is not None:
            self._end(compacting)

    def _end(self, compacting: Future) -> None:
        """Waits for a compaction, raises what it has met, and makes way for another."""
        try:
            compacting.result()
        finally:
            with self._lock:
                if self._compacting is compacting:
                    self._compacting = None

    def close(self) -> None:
        """Ends the threads and removes the files; twice does no harm."""
        self._hurry.set()
        self._compactor.shutdown(wait=True)
        self._readers.shutdown(wait=True)
        for segment in self.segments + self._kept:
            segment.delete()
        self.segments, self._kept = [], []
