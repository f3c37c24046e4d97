"""The key index: uint64 keys to int32 slots, open addressing with linear probing.

One numpy array of 16-byte entries, four to a cache line::

    table[i, 0] = key
    table[i, 1] = slot << 32 | position       slot 2**32 - 1: the entry is empty

The planner gives ``slot`` a wider meaning, *where* a key's row is: below HOST a slot of
its owner device, from HOST on a row of the RAM tier, from PENDING on (while a window is
being planned) the number of a row that is to come. ``position`` belongs to the planner
too: the place of the key in the list of unique keys of the batch being planned. It is
only believed when that list points back at the entry (a sparse set), so nothing has to be
cleared between batches.

Every 64-bit key is legal. The kernels release the GIL.
"""

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from shardjax.embed.jagged import as_keys

EMPTY = np.uint64(0xFFFFFFFF)
NEW = np.uint64(0xFFFFFFFE)
HOST = np.uint64(1 << 30)
PENDING = np.uint64(1 << 31)
EMPTY_ENTRY = np.uint64(0xFFFFFFFF_00000000)
MAX_LOAD = 0.6
MIN_CAPACITY = 64

_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_1 = np.uint64(1)
_BLOCK = 32


@intrinsic
def prefetch(typingctx, array, index):
    """Asks the CPU to load ``array[index, 0]`` (2-D, C-contiguous) into its cache."""

    def codegen(context, builder, signature, args):
        array_type = signature.args[0]
        struct = context.make_array(array_type)(context, builder, args[0])
        stride = builder.extract_value(struct.strides, 0)
        offset = builder.mul(builder.trunc(args[1], stride.type), stride)
        base = builder.bitcast(struct.data, ir.IntType(8).as_pointer())
        address = builder.gep(base, [offset])
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, i32, i32, i32])
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [address.type], fnty=kind
        )
        builder.call(function, [address, i32(1), i32(3), i32(1)])
        return context.get_dummy_value()

    return types.void(array, types.uint64), codegen


@numba.njit(inline="always")
def mix64(key):
    """The finalizer of splitmix64, a bijection of 64 bits (Steele et al. 2014)."""
    key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return key ^ (key >> np.uint64(31))


@numba.njit(inline="always")
def _approach(table, keys, start, stop, mask, home):
    """Finds where the probes of keys [start, stop) begin, and prefetches from there."""
    for j in range(start, stop):
        i = mix64(keys[j]) & mask
        home[j - start] = i
        prefetch(table, i)  # pyright: ignore[reportCallIssue]


@numba.njit(nogil=True, cache=True)
def _lookup(table, keys, slots):
    mask = np.uint64(table.shape[0] - 1)
    home = np.empty(_BLOCK, np.uint64)
    for start in range(0, keys.shape[0], _BLOCK):
        stop = min(start + _BLOCK, keys.shape[0])
        _approach(table, keys, start, stop, mask, home)
        for j in range(start, stop):
            key = keys[j]
            i = home[j - start]
            while True:
                slot = table[i, 1] >> _32
                if slot == EMPTY:
                    slots[j] = -1
                    break
                if table[i, 0] == key:
                    slots[j] = np.int64(slot)
                    break
                i = (i + _1) & mask


@numba.njit(nogil=True, cache=True)
def _insert(table, keys, slots):
    mask = np.uint64(table.shape[0] - 1)
    home = np.empty(_BLOCK, np.uint64)
    inserted = 0
    for start in range(0, keys.shape[0], _BLOCK):
        stop = min(start + _BLOCK, keys.shape[0])
        _approach(table, keys, start, stop, mask, home)
        for j in range(start, stop):
            key = keys[j]
            i = home[j - start]
            while True:
                if table[i, 1] >> _32 == EMPTY:
                    inserted += 1
                    break
                if table[i, 0] == key:
                    break
                i = (i + _1) & mask
            table[i, 0] = key
            table[i, 1] = np.uint64(slots[j]) << _32
    return inserted


@numba.njit(nogil=True, cache=True)
def find(table, key):
    """The entry that holds `key`, or the number of entries if there is none."""
    mask = np.uint64(table.shape[0] - 1)
    i = mix64(key) & mask
    while table[i, 1] >> _32 != EMPTY:
        if table[i, 0] == key:
            return np.int64(i)
        i = (i + _1) & mask
    return np.int64(table.shape[0])


@numba.njit(nogil=True, cache=True)
def rehash(old, new):
    """Copies the entries of `old` into the larger `new`; returns how many."""
    mask = np.uint64(new.shape[0] - 1)
    count = 0
    for j in range(old.shape[0]):
        if old[j, 1] >> _32 == EMPTY:
            continue
        i = mix64(old[j, 0]) & mask
        while new[i, 1] >> _32 != EMPTY:
            i = (i + _1) & mask
        new[i, 0] = old[j, 0]
        new[i, 1] = old[j, 1]
        count += 1
    return count


