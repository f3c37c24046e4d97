"""Rows of one group that leave for good: found, taken out of every tier, read once more.

What is planned has not happened: until the step at which they are gone has been carried
out, rows that leave stay where they are, and only the index no longer knows them. Slots on
the devices are the exception, as what is written there is written after that step.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from shardjax.embed.changes import Removals
from shardjax.embed.disk_rows import DiskRows
from shardjax.embed.eviction import Cut, Evicted, Facts, decayed
from shardjax.embed.groups import Table
from shardjax.embed.host_rows import HostRows
from shardjax.embed.index import Index
from shardjax.embed.moves import WriteBack
from shardjax.embed.policies import Eviction, ShowClick
from shardjax.embed.records import HEADER_WORDS
from shardjax.embed.residents import FREE, Residents
from shardjax.embed.span import DeviceSpan
from shardjax.embed.translate import owners_of

_CHUNK = 1 << 20


class Departures:
    """Evicts rows of one group.

    Attributes:
      waiting: rows that leave before the next window, oldest first.
      removals: the keys that have left.

    Args:
      span: the devices that own rows.
      tables: of the group.
      indexes: of each table.
      residents, host, disk: the tiers, as of `Tier`.
      flying: write-backs that have not arrived, by number.
    """

    def __init__(
        self,
        span: DeviceSpan,
        tables: Sequence[Table],
        indexes: Sequence[Index],
        residents: Residents,
        host: HostRows | None,
        disk: DiskRows | None,
        flying: Mapping[int, WriteBack],
    ):
        self._span = span
        self._specs = [t.spec for t in tables]
        self._single_owners = [t.owner for t in tables]
        self._indexes = indexes
        self._residents, self._host, self._disk = residents, host, disk
        self._flying = flying
        self.waiting: list[Evicted] = []
        self.removals = Removals()
        self._leaving: list[Evicted] = []  # until they are gone

    def evict(
        self, table: int, policies: Sequence[Eviction], step: int, rows: int
    ) -> int:
        """Takes out the rows of a table that have to leave before a step.

        Args:
          table, step: which.
          policies: that decide.
          rows: that the table has.

        Returns:
          How many do.
        """
        for policy in policies:
            if isinstance(policy, ShowClick):
                self._decay(table, policy)
                self.removals.forget()
        cut = Cut(policies, step, lambda: self._scan(table))
        if not cut:
            return 0
        parts = [*self._leave_devices(table, cut), *self._leave_host(table, cut)]
        if self._disk is not None:
            for segment, numbers, facts in self._disk.evict(table, cut):
                owners = self._owners(table, facts[0])
                part = Evicted.part(
                    facts, table, owners, segment=segment, numbers=numbers
                )
                parts.append(part)
        if not parts:
            return 0
        evicted = Evicted.join(parts)
        self._indexes[table].remove(evicted.keys[evicted.sources < 0])
        self.waiting.append(evicted)
        self._leaving.append(evicted)
        self.removals.add(evicted, rows)
        return len(evicted)

    @property
    def pending_rows(self) -> int:
        """Rows that leave and have not gone."""
        return sum(len(x) for x in self.not_gone())

    def keys(self, table: int) -> np.ndarray:
        """Salted keys of the rows of a table that leave and have not gone, uint64 [n]."""
        parts = [x.keys[x.tables == table] for x in self.not_gone()]
        return np.concatenate([np.zeros(0, np.uint64), *parts])

    def not_gone(self) -> list[Evicted]:
        """The rows that leave and have not gone, oldest first."""
        return [x for x in self._leaving if not x.is_gone]

    def take(self) -> tuple[Evicted, ...]:
        """The rows that leave before the next window; once."""
        taken, self.waiting = tuple(self.waiting), []
        return taken

    def check_no_one_waits(self) -> None:
        """Raises if rows wait for the next window to leave, and somebody wants them.

        Raises:
          RuntimeError: a snapshot would have them neither here nor there.
        """
        for evicted in self.waiting:
            for t in np.unique(evicted.tables):
                if self._specs[t].on_evict is not None:
                    raise RuntimeError(
                        f"a snapshot cannot be made while {len(evicted)} rows wait to be"
                        f" given to `on_evict` of table {self._specs[t].name!r} after"
                        " `shrink`. Take a training step, or make the snapshot before"
                        " `shrink`"
                    )

    @property
    def in_ram(self) -> int:
        """Rows of the RAM tier that leave and have not gone."""
        return sum(int((x.rows >= 0).sum()) for x in self._leaving)

    def clear(self) -> None:
        """Gives the memory and the files of the rows back that are gone."""
        gone = [x for x in self._leaving if x.is_gone and not self._flies(x)]
        self._leaving = [x for x in self._leaving if x not in gone]
        for evicted in gone:
            rows = evicted.rows[evicted.rows >= 0]
            if len(rows):
                assert self._host is not None
                self._host.release(rows)
            if evicted.segments:
                assert self._disk is not None
                self._disk.let_go(evicted.segments)

    def read(self, evicted: Evicted, at: np.ndarray) -> np.ndarray:
        """Records of those rows, numbers int64 [n], that are in RAM or on disk."""
        words = 1 if self._host is None else self._host.words
        records = np.empty((len(at), words), np.int32)
        own = np.flatnonzero(evicted.rows[at] >= 0)
        n = at[own]
        if len(own):
            assert self._host is not None
            records[own] = self._host.read(
                evicted.rows[n], evicted.owners[n], self._flying
            )
        for s, segment in enumerate(evicted.segments):
            own = np.flatnonzero(evicted.sources[at] == s)
            records[own] = segment.read(evicted.numbers[at[own]])[:, HEADER_WORDS:]
        return records

    def _flies(self, evicted: Evicted) -> bool:
        """Whether some of the rows are still on their way to the RAM tier."""
        rows = evicted.rows[evicted.rows >= 0]
        if self._host is None or not len(rows):
            return False
        return bool((self._host.headers["flight"][rows] != 0).any())

    def _owners(self, table: int, keys: np.ndarray) -> np.ndarray:
        return owners_of(keys, self._single_owners[table], self._span)

    def _device_rows(self, table: int):
        """The owner, slots and entries of a table's rows on each device."""
        slots = self._residents.slots
        for o in range(len(slots)):
            known = slots[o]
            own = (known["table"] == table) & (known["last_step"] != FREE)
            at = np.flatnonzero(own)
            yield o, at, known[at]

    def _host_rows(self, table: int):
        """The rows and headers of a table in RAM, in parts."""
        if self._host is None:
            return
        used = self._host.used
        for start in range(0, len(used), _CHUNK):
            part = used[start : start + _CHUNK]
            at = np.flatnonzero(part["table"] == table)
            yield start + at, part[at]

    def _scan(self, table: int) -> Iterator[Facts]:
        """What is known of all rows of a table, in parts."""
        for _, _, known in self._device_rows(table):
            yield _facts(known)
        for _, known in self._host_rows(table):
            yield _facts(known)
        if self._disk is not None:
            yield from self._disk.facts(table)

    def _leave_devices(self, table: int, cut: Cut) -> Iterator[Evicted]:
        for o, slots, known in self._device_rows(table):
            leaves = cut(_facts(known))
            if leaves.any():
                owners = np.full(int(leaves.sum()), o, np.int32)
                slots = slots[leaves]
                self._residents.free(owners, slots)
                yield Evicted.part(_facts(known[leaves]), table, owners, slots=slots)

    def _leave_host(self, table: int, cut: Cut) -> Iterator[Evicted]:
        for rows, known in self._host_rows(table):
            leaves = cut(_facts(known))
            if leaves.any():
                assert self._host is not None
                facts = _facts(known[leaves])
                self._host.keep(rows[leaves].astype(np.int32))
                self._host.headers["table"][rows[leaves]] = FREE  # nobody's from now on
                yield Evicted.part(
                    facts, table, self._owners(table, facts[0]), rows=rows[leaves]
                )

    def _decay(self, table: int, policy: ShowClick) -> None:
        """Multiplies the scores of a table's rows."""
        for o, slots, known in self._device_rows(table):
            tallies = self._residents.slots["tally"][o]
            tallies[slots] = decayed(known["tally"], policy)
        for rows, known in self._host_rows(table):
            assert self._host is not None
            self._host.keep(rows.astype(np.int32))
            self._host.headers["tally"][rows] = decayed(known["tally"], policy)
        if self._disk is not None:
            self._disk.change(table, lambda tallies: decayed(tallies, policy))


def _facts(known: np.ndarray) -> Facts:
    return known["key"].copy(), known["last_step"].copy(), known["tally"].copy()
