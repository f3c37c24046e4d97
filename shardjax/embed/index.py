"""The key index: uint64 keys to where their rows are, open addressing, linear probing.

One numpy array of 16-byte entries, four to a cache line::

    table[i, 0] = key
    table[i, 1] = ~code << 32 | position       zeros: the entry is empty

The planner's ``code`` says where a key's row is: below HOST a slot of its owner device,
from HOST on a row of the RAM tier, from PENDING on (while a window is being planned) the
number of a row that is to come. ``position`` belongs to the planner too: the place of the
key in the list of unique keys of the batch being planned. It is only believed when that
list points back at the entry (a sparse set), so nothing has to be cleared between batches.

It grows as it fills, a piece at a time and where it lies (linear hashing, Litwin 1980). A
key's *home*, where its probe begins, is as many low bits of its hash as number the homes,
one bit fewer if that is past the last one. One home more thus takes keys from one other
alone: with n homes (a power of two) and s more, homes [0, s) have been split. There is no
wrapping around: past the last home lie entries for what overflows. See `growth`.

Every 64-bit key is legal. The kernels release the GIL.
"""

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from shardjax.embed.growth import SMALL, homes_for, limit_for, space_for
from shardjax.embed.jagged import as_keys

EMPTY = np.uint64(0xFFFFFFFF)
NEW = np.uint64(0xFFFFFFFE)
HOST = np.uint64(1 << 30)
PENDING = np.uint64(1 << 31)

_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_1 = np.uint64(1)
_0 = np.uint64(0)
_BLOCK = 32
_PIECE = 128
_NO_BATCH = np.empty(0, np.int32)


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
def code_of(word):
    """What the second word of an entry says of the row; EMPTY for an empty entry."""
    return ~word >> _32


@numba.njit(inline="always")
def word_of(code, position):
    """The second word of an entry."""
    return ~code << _32 | position


@numba.njit(inline="always")
def mask_of(homes):
    """The bits of a hash that number so many homes."""
    mask = np.uint64(homes) - _1
    mask |= mask >> np.uint64(1)
    mask |= mask >> np.uint64(2)
    mask |= mask >> np.uint64(4)
    mask |= mask >> np.uint64(8)
    return mask | mask >> np.uint64(16)


@numba.njit(inline="always")
def home_of(key, homes, mask):
    """Where the probe for a key begins; `mask` is of `mask_of`."""
    i = mix64(key) & mask
    return i if i < np.uint64(homes) else i & (mask >> _1)


@numba.njit(inline="always")
def _approach(table, homes, mask, keys, start, stop, home):
    """Finds where the probes of keys [start, stop) begin, and prefetches from there."""
    for j in range(start, stop):
        i = home_of(keys[j], homes, mask)
        home[j - start] = i
        prefetch(table, i)  # pyright: ignore[reportCallIssue]


@numba.njit(nogil=True, cache=True)
def _lookup(table, homes, keys, slots):
    mask = mask_of(homes)
    home = np.empty(_BLOCK, np.uint64)
    for start in range(0, keys.shape[0], _BLOCK):
        stop = min(start + _BLOCK, keys.shape[0])
        _approach(table, homes, mask, keys, start, stop, home)
        for j in range(start, stop):
            key = keys[j]
            i = home[j - start]
            while True:
                code = code_of(table[i, 1])
                if code == EMPTY:
                    slots[j] = -1
                    break
                if table[i, 0] == key:
                    slots[j] = np.int64(code)
                    break
                i += _1


@numba.njit(nogil=True, cache=True)
def _insert(table, homes, keys, slots):
    mask = mask_of(homes)
    home = np.empty(_BLOCK, np.uint64)
    inserted = 0
    for start in range(0, keys.shape[0], _BLOCK):
        stop = min(start + _BLOCK, keys.shape[0])
        _approach(table, homes, mask, keys, start, stop, home)
        for j in range(start, stop):
            key = keys[j]
            i = home[j - start]
            while True:
                if code_of(table[i, 1]) == EMPTY:
                    inserted += 1
                    break
                if table[i, 0] == key:
                    break
                i += _1
            table[i, 0] = key
            table[i, 1] = word_of(np.uint64(slots[j]), _0)
    return inserted


