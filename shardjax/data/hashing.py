"""Strings to 64-bit keys: XXH64 with seed 0, the same on every platform.

XXH64 (Yann Collet, https://xxhash.com) of the UTF-8 bytes. It is documented, fast, and
other tools compute it too, so a key can be looked up outside this library.
"""

import numba
import numpy as np
import pyarrow as pa

MISSING_KEY = 0xEF46DB3751D8E999
"""The key of a missing categorical value: XXH64 of the empty string."""

_PRIME_1 = np.uint64(0x9E3779B185EBCA87)
_PRIME_2 = np.uint64(0xC2B2AE3D27D4EB4F)
_PRIME_3 = np.uint64(0x165667B19E3779F9)
_PRIME_4 = np.uint64(0x85EBCA77C2B2AE63)
_PRIME_5 = np.uint64(0x27D4EB2F165667C5)


def hash_strings(values) -> np.ndarray:
    """Hashes strings to keys: XXH64, seed 0, of their UTF-8 bytes.

    Args:
      values: strings or bytes, [n]: a list, a numpy or pandas array, or a pyarrow array
        of strings or binary, dictionary-encoded or not. Missing entries (None, NaN,
        null) hash as the empty string, to `MISSING_KEY`.

    Returns:
      uint64 [n].

    Raises:
      TypeError: if an entry is neither a string nor bytes.

    Example:
      >>> [hex(key) for key in hash_strings(["a", ""])]
      ['0xd24ec4f1a98c6e5b', '0xef46db3751d8e999']
    """
    array = values if isinstance(values, pa.Array | pa.ChunkedArray) else _arrow(values)
    if isinstance(array, pa.ChunkedArray):
        if array.num_chunks != 1:
            keys = [hash_strings(chunk) for chunk in array.chunks]
            return np.concatenate([np.empty(0, np.uint64), *keys])
        array = array.chunk(0)
    if pa.types.is_null(array.type):
        return np.full(len(array), MISSING_KEY, np.uint64)
    if pa.types.is_dictionary(array.type):
        keys = np.append(hash_strings(array.dictionary), np.uint64(MISSING_KEY))
        at = array.indices.fill_null(len(array.dictionary)).to_numpy(False)
        return keys[at]
    type_ = array.type
    if (
        pa.types.is_string_view(type_)
        or pa.types.is_binary_view(type_)
        or pa.types.is_fixed_size_binary(type_)
    ):
        array = array.cast(pa.large_binary())
    if pa.types.is_string(array.type) or pa.types.is_binary(array.type):
        offset_dtype = np.int32
    elif pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type):
        offset_dtype = np.int64
    else:
        raise TypeError(f"values to hash must be strings or bytes, got {array.type}")
    if len(array) == 0:
        return np.empty(0, np.uint64)
    validity, offsets, data = array.buffers()
    offsets = np.frombuffer(offsets, offset_dtype)
    offsets = offsets[array.offset : array.offset + len(array) + 1]
    keys = hash_bytes(
        np.frombuffer(data or b"", np.uint8), offsets.astype(np.int64, copy=False)
    )
    if validity is not None and array.null_count:
        # A null slot may still span bytes, so its hash cannot be relied on.
        keys[array.is_null().to_numpy(False)] = MISSING_KEY
    return keys


