import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from shardjax.embed import Index, growth, index as index_module
from shardjax.embed.growth import homes_for
from shardjax.embed.index import EMPTY, find, find_entries, home_of, mask_of, mix64
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


def assert_same(index: Index, model: dict[int, int]):
    asked = u64([*model, *(k ^ 1 for k in model), 7])
    expected = [model.get(int(k), -1) for k in asked]
    np.testing.assert_array_equal(index.lookup(asked), expected)
    got = dict(zip(*(x.tolist() for x in index.items()), strict=True))
    assert got == model


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
        assert len(index) == len(model) <= index.limit
    assert_same(index, model)


CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), st.lists(NEAR_KEYS, max_size=60)),
        st.tuples(st.just("insert many"), st.integers(0, 2**20)),
        st.tuples(st.just("remove"), st.lists(NEAR_KEYS, max_size=60)),
        st.tuples(st.just("remove some"), st.floats(0, 1)),
        st.tuples(st.just("relocate"), st.integers(0, 2**31 - 1)),
        st.tuples(st.just("reserve"), st.integers(0, 40)),
    ),
    max_size=12,
)


@pytest.fixture
def none_is_small(monkeypatch):
    """Indexes grow a home at a time from the first."""
    monkeypatch.setattr(growth, "SMALL", 0)


@given(changes=CHANGES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_large_index_is_a_dict_whatever_happens_to_it(none_is_small, changes):
    index, model = Index(), {}
    for change, what in changes:
        known = u64(model)
        if change.startswith("insert"):
            new = what
            if change == "insert many":
                new = np.random.default_rng(what).integers(0, 2**64, 150, np.uint64)
            slots = np.arange(len(new)) + len(model)
            index.insert(u64(new), slots)
            model.update(zip(map(int, new), slots.tolist(), strict=True))
        elif change.startswith("remove"):
            gone = what
            if change == "remove some":
                gone = list(model)[: int(what * len(model))]
            index.remove(u64(gone))
            for key in gone:
                model.pop(key, None)
        elif change == "relocate":
            index.relocate(known, np.full(len(known), what))
            model = dict.fromkeys(model, what)
        else:
            # a batch has met all keys, in an order of its own
            met = known[np.argsort(mix64_of(known))]
            entries = entries_of(index, met)
            index.table[entries, 1] |= np.arange(len(met), dtype=np.uint64)
            index.reserve(len(index) + what, entries)
            np.testing.assert_array_equal(entries, entries_of(index, met))
            index.table[entries, 1] &= ~np.uint64(0xFFFFFFFF)
        assert len(index) == len(model) <= index.limit
    assert_same(index, model)
    assert np.count_nonzero(index.table[: 2 * index.homes, 1]) == len(model)


def mix64_of(keys: np.ndarray) -> np.ndarray:
    return np.array([mix64(k) for k in keys], np.uint64)


def entries_of(index: Index, keys: np.ndarray) -> np.ndarray:
    entries = np.empty(len(keys), np.int32)
    find_entries(index.table, index.homes, keys, entries)
    return entries


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


@pytest.mark.parametrize("reserves", [True, False])
def test_growth_is_in_small_steps_and_moves_nothing(monkeypatch, reserves):
    monkeypatch.setattr(growth, "can_reserve", reserves)
    seen = [0]

    def counted(*args):
        seen.append(split(*args))

    split = index_module.split
    monkeypatch.setattr(index_module, "split", counted)
    rng = np.random.default_rng(0)
    keys, step = rng.integers(2**64, size=400_000, dtype=np.uint64), 1000
    index, moved = Index(), []
    for at in range(0, len(keys), step):
        table, before = index.table, index.nbytes
        seen[:] = [0]
        index.insert(keys[at : at + step], np.arange(at, at + step))
        if index.table is not table:
            moved.append(at)
        if at > growth.SMALL // 2:  # it is large, and was so before
            assert max(seen) < 5 * step + 1000
            if reserves:
                assert index.nbytes - before <= 16 * 5 * step
                assert index.nbytes < 48 * len(index) + 16 * growth.SMALL
        if at % 20_000 == 0:
            found = index.lookup(keys[: at + step])
            np.testing.assert_array_equal(found, np.arange(at + step))
    np.testing.assert_array_equal(index.lookup(keys), np.arange(len(keys)))
    # once it is not small it stays where it is
    assert len([at for at in moved if at > growth.SMALL // 2]) == (0 if reserves else 3)


def test_keys_in_the_order_of_an_index_fill_another_evenly():
    rng = np.random.default_rng(0)
    first, second = Index(), Index()
    keys = rng.integers(2**64, size=200_000, dtype=np.uint64)
    first.insert(keys, np.arange(len(keys)))
    ordered, _ = first.items()
    farthest = 0
    for part in np.array_split(ordered, 400):
        second.insert(part, np.arange(len(part)))
        homes, mask = second.homes, mask_of(second.homes)
        entries = entries_of(second, part)
        at = [home_of(key, homes, mask) for key in part[::50]]
        farthest = max(farthest, int((entries[::50] - np.array(at)).max()))
    assert farthest < 200


def test_an_index_has_room_for_what_int32_can_number():
    with pytest.raises(
        MemoryError, match="an index has room for 608453700 keys and not"
    ):
        Index(608_453_701)
    assert Index(600_000_000).limit >= 600_000_000


def test_expected_keys_need_no_growth():
    index = Index(expected=5000)
    table, homes = index.table, index.homes
    index.insert(np.arange(5000, dtype=np.uint64), np.arange(5000))
    assert index.table is table
    assert index.homes == homes == homes_for(5000)


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
    none = find(index.table, index.homes, absent[0])
    assert none == len(index.table) - 1
    assert index.codes(np.array([none])) == EMPTY


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
    assert index.nbytes <= 2048
