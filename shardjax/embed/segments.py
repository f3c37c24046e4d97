"""Rows on disk: immutable files of records, sorted by the hash of their key.

A segment file is nothing but records of int32 words, in the order of `mix64(key)`::

    key (2 words) | table | last_step | tally | checksum | the row's words

In RAM a segment has, per bucket of about 16 records that are neighbours by hash, where it
starts; per record 12 bits of its hash; and one bit that says whether it is dead: less than
2 bytes per key, and no bloom filter besides, as the bits of a bucket are one. A look-up
reads the records whose bits match, of which one in 250 is another key's. It asks for keys in
the order of their hashes, so it goes through RAM and file from front to back.

A mapped file is read as memory: 0.1 us for a record that the page cache has, where the
system call that reads one of a file that is not mapped takes 0.7 us. Before a look-up in a
mapped file its size is checked; but a medium that fails meanwhile ends the process (SIGBUS).

A row is in one place only: what is taken out is dead at once. So there are no versions and
no tombstones, and compaction copies what lives.
"""

import contextlib
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shardjax.embed.records import (
    AT_ONCE,
    bury_records,
    find_records,
    keys_of,
    summarize,
    verify,
)

# keys (uint64), last steps (int32) and tallies (uint32) of some rows, [n] each
Facts = tuple[np.ndarray, np.ndarray, np.ndarray]
# a table, and new tallies of old ones, uint32 [n]
Change = tuple[int, Callable[[np.ndarray], np.ndarray]]
BUCKET = 16


class CorruptSegmentError(OSError):
    """A segment file is not what was written."""


def unmapped(words: int) -> np.ndarray:
    """What stands for the records of a file that is not mapped; read-only as they are."""
    return np.frombuffer(b"", np.int32).reshape(0, words)


def _changed(records: np.ndarray, changes: Iterable[Change]) -> np.ndarray:
    """Makes changes in records, int32 [n, words], and returns them."""
    for table, change in changes:
        own = records[:, 2] == table
        records[own, 4] = change(records[own, 4].view(np.uint32)).view(np.int32)
    return records