def hash_bytes(data: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Hashes byte strings that lie one after the other: XXH64, seed 0.

    Args:
      data: uint8 [total].
      offsets: int64 [n + 1], non-decreasing; string i is
        `data[offsets[i]:offsets[i + 1]]`.

    Returns:
      uint64 [n].

    Raises:
      ValueError: if the offsets decrease or leave the data.

    Example:
      >>> data = np.frombuffer(b"abc", np.uint8)
      >>> [hex(key) for key in hash_bytes(data, np.array([0, 3]))]
      ['0x44bc2cf5ad770999']
    """
    data = np.ascontiguousarray(data, np.uint8).view()
    data.flags.writeable = False  # As of `Cells`: one kernel serves both.
    offsets = np.ascontiguousarray(offsets, np.int64)
    if not len(offsets):
        raise ValueError("`offsets` must have n + 1 entries, got none")
    if offsets[0] < 0 or offsets[-1] > len(data) or (np.diff(offsets) < 0).any():
        raise ValueError(
            f"`offsets` must not decrease and must stay within the {len(data)} bytes of"
            f" `data`, got {offsets[0]} to {offsets[-1]}"
        )
    return _hash_all(data, offsets)


def _arrow(values) -> pa.Array | pa.ChunkedArray:
    """Makes a pyarrow array of strings or bytes, refusing any other entry."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "US":
        values = values.tolist()
    if isinstance(values, str | bytes):
        raise TypeError(
            "values to hash must be an array of strings, got one"
            f" {type(values).__name__}. Put it in a list."
        )
    try:
        array = pa.array(values, from_pandas=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise TypeError(
            f"values to hash must be all strings or all bytes: {error}"
        ) from error
    return array


@numba.njit(nogil=True, cache=True)
def _hash_all(data, offsets):
    keys = np.empty(len(offsets) - 1, np.uint64)
    for i in range(len(keys)):
        keys[i] = xxh64(data, offsets[i], offsets[i + 1])
    return keys


@numba.njit(nogil=True, cache=True)
def _rotate(x, bits):
    return (x << np.uint64(bits)) | (x >> np.uint64(64 - bits))


@numba.njit(nogil=True, cache=True)
def _round(accumulator, word):
    return _rotate(accumulator + word * _PRIME_2, 31) * _PRIME_1


@numba.njit(nogil=True, cache=True)
def _merge(hashed, accumulator):
    return (hashed ^ _round(np.uint64(0), accumulator)) * _PRIME_1 + _PRIME_4


@numba.njit(nogil=True, cache=True)
def _word_32(data, at):
    # Little-endian by construction; LLVM turns the shifts into one load.
    return (
        np.uint64(data[at])
        | np.uint64(data[at + 1]) << np.uint64(8)
        | np.uint64(data[at + 2]) << np.uint64(16)
        | np.uint64(data[at + 3]) << np.uint64(24)
    )


@numba.njit(nogil=True, cache=True)
def _word_64(data, at):
    return _word_32(data, at) | _word_32(data, at + 4) << np.uint64(32)


@numba.njit(nogil=True, cache=True)
def xxh64(data, start, stop):
    """Hashes `data[start:stop]`, uint8, to a uint64; for use inside numba kernels.

    The caller sees to it that the bounds lie within the data.

    Example:
      >>> int(xxh64(np.zeros(0, np.uint8), 0, 0)) == MISSING_KEY
      True
    """
    at = start
    if stop - start >= 32:
        a = _PRIME_1 + _PRIME_2
        b = _PRIME_2
        c = np.uint64(0)
        d = np.uint64(0) - _PRIME_1
        while at + 32 <= stop:
            a = _round(a, _word_64(data, at))
            b = _round(b, _word_64(data, at + 8))
            c = _round(c, _word_64(data, at + 16))
            d = _round(d, _word_64(data, at + 24))
            at += 32
        hashed = _rotate(a, 1) + _rotate(b, 7) + _rotate(c, 12) + _rotate(d, 18)
        hashed = _merge(hashed, a)
        hashed = _merge(hashed, b)
        hashed = _merge(hashed, c)
        hashed = _merge(hashed, d)
    else:
        hashed = _PRIME_5
    hashed += np.uint64(stop - start)
    while at + 8 <= stop:
        hashed ^= _round(np.uint64(0), _word_64(data, at))
        hashed = _rotate(hashed, 27) * _PRIME_1 + _PRIME_4
        at += 8
    if at + 4 <= stop:
        hashed ^= _word_32(data, at) * _PRIME_1
        hashed = _rotate(hashed, 23) * _PRIME_2 + _PRIME_3
        at += 4
    while at < stop:
        hashed ^= np.uint64(data[at]) * _PRIME_5
        hashed = _rotate(hashed, 11) * _PRIME_1
        at += 1
    hashed ^= hashed >> np.uint64(33)
    hashed *= _PRIME_2
    hashed ^= hashed >> np.uint64(29)
    hashed *= _PRIME_3
    return hashed ^ (hashed >> np.uint64(32))
