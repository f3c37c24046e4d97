"""Which keys have which slots of a slab, and who leaves when others must come.

A *window* is some batches whose rows are on the devices together. While it is being
planned, a row that must come has a number (PENDING) in the index; when the window is
closed, `settle` gives each its slot. Rows used by the window stay. Others leave as the
hand of a clock meets them: each use adds to a row's `uses`, each pass of the hand halves
it, and a row at zero goes (a generalized clock, Smith 1978: frequency with aging).
"""

from collections.abc import Sequence

import numba
import numpy as np

from shardjax.embed.eviction import MOST_TALLY
from shardjax.embed.index import HOST, NEW, PENDING, code_of, prefetch, word_of
from shardjax.embed.span import DeviceSpan
from shardjax.embed.storage import Storage
from shardjax.embed.translate import owner_of

_LOW = np.uint64(0xFFFFFFFF)

SLOT = np.dtype(
    [
        ("key", np.uint64),  # salted
        ("last_step", np.int32),  # that uses the row; FREE for a slot without one
        ("tally", np.uint32),  # how many steps have; or a ShowClick score
        ("table", np.int32),  # its number
        ("uses", np.int32),  # lately, see `sweep`
    ]
)
FREE = -1
MAX_USES = {"lfu": 15, "lru": 1}
_BLOCK = 32


@numba.njit(inline="always")
def _approach(
    table, unique_entry, start, stop, single_owner, devices, first, columns, words,
    where, owners,
):  # fmt: skip
    """Finds where unique keys [start, stop) have their rows, and prefetches the slots.

    Two passes and no branch on what is found: a wrong guess would wait for the entry.

    Args:
      columns: slots per owner that somebody keeps track of.
      words, where, owners: of `survey`; where `where` is -1, both stay.
    """
    for g in range(start, stop):
        prefetch(table, np.uint64(unique_entry[g]))  # pyright: ignore[reportCallIssue]
    for g in range(start, stop):
        if where[g] < 0:
            continue
        i = unique_entry[g]
        code = code_of(table[i, 1])
        owner = owner_of(table[i, 0], single_owner, devices) - first
        owners[g] = owner
        where[g] = np.int64(code)
        if columns > 0:
            at = np.uint64(owner * columns) + min(code, np.uint64(columns - 1))
            prefetch(words, at)  # pyright: ignore[reportCallIssue]


@numba.njit(nogil=True, cache=True)
def survey(
    table, unique_entry, unique, single_owner, devices, first, first_step, slots,
    words, where, owners, needed,
):  # fmt: skip
    """Looks up where a batch's unique rows of one table are; changes nothing.

    Args:
      table: the index array.
      unique_entry: int32 [..]: entry of each unique key.
      unique: how many.
      single_owner: the one owner of the table's rows, or -1.
      devices, first: owners of all processes, and the first one of this.
      first_step: of the window being planned.
      slots: [owners, slots] of SLOT; no columns if nobody keeps track.
      words: int64 [owners * slots, 3], the same memory.
      where: int64 [..], in and out: what the index says of each unique key; stays -1 for
        a key that stays without a row, which has no entry.
      owners: int32 [..], out.
      needed: int64 [owners], in and out: rows that the window does not have yet.
    """
    tracked = slots.shape[1] > 0
    for start in range(0, unique, _BLOCK):
        stop = min(start + _BLOCK, unique)
        _approach(
            table, unique_entry, start, stop, single_owner, devices, first,
            slots.shape[1], words, where, owners,
        )  # fmt: skip
        for g in range(start, stop):
            if where[g] < 0:
                continue
            code = np.uint64(where[g])
            owner = owners[g]
            if code < HOST:
                if tracked and slots[owner, code].last_step < first_step:
                    needed[owner] += 1
            elif code < PENDING or code == NEW:
                needed[owner] += 1