@numba.njit(inline="always")
def _find_from(table, key, i):
    """The entry that holds `key`, whose probe begins at i, or the last entry."""
    while code_of(table[i, 1]) != EMPTY:
        if table[i, 0] == key:
            return np.int64(i)
        i += _1
    return np.int64(table.shape[0] - 1)


@numba.njit(nogil=True, cache=True)
def find(table, homes, key):
    """The entry that holds `key`; if there is none the last, which is always empty."""
    return _find_from(table, key, home_of(key, homes, mask_of(homes)))


@numba.njit(nogil=True, cache=True)
def find_entries(table, homes, keys, entries):
    """Writes the entry of each of `keys`, int32 [n], as `find`."""
    mask = mask_of(homes)
    home = np.empty(_BLOCK, np.uint64)
    for start in range(0, keys.shape[0], _BLOCK):
        stop = min(start + _BLOCK, keys.shape[0])
        _approach(table, homes, mask, keys, start, stop, home)
        for j in range(start, stop):
            entries[j] = _find_from(table, keys[j], home[j - start])


@numba.njit(nogil=True, cache=True)
def split(table, homes, wanted, unique_entry):
    """Moves the entries that have another home among `wanted` homes than among `homes`.

    Entries are taken out a piece at a time and put in again. Past the homes that are
    split it goes on to an empty entry: what has overflowed may have to move up.

    Args:
      unique_entry: int32 [n], in and out: entries of the unique keys of a batch.

    Returns:
      How many entries it has looked at.
    """
    keys, words = np.empty(_PIECE, np.uint64), np.empty(_PIECE, np.uint64)
    entries = np.empty(_PIECE, np.uint64)
    seen = 0
    while homes < wanted:
        mask = mask_of(homes + 1)
        lower = np.int64(mask >> _1) + 1
        stop = min(wanted, 2 * lower)
        i, end = np.uint64(homes - lower), np.uint64(stop - lower)
        while i < end or code_of(table[i, 1]) != EMPTY:
            piece = min(np.uint64(_PIECE), end - i) if i < end else _1
            count = 0
            for at in range(i, i + piece):  # no branches: half are empty, at random
                keys[count] = table[at, 0]
                words[count] = table[at, 1]
                entries[count] = at
                count += table[at, 1] > _LOW
                table[at, 1] = _0
            for j in range(count):
                to = home_of(keys[j], stop, mask)
                while code_of(table[to, 1]) != EMPTY:
                    to += _1
                table[to, 0] = keys[j]
                table[to, 1] = words[j]
                position = np.int64(words[j] & _LOW)
                if position < unique_entry.shape[0]:
                    if unique_entry[position] == np.int64(entries[j]):
                        unique_entry[position] = np.int64(to)
            i += piece
            seen += np.int64(piece)
        homes = stop
    return seen


@numba.njit(nogil=True, cache=True)
def remove(table, homes, keys):
    """Removes those of `keys` that are there; returns how many.

    What follows an entry moves up (Knuth, vol. 3, 6.4, algorithm R): no tombstones.
    """
    mask = mask_of(homes)
    removed = 0
    for key in keys:
        hole = find(table, homes, key)
        if code_of(table[hole, 1]) == EMPTY:
            continue
        i = hole + 1
        while code_of(table[i, 1]) != EMPTY:
            if np.int64(home_of(table[i, 0], homes, mask)) <= hole:
                table[hole, 0] = table[i, 0]
                table[hole, 1] = table[i, 1]
                hole = i
            i += 1
        table[hole, 1] = _0
        removed += 1
    return removed


