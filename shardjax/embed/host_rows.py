"""Rows in RAM: one growing arena per slab, of records that nobody looks into.

A record is a row's numbers and optimizer state as 32-bit words, as `moves` packs them.
The arena is address space that the system backs with memory as it is written to: growing
copies nothing. Rows that leave make room for those that come, last in, first out.
"""

import mmap
import os

import numba
import numpy as np


def reserve(shape: tuple[int, ...], dtype) -> np.ndarray:
    """An array of zeros whose pages take memory when they are first written to."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    flags = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    if not flags:
        return np.zeros(shape, dtype)
    space = mmap.mmap(-1, max(size, 1), flags | getattr(mmap, "MAP_NORESERVE", 0))
    return np.frombuffer(space, dtype, int(np.prod(shape, dtype=np.int64))).reshape(
        shape
    )


@numba.njit(nogil=True, cache=True)
def take_records(records, rows, out, places):
    """Copies records[rows[i]] to out[places[i]]."""
    for i in range(rows.shape[0]):
        out[places[i]] = records[rows[i]]


@numba.njit(nogil=True, cache=True)
def land_records(data, rows, records, flight):
    """Copies data[i] to records[rows[i]], which is then in RAM; -1: nobody wants it."""
    for i in range(rows.shape[0]):
        if rows[i] >= 0:
            records[rows[i]] = data[i]
            flight[rows[i]] = 0


@numba.njit(nogil=True, cache=True)
def _take(n, free, free_count, used, out):
    for i in range(n):
        if free_count > 0:
            free_count -= 1
            out[i] = free[free_count]
        else:
            out[i] = used
            used += 1
    return free_count, used


class HostRows:
    """The RAM tier of one slab.

    Attributes:
      words: 32-bit words per record.
      records: int32 [room, words].
      keys: uint64 [room], salted.
      tables: int32 [room], numbers of their tables.
      steps_used, last_step: uint32 and int32 [room], of each row.
      flight: int32 [room], number of the write-back that is to bring the row's record, 0
        when it is there.
      place: int32 [room], which row of that write-back.
    """

    def __init__(self, words: int):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        room = min(memory // (4 * words), 2**30 - 2**20)
        self.words = words
        self.records = reserve((room, words), np.int32)
        self.keys = reserve((room,), np.uint64)
        self.tables = reserve((room,), np.int32)
        self.steps_used = reserve((room,), np.uint32)
        self.last_step = reserve((room,), np.int32)
        self.flight = reserve((room,), np.int32)
        self.place = reserve((room,), np.int32)
        self._free = reserve((room,), np.int32)
        self._free_count = 0
        self._used = 0

    def __len__(self) -> int:
        return self._used - self._free_count

    @property
    def bytes(self) -> int:
        """RAM that the arena takes."""
        return self._used * (4 * self.words + 8 + 6 * 4)

    def take(self, n: int) -> np.ndarray:
        """n rows for new records, int32 [n].

        Raises:
          MemoryError: if the RAM of the host does not hold as many.
        """
        if len(self) + n > len(self.keys):
            raise MemoryError(
                f"the RAM tier has room for {len(self.keys)} rows, and {len(self) + n} are"
                " needed"
            )
        rows = np.empty(n, np.int32)
        self._free_count, self._used = _take(
            n, self._free, self._free_count, self._used, rows
        )
        return rows

    def release(self, rows: np.ndarray) -> None:
        """Gives rows, int32 [n], back."""
        self.flight[rows] = 0
        self._free[self._free_count : self._free_count + len(rows)] = rows
        self._free_count += len(rows)