@numba.njit(nogil=True, cache=True)
def commit(
    table, unique_entry, unique, single_owner, devices, first, number, step, first_step,
    max_uses, amounts, slots, words, pinned, where, owners, coming, count,
):  # fmt: skip
    """Takes a batch into the window.

    Args:
      number: of the table in its group.
      step: of the batch.
      max_uses: how far `uses` counts.
      amounts: int64 [..] that the rows' tallies grow by; none: 1 each.
      slots, words: of `survey`, in and out.
      pinned: int64 [owners], in and out: rows that the window has or will have.
      where: int64 [..], in and out: -1 for a key that stays without a row; of the others,
        the slot or the number of the row that is to come.
      owners: int32 [..], out.
      coming: of `Coming.columns`, in and out.
      count: rows that are to come so far.

    Returns:
      The new count.
    """
    keys, tables, row_owners, sources, steps, used, tallies = coming
    tracked = slots.shape[1] > 0
    for start in range(0, unique, _BLOCK):
        stop = min(start + _BLOCK, unique)
        _approach(
            table, unique_entry, start, stop, single_owner, devices, first,
            slots.shape[1], words, where, owners,
        )  # fmt: skip
        for g in range(start, stop):
            if where[g] < 0:
                continue
            code = np.uint64(where[g])
            owner = owners[g]
            if code < HOST:
                if tracked:
                    slot = slots[owner, code]
                    pinned[owner] += slot.last_step < first_step
                    slot.last_step = step
                    amount = amounts[g] if amounts.shape[0] else 1
                    slot.tally = min(slot.tally + amount, MOST_TALLY)
                    slot.uses = min(slot.uses + 1, max_uses)
            elif code < PENDING or code == NEW:
                i = unique_entry[g]
                keys[count] = table[i, 0]
                tables[count] = number
                row_owners[count] = owner
                sources[count] = where[g]
                steps[count] = step
                used[count] = 1
                tallies[count] = amounts[g] if amounts.shape[0] else 1
                pending = PENDING | np.uint64(count)
                table[i, 1] = word_of(pending, table[i, 1] & _LOW)
                where[g] = np.int64(pending)
                pinned[owner] += 1
                count += 1
            else:
                at = np.int64(code - PENDING)
                steps[at] = step
                used[at] += 1
                tallies[at] += amounts[g] if amounts.shape[0] else 1
    return count


@numba.njit(nogil=True, cache=True)
def sweep(slots, first_step, hand, used, wanted, out, out_steps):
    """Picks `wanted` slots whose rows leave; returns where the hand stops.

    Slots of the window (used at `first_step` or later) and free ones are passed over.
    There must be enough others.

    Args:
      slots: [slots] of SLOT, of one owner, in and out.
      first_step: of the window.
      hand: where to start.
      used: slots that have ever been given out.
      wanted: how many.
      out: int32 [wanted], out.
      out_steps: int32 [wanted], out: the last steps that used their rows.
    """
    picked = 0
    while picked < wanted:
        at = hand
        hand = hand + 1 if hand + 1 < used else 0
        slot = slots[at]
        if slot.last_step >= first_step or slot.last_step == FREE:
            continue
        if slot.uses > 0:
            slot.uses >>= 1
            continue
        out[picked] = at
        out_steps[picked] = slot.last_step
        slot.last_step = FREE
        picked += 1
    return hand


@numba.njit(nogil=True, cache=True)
def seat(
    coming, start, count, taken, next_slot, left, left_count, seats, slots, before,
    max_uses,
):  # fmt: skip
    """Gives each row that comes a slot: one that is free, or one never used.

    Args:
      start, count: which rows of `coming`.
      taken: int64 [owners], in and out: how many of `left` have been used.
      left: int32 [owners, ..] free slots, in the order to be used.
      left_count: int64 [owners], how many those are.
      seats: int32 [count], out: the slots.
      slots: of `survey`, in and out.
      before: uint32 [count]: tally of each row in its earlier places.
    """
    keys, tables, owners, _, steps, used, tallies = coming
    tracked = slots.shape[1] > 0
    for n in range(start, count):
        o = owners[n]
        if taken[o] < left_count[o]:
            at = left[o, taken[o]]
            taken[o] += 1
        else:
            at = next_slot[o]
            next_slot[o] = at + 1
        seats[n] = at
        if tracked:
            slot = slots[o, at]
            slot.key = keys[n]
            slot.table = tables[n]
            slot.last_step = steps[n]
            slot.tally = min(np.int64(before[n]) + tallies[n], MOST_TALLY)
            slot.uses = min(used[n] - 1, max_uses)


