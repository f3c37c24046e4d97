"""The hash table on devices beside a dict, and its invariants after all that happens to it."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardjax.embed import (
    DeviceTable,
    device_table,
    init_device_table,
    join_keys,
    split_keys,
)
from shardjax.embed.probing import BUCKET, EMPTY, FIRST_TAG, NO_SLOT
from shardjax.embed.records import hashes_of
from shardjax.mesh import AXES, make_mesh
from tests.embed.reference import unmix64, wide_keys

BATCH = 64


def u64(keys) -> np.ndarray:
    return np.array(list(keys), np.uint64)


def colliding_keys(n: int, buckets: int) -> np.ndarray:
    """n keys whose probes are all the same, and whose tags are."""
    return u64(unmix64((0xABCD << 32) + 5 + i * buckets) for i in range(n))


def exported(table: DeviceTable) -> dict[int, int]:
    hi, lo, used = (np.asarray(x) for x in device_table.export(table))
    keys = join_keys(hi, lo)
    assert not keys[~used].any()
    slots = np.flatnonzero(used)
    model = dict(zip(keys[slots].tolist(), slots.tolist(), strict=True))
    assert len(model) == len(slots), "a key has two slots"
    return model


def assert_sound(table: DeviceTable, model: dict[int, int]):
    """It holds the keys of `model` at their slots, and each can be found by its probe."""
    assert exported(table) == model
    assert table.count.tolist() == [len(model)]
    buckets, tags = table.buckets, np.asarray(table.tags)
    assert (tags[table.capacity :] == NO_SLOT).all()
    used = np.isin(np.arange(table.capacity), list(model.values()))
    np.testing.assert_array_equal(tags[: table.capacity] >= FIRST_TAG, used)
    assert (tags[: table.capacity][~used] == EMPTY).all()
    passed = np.zeros(buckets, np.int64)
    hashed = hashes_of(u64(model))
    high, low = hashed >> np.uint64(32), hashed & np.uint64(0xFFFFFFFF)
    at = (low % np.uint64(buckets)).astype(np.int64)
    stride = ((1 + high % np.uint64(max(buckets - 1, 1))) % np.uint64(buckets)).astype(
        int
    )
    there = np.array(list(model.values()), np.int64) // BUCKET
    for _ in range(table.rounds):
        np.add.at(passed, at[at != there], 1)
        at = np.where(at == there, at, (at + stride) % buckets)
    np.testing.assert_array_equal(at, there)
    np.testing.assert_array_equal(table.passed, passed)


class Checked:
    """A table and the dict that it must be equal to, for batches of one length."""

    def __init__(self, capacity: int, **options):
        self.table = init_device_table(capacity, **options)
        self.exact = capacity <= BUCKET * self.table.reach
        self.model: dict[int, int] = {}

    def find(self, keys, valid):
        slots = device_table.find(self.table, split_keys(keys), valid)
        assert slots.dtype == jnp.int32
        expected = [self.model.get(int(k), -1) for k in keys]
        np.testing.assert_array_equal(slots, np.where(valid, expected, -1))

    def insert(self, keys, valid):
        self.table, slots, is_new, full = device_table.find_or_insert(
            self.table, split_keys(keys), valid
        )
        assert slots.dtype == jnp.int32 and is_new.dtype == jnp.bool_
        before, taken = dict(self.model), set(self.model.values())
        asked, refused = set(), 0
        for key, ok, slot, new in zip(
            keys.tolist(), valid, slots.tolist(), is_new.tolist(), strict=True
        ):
            if not ok:
                assert (slot, new) == (-1, False)
                continue
            asked.add(key)
            assert new == (slot >= 0 and key not in self.model)
            if new:
                assert slot not in taken and slot < self.table.capacity
                taken.add(slot)
                self.model[key] = slot
            assert slot == self.model.get(key, -1)
            refused += slot < 0
        assert int(full) == refused
        if self.exact:
            wanted = len(asked - before.keys())
            free = self.table.capacity - len(before)
            assert len(self.model) - len(before) == min(wanted, free)

    def erase(self, keys, valid):
        self.table, erased = device_table.erase(self.table, split_keys(keys), valid)
        expected = [int(k) in self.model for k in keys]
        np.testing.assert_array_equal(erased, valid & expected)
        for key in keys[valid].tolist():
            self.model.pop(key, None)


def random_batch(rng: np.random.Generator, universe: np.ndarray):
    """Keys with duplicates, some of them not valid."""
    few = rng.choice(universe, rng.integers(1, len(universe) + 1), replace=False)
    return rng.choice(few, BATCH), rng.random(BATCH) < rng.choice([0.1, 0.9, 1.0])


@pytest.mark.parametrize("kind", ["wide", "colliding", "low", "high"])
@pytest.mark.parametrize("capacity", [1, 2, 127, 128, 129])
def test_a_table_is_a_dict_whatever_happens_to_it(capacity, kind):
    rng = np.random.default_rng(capacity)
    checked = Checked(capacity)
    universe = wide_keys(max(capacity + capacity // 4, 4), seed=1)  # with 0 and 2**64-1
    if kind == "colliding":
        universe = colliding_keys(len(universe), checked.table.buckets)
    elif kind != "wide":  # one word is the same in all keys
        universe = np.arange(len(universe), dtype=np.uint64) << 32 * (kind == "high")
    fullest = 0
    for i in range(60):
        ways = [checked.insert, checked.find, checked.erase]
        # fills up, then empties, and again
        chances = [0.6, 0.2, 0.2] if i % 30 < 20 else [0.1, 0.2, 0.7]
        ways[rng.choice(3, p=chances)](*random_batch(rng, universe))
        fullest = max(fullest, len(checked.model))
        if i % 10 == 9:
            assert_sound(checked.table, checked.model)
    assert fullest == capacity


def test_a_probe_that_reaches_no_room_is_reported():
    checked = Checked(200, reach=2)
    keys, all_valid = colliding_keys(BATCH, checked.table.buckets), np.ones(BATCH, bool)
    checked.insert(keys, all_valid)
    assert len(checked.model) == 2 * BUCKET
    checked.find(keys, all_valid)
    assert_sound(checked.table, checked.model)
    checked.erase(keys[:BUCKET].repeat(BATCH // BUCKET), all_valid)
    checked.insert(keys, all_valid)
    assert len(checked.model) == 2 * BUCKET
    assert_sound(checked.table, checked.model)


def test_a_table_within_reach_takes_as_many_keys_as_it_has_slots():
    checked = Checked(BATCH, reach=BATCH // BUCKET)
    assert checked.table.buckets > checked.table.reach  # the next prime
    keys = colliding_keys(BATCH, checked.table.buckets)
    checked.insert(keys, np.ones(BATCH, bool))
    assert len(checked.model) == BATCH
    assert_sound(checked.table, checked.model)


def test_the_first_of_equal_keys_is_new_and_runs_are_equal():
    keys = split_keys(u64([3, 9, 3, 7, 9, 3]))
    valid = np.array([False, True, True, True, True, True])
    runs = []
    for _ in range(2):
        table, slots, is_new, full = device_table.find_or_insert(
            init_device_table(50), keys, valid
        )
        assert is_new.tolist() == [False, True, True, True, False, False]
        assert int(full) == 0 and int(table.count[0]) == 3
        runs.append(jax.tree.map(np.asarray, (table, slots)))
    jax.tree.map(np.testing.assert_array_equal, *runs)


def test_a_table_is_the_same_where_jax_has_64_bits():
    keys = split_keys(np.random.default_rng(0).choice(wide_keys(2000), 1024))
    runs = []
    for enabled in (False, True):
        with jax.enable_x64(enabled):
            table, *answers = device_table.find_or_insert(init_device_table(3000), keys)
            runs.append(jax.tree.map(np.asarray, (table, answers)))
    jax.tree.map(np.testing.assert_array_equal, *runs)
    first, second = (jax.tree.map(lambda x: x.dtype, run) for run in runs)
    assert first == second


@pytest.mark.parametrize("key", [0, 2**64 - 1, 2**32])
def test_all_keys_equal(key):
    checked = Checked(127)
    keys, all_valid = u64([key] * BATCH), np.ones(BATCH, bool)
    for way in (checked.insert, checked.find, checked.insert, checked.erase):
        way(keys, all_valid)
    assert checked.model == {}
    assert_sound(checked.table, {})


def test_empty_batches_and_other_shapes():
    table = init_device_table(10)
    none = split_keys(u64([]))
    table, slots, is_new, full = device_table.find_or_insert(table, none)
    assert slots.shape == is_new.shape == (0,) and int(full) == 0
    table, erased = device_table.erase(table, none)
    assert erased.shape == device_table.find(table, none).shape == (0,)
    square = split_keys(np.arange(6, dtype=np.uint64).reshape(2, 3) % 4)
    table, slots, is_new, full = device_table.find_or_insert(table, square)
    assert is_new.tolist() == [[True, True, True], [True, False, False]]
    np.testing.assert_array_equal(device_table.find(table, square), slots)
    one = tuple(x[0, 1] for x in square)
    assert int(device_table.find(table, one)) == int(slots[0, 1])


def test_many_operations_at_load_nine_tenths(request):
    """A million operations, ten with --all-combinations: numbers of keys are the dict."""
    operations = 10**7 if request.config.getoption("--all-combinations") else 10**6
    batch, capacity = 4096, 30_000
    rng = np.random.default_rng(0)
    universe = wide_keys(40_000, seed=2)
    slot_of = np.full(len(universe), -1)  # the model, by number of the key
    table = init_device_table(capacity)
    erases = 0
    for i in range(operations // batch + 1):
        some = rng.integers(0, len(universe), batch)
        some[: batch // 4] = rng.choice(some[: batch // 64], batch // 4)
        keys = split_keys(universe[some])
        known = np.count_nonzero(slot_of >= 0)
        if i % 4 == 3:
            np.testing.assert_array_equal(device_table.find(table, keys), slot_of[some])
        elif known > 0.85 * capacity and i % 4 == 1:
            table, erased = device_table.erase(table, keys)
            np.testing.assert_array_equal(erased, slot_of[some] >= 0)
            slot_of[some] = -1
            erases += 1
        else:  # as many new ones as bring the load to nine tenths
            unknown = np.unique(some[slot_of[some] < 0])
            room = int(0.9 * capacity) - known
            valid = (slot_of[some] >= 0) | np.isin(some, unknown[:room])
            table, slots, is_new, full = device_table.find_or_insert(table, keys, valid)
            assert int(full) == 0
            slots, is_new, before = np.asarray(slots), np.asarray(is_new), slot_of[some]
            slot_of[some[is_new]] = slots[is_new]
            np.testing.assert_array_equal(slots, np.where(valid, slot_of[some], -1))
            _, first = np.unique(np.where(valid, some, -1), return_index=True)
            first = np.isin(np.arange(batch), first)
            np.testing.assert_array_equal(is_new, valid & first & (before < 0))
    assert erases > operations // batch // 5
    assert np.count_nonzero(slot_of >= 0) > 0.8 * capacity
    known = np.flatnonzero(slot_of >= 0)
    model = dict(zip(universe[known].tolist(), slot_of[known].tolist(), strict=True))
    assert_sound(table, model)


def test_a_large_table_with_a_short_reach_fills_almost():
    checked, all_valid = Checked(4096, reach=8), np.ones(4096, bool)
    keys = wide_keys(2 * 4096, seed=3)
    checked.insert(keys[::2], all_valid)
    assert 0.95 * 4096 < len(checked.model) < 4096
    checked.insert(keys[1::2], all_valid)
    assert_sound(checked.table, checked.model)


def sharded(mesh, function, outputs):
    """A function of the table over all axes of a mesh, each device with keys of its own."""
    return jax.jit(
        jax.shard_map(
            partial(function, axis=AXES),
            mesh=mesh,
            in_specs=P(AXES),
            out_specs=outputs,
        )
    )


def test_tables_of_eight_devices_are_one():
    rng = np.random.default_rng(0)
    mesh, spec = make_mesh("2x4"), P(AXES)
    insert = sharded(mesh, device_table.find_or_insert, (spec, spec, spec, P()))
    find = sharded(mesh, device_table.find, spec)
    erase = sharded(mesh, device_table.erase, (spec, spec))
    capacity = 60
    whole, parts = Checked(8 * capacity), init_device_table(capacity, mesh=mesh)
    assert parts.hi.sharding.spec == spec
    universe = wide_keys(300, seed=4)
    for i in range(12):
        keys, valid = random_batch(rng, universe)
        words = jax.device_put(split_keys(keys), jax.NamedSharding(mesh, spec))
        valid_parts = jax.device_put(valid, jax.NamedSharding(mesh, spec))
        if i % 3 < 2:
            before = dict(whole.model)
            whole.insert(keys, valid)
            parts, slots, is_new, full = insert(parts, words, valid_parts)
            assert int(full) == 0
            is_new = np.asarray(is_new)
            _, first = np.unique(keys[valid], return_index=True)
            first = np.isin(np.arange(sum(valid)), first)
            unknown = [int(k) not in before for k in keys[valid]]
            np.testing.assert_array_equal(is_new[valid], first & unknown)
            assert not is_new[~valid].any()
        else:
            expected = valid & [int(k) in whole.model for k in keys]
            whole.erase(keys, valid)
            parts, erased = erase(parts, words, valid_parts)
            np.testing.assert_array_equal(erased, expected)
        model = exported(parts)
        assert model.keys() == whole.model.keys()
        found = find(parts, words, valid_parts)
        expected = [model.get(int(k), -1) for k in keys]
        np.testing.assert_array_equal(found, np.where(valid, expected, -1))
    assert len(set(s // capacity for s in exported(parts).values())) == 8


def test_each_device_reports_what_it_has_no_room_for():
    mesh, spec = make_mesh("8x1"), P(AXES)
    insert = sharded(mesh, device_table.find_or_insert, (spec, spec, spec, P()))
    table = init_device_table(1, mesh=mesh)
    keys = wide_keys(BATCH, seed=5)
    table, *answers = insert(table, split_keys(keys), np.ones(BATCH, bool))
    slots, is_new, full = (np.asarray(x) for x in answers)
    assert sorted(slots[is_new].tolist()) == list(range(8))
    assert int(full) == BATCH - 8
    assert exported(table) == dict(
        zip(keys[is_new].tolist(), slots[is_new].tolist(), strict=True)
    )


def test_a_vocabulary_inside_jit():
    """Counts keys in rows by slot, as a step with an embedding would."""

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(table, rows, keys):
        table, slots, is_new, _ = device_table.find_or_insert(table, keys)
        rows = rows.at[jnp.where(is_new, slots, len(rows))].set(0, mode="drop")
        return table, rows.at[slots].add(1, mode="drop")

    rng = np.random.default_rng(0)
    table, rows = init_device_table(100), jnp.full(100, 77)
    counts = Counter()
    for _ in range(5):
        keys = rng.choice(wide_keys(60), 32)
        counts.update(keys.tolist())
        table, rows = step(table, rows, split_keys(keys))
    assert {k: int(rows[s]) for k, s in exported(table).items()} == counts


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"capacity": 0},
            ValueError,
            r"`capacity` .* must be in \[1, 2\*\*30\], got 0",
        ),
        ({"capacity": 2**31}, ValueError, r"must be in \[1, 2\*\*30\], got 2147483648"),
        ({"capacity": 8.0}, TypeError, "`capacity` .* integer, got float 8.0"),
        ({"capacity": True}, TypeError, "`capacity` .* integer, got bool True"),
        (
            {"capacity": 8, "reach": 0},
            ValueError,
            r"`reach` .* in \[1, 2\*\*30\], got 0",
        ),
    ],
)
def test_tables_that_there_cannot_be(options, error, message):
    with pytest.raises(error, match=message):
        init_device_table(**options)


def test_slots_of_all_devices_are_int32():
    with pytest.raises(
        ValueError, match=r"fewer than 2\*\*31, got `capacity` 268435456"
    ):
        init_device_table(2**28, mesh=make_mesh("8x1"))


KEYS = split_keys(u64([1, 2]))


@pytest.mark.parametrize(
    ("keys", "valid", "error", "message"),
    [
        (u64([1, 2, 3]), None, TypeError, r"pair \(hi, lo\) of uint32 .* got ndarray"),
        (u64([1, 2]), None, TypeError, r"pair \(hi, lo\) of uint32 .*uint64"),
        ((1, 2), None, TypeError, r"pair \(hi, lo\) of uint32 arrays, got tuple"),
        (
            (KEYS[0], KEYS[1].astype(np.int32)),
            None,
            TypeError,
            "got dtypes uint32 and int32. Make it by split_keys",
        ),
        ((KEYS[0], KEYS[1][:1]), None, ValueError, r"one shape, got \(2,\) and \(1,\)"),
        (KEYS, np.ones(2, np.int32), TypeError, "`valid` must be boolean, got int32"),
        (KEYS, np.ones(3, bool), ValueError, r"shape of `keys`, \(2,\), got \(3,\)"),
    ],
)
def test_keys_that_do_not_fit(keys, valid, error, message):
    table = init_device_table(4)
    for function in (
        device_table.find,
        device_table.find_or_insert,
        device_table.erase,
    ):
        with pytest.raises(error, match=message):
            function(table, keys, valid)


def test_a_table_of_all_devices_is_used_inside_shard_map():
    table = init_device_table(4, mesh=make_mesh("8x1"))
    with pytest.raises(
        ValueError, match="lies on 8 devices. Call this inside jax.shard_map"
    ):
        device_table.find(table, KEYS)
