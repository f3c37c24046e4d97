"""Which keys have which slots of a slab, and who leaves when others must come.

A *window* is some batches whose rows are on the devices together. While it is being
planned, a row that must come has a number (PENDING) in the index; when the window is
closed, `settle` gives each its slot. Rows used by the window stay. Others leave as the
hand of a clock meets them: each use adds to a row's `uses`, each pass of the hand halves
it, and a row at zero goes (a generalized clock, Smith 1978: frequency with aging).
"""

import numba
import numpy as np

from shardjax.embed.index import HOST, NEW, PENDING
from shardjax.embed.storage import Storage
from shardjax.embed.translate import owner_of

_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)

FREE = -1  # `last_step` of a slot without a row
MAX_USES = {"lfu": 15, "lru": 1}


@numba.njit(nogil=True, cache=True)
def survey(
    table, unique_entry, unique, single_owner, devices, first_step, last_step,
    where, owners, needed,
):  # fmt: skip
    """Looks up where a batch's unique rows of one table are; changes nothing.

    Args:
      table: the index array.
      unique_entry: int32 [..]: entry of each unique key.
      unique: how many.
      single_owner: the one owner of the table's rows, or -1.
      devices: number of owners.
      first_step: of the window being planned.
      last_step: int32 [owners, slots]: the last step that uses each slot's row; no
        columns if nobody keeps track.
      where: int64 [..], out: what the index says of each unique key.
      owners: int32 [..], out.
      needed: int64 [owners], in and out: rows that the window does not have yet.

    Returns:
      How many of the keys are NEW.
    """
    tracked = last_step.shape[1] > 0
    new = 0
    for g in range(unique):
        i = unique_entry[g]
        code = table[i, 1] >> _32
        owner = owner_of(table[i, 0], single_owner, devices)
        owners[g] = owner
        where[g] = np.int64(code)
        if code < HOST:
            if tracked and last_step[owner, code] < first_step:
                needed[owner] += 1
        elif code < PENDING:
            needed[owner] += 1
        elif code == NEW:
            needed[owner] += 1
            new += 1
    return new


@numba.njit(nogil=True, cache=True)
def commit(
    table, unique_entry, unique, owners, number, step, first_step, max_uses,
    last_step, steps_used, uses, pinned, where, coming, count,
):  # fmt: skip
    """Takes a surveyed batch into the window.

    Args:
      number: of the table in its group.
      step: of the batch.
      max_uses: how far `uses` counts.
      last_step, steps_used, uses: of the slots, [owners, slots], in and out.
      pinned: int64 [owners], in and out: rows that the window has or will have.
      where: int64 [..], in and out: of `survey`; rows that are to come get a number.
      coming: of `Coming.columns`, in and out.
      count: rows that are to come so far.

    Returns:
      The new count.
    """
    keys, tables, row_owners, sources, steps, used = coming
    tracked = last_step.shape[1] > 0
    for g in range(unique):
        if where[g] < 0:
            continue
        code = np.uint64(where[g])
        owner = owners[g]
        if code < HOST:
            if tracked:
                if last_step[owner, code] < first_step:
                    pinned[owner] += 1
                last_step[owner, code] = step
                steps_used[owner, code] += 1
                if uses[owner, code] < max_uses:
                    uses[owner, code] += 1
        elif code < PENDING or code == NEW:
            i = unique_entry[g]
            keys[count] = table[i, 0]
            tables[count] = number
            row_owners[count] = owner
            sources[count] = where[g]
            steps[count] = step
            used[count] = 1
            table[i, 1] = (PENDING | np.uint64(count)) << _32 | (table[i, 1] & _LOW)
            where[g] = np.int64(PENDING | np.uint64(count))
            pinned[owner] += 1
            count += 1
        else:
            at = np.int64(code - PENDING)
            steps[at] = step
            used[at] += 1
    return count


@numba.njit(nogil=True, cache=True)
def sweep(last_step, uses, first_step, hand, slots, wanted, out, out_steps):
    """Picks `wanted` slots whose rows leave; returns where the hand stops.

    Their last steps go to `out_steps`, int32 [wanted].

    Slots of the window (used at `first_step` or later) and free ones are passed over.
    There must be enough others.
    """
    picked = 0
    while picked < wanted:
        at = hand
        hand = hand + 1 if hand + 1 < slots else 0
        if last_step[at] >= first_step or last_step[at] == FREE:
            continue
        if uses[at] > 0:
            uses[at] >>= 1
            continue
        out[picked] = at
        out_steps[picked] = last_step[at]
        last_step[at] = FREE
        picked += 1
    return hand


