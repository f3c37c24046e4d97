"""Rows on disk: immutable files of records, sorted by the hash of their key.

A segment file is nothing but records of int32 words, in the order of `mix64(key)`::

    key (2 words) | table | last_step | tally | checksum | the row's words

In RAM a segment has, per bucket of about 16 records that are neighbours by hash, where it
starts; per record 12 bits of its hash; and one bit that says whether it is dead: less than
2 bytes per key, and no bloom filter besides, as the bits of a bucket are one. A look-up
reads the records whose bits match, of which one in 250 is another key's.

A row is in one place only: what is taken out is dead at once. So there are no versions and
no tombstones, and compaction copies what lives.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numba
import numpy as np
from numba.core import types

from shardjax.embed.index import mix64, prefetch

# keys (uint64), last steps (int32) and tallies (uint32) of some rows, [n] each
Facts = tuple[np.ndarray, np.ndarray, np.ndarray]

HEADER_WORDS = 6
BUCKET = 16
_32 = np.uint64(32)
_BLOCK = 32
_WRITE_BYTES = 16 << 20

_pread = types.ExternalFunction(
    "pread", types.int64(types.int32, types.uintp, types.uintp, types.int64)
)


class CorruptSegmentError(OSError):
    """A segment file is not what was written."""


@numba.njit(inline="always")
def _bucket(h, buckets):
    return np.int64(((h >> _32) * np.uint64(buckets)) >> _32)


@numba.njit(inline="always")
def _checksum(record):
    """A 32-bit hash of a record, its checksum's own word apart."""
    h = np.uint64(0x9E3779B97F4A7C15)
    for w in range(record.shape[0]):
        if w != 5:
            h = (h ^ np.uint64(np.uint32(record[w]))) * np.uint64(0xBF58476D1CE4E5B9)
            h ^= h >> _32
    return np.int32(np.uint32(h))


@numba.njit(nogil=True, cache=True)
def hash_keys(keys, out):
    """Writes `mix64` of keys, uint64 [n], by which segments are sorted."""
    for i in range(keys.shape[0]):
        out[i] = mix64(keys[i])


@numba.njit(nogil=True, cache=True)
def _write_records(order, keys, tables, last_step, tallies, rows, out):
    for n in range(order.shape[0]):
        i = order[n]
        record = out[n]
        record[0] = np.int32(np.uint32(keys[i] & np.uint64(0xFFFFFFFF)))
        record[1] = np.int32(np.uint32(keys[i] >> _32))
        record[2] = tables[i]
        record[3] = last_step[i]
        record[4] = np.int32(tallies[i])
        for w in range(rows.shape[1]):
            record[HEADER_WORDS + w] = rows[i, w]
        record[5] = _checksum(record)


@numba.njit(nogil=True, cache=True)
def _summarize(hashes, order, starts, bits):
    """Fills a segment's buckets and bits from its hashes, in order."""
    buckets = starts.shape[0] - 1
    at = 0
    for n in range(order.shape[0]):
        h = hashes[order[n]]
        b = _bucket(h, buckets)
        while at <= b:
            starts[at] = n
            at += 1
        _set_bits(bits, n, np.int64(h & np.uint64(0xFFF)))
    while at <= buckets:
        starts[at] = order.shape[0]
        at += 1


@numba.njit(inline="always")
def _set_bits(bits, n, value):
    """Writes the 12 bits of record n: three bytes for two records."""
    at = (n >> 1) * 3
    if n & 1:
        bits[at + 1] = (bits[at + 1] & 0x0F) | ((value & 0x0F) << 4)
        bits[at + 2] = value >> 4
    else:
        bits[at] = value & 0xFF
        bits[at + 1] = (bits[at + 1] & 0xF0) | (value >> 8)


@numba.njit(inline="always")
def _get_bits(bits, n):
    at = (n >> 1) * 3
    if n & 1:
        return (np.int64(bits[at + 1]) >> 4) | (np.int64(bits[at + 2]) << 4)
    return np.int64(bits[at]) | ((np.int64(bits[at + 1]) & 0x0F) << 8)