@numba.njit(nogil=True, cache=True)
def remove(table, keys):
    """Removes those of `keys` that are there; returns how many.

    What follows an entry moves up (Knuth, vol. 3, 6.4, algorithm R): no tombstones.
    """
    mask = np.uint64(table.shape[0] - 1)
    removed = 0
    for key in keys:
        at = find(table, key)
        if at == table.shape[0]:
            continue
        hole = np.uint64(at)
        i = (hole + _1) & mask
        while table[i, 1] >> _32 != EMPTY:
            home = mix64(table[i, 0]) & mask
            if (i - home) & mask >= (i - hole) & mask:
                table[hole, 0] = table[i, 0]
                table[hole, 1] = table[i, 1]
                hole = i
            i = (i + _1) & mask
        table[hole, 1] = EMPTY_ENTRY
        removed += 1
    return removed


@numba.njit(nogil=True, cache=True)
def relocate(table, keys, where):
    """Writes where each of `keys`, all of them there, has its row: int64 [n]."""
    mask = np.uint64(table.shape[0] - 1)
    home = np.empty(_BLOCK, np.uint64)
    for start in range(0, keys.shape[0], _BLOCK):
        stop = min(start + _BLOCK, keys.shape[0])
        _approach(table, keys, start, stop, mask, home)
        for j in range(start, stop):
            i = home[j - start]
            while table[i, 0] != keys[j] or table[i, 1] >> _32 == EMPTY:
                i = (i + _1) & mask
            table[i, 1] = np.uint64(where[j]) << _32 | (table[i, 1] & _LOW)


def empty_table(entries: int) -> np.ndarray:
    """An index array of `entries` (a power of two) without a key, uint64 [entries, 2]."""
    table = np.empty((entries, 2), np.uint64)
    table[:, 1] = EMPTY_ENTRY
    return table


def entries_for(count: int) -> int:
    """The power of two of entries that holds `count` keys at the permitted load."""
    entries = MIN_CAPACITY
    while entries * MAX_LOAD < count:
        entries *= 2
    return entries


class Index:
    """A growing map from uint64 keys to int32 slots.

    Example:
      >>> index = Index()
      >>> index.insert(np.array([7, 2**64 - 1], np.uint64), np.array([0, 1]))
      >>> index.lookup(np.array([2**64 - 1, 8], np.uint64))
      array([ 1, -1], dtype=int32)
    """

    def __init__(self, expected: int = 0):
        """Makes an empty index with room for `expected` keys."""
        self.table = empty_table(entries_for(expected))
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def reserve(self, count: int) -> None:
        """Grows the table so that `count` keys fit."""
        entries = entries_for(count)
        if entries > len(self.table):
            table = empty_table(entries)
            self.count = rehash(self.table, table)
            self.table = table

    def remove(self, keys: np.ndarray) -> None:
        """Forgets those of `keys`, uint64 [n], that it knows.

        Example:
          >>> index = Index()
          >>> index.insert(np.array([7, 8], np.uint64), np.array([0, 1]))
          >>> index.remove(np.array([7, 9], np.uint64))
          >>> len(index), index.lookup(np.array([7, 8], np.uint64)).tolist()
          (1, [-1, 1])
        """
        self.count -= remove(self.table, as_keys(keys))

    def insert(self, keys: np.ndarray, slots: np.ndarray) -> None:
        """Maps each of `keys`, uint64 [n], to its slot, int32 [n]; the last one wins.

        Raises:
          TypeError: for keys that are not integers.
          ValueError: for another number of slots than keys, or a slot that is not in
            [0, 2**31).
        """
        keys, slots = as_keys(keys), np.asarray(slots)
        if keys.ndim != 1 or slots.shape != keys.shape:
            raise ValueError(
                "an index needs one slot per key, one dim each, got shapes"
                f" {slots.shape} and {keys.shape}"
            )
        bad = (slots < 0) | (slots >= 2**31)
        if bad.any():
            raise ValueError(f"slots must be in [0, 2**31), got {slots[bad][0]}")
        self.reserve(self.count + len(keys))
        self.count += _insert(self.table, keys, slots.astype(np.int32))

    def lookup(self, keys: np.ndarray) -> np.ndarray:
        """The slot of each of `keys`, uint64 [n], as int32 [n]; -1 for an absent key."""
        keys = as_keys(keys)
        slots = np.empty(len(keys), np.int32)
        _lookup(self.table, keys, slots)
        return slots

    def number(self, keys: np.ndarray) -> np.ndarray:
        """Numbers keys, uint64 [n], in the order in which they are first seen.

        Example:
          >>> index = Index()
          >>> index.number(np.array([9, 7, 9], np.uint64))
          array([0, 1, 0], dtype=int32)
        """
        keys = as_keys(keys)
        numbers = self.lookup(keys)
        if (numbers < 0).any():
            new, first = np.unique(keys[numbers < 0], return_index=True)
            order = np.argsort(first)
            slots = np.arange(self.count, self.count + len(new), dtype=np.int32)
            self.insert(new[order], slots)
            numbers = self.lookup(keys)
        return numbers

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """All keys, uint64 [count], and their slots, int32 [count], in table order."""
        slots = self.table[:, 1] >> _32
        used = slots != EMPTY
        return self.table[used, 0], slots[used].astype(np.int32)
