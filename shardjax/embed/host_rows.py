"""Rows in RAM: one growing arena per slab, of records that nobody looks into.

A record is a row's numbers and optimizer state as 32-bit words, as `moves` packs them. A
header of 32 bytes says whose it is. Both lie in address space that the system backs with
memory as it is written to: growing copies nothing. Rows that leave make room for those
that come, last in, first out.
"""

import os
from collections.abc import Mapping
from typing import Any

import numba
import numpy as np

from shardjax.embed.index import prefetch
from shardjax.embed.memory import give_back, reserve
from shardjax.embed.moves import WriteBack

HEADER = np.dtype(
    [
        ("key", np.uint64),  # salted
        ("table", np.int32),  # its number; FREE for none
        ("last_step", np.int32),  # that used the row
        ("tally", np.uint32),  # how many did; or a ShowClick score
        ("flight", np.int32),  # write-back that is to bring the record; 0: it is there
        ("place", np.int32),  # row of that write-back
        ("uses", np.int32),  # see `sweep_cold`
    ]
)
FREE = -1
_BLOCK = 16


@numba.njit(nogil=True, cache=True)
def store_headers(
    headers, rows, slots, at, owners, places, flight, steps, keys, tables
):
    """Writes the headers of rows that leave the devices.

    Args:
      headers: [room] of HEADER, in and out.
      rows: int32 [n], where in it.
      slots: [owners, slots] of `residents.SLOT`.
      at, owners, places: int32 [n], their slots, and their places in the write-back.
      flight: number of the write-back.
      steps: int32 [n], last steps that used them.
      keys, tables: uint64 and int32 [n], out.
    """
    for i in range(rows.shape[0]):
        slot = slots[owners[i], at[i]]
        keys[i] = slot.key
        tables[i] = slot.table
        h = headers[rows[i]]
        h.key = slot.key
        h.table = slot.table
        h.last_step = steps[i]
        h.tally = slot.tally
        h.flight = flight
        h.place = places[i]
        h.uses = 0 if slot.tally < 2 else 1


@numba.njit(nogil=True, cache=True)
def take_records(
    headers, words, records, rows, numbers, owners, places, out, tallies, flights
):
    """Copies the records that are there to where they are wanted.

    Args:
      headers, records: of the arena.
      words: int64 [room, 4], the memory of the headers.
      rows: int32 [n].
      numbers: int64 [n], of the rows in what follows.
      owners, places: int32 [..], where in `out` the records go.
      out: int32 [owners, .., words], out.
      tallies: uint32 [..], out.
      flights: int32 [n], out: write-backs that the others are still in, else 0.

    Returns:
      How many those are.
    """
    length = records.shape[1]
    flat = records.reshape(-1, 1)
    late = 0
    for start in range(0, rows.shape[0], _BLOCK):
        stop = min(start + _BLOCK, rows.shape[0])
        for i in range(start, stop):
            r = np.uint64(rows[i])
            prefetch(words, r)  # pyright: ignore[reportCallIssue]
            first = r * np.uint64(length)
            for w in range(0, length + 15, 16):  # a record may lie across cache lines
                at = first + np.uint64(min(w, length - 1))
                prefetch(flat, at)  # pyright: ignore[reportCallIssue]
        for i in range(start, stop):
            r, n = rows[i], numbers[i]
            h = headers[r]
            tallies[n] = h.tally
            flights[i] = h.flight
            if h.flight != 0:
                late += 1
                continue
            o, place = owners[n], places[n]
            for w in range(length):
                out[o, place, w] = records[r, w]
    return late


@numba.njit(nogil=True, cache=True)
def land_records(data, rows, headers, records):
    """Copies data[i] to records[rows[i]], which is then there; -1: nobody wants it."""
    length = records.shape[1]
    for i in range(rows.shape[0]):
        r = rows[i]
        if r >= 0:
            for w in range(length):
                records[r, w] = data[i, w]
            headers[r].flight = 0


@numba.njit(nogil=True, cache=True)
def sweep_cold(headers, hand, used, wanted, out):
    """Picks rows that go to disk, int32 [wanted]: those that have come and not been met
    by the hand of a clock before, if they were used once; the second time, if more.

    Returns:
      Where the hand stops, and how many there are: fewer if the others are not there.
    """
    picked = 0
    for _ in range(3 * used):
        if picked == wanted:
            break
        h = headers[hand]
        if h.table != FREE and h.flight == 0:
            if h.uses > 0:
                h.uses = 0
            else:
                out[picked] = hand
                h.flight = -1  # picked
                picked += 1
        hand = hand + 1 if hand + 1 < used else 0
    for i in range(picked):
        headers[out[i]].flight = 0
    return hand, picked


