"""Where the rows of one group are, and how they get to where a window needs them."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np

from shardjax.embed.departures import Departures
from shardjax.embed.disk_rows import DiskBudget, DiskRows
from shardjax.embed.eviction import Evicted
from shardjax.embed.groups import Group
from shardjax.embed.host_rows import (
    HostRows,
    land_records,
    store_headers,
    take_records,
)
from shardjax.embed.index import HOST, NEW, PENDING, Index, mix64
from shardjax.embed.moves import (
    Fill,
    Move,
    Stored,
    WriteBack,
    padded,
    record_words,
    row_words,
)
from shardjax.embed.outline import (
    DeviceOutline,
    DiskOutline,
    HostOutline,
    TierOutline,
)
from shardjax.embed.residents import Residents
from shardjax.embed.segments import Found
from shardjax.embed.span import DeviceSpan
from shardjax.embed.translate import owners_of


@numba.njit(nogil=True, cache=True)
def _first_words(keys, seed, words):
    """64 random bits per row, a function of (seed, table, key): keys are salted."""
    for i in range(keys.shape[0]):
        words[i] = mix64(mix64(keys[i]) ^ seed)


@numba.njit(nogil=True, cache=True)
def number_by_owner(owners, at, counts, places):
    """Numbers the rows `at` within their owners: places[at[i]]; `counts`, in and out."""
    for n in at:
        places[n] = counts[owners[n]]
        counts[owners[n]] += 1


@numba.njit(nogil=True, cache=True)
def place_slots(slots, owners, places, out):
    """Writes the slots of rows that have a place: out[owner, place]."""
    for i in range(slots.shape[0]):
        if places[i] >= 0:
            out[owners[i], places[i]] = slots[i]


def by_table(tables: np.ndarray, count: int) -> Iterator[tuple[int, np.ndarray]]:
    """Each table that occurs in `tables`, int32 [n], and where: int64 [..]."""
    order = np.argsort(tables.astype(np.uint16), kind="stable")
    ends = np.cumsum(np.bincount(tables, minlength=count))
    start = 0
    for t, end in enumerate(ends):
        if end > start:
            yield t, order[start:end]
        start = end


class Tier:
    """The rows of one group: on the devices, on their way, in RAM and on disk.

    Attributes:
      span: the devices that own the rows, of which `owners` are this process's.
      residents: what is on the devices, as planned.
      host: what is in RAM; None if all rows are on the devices.
      disk: what is on disk, if anything may be.
      failure: why rows that should be on disk are in RAM.
      departures: rows that leave for good.
    """

    def __init__(
        self,
        number: int,
        group: Group,
        indexes: Sequence[Index],
        span: DeviceSpan,
        seed: np.uint64,
        budget: DiskBudget | None,
        threads: int = 1,
    ):
        self.number = number
        self.group = group
        self.indexes = indexes
        self.span = span
        self.owners = span.count
        self.seed = seed
        storage = group.storage
        tracked = storage is not None or any(t.spec.evictions for t in group.tables)
        self.residents = Residents(span, storage, tracked)
        self.host = None if storage is None else HostRows(record_words(group))
        self.disk: DiskRows | None = None
        if budget is not None and self.host is not None:
            self.disk = DiskRows(budget, group.name, self.host.words)
        self.failure: OSError | None = None
        self._flying: dict[int, WriteBack] = {}
        self._flights = 0
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "tier") if threads > 1 else None
        self.departures = Departures(
            span,
            group.tables,
            indexes,
            self.residents,
            self.host,
            self.disk,
            self._flying,
        )

    def own(self, table: int, salted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which keys of a table, uint64 [n], are of this process, bool [n]; and the owners
        of those, int32 [..], from this process's first."""
        owners = owners_of(salted, self.group.tables[table].owner, self.span)
        mask = (owners >= 0) & (owners < self.owners)
        return mask, owners[mask]

    def land(self) -> None:
        """Takes in the write-backs that have arrived."""
        for number, write_back in list(self._flying.items()):
            if write_back.has_arrived:
                for data, rows in zip(write_back.parts(), write_back.rows, strict=True):
                    self._land(data, rows)
                del self._flying[number]

    def _land(self, data: np.ndarray, rows: np.ndarray) -> None:
        """Copies records, int32 [n, words], to rows of the RAM tier, int32 [n]."""
        assert self.host is not None
        headers, records = self.host.headers, self.host.records
        self._in_parts(
            len(rows), lambda p: land_records(data[p], rows[p], headers, records)
        )

    def _in_parts(self, n: int, copy: Callable[[slice], Any]) -> list:
        """Copies n rows, a part per thread; one part where threads are not worth it."""
        if self._pool is None or n < 4096:
            return [copy(slice(0, n))]
        ends = np.linspace(0, n, self._threads + 1).astype(int).tolist()
        parts = [slice(a, b) for a, b in itertools.pairwise(ends)]
        return list(self._pool.map(copy, parts))

    @property
    def found_by(self) -> int:
        """Bytes of RAM that it takes to find rows."""
        disk = 0 if self.disk is None else self.disk.ram_bytes
        return sum(x.nbytes for x in self.indexes) + disk

    def close(
        self, first_step: int, ends: Sequence[int], most_bytes: int | None
    ) -> tuple[np.ndarray, list[Move | None], list[np.ndarray], np.ndarray]:
        """Ends a window: settles who leaves and where those that come go.

        Args:
          first_step: of the window.
          ends: for each of its batches, how many rows were to come after it.
          most_bytes: RAM that rows may take; None for any.

        Returns:
          The slot of each row that comes, int32; what has to be done before each batch's
          step, if anything; the slots given out by then, int32 [owners] each; and which
          rows come from disk, bool. Rows that have been before come and go before the
          first step, a new row comes before the first step that uses it.
        """
        residents, coming = self.residents, self.residents.coming
        if not coming.count and not self.departures.waiting:
            used = residents.next_slot.copy()
            nothing = np.zeros(0, np.int32)
            moves = [None] * len(ends)
            return nothing, moves, [used] * len(ends), nothing.astype(bool)
        self.land()
        evicted = self.departures.take()
        new = coming.sources == int(NEW)
        from_disk = np.zeros(coming.count, bool)
        found = None
        if self.disk is not None and len(self.disk):
            asked = np.flatnonzero(new)
            found = self.disk.take(coming.keys[asked], coming.tables[asked])
            from_disk[asked] = found.mask
            new &= ~from_disk
        left, last_steps = residents.leave(first_step)
        stored, places, before = self._fetch(new, from_disk, found)
        if most_bytes is not None:
            self._make_room(sum(map(len, left)), most_bytes)
        write_back = self._write_back(left, last_steps)
        slots, used = residents.seat(left, before, ends)
        if stored is not None:
            place_slots(slots, coming.owners, places, stored.slots)
        for t, at in by_table(coming.tables, len(self.indexes)):
            self.indexes[t].relocate(coming.keys[at], slots[at].astype(np.int64))
        moves: list[Move | None] = []
        start = 0
        for end in ends:
            fresh = start + np.flatnonzero(new[start:end])
            fills = tuple(self._fills(fresh, slots))
            arrivals = fresh
            if not moves and stored is not None:
                arrivals = np.concatenate([np.flatnonzero(~new), fresh])
            if not residents.tracked:
                arrivals = fresh[:0]
            move = Move(
                self.number,
                write_back if not moves else None,
                stored if not moves else None,
                fills,
                coming.keys[arrivals],
                coming.tables[arrivals],
                places[arrivals],
                coming.owners[arrivals],
                () if moves else evicted,
            )
            something = move.write_back or move.stored or fills or move.evicted
            moves.append(move if something else None)
            start = end
        return slots, moves, used, from_disk

    def outline(self, used: np.ndarray | None = None) -> TierOutline:
        """What there is now, as planned; or in slots below `used`, int32 [owners], alone."""
        device = DeviceOutline(
            self.residents,
            self.indexes,
            [t.owner for t in self.group.tables],
            self.residents.next_slot if used is None else used,
        )
        flying = list(self._flying.values())
        return TierOutline(
            device,
            None if self.host is None else HostOutline(self.host, flying),
            None if self.disk is None else DiskOutline(self.disk),
            record_words(self.group),
            np.array([t.salt for t in self.group.tables], np.uint64),
        )

    def adopt(
        self, keys, tables, last_steps, tallies, words, most_bytes
    ) -> Move | None:
        """Takes over rows of a snapshot: the devices as many as they can, then RAM.

        Args:
          keys, tables: uint64 (salted) and int32 [n], of rows that there are not.
          last_steps, tallies: int32 and uint32 [n].
          words: int32 [n, words], the rows.
          most_bytes: RAM that rows may take; None for any.

        Returns:
          What is to be done on the devices, if anything.

        Raises:
          MemoryError, OSError: if RAM or disk do not hold them.
        """
        owners = np.empty(len(keys), np.int32)
        for t, at in by_table(tables, len(self.indexes)):
            owners[at] = owners_of(keys[at], self.group.tables[t].owner, self.span)
        slots = self.residents.adopt(owners, keys, tables, last_steps, tallies)
        where = slots.astype(np.int64)
        rest = np.flatnonzero(slots < 0)
        if len(rest):
            rows = self._adopt_in_ram(
                keys[rest], tables[rest], last_steps[rest], tallies[rest], words[rest],
                most_bytes,
            )  # fmt: skip
            where[rest] = rows.astype(np.int64) + int(HOST)
        for t, at in by_table(tables, len(self.indexes)):
            self.indexes[t].insert(keys[at], np.zeros(len(at), np.int32))
            self.indexes[t].relocate(keys[at], where[at])
        here = slots >= 0
        own = [np.flatnonzero(here & (owners == o)) for o in range(self.owners)]
        if not any(map(len, own)):
            return None
        stored_slots = padded([slots[x] for x in own])
        records = np.zeros((*stored_slots.shape, words.shape[1]), np.int32)
        for o, x in enumerate(own):
            records[o, : len(x)] = words[x]
        nothing = np.zeros(0, np.int32)
        return Move(
            self.number, None, Stored(stored_slots, records), (),
            nothing.astype(np.uint64), nothing, nothing, nothing,
        )  # fmt: skip

    def _adopt_in_ram(self, keys, tables, last_steps, tallies, words, most_bytes):
        """Takes over rows of a snapshot into RAM; returns where, int32 [n]."""
        host = self.host
        assert host is not None, "without a storage the devices take all"
        if most_bytes is not None:
            self._make_room(len(keys), most_bytes)
            failure, self.failure = self.failure, None
            if failure is not None:
                raise failure
            if self.full(len(keys), most_bytes):
                raise MemoryError(
                    f"the RAM tier is full: `host_bytes` of the storage, {most_bytes} of"
                    f" them for rows, does not hold {len(host)} rows and {len(keys)} more"
                    " of the checkpoint. Give more, or a folder as `disk`"
                )
        rows = host.take(len(keys))
        headers = host.headers
        for name, column in (
            ("key", keys),
            ("table", tables),
            ("last_step", last_steps),
            ("tally", tallies),
            ("flight", 0),
            ("uses", np.minimum(tallies, 2) // 2),
        ):
            headers[name][rows] = column
        host.records[rows] = words
        return rows

    def _make_room(self, rows: int, most_bytes: int) -> None:
        """Moves cold rows to disk, so that `rows` more fit into RAM."""
        if self.disk is None:
            return
        assert self.host is not None
        lacking = rows - self.host.room(most_bytes)
        if lacking > 0 and not self._demote(lacking):
            return
        keys, tables, moved = self.host.shrink(most_bytes)  # what finds rows takes more
        for t, at in by_table(tables, len(self.indexes)):
            where = moved[at].astype(np.int64) + int(HOST)
            self.indexes[t].relocate(keys[at], where)

    def _demote(self, lacking: int) -> bool:
        """Moves at least so many cold rows to disk, if there are; whether it worked."""
        assert self.host is not None and self.disk is not None
        # more than it takes now, so that files are large
        chosen = self.host.coldest(min(lacking + len(self.host) // 16, len(self.host)))
        headers = self.host.headers[chosen]
        keys, tables = headers["key"].copy(), headers["table"].copy()
        try:
            self.disk.add(
                keys,
                tables,
                headers["last_step"].copy(),
                headers["tally"].copy(),
                self.host.records[chosen],
            )
        except OSError as error:
            self.failure = error
            return False
        for t, at in by_table(tables, len(self.indexes)):
            self.indexes[t].remove(keys[at])
        self.host.release(chosen)
        return True

    def full(self, rows: int, most_bytes: int | None) -> bool:
        """Whether RAM does not hold `rows` more and there is no disk for others."""
        if self.host is None or self.disk is not None or most_bytes is None:
            return False
        return rows > self.host.room(most_bytes)

    def _write_back(self, left, last_steps) -> WriteBack | None:
        """Finds rows of the RAM tier for the rows that leave the devices."""
        counts = [len(x) for x in left]
        count = sum(counts)
        if not count:
            return None
        assert self.host is not None
        host, residents = self.host, self.residents
        owners = np.repeat(np.arange(self.owners, dtype=np.int32), counts)
        places = np.concatenate([np.arange(len(x), dtype=np.int32) for x in left])
        slots = np.concatenate(left)
        rows = host.take(count)
        self._flights += 1
        keys, tables = np.empty(count, np.uint64), np.empty(count, np.int32)
        store_headers(
            host.headers, rows, residents.slots, slots, owners, places, self._flights,
            np.concatenate(last_steps), keys, tables,
        )  # fmt: skip
        for t, at in by_table(tables, len(self.indexes)):
            where = rows[at].astype(np.int64) + int(HOST)
            self.indexes[t].relocate(keys[at], where)
        padded_slots = padded(left)
        padded_rows = np.full(padded_slots.shape, -1, np.int32)
        own_rows = np.split(rows, np.cumsum(counts[:-1]))
        for padded_own, own in zip(padded_rows, own_rows, strict=True):
            padded_own[: len(own)] = own
        write_back = WriteBack(padded_slots, padded_rows, keys, tables, owners, places)
        self._flying[self._flights] = write_back
        return write_back

    def _fetch(
        self, new, from_disk, found: Found | None
    ) -> tuple[Stored | None, np.ndarray, np.ndarray]:
        """Takes the rows that come back out of the RAM tier, and those found on disk.

        Returns:
          Them, without their slots; the place of each row that comes in them, int32, -1
          for those that are new; and the tally of each, uint32.
        """
        coming = self.residents.coming
        places = np.full(coming.count, -1, np.int32)
        before = np.zeros(coming.count, np.uint32)
        back = np.flatnonzero(~new)
        if not len(back):
            return None, places, before
        assert self.host is not None
        host = self.host
        counts = np.zeros(self.owners, np.int32)
        number_by_owner(coming.owners, back, counts, places)
        stored_slots = padded([np.zeros(n, np.int32) for n in counts])
        records = np.empty((*stored_slots.shape, host.words), np.int32)
        stored = Stored(stored_slots, records)
        if found is not None:
            disk = np.flatnonzero(from_disk)
            records[coming.owners[disk], places[disk]] = found.rows[found.mask]
            before[disk] = found.tallies[found.mask]
            back = back[~from_disk[back]]
        rows = (coming.sources[back] - int(HOST)).astype(np.int32)
        flights = np.empty(len(rows), np.int32)
        late = sum(
            self._in_parts(
                len(rows),
                lambda p: take_records(
                    host.headers, host.header_words, host.records, rows[p], back[p],
                    coming.owners, places, records, before, flights[p],
                ),
            )
        )  # fmt: skip
        for number, write_back in self._flying.items() if late else ():
            own = np.flatnonzero(flights == number)
            if len(own):
                sources = host.headers["place"][rows[own]]
                owners, here = coming.owners[back[own]], places[back[own]]
                write_back.rows[owners, sources] = -1
                stored.late.append((write_back, owners, sources, here))
        host.release(rows)
        return stored, places, before

    def _fills(self, new, slots) -> Iterator[Fill]:
        """First values of the rows that are new, by initializer."""
        coming = self.residents.coming
        by_initializer: dict[int, list[int]] = {}
        tables = coming.tables[new]
        for t in np.unique(tables):
            initializer = self.group.tables[t].spec.initializer
            by_initializer.setdefault(id(initializer), []).append(int(t))
        for members in by_initializer.values():
            chosen = new if len(by_initializer) == 1 else new[np.isin(tables, members)]
            words = np.empty(len(chosen), np.uint64)
            _first_words(coming.keys[chosen], self.seed, words)
            owners = coming.owners[chosen]
            own = [np.flatnonzero(owners == o) for o in range(self.owners)]
            fill_slots = padded([slots[chosen[x]] for x in own])
            fill_words = np.zeros(fill_slots.shape, np.uint64)
            for o, x in enumerate(own):
                fill_words[o, : len(x)] = words[x]
            initializer = self.group.tables[members[0]].spec.initializer
            yield Fill(initializer, fill_slots, fill_words)

    def locate(
        self,
        table: int,
        keys: np.ndarray,
        where: np.ndarray,
        owners: np.ndarray,
        applied: np.ndarray,
        waiting: Sequence[Move],
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Finds rows as the devices have them now, not as planned; changes nothing.

        Args:
          table: number of the table.
          keys: uint64 [n], salted.
          where: int64 [n], what the index says; -1 for nothing.
          owners: int32 [n].
          applied: int32 [owners]: slots that have been in use.
          waiting: moves that have been planned and not carried out, oldest first.

        Returns:
          Slots, int32 [n], -1 where the row is not on its device; numbers (int64 [m]) of
          those that are elsewhere, and their records, int32 [m, words].
        """
        resident = (where >= 0) & (where < int(HOST))
        slots = np.where(resident, where, -1).astype(np.int32)
        if not self.residents.tracked:
            slots[resident & (slots >= applied[owners])] = -1
            return slots, np.zeros(0, np.int64), np.zeros((0, 1), np.int32)
        self.land()
        in_ram = (where >= int(HOST)) & (where < int(PENDING))
        rows = np.where(in_ram, where - int(HOST), -1)
        source: list[Stored | None] = [None]
        # what has it: 0 none, from 1 a number of a `Stored`, -1 the disk, from -2 down
        # the number of an `Evicted`
        held = np.zeros(len(keys), np.int64)
        places = np.zeros(len(keys), np.int64)
        leaving: list[Evicted] = []

        def undo(evicted: Evicted) -> None:
            at, found = _find(table, keys, evicted.tables, evicted.keys)
            leaving.append(evicted)
            slots[at], rows[at] = evicted.slots[found], -1
            held[at] = np.where(slots[at] < 0, -1 - len(leaving), 0)
            places[at] = found

        for evicted in reversed(self.departures.waiting):
            undo(evicted)
        for move in reversed(waiting):
            at, found = _find(table, keys, move.tables, move.keys)
            source.append(move.stored)
            came = move.places[found]
            slots[at], rows[at] = -1, -1
            held[at] = np.where(came >= 0, len(source) - 1, 0)
            places[at] = came
            if move.write_back is not None:
                back = move.write_back
                at, found = _find(table, keys, back.tables, back.keys)
                slots[at] = back.slots[back.owners[found], back.places[found]]
                rows[at], held[at] = -1, 0
            for evicted in reversed(move.evicted):
                undo(evicted)
        on_disk = None
        unknown = np.flatnonzero((slots < 0) & (rows < 0) & (held == 0))
        if self.disk is not None and len(unknown):
            tables = np.full(len(unknown), table, np.int32)
            on_disk = self.disk.read(keys[unknown], tables)
            held[unknown[on_disk.mask]] = -1
        elsewhere = np.flatnonzero((rows >= 0) | (held != 0))
        words = 1 if self.host is None else self.host.words
        records = np.empty((len(elsewhere), words), np.int32)
        if on_disk is not None:
            records[held[elsewhere] == -1] = on_disk.rows[on_disk.mask]
        for i, evicted in enumerate(leaving):
            at = np.flatnonzero(held[elsewhere] == -2 - i)
            records[at] = self.departures.read(evicted, places[elsewhere[at]])
        for i, stored in enumerate(source):
            if stored is not None:
                at = np.flatnonzero(held[elsewhere] == i)
                n = elsewhere[at]
                records[at] = stored.complete()[owners[n], places[n]]
        at = np.flatnonzero(rows[elsewhere] >= 0)
        n = elsewhere[at]
        if len(at):
            assert self.host is not None
            records[at] = self.host.read(rows[n], owners[n], self._flying)
        return slots, elsewhere, records

    def facts(
        self, table: int, keys: np.ndarray, where: np.ndarray, owners: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """What is known of rows that there are, with the batches that wait.

        Args:
          table, keys, where, owners: as of `locate`.

        Returns:
          Their last steps, int32 [n], and tallies, uint32 [n].
        """
        last_steps, tallies = np.zeros(len(keys), np.int32), np.zeros(len(keys), "u4")
        on_device = np.flatnonzero((where >= 0) & (where < int(HOST)))
        known = self.residents.slots[owners[on_device], where[on_device]]
        last_steps[on_device], tallies[on_device] = known["last_step"], known["tally"]
        in_ram = np.flatnonzero(where >= int(HOST))
        if len(in_ram):
            assert self.host is not None
            known = self.host.headers[where[in_ram] - int(HOST)]
            last_steps[in_ram], tallies[in_ram] = known["last_step"], known["tally"]
        unknown = where < 0
        for evicted in reversed(self.departures.not_gone()):
            at, found = _find(table, keys, evicted.tables, evicted.keys)
            last_steps[at] = evicted.last_steps[found]
            tallies[at] = evicted.tallies[found]
            unknown[at] = False
        if self.disk is not None and unknown.any():
            at = np.flatnonzero(unknown)
            found = self.disk.read(keys[at], np.full(len(at), table, np.int32))
            last_steps[at[found.mask]] = found.last_step[found.mask]
            tallies[at[found.mask]] = found.tallies[found.mask]
        return last_steps, tallies

    @property
    def row_words(self) -> int:
        """Words of a record that are the row's own numbers."""
        return row_words(self.group)


def _find(table, keys, tables, known) -> tuple[np.ndarray, np.ndarray]:
    """Which of `keys` are among `known` ones of a table: where here, where there."""
    own = np.flatnonzero(tables == table)
    index = Index(len(own))
    index.insert(known[own], np.arange(len(own)))
    found = index.lookup(keys)
    at = np.flatnonzero(found >= 0)
    return at, own[found[at]]
