"""The string hash: published XXH64 values, and every container of strings alike."""

from itertools import pairwise

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from shardjax.data import MISSING_KEY, hash_bytes, hash_strings

# Values of the reference implementation (https://xxhash.com, seed 0); the lengths cover
# the tails of 1, 4 and 8 bytes and the loop of 32.
KNOWN = {
    "": 0xEF46DB3751D8E999,
    "a": 0xD24EC4F1A98C6E5B,
    "abc": 0x44BC2CF5AD770999,
    "xxhash": 0x32DD38952C4BC720,
    "Nobody inspects the spammish repetition": 0xFBCEA83C8A378BF1,
}


def reference_xxh64(data: bytes) -> int:
    """XXH64 in plain Python integers, written from the specification."""
    mask = 2**64 - 1
    p1, p2, p3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
    p4, p5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5

    def rotate(x, bits):
        return (x << bits | x >> (64 - bits)) & mask

    def round_(accumulator, word):
        return rotate((accumulator + word * p2) & mask, 31) * p1 & mask

    rest = data
    if len(data) >= 32:
        lanes = [(p1 + p2) & mask, p2, 0, -p1 & mask]
        while len(rest) >= 32:
            for i in range(4):
                word = int.from_bytes(rest[8 * i : 8 * i + 8], "little")
                lanes[i] = round_(lanes[i], word)
            rest = rest[32:]
        h = sum(map(rotate, lanes, (1, 7, 12, 18))) & mask
        for lane in lanes:
            h = ((h ^ round_(0, lane)) * p1 + p4) & mask
    else:
        h = p5
    h = (h + len(data)) & mask
    while len(rest) >= 8:
        h ^= round_(0, int.from_bytes(rest[:8], "little"))
        h, rest = (rotate(h, 27) * p1 + p4) & mask, rest[8:]
    if len(rest) >= 4:
        h ^= int.from_bytes(rest[:4], "little") * p1 & mask
        h, rest = (rotate(h, 23) * p2 + p3) & mask, rest[4:]
    for byte in rest:
        h = rotate(h ^ byte * p5 & mask, 11) * p1 & mask
    for shift, prime in ((33, p2), (29, p3)):
        h = (h ^ h >> shift) * prime & mask
    return h ^ h >> 32


def test_known_answers():
    assert hash_strings(list(KNOWN)).tolist() == list(KNOWN.values())
    assert {text: reference_xxh64(text.encode()) for text in KNOWN} == KNOWN
    assert MISSING_KEY == KNOWN[""]


def test_every_length_to_200_agrees_with_the_specification():
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, 30_000).astype(np.uint8)
    offsets = np.cumsum(np.arange(200))
    expected = [reference_xxh64(data[a:b].tobytes()) for a, b in pairwise(offsets)]
    assert hash_bytes(data, offsets).tolist() == expected


TEXTS = ["a", "é", "", "日本語 text", "a", "x" * 100]


@pytest.mark.parametrize(
    "container",
    [
        list,
        tuple,
        np.array,
        lambda t: np.array(t, object),
        pd.Series,
        lambda t: [s.encode() for s in t],
        lambda t: np.array([s.encode() for s in t]),
        pa.array,
        lambda t: pa.array(t, pa.large_string()),
        lambda t: pa.array([s.encode() for s in t], pa.large_binary()),
        lambda t: pa.array(t, pa.string_view()),
        lambda t: pa.array(t).dictionary_encode(),
        lambda t: pa.chunked_array([t[:2], t[2:2], t[2:]], pa.string()),
        lambda t: pa.array(["skipped", *t, "skipped"]).slice(1, len(t)),
    ],
)
def test_every_container_gives_the_same_keys(container):
    expected = [reference_xxh64(text.encode()) for text in TEXTS]
    keys = hash_strings(container(TEXTS))
    assert keys.dtype == np.uint64
    assert keys.tolist() == expected


@pytest.mark.parametrize(
    "values",
    [
        ["a", None],
        pd.Series(["a", None]),
        np.array(["a", np.nan], object),
        pa.array(["a", None]),
        pa.array(["a", None]).dictionary_encode(),
        pa.chunked_array([["a"], [None]], pa.string()),
        pa.array(["x", "a", None]).slice(1),
    ],
)
def test_missing_strings_get_the_missing_key(values):
    assert hash_strings(values).tolist() == [KNOWN["a"], MISSING_KEY]


def test_no_strings_and_only_missing_ones():
    assert hash_strings([]).tolist() == []
    assert hash_strings(pa.chunked_array([], pa.string())).tolist() == []
    assert hash_strings(pa.array([], pa.string())).tolist() == []
    assert hash_strings([None, None]).tolist() == [MISSING_KEY] * 2


@pytest.mark.parametrize("values", [[1, 2], np.arange(3), ["a", 1], pa.array([1.5])])
def test_other_entries_are_refused(values):
    with pytest.raises(TypeError, match="values to hash must be"):
        hash_strings(values)


def test_one_string_is_not_a_list_of_letters():
    with pytest.raises(TypeError, match="got one str. Put it in a list"):
        hash_strings("abc")


@pytest.mark.parametrize("offsets", [[], [0, 4], [-1, 2], [2, 1, 3]])
def test_offsets_outside_the_data_are_refused(offsets):
    with pytest.raises(ValueError, match="`offsets` must"):
        hash_bytes(np.zeros(3, np.uint8), np.array(offsets, np.int64))