@numba.njit(nogil=True, cache=True)
def relocate(table, homes, keys, where):
    """Writes where each of `keys`, all of them there, has its row: int64 [n]."""
    mask = mask_of(homes)
    home = np.empty(_BLOCK, np.uint64)
    for start in range(0, keys.shape[0], _BLOCK):
        stop = min(start + _BLOCK, keys.shape[0])
        _approach(table, homes, mask, keys, start, stop, home)
        for j in range(start, stop):
            i = home[j - start]
            while table[i, 0] != keys[j] or code_of(table[i, 1]) == EMPTY:
                i += _1
            table[i, 1] = word_of(np.uint64(where[j]), table[i, 1] & _LOW)


class Index:
    """A growing map from uint64 keys to int32 slots.

    Attributes:
      table: its entries, uint64 [.., 2]; those past the homes have hardly been used.
      homes: how many entries are home to keys.
      count: keys.

    Example:
      >>> index = Index()
      >>> index.insert(np.array([7, 2**64 - 1], np.uint64), np.array([0, 1]))
      >>> index.lookup(np.array([2**64 - 1, 8], np.uint64))
      array([ 1, -1], dtype=int32)
    """

    def __init__(self, expected: int = 0):
        """Makes an empty index with room for `expected` keys."""
        self.homes = homes_for(expected)
        self.table = space_for(self.homes)
        self.count = 0

    def __len__(self) -> int:
        return self.count

    @property
    def limit(self) -> int:
        """Keys that it takes before it grows."""
        return limit_for(self.homes)

    @property
    def nbytes(self) -> int:
        """RAM that it takes, in bytes."""
        return min(self.table.nbytes, 16 * (self.homes + SMALL))

    @property
    def end(self) -> int:
        """Entries that may be in use are before this."""
        end = self.homes
        while self.table[end, 1]:
            end += 1
        return end

    def reserve(self, count: int, unique_entry: np.ndarray = _NO_BATCH) -> None:
        """Grows so that `count` keys fit.

        Args:
          count: how many.
          unique_entry: int32 [n], in and out: entries of the unique keys of a batch.
        """
        homes = homes_for(count)
        if homes <= self.homes:
            return
        if len(self.table) < homes + homes // 2:
            table = space_for(homes)
            table[: len(self.table)] = self.table
            self.table = table
        split(self.table, self.homes, homes, unique_entry)
        self.homes = homes

    def clear(self) -> None:
        """Forgets all keys, and keeps the room."""
        self.table[: self.end] = _0
        self.count = 0

    def remove(self, keys: np.ndarray) -> None:
        """Forgets those of `keys`, uint64 [n], that it knows.

        Example:
          >>> index = Index()
          >>> index.insert(np.array([7, 8], np.uint64), np.array([0, 1]))
          >>> index.remove(np.array([7, 9], np.uint64))
          >>> len(index), index.lookup(np.array([7, 8], np.uint64)).tolist()
          (1, [-1, 1])
        """
        self.count -= remove(self.table, self.homes, as_keys(keys))

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
        self.count += _insert(self.table, self.homes, keys, slots.astype(np.int32))

    def relocate(self, keys: np.ndarray, where: np.ndarray) -> None:
        """Says anew where rows are: of `keys`, uint64 [n], all known, int64 [n]."""
        relocate(self.table, self.homes, keys, where)

    def lookup(self, keys: np.ndarray) -> np.ndarray:
        """The slot of each of `keys`, uint64 [n], as int32 [n]; -1 for an absent key."""
        keys = as_keys(keys)
        slots = np.empty(len(keys), np.int32)
        _lookup(self.table, self.homes, keys, slots)
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

    def codes(self, entries: np.ndarray) -> np.ndarray:
        """What entries, int32 [n], say of their rows, uint64 [n]."""
        return ~self.table[entries, 1] >> _32

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """All keys, uint64 [count], and their slots, int32 [count], in table order."""
        used = self.table[: self.end]
        used = used[used[:, 1] != _0]
        return used[:, 0].copy(), (~used[:, 1] >> _32).astype(np.int32)