@numba.njit(nogil=True, cache=True)
def resolve(where, unique, new_slots, slots):
    """Slots of a batch's unique keys once its window is closed; -1 for no row."""
    for g in range(unique):
        code = where[g]
        if code < 0:
            slots[g] = -1
        elif np.uint64(code) < HOST:
            slots[g] = np.int32(code)
        else:
            slots[g] = new_slots[np.uint64(code) - PENDING]


class Coming:
    """Rows that a window needs and that are not on the devices yet, in order of use."""

    def __init__(self):
        self.count = 0
        self._room = 0
        self.columns: tuple[np.ndarray, ...] = ()
        self.reserve(1024)

    def reserve(self, more: int) -> None:
        """Makes room for `more` rows."""
        needed = self.count + more
        if needed <= self._room:
            return
        room = max(2 * self._room, needed)
        kinds = (
            np.uint64, np.int32, np.int32, np.int64, np.int32, np.uint32, np.int64,
        )  # fmt: skip
        columns = tuple(np.empty(room, kind) for kind in kinds)
        for new, old in zip(columns, self.columns, strict=False):
            new[: self.count] = old[: self.count]
        self.columns, self._room = columns, room

    @property
    def keys(self) -> np.ndarray:
        """Salted keys, uint64 [count]."""
        return self.columns[0][: self.count]

    @property
    def tables(self) -> np.ndarray:
        """Numbers of their tables, int32 [count]."""
        return self.columns[1][: self.count]

    @property
    def owners(self) -> np.ndarray:
        """int32 [count]."""
        return self.columns[2][: self.count]

    def new_keys(self, table: int) -> np.ndarray:
        """Keys of a table that the index did not know, uint64 [n]."""
        return self.keys[(self.tables == table) & (self.sources == int(NEW))]

    @property
    def sources(self) -> np.ndarray:
        """What the index said of them, int64 [count]: NEW or a row of the RAM tier."""
        return self.columns[3][: self.count]


