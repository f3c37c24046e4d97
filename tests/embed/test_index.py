import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardjax.embed import Index
from shardjax.embed.index import MAX_LOAD, empty_table, entries_for, find, mix64
from tests.embed.reference import unmix64

KEYS = st.integers(0, 2**64 - 1)
# few keys, so that they repeat, and those that differ in the high or low bits alone
NEAR_KEYS = st.one_of(
    st.integers(0, 30),
    st.integers(2**64 - 30, 2**64 - 1),
    st.integers(0, 30).map(lambda i: i << 58),
    KEYS,
)


def u64(keys) -> np.ndarray:
    return np.array(list(keys), np.uint64)


@given(st.lists(st.lists(st.tuples(NEAR_KEYS, st.integers(0, 2**31 - 1)), max_size=60)))
def test_index_is_a_dict(batches):
    index, model = Index(), {}
    for batch in batches:
        keys, slots = (
            u64(k for k, _ in batch),
            np.array([s for _, s in batch], np.int64),
        )
        index.insert(keys, slots)
        model.update(batch)
        assert len(index) == len(model) <= MAX_LOAD * len(index.table)
    asked = u64([*model, *(k ^ 1 for k in model), 7])
    expected = [model.get(int(k), -1) for k in asked]
    np.testing.assert_array_equal(index.lookup(asked), expected)
    got = dict(zip(*(x.tolist() for x in index.items()), strict=True))
    assert got == model


@given(st.lists(st.lists(NEAR_KEYS, max_size=60)))
def test_number_counts_keys_in_order(batches):
    index, model = Index(), {}
    for batch in batches:
        expected = [model.setdefault(k, len(model)) for k in batch]
        numbers = index.number(u64(batch))
        assert numbers.dtype == np.int32
        np.testing.assert_array_equal(numbers, expected)


def test_growth_keeps_every_key():
    rng = np.random.default_rng(0)
    keys = np.unique(rng.integers(2**64, size=100_000, dtype=np.uint64))
    index, at = Index(), 0
    for size in (1, 3, 50, 1000, 20_000, len(keys)):
        part = keys[at : at + size]
        index.insert(part, np.arange(at, at + len(part)))
        at += len(part)
        np.testing.assert_array_equal(index.lookup(keys[:at]), np.arange(at))
        assert (index.lookup(keys[at:]) == -1).all()
    assert len(index) == len(keys)


def test_expected_keys_need_no_growth():
    index = Index(expected=5000)
    table = index.table
    index.insert(np.arange(5000, dtype=np.uint64), np.arange(5000))
    assert index.table is table
    assert len(table) == entries_for(5000)


def test_keys_that_share_a_hash_are_kept_apart():
    # all have one home in every index
    keys = u64(unmix64((i << 32) | 5) for i in range(2000))
    assert len(np.unique(keys)) == len(keys)
    assert {mix64(k) & 0xFFFFFFFF for k in keys} == {5}
    index = Index()
    index.insert(keys, np.arange(len(keys)))
    np.testing.assert_array_equal(index.lookup(keys), np.arange(len(keys)))
    absent = u64([unmix64((2000 << 32) | 5)])
    assert index.lookup(absent) == -1
    assert find(index.table, absent[0]) == len(index.table)


def test_all_integer_kinds_of_keys_are_one_key():
    index = Index()
    index.insert(np.array([-1, 3], np.int64), np.array([0, 1]))
    for dtype in (np.int8, np.int16, np.int32, np.int64):
        np.testing.assert_array_equal(index.lookup(np.array([3, -1], dtype)), [1, 0])
    for dtype in (np.uint8, np.uint16, np.uint32, np.uint64):
        np.testing.assert_array_equal(index.lookup(np.array([3, 255], dtype)), [1, -1])
    assert index.lookup(u64([2**64 - 1])) == 0


def test_views_are_read_in_their_own_order():
    keys = np.arange(20, dtype=np.uint64)
    index = Index()
    index.insert(keys[::-2], np.arange(10))
    np.testing.assert_array_equal(index.lookup(keys[1::2]), np.arange(10)[::-1])


@pytest.mark.parametrize("call", [Index().lookup, Index().number])
def test_float_keys_are_refused(call):
    with pytest.raises(
        TypeError, match="keys of `values` must be integers, got dtype f"
    ):
        call(np.array([1.5]))


@pytest.mark.parametrize(
    ("keys", "slots", "error", "message"),
    [
        ([1.0], [0], TypeError, "must be integers, got dtype float64"),
        ([1, 2], [0], ValueError, r"one slot per key, .* got shapes \(1,\) and \(2,\)"),
        ([[1]], [[0]], ValueError, r"one dim each, got shapes \(1, 1\)"),
        ([1, 2], [0, -1], ValueError, r"slots must be in \[0, 2\*\*31\), got -1"),
        ([1], [2**31], ValueError, r"slots must be in \[0, 2\*\*31\), got 2147483648"),
    ],
)
def test_bad_insertions_are_refused(keys, slots, error, message):
    index = Index()
    with pytest.raises(error, match=message):
        index.insert(np.array(keys), np.array(slots))
    assert len(index) == 0


def test_an_empty_index_holds_nothing():
    index = Index()
    assert len(index) == 0
    assert (index.lookup(u64([0, 2**64 - 1])) == -1).all()
    index.insert(u64([]), np.array([], np.int32))
    assert index.number(u64([])).shape == (0,)
    assert [len(x) for x in index.items()] == [0, 0]
    assert len(empty_table(64)) == 64
