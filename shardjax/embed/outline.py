"""What rows there are at one moment of training, and where: the first half of a snapshot.

Planning runs ahead of the devices, and a snapshot is of one moment of the program: the end
of a training step. So its two halves are taken at two times. When the planner has planned
that step and none after it, it writes down which rows there are, where they lie and what
is known of them: an *outline*. When the devices have taken the step, `snapshot.Snapshot`
reads the rows. In between and afterwards everybody goes on; what would change a row of the
RAM tier that has not been read yet has it copied first.

A snapshot is made of *table records*, int32 [n, 5 + words]::

    key (2 words) | number of the table in its group | last_step | tally | the row's words
"""

import copy
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numba
import numpy as np

from shardjax.embed.changes import Mark, SlotChanges
from shardjax.embed.disk_rows import DiskRows
from shardjax.embed.host_rows import FREE, HEADER, HostRows
from shardjax.embed.index import EMPTY, HOST, Index, code_of
from shardjax.embed.moves import WriteBack
from shardjax.embed.residents import Residents
from shardjax.embed.segments import Change, Segment
from shardjax.embed.translate import owner_of

FACT_WORDS = 5
_CHUNK_BYTES = 4 << 20


@numba.njit(nogil=True, cache=True)
def _invert(table, end, single_owner, devices, first, used, number, keys, tables):
    """Writes which key of an index has which slot: keys[owner, slot]."""
    for i in range(end):
        code = code_of(table[i, 1])
        if code == EMPTY or code >= HOST:
            continue
        owner = owner_of(table[i, 0], single_owner, devices) - first
        if code < np.uint64(used[owner]):
            keys[owner, code] = table[i, 0]
            tables[owner, code] = number


@numba.njit(nogil=True, cache=True)
def write_facts(records, keys, tables, last_steps, tallies):
    """Writes the first words of table records."""
    for i in range(records.shape[0]):
        records[i, 0] = np.int32(np.uint32(keys[i] & np.uint64(0xFFFFFFFF)))
        records[i, 1] = np.int32(np.uint32(keys[i] >> np.uint64(32)))
        records[i, 2] = tables[i]
        records[i, 3] = last_steps[i]
        records[i, 4] = np.int32(tallies[i])


def table_records(keys, tables, last_steps, tallies, words) -> np.ndarray:
    """Table records of rows, int32 [n, words], and what is known of them."""
    records = np.empty((len(keys), FACT_WORDS + words.shape[1]), np.int32)
    write_facts(records, keys, tables, last_steps, tallies)
    records[:, FACT_WORDS:] = words
    return records