@dataclass(eq=False)
class Segment:
    """One file of records.

    Attributes:
      path: the file, open as `fd` for reading.
      count: records in it.
      words: of a record.
      starts: uint32 [buckets + 1].
      bits: uint8 [3 * count / 2], and a little to read past the end.
      dead: uint8 [count / 8], bits.
      mapped: int32 [count, words], the file as memory; [0, words] if it is not mapped.
      dead_count: how many are dead.
      oldest, newest: the least and the greatest `last_step` of the records.
      readers: how many read records that are dead.
      changes: (table, change of tallies, uint32 [n]) that the file does not have yet: they
        are made in what is read, in this order.
    """

    path: Path
    fd: int
    count: int
    words: int
    starts: np.ndarray
    bits: np.ndarray
    dead: np.ndarray
    mapped: np.ndarray
    dead_count: int = 0
    oldest: int = 0
    newest: int = 0
    readers: int = 0
    changes: list[Change] = field(default_factory=list)

    @property
    def live(self) -> int:
        """Records that live."""
        return self.count - self.dead_count

    @property
    def file_bytes(self) -> int:
        """Bytes of the file."""
        return self.count * self.words * 4

    @property
    def ram_bytes(self) -> int:
        """Bytes of RAM that it takes to find records."""
        return self.starts.nbytes + self.bits.nbytes + self.dead.nbytes

    @classmethod
    def write(
        cls,
        path: Path,
        words: int,
        most: int,
        parts: Iterable[tuple[np.ndarray, np.ndarray]],
    ) -> "Segment":
        """Writes a new file.

        Args:
          path: of the file; it must not exist.
          words: of a record.
          most: records there may be.
          parts: hashes, uint64 [n], in order, and records, int32 [n, words].

        Raises:
          OSError: if it cannot be written; then there is no file.
        """
        starts = np.zeros(max(most // BUCKET, 1) + 1, np.uint32)
        bits = np.zeros((most + 1 + AT_ONCE) // 2 * 3 + 8, np.uint8)
        count, at, oldest, newest = 0, 0, np.iinfo(np.int32).max, 0
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            for hashes, records in parts:
                at = summarize(hashes, count, at, starts, bits)
                count += len(records)
                oldest = min(oldest, int(records[:, 3].min()))
                newest = max(newest, int(records[:, 3].max()))
                view = records.reshape(-1).view(np.uint8).data
                while view:
                    view = view[os.write(fd, view) :]
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        starts[at:] = count
        dead = np.zeros((count + 7) // 8, np.uint8)
        nothing = unmapped(words)
        return cls(
            path, fd, count, words, starts, bits, dead, nothing,
            oldest=oldest, newest=newest,
        )  # fmt: skip

    def find(self, wanted, keys, tables, hashes, out, records):
        """Looks up some keys.

        Args:
          wanted: int64 [n], numbers of the keys to look up; fastest in the order of their
            hashes, which is that of the records.
          keys, tables, hashes: uint64, int32 and uint64 of all keys.
          out: int64 [keys], out: number of each record found.
          records: int32 [keys, words], out; undefined for what is not found.

        Returns:
          The numbers of the keys found, int64 [k], and those of the others, int64 [n - k].

        Raises:
          CorruptSegmentError: for a record that is cut off or changed.
        """
        if len(self.mapped):
            size = os.fstat(self.fd).st_size
            if size < self.file_bytes:  # memory past the end of a file is a SIGBUS
                self.fail(size // (4 * self.words), "is cut off")
        bad = np.zeros(2, np.int64)
        answer = find_records(
            self.fd, self.mapped, wanted, keys, tables, hashes, self.starts, self.bits,
            self.dead, out, records, bad,
        )  # fmt: skip
        if bad[0]:
            self.fail(int(bad[1]), "is cut off" if bad[0] == 1 else "has changed")
        if self.changes:
            here = answer[0]
            records[here] = _changed(records[here], self.changes)
        return answer

    def map(self) -> None:
        """Lets `find` read the file as memory, unless the file system refuses that."""
        with contextlib.suppress(
            OSError, ValueError
        ):  # that: the file has been cut off
            memory = mmap.mmap(self.fd, self.file_bytes, prot=mmap.PROT_READ)
            memory.madvise(
                mmap.MADV_RANDOM
            )  # a miss reads one page, not its neighbours
            self.mapped = np.frombuffer(memory, np.int32).reshape(-1, self.words)

    def fail(self, record: int, what: str) -> None:
        """Raises for a bad record."""
        raise CorruptSegmentError(
            f"{self.path}: record {record} (byte {record * self.words * 4}) {what}: the"
            " file is not what was written. Its rows are lost; check the disk"
        )

    def bury(self, rows: np.ndarray) -> None:
        """Marks records, int64 [n], as dead."""
        self.dead_count += bury_records(self.dead, rows)

    def live_records(
        self,
        start: int,
        stop: int,
        dead: np.ndarray | None = None,
        changes: list[Change] | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Reads the records [start, stop) that live.

        Args:
          start, stop: numbers of records.
          dead: which do not, if not those that are dead now.
          changes: to be made in them, if not those of now.

        Returns:
          Their numbers, int64 [n], and they, int32 [n, words]; checksums are as in the
          file, whatever the changes.

        Raises:
          CorruptSegmentError: for a record that is cut off or changed.
        """
        size = self.words * 4
        data = os.pread(self.fd, (stop - start) * size, start * size)
        if len(data) != (stop - start) * size:
            self.fail(start + len(data) // size, "is cut off")
        records = np.frombuffer(data, np.int32).reshape(-1, self.words)
        numbers = np.arange(start, stop)
        dead = self.dead if dead is None else dead
        live = np.flatnonzero((dead[numbers >> 3] >> (numbers & 7)) & 1 == 0)
        records = records[live]
        bad = verify(records)
        if bad >= 0:
            self.fail(int(numbers[live][bad]), "has changed")
        return numbers[live], _changed(
            records, self.changes if changes is None else changes
        )

    def facts(self, table: int) -> Iterator[tuple[np.ndarray, Facts]]:
        """Numbers, int64 [n], of the live records of a table, and what is known of
        them, in parts."""
        chunk = max((4 << 20) // (self.words * 4), 1)
        for start in range(0, self.count, chunk):
            stop = min(start + chunk, self.count)
            numbers, records = self.live_records(start, stop)
            own = records[:, 2] == table
            records = records[own]
            keys = keys_of(records)
            tallies = records[:, 4].copy().view(np.uint32)
            yield numbers[own], (keys, records[:, 3].copy(), tallies)

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """Records by number, int64 [n], also dead ones: int32 [n, words].

        Raises:
          CorruptSegmentError: for a record that is cut off or changed.
        """
        size = self.words * 4
        records = np.empty((len(numbers), self.words), np.int32)
        for i, n in enumerate(numbers.tolist()):
            data = os.pread(self.fd, size, n * size)
            if len(data) != size:
                self.fail(n, "is cut off")
            records[i] = np.frombuffer(data, np.int32)
        bad = verify(records)
        if bad >= 0:
            self.fail(int(numbers[bad]), "has changed")
        return records

    def delete(self) -> None:
        """Closes and removes the file; its memory is there until nothing refers to it."""
        self.mapped = unmapped(self.words)
        os.close(self.fd)
        self.path.unlink(missing_ok=True)


@dataclass
class Found:
    """What a look-up on disk found.

    Attributes:
      mask: bool [n], which keys.
      last_step, tallies: int32 and uint32 [n].
      rows: int32 [n, words]; undefined where the mask is false.
    """

    mask: np.ndarray
    last_step: np.ndarray = field(repr=False)
    tallies: np.ndarray = field(repr=False)
    rows: np.ndarray = field(repr=False)