@numba.njit(nogil=True, cache=True)
def _candidates(hashes, wanted, starts, bits, dead, out):
    """The first live record of a segment whose bits match, int64 [n], -1 for none."""
    buckets = starts.shape[0] - 1
    starts_2d, bits_2d = starts.reshape(-1, 1), bits.reshape(-1, 1)
    bucket = np.empty(_BLOCK, np.int64)
    for first in range(0, wanted.shape[0], _BLOCK):
        stop = min(first + _BLOCK, wanted.shape[0])
        for j in range(first, stop):
            b = _bucket(hashes[wanted[j]], buckets)
            bucket[j - first] = b
            prefetch(starts_2d, np.uint64(b))  # pyright: ignore[reportCallIssue]
        for j in range(first, stop):
            at = np.uint64(starts[bucket[j - first]] // 2 * 3)
            last = np.uint64(bits.shape[0] - 1)
            prefetch(bits_2d, min(at, last))  # pyright: ignore[reportCallIssue]
        for j in range(first, stop):
            b = bucket[j - first]
            mark = np.int64(hashes[wanted[j]] & np.uint64(0xFFF))
            out[j] = -1
            for n in range(starts[b], starts[b + 1]):
                if _get_bits(bits, n) == mark and not (dead[n >> 3] >> (n & 7)) & 1:
                    out[j] = n
                    break


@numba.njit(nogil=True, cache=True)
def _fetch(
    fd, candidates, wanted, keys, tables, hashes, starts, bits, dead, out, records, bad
):
    """Reads candidates; writes the record that is a key's own, and its number.

    Args:
      fd: of the segment.
      candidates: int64 [n], of `_candidates`.
      wanted: int64 [n], numbers of keys.
      keys, tables, hashes: of all keys.
      out: int64 [keys], out: number of the record; unchanged if there is none.
      records: int32 [keys, words], out.
      bad: int64 [2], out: what was wrong (1: short read, 2: checksum) and where.
    """
    words = records.shape[1]
    size = words * 4
    buffer = np.empty(words, np.int32)
    address = buffer.ctypes.data
    buckets = starts.shape[0] - 1
    for j in range(wanted.shape[0]):
        n = candidates[j]
        if n < 0:
            continue
        i = wanted[j]
        end = starts[_bucket(hashes[i], buckets) + 1]
        mark = np.int64(hashes[i] & np.uint64(0xFFF))
        while n < end:
            if _get_bits(bits, n) == mark and not (dead[n >> 3] >> (n & 7)) & 1:
                if _pread(fd, address, size, n * size) != size:
                    bad[0], bad[1] = 1, n
                    return
                if buffer[5] != _checksum(buffer):
                    bad[0], bad[1] = 2, n
                    return
                key = np.uint64(np.uint32(buffer[0]))
                key |= np.uint64(np.uint32(buffer[1])) << _32
                if key == keys[i] and buffer[2] == tables[i]:
                    out[i] = n
                    for w in range(words):
                        records[i, w] = buffer[w]
                    break
            n += 1


@numba.njit(nogil=True, cache=True)
def _bury(dead, rows):
    """Marks records dead; returns how many were not."""
    count = 0
    for n in rows:
        bit = np.uint8(1 << (n & 7))
        if not dead[n >> 3] & bit:
            dead[n >> 3] |= bit
            count += 1
    return count


@numba.njit(nogil=True, cache=True)
def _verify(records):
    """The first record whose checksum is wrong, -1 for none."""
    for n in range(records.shape[0]):
        if records[n, 5] != _checksum(records[n]):
            return n
    return -1


@dataclass(eq=False)
class Segment:
    """One file of records.

    Attributes:
      path: the file, open as `fd` for reading.
      count: records in it.
      words: of a record.
      starts: uint32 [buckets + 1].
      bits: uint8 [3 * count / 2].
      dead: uint8 [count / 8], bits.
      dead_count: how many are.
      oldest: the least `last_step` of the records.
      readers: how many read records that are dead.
    """

    path: Path
    fd: int
    count: int
    words: int
    starts: np.ndarray
    bits: np.ndarray
    dead: np.ndarray
    dead_count: int = 0
    oldest: int = 0
    readers: int = 0

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
    def write(cls, path: Path, keys, tables, last_step, tallies, rows) -> "Segment":
        """Writes a new file.

        Args:
          path: of the file; it must not exist.
          keys: uint64 [n], salted; with `tables`, int32 [n], unique.
          last_step, tallies: int32 and uint32 [n].
          rows: int32 [n, words].

        Raises:
          OSError: if it cannot be written; then there is no file.
        """
        count, words = len(keys), HEADER_WORDS + rows.shape[1]
        hashes = np.empty(count, np.uint64)
        hash_keys(keys, hashes)
        order = np.argsort(hashes)
        starts = np.zeros(max(count // BUCKET, 1) + 1, np.uint32)
        bits = np.zeros((count + 1) // 2 * 3, np.uint8)
        _summarize(hashes, order, starts, bits)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            chunk = max(_WRITE_BYTES // (4 * words), 1)
            for start in range(0, count, chunk):
                part = order[start : start + chunk]
                out = np.empty((len(part), words), np.int32)
                _write_records(part, keys, tables, last_step, tallies, rows, out)
                view = out.reshape(-1).view(np.uint8).data
                while view:
                    view = view[os.write(fd, view) :]
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        dead = np.zeros((count + 7) // 8, np.uint8)
        oldest = int(last_step.min()) if count else 0
        return cls(path, fd, count, words, starts, bits, dead, oldest=oldest)

    def find(self, wanted, keys, tables, hashes, out, records, run: Callable) -> None:
        """Looks up some keys.

        Args:
          wanted: int64 [n], numbers of the keys to look up.
          keys, tables, hashes: uint64, int32 and uint64 of all keys.
          out: int64 [keys], out: number of each record found.
          records: int32 [keys, words], out.
          run: maps a function over iterables, perhaps in threads.

        Raises:
          CorruptSegmentError: for a record that is cut off or changed.
        """
        candidates = np.empty(len(wanted), np.int64)
        _candidates(hashes, wanted, self.starts, self.bits, self.dead, candidates)
        hit = np.flatnonzero(candidates >= 0)
        if not len(hit):
            return
        hit = hit[np.argsort(candidates[hit])]  # the disk's order
        parts = np.array_split(hit, max(min(len(hit) // 256, 32), 1))

        def fetch(part):
            bad = np.zeros(2, np.int64)
            _fetch(
                self.fd, candidates[part], wanted[part], keys, tables, hashes, self.starts,
                self.bits, self.dead, out, records, bad,
            )  # fmt: skip
            return bad

        for bad in run(fetch, parts):
            if bad[0]:
                self.fail(int(bad[1]), "is cut off" if bad[0] == 1 else "has changed")

    def fail(self, record: int, what: str) -> None:
        """Raises for a bad record."""
        raise CorruptSegmentError(
            f"{self.path}: record {record} (byte {record * self.words * 4}) {what}: the"
            " file is not what was written. Its rows are lost; check the disk"
        )

    def bury(self, rows: np.ndarray) -> None:
        """Marks records, int64 [n], as dead."""
        self.dead_count += _bury(self.dead, rows)

    def live_records(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Reads the records [start, stop) that live.

        Returns:
          Their numbers, int64 [n], and they, int32 [n, words].

        Raises:
          CorruptSegmentError: for a record that is cut off or changed.
        """
        size = self.words * 4
        data = os.pread(self.fd, (stop - start) * size, start * size)
        if len(data) != (stop - start) * size:
            self.fail(start + len(data) // size, "is cut off")
        records = np.frombuffer(data, np.int32).reshape(-1, self.words)
        numbers = np.arange(start, stop)
        live = np.flatnonzero((self.dead[numbers >> 3] >> (numbers & 7)) & 1 == 0)
        records = records[live]
        bad = _verify(records)
        if bad >= 0:
            self.fail(int(numbers[live][bad]), "has changed")
        return numbers[live], records

    def facts(self, table: int) -> Iterator[tuple[np.ndarray, Facts]]:
        """Numbers, int64 [n], of the live records of a table, and what is known of
        them, in parts."""
        chunk = max((4 << 20) // (self.words * 4), 1)
        for start in range(0, self.count, chunk):
            stop = min(start + chunk, self.count)
            numbers, records = self.live_records(start, stop)
            own = records[:, 2] == table
            records = records[own]
            keys = np.ascontiguousarray(records[:, :2]).view(np.uint64)[:, 0]
            tallies = records[:, 4].copy().view(np.uint32)
            yield numbers[own], (keys, records[:, 3].copy(), tallies)

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """The words, int32 [n, words], of the rows of records, int64 [n], also dead ones.

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
        bad = _verify(records)
        if bad >= 0:
            self.fail(int(numbers[bad]), "has changed")
        return records[:, HEADER_WORDS:]

    def delete(self) -> None:
        """Closes and removes the file."""
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
