"""Kernels of segments: records, and what in RAM tells where they are."""

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from shardjax.embed.index import mix64, prefetch

HEADER_WORDS = 6
AT_ONCE = 24
_AHEAD = 8
_32 = np.uint64(32)
_MARK = np.uint64(0xFFF)

_pread = types.ExternalFunction(
    "pread", types.int64(types.int32, types.uintp, types.uintp, types.int64)
)


@intrinsic
def _load64(typingctx, array, index):
    """The 8 bytes from ``array[index]`` on (uint8, 1-D, contiguous), a uint64."""

    def codegen(context, builder, signature, args):
        struct = context.make_array(signature.args[0])(context, builder, args[0])
        pointer = builder.gep(struct.data, [args[1]])
        pointer = builder.bitcast(pointer, ir.IntType(64).as_pointer())
        return builder.load(pointer, align=1)

    return types.uint64(array, types.uint64), codegen


@numba.njit(inline="always")
def _bucket(h, buckets):
    return np.int64(((h >> _32) * np.uint64(buckets)) >> _32)


@numba.njit(inline="always")
def _checksum(record):
    """A 32-bit hash of a record, its checksum's own word apart."""
    h = np.uint64(0x9E3779B97F4A7C15)
    for w in range(0, record.shape[0], 2):
        pair = np.uint64(np.uint32(record[w]))
        if w != 4 and w + 1 < record.shape[0]:
            pair |= np.uint64(np.uint32(record[w + 1])) << _32
        h = (h ^ pair) * np.uint64(0xBF58476D1CE4E5B9)
        h ^= h >> _32
    return np.int32(np.uint32(h))


@numba.njit(nogil=True, cache=True)
def _hash_keys(keys, out):
    for i in range(keys.shape[0]):
        out[i] = mix64(keys[i])


def hashes_of(keys: np.ndarray) -> np.ndarray:
    """`mix64` of keys, uint64 [n], by which segments are sorted."""
    hashes = np.empty(len(keys), np.uint64)
    _hash_keys(keys, hashes)
    return hashes


def keys_of(records: np.ndarray) -> np.ndarray:
    """The salted keys of records, int32 [n, words]: uint64 [n]."""
    return np.ascontiguousarray(records[:, :2]).view(np.uint64)[:, 0]


@numba.njit(nogil=True, cache=True)
def write_records(order, keys, tables, last_step, tallies, rows, out):
    """Writes records, int32 [n, words], in an order."""
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
def seal(records):
    """Writes the checksums of records, int32 [n, words]."""
    for n in range(records.shape[0]):
        records[n, 5] = _checksum(records[n])


@numba.njit(nogil=True, cache=True)
def summarize(hashes, first, at, starts, bits):
    """Fills a segment's buckets and bits from more of its hashes, in order.

    Args:
      hashes: uint64 [n].
      first: records before these.
      at: buckets whose start is known.
      starts, bits: of the segment, in and out.

    Returns:
      The buckets whose start is known now.
    """
    buckets = starts.shape[0] - 1
    for n in range(hashes.shape[0]):
        b = _bucket(hashes[n], buckets)
        while at <= b:
            starts[at] = first + n
            at += 1
        _set_bits(bits, first + n, np.int64(hashes[n] & _MARK))
    return at


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


@numba.njit(inline="always")
def _next(bits, dead, mark, n, stop):
    """The first live record of [n, stop) with these 12 bits, or `stop`."""
    ones = np.uint64(0x001001001001)
    at = n & ~1
    while at < stop:
        # Is it one of 24 records, more than most buckets have? The term keeps a high bit
        # if the 12 bits of a record are 0. 10 ns; with a branch per four records, 26 ns.
        some = np.uint64(0)
        for k in range(0, AT_ONCE // 2 * 3, 6):
            x = _load64(bits, np.uint64((at >> 1) * 3 + k)) ^ (mark * ones)  # pyright: ignore[reportCallIssue]
            some |= (x - ones) & ~x
        if some & np.uint64(0x800800800800):
            for m in range(max(at, n), min(at + AT_ONCE, stop)):
                if _get_bits(bits, m) == mark and not (dead[m >> 3] >> (m & 7)) & 1:
                    return m
        at += AT_ONCE
    return stop


@numba.njit(nogil=True, cache=True)
def find_records(
    fd, mapped, wanted, keys, tables, hashes, starts, bits, dead, out, records, bad
):
    """Looks up keys: first where each may be, then what is there.

    Args:
      fd, mapped, starts, bits, dead: of the segment.
      wanted: int64 [n], numbers of keys.
      keys, tables, hashes: of all keys.
      out: int64 [keys], out: number of the record; unchanged if there is none.
      records: int32 [keys, words], out; undefined if there is none.
      bad: int64 [2], out: what was wrong (1: short read, 2: checksum) and where.

    Returns:
      The numbers of the keys found, and those of the others.
    """
    found, left = np.empty_like(wanted), np.empty_like(wanted)
    place = np.empty_like(wanted)
    count = left_count = found_count = 0
    buckets = starts.shape[0] - 1
    for i in wanted:
        b = _bucket(hashes[i], buckets)
        stop = np.int64(starts[b + 1])
        n = _next(bits, dead, hashes[i] & _MARK, np.int64(starts[b]), stop)
        if n < stop:
            place[count], found[count] = n, i
            count += 1
        else:
            left[left_count] = i
            left_count += 1
    words = records.shape[1]
    size = words * 4
    in_memory = mapped.shape[0] > 0
    flat = mapped.reshape(-1, 1)
    for j in range(count):
        # a quarter less time: 8 records are on their way from RAM while one is checked
        if in_memory and j + _AHEAD < count:
            for w in range(0, words, 16):  # each cache line
                at = np.uint64(place[j + _AHEAD] * words + w)
                prefetch(flat, at)  # pyright: ignore[reportCallIssue]
        i, n = found[j], place[j]
        record = records[i]
        stop = np.int64(starts[_bucket(hashes[i], buckets) + 1])
        while n < stop:
            if in_memory:
                for w in range(words):
                    record[w] = mapped[n, w]
            elif _pread(fd, record.ctypes.data, size, n * size) != size:
                bad[0], bad[1] = 1, n
                return found, left
            if record[5] != _checksum(record):
                bad[0], bad[1] = 2, n
                return found, left
            key = np.uint64(np.uint32(record[0]))
            key |= np.uint64(np.uint32(record[1])) << _32
            if key == keys[i] and record[2] == tables[i]:
                break
            n = _next(bits, dead, hashes[i] & _MARK, n + 1, stop)
        if n < stop:
            out[i] = n
            found[found_count] = i
            found_count += 1
        else:
            left[left_count] = i
            left_count += 1
    return found[:found_count], left[:left_count]


@numba.njit(nogil=True, cache=True)
def bury_records(dead, rows):
    """Marks records dead; returns how many were not."""
    count = 0
    for n in rows:
        bit = np.uint8(1 << (n & 7))
        if not dead[n >> 3] & bit:
            dead[n >> 3] |= bit
            count += 1
    return count


@numba.njit(nogil=True, cache=True)
def verify(records):
    """The first record whose checksum is wrong, -1 for none."""
    for n in range(records.shape[0]):
        if records[n, 5] != _checksum(records[n]):
            return n
    return -1