@numba.njit(nogil=True, cache=True)
def seat(
    coming, count, next_slot, capacity, free, free_count, left, slots, slot_keys,
    slot_tables, last_step, steps_used, uses, before, max_uses,
):  # fmt: skip
    """Gives each row that comes a slot: a free one, one never used, or one just left.

    Args:
      before: uint32 [count]: steps that have used each row in its earlier places.
      left: int32 [owners, ..] slots of rows that leave, in the order to be used.
      slots: int32 [count], out.
    """
    keys, tables, owners, _, steps, used = coming
    taken = np.zeros(next_slot.shape[0], np.int64)
    tracked = last_step.shape[1] > 0
    for n in range(count):
        o = owners[n]
        if free_count[o] > 0:
            free_count[o] -= 1
            slot = free[o, free_count[o]]
        elif next_slot[o] < capacity:
            slot = next_slot[o]
            next_slot[o] = slot + 1
        else:
            slot = left[o, taken[o]]
            taken[o] += 1
        slots[n] = slot
        if tracked:
            slot_keys[o, slot] = keys[n]
            slot_tables[o, slot] = tables[n]
            last_step[o, slot] = steps[n]
            steps_used[o, slot] = before[n] + used[n]
            uses[o, slot] = min(used[n] - 1, max_uses)


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
        kinds = (np.uint64, np.int32, np.int32, np.int64, np.int32, np.uint32)
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

    @property
    def sources(self) -> np.ndarray:
        """What the index said of them, int64 [count]: NEW or a row of the RAM tier."""
        return self.columns[3][: self.count]


class Residents:
    """The slots of one slab on each of its owners.

    Attributes:
      capacity: slots per owner, None if the slab grows.
      next_slot: int32 [owners], the first slot never used.
      coming: rows of the window being planned that are not there yet.
      pinned: int64 [owners], rows of that window.
    """

    def __init__(self, owners: int, storage: Storage | None):
        self.owners = owners
        self.capacity = None if storage is None else -(-storage.device_rows // owners)
        self.next_slot = np.zeros(owners, np.int32)
        self.coming = Coming()
        self.pinned = np.zeros(owners, np.int64)
        self.max_uses = MAX_USES["lfu" if storage is None else storage.keep]
        slots = self.capacity or 0
        self.last_step = np.full((owners, slots), FREE, np.int32)
        self.steps_used = np.zeros((owners, slots), np.uint32)
        self.uses = np.zeros((owners, slots), np.uint8)
        self.keys = np.zeros((owners, slots), np.uint64)
        self.tables = np.zeros((owners, slots), np.int32)
        self._hand = np.zeros(owners, np.int64)
        self._free = np.zeros((owners, slots), np.int32)
        self._free_count = np.zeros(owners, np.int32)

    def begin(self) -> None:
        """Starts a window."""
        self.coming.count = 0
        self.pinned[:] = 0

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
                room = self.capacity - int(self.next_slot[o] - self._free_count[o])
                wanted = max(int(coming[o]) - room, 0)
            out, out_steps = np.empty((2, wanted), np.int32)
            if wanted:
                self._hand[o] = sweep(
                    self.last_step[o], self.uses[o], first_step, self._hand[o],
                    int(self.next_slot[o]), wanted, out, out_steps,
                )  # fmt: skip
            slots.append(out)
            steps.append(out_steps)
        return slots, steps

    def seat(self, left: list[np.ndarray], before: np.ndarray) -> np.ndarray:
        """Slots of the rows that come, int32 [count], some of them those just left."""
        longest = max((len(x) for x in left), default=0)
        places = np.zeros((self.owners, longest), np.int32)
        for o, x in enumerate(left):
            places[o, : len(x)] = x
        slots = np.empty(self.coming.count, np.int32)
        seat(
            self.coming.columns, self.coming.count, self.next_slot,
            2**30 if self.capacity is None else self.capacity, self._free,
            self._free_count, places, slots, self.keys, self.tables, self.last_step,
            self.steps_used, self.uses, before, self.max_uses,
        )  # fmt: skip
        return slots