class Residents:
    """The slots of one slab on each of its owners.

    Args:
      span: the devices that own the slots.
      storage: of the rows; None for all on the devices.
      tracked: whether to know more of the rows than their number.

    Attributes:
      owners: those of this process.
      capacity: slots per owner, None if the slab grows.
      next_slot: int32 [owners], the first slot never used.
      coming: rows of the window being planned that are not there yet.
      pinned: int64 [owners], rows of that window.
    """

    def __init__(self, span: DeviceSpan, storage: Storage | None, tracked: bool):
        self.span = span
        self.owners = owners = span.count
        self.capacity = None
        if storage is not None:
            self.capacity = -(-storage.device_rows // span.total)
        self.next_slot = np.zeros(owners, np.int32)
        self.coming = Coming()
        self.pinned = np.zeros(owners, np.int64)
        self.max_uses = MAX_USES["lfu" if storage is None else storage.keep]
        self.slots = np.zeros((owners, 0), SLOT)
        self.words = np.zeros((0, 3), np.int64)
        self._hand = np.zeros(owners, np.int64)
        self._free = [np.zeros(0, np.int32)] * owners
        self.tracked = tracked
        if tracked:
            self._reserve(self.capacity or 1024)

    def _reserve(self, slots: int) -> None:
        """Makes room to know of `slots` slots per owner."""
        known = self.slots
        self.slots = np.zeros((self.owners, slots), SLOT)
        self.slots["last_step"] = FREE
        self.slots[:, : known.shape[1]] = known
        self.words = self.slots.view(np.int64).reshape(self.owners * slots, 3)

    def free(self, owners: np.ndarray, slots: np.ndarray) -> None:
        """Takes the rows out of slots, int32 [n] each."""
        self.slots["last_step"][owners, slots] = FREE
        for o in np.unique(owners):
            freed = slots[owners == o].astype(np.int32)
            self._free[o] = np.concatenate([self._free[o], freed])

    def adopt(self, owners, keys, tables, last_steps, tallies) -> np.ndarray:
        """Gives rows of a snapshot slots that have never been used, as many as there are.

        Args:
          owners, keys, tables: int32, uint64 (salted) and int32 [n].
          last_steps, tallies: int32 and uint32 [n].

        Returns:
          Their slots, int32 [n]; -1 for those that there is no room for.
        """
        slots = np.full(len(keys), -1, np.int32)
        for o in range(self.owners):
            own = np.flatnonzero(owners == o)
            first = int(self.next_slot[o])
            if self.capacity is not None:
                own = own[: self.capacity - first]
            slots[own] = first + np.arange(len(own), dtype=np.int32)
            self.next_slot[o] += len(own)
        if self.tracked:
            most = int(self.next_slot.max())
            if most > self.slots.shape[1]:
                self._reserve(max(2 * self.slots.shape[1], most))
            here = slots >= 0
            seats = self.slots[owners[here], slots[here]]
            seats["key"], seats["table"] = keys[here], tables[here]
            seats["last_step"], seats["tally"] = last_steps[here], tallies[here]
            seats["uses"] = 0
            self.slots[owners[here], slots[here]] = seats
        return slots

    def begin(self) -> None:
        """Starts a window."""
        self.coming.count = 0
        self.pinned[:] = 0

    def surely_fit(self, rows: int) -> bool:
        """Whether `rows` more fit into the window whoever owns them."""
        return self.capacity is None or int(self.pinned.max()) + rows <= self.capacity

    def lacking(self, needed: np.ndarray) -> int:
        """Slots an owner would lack if the window took `needed`, int64 [owners], more."""
        if self.capacity is None:
            return 0
        return max(int((self.pinned + needed).max()) - self.capacity, 0)

    def leave(self, first_step: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Picks the rows that must leave for those that come.

        Returns:
          Their slots and their last steps, a list by owner of int32 [n] each.
        """
        coming = np.bincount(self.coming.owners, minlength=self.owners)
        slots, steps = [], []
        for o in range(self.owners):
            wanted = 0
            if self.capacity is not None:
                room = self.capacity - int(self.next_slot[o]) + len(self._free[o])
                wanted = max(int(coming[o]) - room, 0)
            out, out_steps = np.empty((2, wanted), np.int32)
            if wanted:
                self._hand[o] = sweep(
                    self.slots[o], first_step, self._hand[o], int(self.next_slot[o]),
                    wanted, out, out_steps,
                )  # fmt: skip
            slots.append(out)
            steps.append(out_steps)
        return slots, steps

    def seat(
        self, left: list[np.ndarray], before: np.ndarray, ends: Sequence[int]
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Gives the rows that come their slots, some of them those just left.

        Args:
          left: of `leave`.
          before: uint32 [count]: tally of each row in its earlier places.
          ends: where parts of them end.

        Returns:
          The slots, int32 [count]; and `next_slot` after each part.
        """
        coming = np.bincount(self.coming.owners, minlength=self.owners)
        room = []
        for o, free in enumerate(self._free):
            n = min(len(free), int(coming[o]))
            self._free[o] = free[: len(free) - n]
            room.append(np.concatenate([free[len(free) - n :], left[o]]))
        counts = np.array([len(x) for x in room], np.int64)
        places = np.zeros((self.owners, int(counts.max())), np.int32)
        for o, x in enumerate(room):
            places[o, : len(x)] = x
        most = int((self.next_slot + np.maximum(coming - counts, 0)).max())
        if self.tracked and most > self.slots.shape[1]:
            self._reserve(max(2 * self.slots.shape[1], most))
        seats = np.empty(self.coming.count, np.int32)
        taken = np.zeros(self.owners, np.int64)
        used = []
        start = 0
        for end in ends:
            seat(
                self.coming.columns, start, end, taken, self.next_slot, places,
                counts, seats, self.slots, before, self.max_uses,
            )  # fmt: skip
            used.append(self.next_slot.copy())
            start = end
        return seats, used