@numba.njit(nogil=True, cache=True)
def _release(rows, headers, free, free_count):
    for i in range(rows.shape[0]):
        headers[rows[i]].table = FREE
        headers[rows[i]].flight = 0
        free[free_count + i] = rows[i]


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
      headers: [room] of HEADER.
      header_words: int64 [room, 4], the same memory.
      outlines: `HostOutline`s that are told of rows before they change.
    """

    def __init__(self, words: int):
        memory = 2**34
        if hasattr(os, "sysconf"):
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.row_bytes = 4 * words + HEADER.itemsize + 4
        room = min(memory // self.row_bytes, 2**30 - 2**20)
        self.words = words
        self.records = reserve((room, words), np.int32)
        self.headers = reserve((room,), HEADER)
        self.header_words = self.headers.view(np.int64).reshape(room, 4)
        self._free = reserve((room,), np.int32)
        self._free_count = 0
        self._used = 0
        self._hand = 0
        self.outlines: list[Any] = []  # `HostOutline`s that rows have to be kept for

    def __len__(self) -> int:
        return self._used - self._free_count

    @property
    def used(self) -> np.ndarray:
        """The headers of all rows that have ever been taken, [n] of HEADER."""
        return self.headers[: self._used]

    @property
    def bytes(self) -> int:
        """RAM that the arena takes."""
        return self._used * self.row_bytes

    def take(self, n: int) -> np.ndarray:
        """n rows for new records, int32 [n].

        Raises:
          MemoryError: if the RAM of the host does not hold as many.
        """
        if len(self) + n > len(self.headers):
            raise MemoryError(
                f"the RAM tier has room for {len(self.headers)} rows, and"
                f" {len(self) + n} are needed"
            )
        rows = np.empty(n, np.int32)
        self._free_count, self._used = _take(
            n, self._free, self._free_count, self._used, rows
        )
        return rows

    def release(self, rows: np.ndarray) -> None:
        """Gives rows, int32 [n], back."""
        self.keep(rows)
        _release(rows, self.headers, self._free, self._free_count)
        self._free_count += len(rows)

    def keep(self, rows: np.ndarray) -> None:
        """Lets outlines copy rows, int32 [n], that are about to change."""
        for outline in list(self.outlines):
            outline.keep(rows)

    def shrink(self, most_bytes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Moves rows from the arena's end into free ones, and gives its memory back.

        Does nothing until it would give back a 32nd. Rows that are on their way, or about
        to leave for good, stay where they are, and what is before them.

        Args:
          most_bytes: that the arena shall take.

        Returns:
          Keys, uint64 [n], and tables, int32 [n], of the rows that have moved, and where
          they are now, int32 [n].
        """
        end = max(most_bytes // self.row_bytes, len(self))
        nothing = np.zeros(0, np.int32)
        if self._used - end < self._used // 32:
            return nothing.astype(np.uint64), nothing, nothing
        is_free = np.zeros(self._used, bool)
        is_free[self._free[: self._free_count]] = True
        tail = self.headers[end : self._used]
        stuck = ~is_free[end:] & ((tail["flight"] != 0) | (tail["table"] == FREE))
        if stuck.any():
            end += int(np.flatnonzero(stuck)[-1]) + 1
        moved = end + np.flatnonzero(~is_free[end:])
        free = np.flatnonzero(is_free[:end])
        rows, left = free[: len(moved)].astype(np.int32), free[len(moved) :]
        self.keep(moved.astype(np.int32))
        self.records[rows] = self.records[moved]
        self.headers[rows] = self.headers[moved]
        for array in (self.records, self.headers):
            give_back(array, end, self._used)
        self._free[: len(left)] = left[::-1]  # the lowest is taken first
        self._free_count, self._used = len(left), end
        self._hand = self._hand if self._hand < end else 0
        return self.headers["key"][rows], self.headers["table"][rows], rows

    def read(
        self, rows: np.ndarray, owners: np.ndarray, flying: Mapping[int, WriteBack]
    ) -> np.ndarray:
        """Records, int32 [n, words], of rows, also of those on their way.

        Args:
          rows, owners: int32 [n].
          flying: write-backs that have not arrived, by number; waits for those needed.
        """
        records = self.records[rows]
        headers = self.headers[rows]
        for number in np.unique(headers["flight"][headers["flight"] > 0]):
            parts = flying[int(number)].parts()
            for i in np.flatnonzero(headers["flight"] == number):
                records[i] = parts[owners[i]][headers["place"][i]]
        return records

    def room(self, most_bytes: int) -> int:
        """How many more rows fit if the arena may take `most_bytes`."""
        return most_bytes // self.row_bytes - len(self)

    def coldest(self, wanted: int) -> np.ndarray:
        """Rows to go to disk, int32 [n], fewer than `wanted` if too many are in flight."""
        out = np.empty(wanted, np.int32)
        self._hand, n = sweep_cold(self.headers, self._hand, self._used, wanted, out)
        return out[:n]