class DeviceOutline:
    """The rows on the devices.

    Attributes:
      used: int32 [owners], slots given out.
      keys, tables: uint64 (salted) and int32 [owners, most used]; table FREE for a slot
        without a row.
      last_steps, tallies: int32 and uint32 like them; None where nobody keeps track.
      count: rows.
    """

    def __init__(
        self,
        residents: Residents,
        indexes: Sequence[Index],
        single_owners: Sequence[int],
        used: np.ndarray,
    ):
        self.used = used.copy()
        most = max(int(used.max()), 1)
        shape = residents.owners, most
        self.last_steps = self.tallies = None
        if residents.tracked:
            slots = residents.slots[:, :most]
            self.keys = slots["key"].copy()
            self.last_steps = slots["last_step"].copy()
            self.tallies = slots["tally"].copy()
            self.tables = np.where(self.last_steps == FREE, FREE, slots["table"])
        else:
            self.keys = np.zeros(shape, np.uint64)
            self.tables = np.full(shape, FREE, np.int32)
            for number, (index, owner) in enumerate(
                zip(indexes, single_owners, strict=True)
            ):
                _invert(
                    index.table, index.end, owner, residents.span.total,
                    residents.span.first, self.used, number, self.keys, self.tables,
                )  # fmt: skip
        self.count = int((self.tables != FREE).sum())

    def changed(self, sequence: int, slots: SlotChanges | None) -> np.ndarray:
        """Which slots have rows that were written after a plan, bool [owners, slots].

        Args:
          sequence: of the plan.
          slots: that were written, where nobody knows of the rows.
        """
        if self.last_steps is not None:
            late = self.last_steps > sequence
        else:
            assert slots is not None
            late = slots.since(sequence, self.tables.shape[1])
        return late & (self.tables != FREE)

    def narrow(self, changed: np.ndarray) -> None:
        """Leaves rows out; `changed` are those that stay."""
        self.tables[~changed] = FREE
        self.count = int(changed.sum())

    def records(self, owner: int, slots: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Table records of slots that have a row, int64 [n], and their words."""
        nothing = np.zeros(len(slots), np.int32)
        last_steps, tallies = nothing, nothing.view(np.uint32)
        if self.last_steps is not None and self.tallies is not None:
            last_steps = self.last_steps[owner, slots]
            tallies = self.tallies[owner, slots]
        return table_records(
            self.keys[owner, slots], self.tables[owner, slots], last_steps, tallies, words
        )  # fmt: skip


class HostOutline:
    """The rows in RAM, and the copies of those that were about to change.

    One thread reads; `keep` may be called in others.

    Args:
      host: the tier. Its `outlines` know of this one until `close`.
      flying: write-backs that have not arrived.

    Attributes:
      count: rows, with those on their way.
    """

    def __init__(self, host: HostRows, flying: Sequence[WriteBack]):
        self._host = host
        headers = host.used
        self._unsaved = (headers["table"] != FREE) & (headers["flight"] == 0)
        self._hand = 0
        self._lock = threading.Lock()
        self._kept: list[np.ndarray] = []
        self._after: int | None = None  # a plan: only rows that were used later
        self.flying = [_Flying(x, host) for x in flying]
        self.count = int(self._unsaved.sum()) + sum(len(x.keys) for x in self.flying)
        host.outlines.append(self)

    def _copy(self, rows: np.ndarray) -> np.ndarray:
        headers = self._host.headers[rows]
        return table_records(
            headers["key"], headers["table"], headers["last_step"], headers["tally"],
            self._host.records[rows],
        )  # fmt: skip

    def keep(self, rows: np.ndarray) -> None:
        """Copies those of some rows, int32 [n], that have not been read: they are about
        to change."""
        with self._lock:
            rows = rows[rows < len(self._unsaved)]
            rows = rows[self._unsaved[rows]]
            if len(rows):
                self._unsaved[rows] = False
                self._kept.append(self._copy(rows))

    def narrow(self, sequence: int) -> None:
        """Leaves out the rows that were not used after a plan; `count` is then of those
        that have been read."""
        self._after, self.count = sequence, 0
        self.flying = [x.late(sequence) for x in self.flying]

    def landed(self) -> Iterator[np.ndarray]:
        """Table records of the rows that were on their way."""
        flying, self.flying = self.flying, []
        for part in flying:
            if self._after is not None:
                self.count += len(part.keys)
            if len(part.keys):
                yield part.records()

    def next(self) -> np.ndarray | None:
        """More table records; None if there are no more."""
        found = self._next()
        if found is not None and self._after is not None:
            found = found[found[:, 3] > self._after]
            self.count += len(found)
        return found

    def _next(self) -> np.ndarray | None:
        with self._lock:
            if self._kept:
                return self._kept.pop()
            while self._hand < len(self._unsaved):
                most = max(_CHUNK_BYTES // (4 * self._host.words + HEADER.itemsize), 1)
                part = self._unsaved[self._hand : self._hand + most]
                rows = self._hand + np.flatnonzero(part)
                part[:] = False
                self._hand += most
                if self._after is not None:
                    last_steps = self._host.headers["last_step"][rows]
                    rows = rows[last_steps > self._after]
                if len(rows):
                    return self._copy(rows)
            return None

    def close(self) -> None:
        """Nobody asks for more."""
        if self in self._host.outlines:
            self._host.outlines.remove(self)


class _Flying:
    """Rows on their way to RAM at the moment of an outline."""

    def __init__(self, write_back: WriteBack, host: HostRows):
        self.write_back = write_back
        self.owners, self.places = np.nonzero(write_back.rows >= 0)
        rows = write_back.rows[self.owners, self.places]
        headers = host.headers[rows]
        stay = headers["table"] != FREE  # the others are about to leave for good
        self.owners, self.places = self.owners[stay], self.places[stay]
        self.keys, self.tables = headers["key"][stay], headers["table"][stay]
        self.last_steps = headers["last_step"][stay]
        self.tallies = headers["tally"][stay]

    def late(self, sequence: int) -> "_Flying":
        """Those that were used after a plan."""
        chosen = copy.copy(self)
        late = self.last_steps > sequence
        for name in ("owners", "places", "keys", "tables", "last_steps", "tallies"):
            setattr(chosen, name, getattr(self, name)[late])
        return chosen

    def records(self) -> np.ndarray:
        """Table records; waits for those that have been dispatched."""
        parts = self.write_back.parts()
        words = np.empty((len(self.keys), parts[0].shape[1]), np.int32)
        for o in np.unique(self.owners):
            own = self.owners == o
            words[own] = parts[o][self.places[own]]
        return table_records(
            self.keys, self.tables, self.last_steps, self.tallies, words
        )


class DiskOutline:
    """The rows on disk: their files stay until `close`.

    Attributes:
      count: rows.
    """

    def __init__(self, disk: DiskRows):
        self._disk = disk
        self._parts: list[tuple[Segment, np.ndarray, list[Change]]] = disk.hold()
        self.count = sum(
            s.count - int(np.unpackbits(dead, bitorder="little")[: s.count].sum())
            for s, dead, _ in self._parts
        )
        self._after: int | None = None  # a plan: only rows that were used later

    def narrow(self, sequence: int) -> None:
        """Leaves out the rows that were not used after a plan; `count` is then of those
        that have been read."""
        self._after, self.count = sequence, 0

    def records(self) -> Iterator[np.ndarray]:
        """Table records, a part at a time."""
        for segment, dead, changes in self._parts:
            if self._after is not None and segment.newest <= self._after:
                continue
            chunk = max(_CHUNK_BYTES // (4 * segment.words), 1)
            for start in range(0, segment.count, chunk):
                stop = min(start + chunk, segment.count)
                _, found = segment.live_records(start, stop, dead, changes)
                if self._after is not None:
                    found = found[found[:, 3] > self._after]
                    self.count += len(found)
                if len(found):
                    yield np.delete(found, FACT_WORDS, 1)  # the checksum

    def close(self) -> None:
        """Lets the files go."""
        parts, self._parts = self._parts, []
        self._disk.let_go([s for s, _, _ in parts])


@dataclass(eq=False)
class TierOutline:
    """The rows of one group.

    Attributes:
      device, host, disk: by place; None for a place that there is not.
      words: of a row.
      salts: uint64 [tables], added to the keys of each.
    """

    device: DeviceOutline
    host: HostOutline | None
    disk: DiskOutline | None
    words: int
    salts: np.ndarray

    @property
    def count(self) -> int:
        """How many."""
        parts = (self.device, self.host, self.disk)
        return sum(x.count for x in parts if x is not None)

    def leave_out(self) -> None:
        """Leaves out all rows: those on the devices, where there are no others."""
        self.device.narrow(np.zeros(self.device.tables.shape, bool))

    def narrow(self, sequence: int, changed: np.ndarray) -> None:
        """Leaves out the rows that have not changed since a plan.

        Args:
          sequence: of the plan.
          changed: of `DeviceOutline.changed`.
        """
        self.device.narrow(changed)
        if self.host is not None:
            self.host.narrow(sequence)
        if self.disk is not None:
            self.disk.narrow(sequence)

    def unsalted(self, records: np.ndarray) -> np.ndarray:
        """Table records with the keys that users know."""
        _unsalt(records, self.salts)
        return records

    def close(self) -> None:
        """Nobody asks for more."""
        for part in (self.host, self.disk):
            if part is not None:
                part.close()


@numba.njit(nogil=True, cache=True)
def _unsalt(records, salts):
    for i in range(records.shape[0]):
        key = np.uint64(np.uint32(records[i, 0]))
        key |= np.uint64(np.uint32(records[i, 1])) << np.uint64(32)
        key -= salts[records[i, 2]]
        records[i, 0] = np.int32(np.uint32(key & np.uint64(0xFFFFFFFF)))
        records[i, 1] = np.int32(np.uint32(key >> np.uint64(32)))


@dataclass(eq=False)
class Outline:
    """What there is after a training plan, and before the next.

    Attributes:
      sequence: number of the plan.
      evicted_before: a step before which policies have looked for rows.
      sizes: static sizes of plans, by name.
      tiers: per group.
      mark: it, for changes to be counted from.
      counts: of keys without a row, by table: of `Gate.counts`.
    """

    sequence: int
    evicted_before: int
    sizes: dict[tuple, int]
    tiers: list[TierOutline]
    mark: Mark
    counts: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)

    def close(self) -> None:
        """Nobody asks for more."""
        for tier in self.tiers:
            tier.close()
