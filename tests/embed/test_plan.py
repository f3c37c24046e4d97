"""What happens to every id of a batch, and what a refused batch leaves behind."""

import gc
import time

import jax
import numpy as np
import optax
import pytest

from shardjax.embed import (
    EmbeddingCollection,
    FeatureSpec,
    Jagged,
    PlanError,
    TableSpec,
    growth,
    zeros,
)
from shardjax.mesh import make_mesh
from tests.embed.reference import embed_batch, run_plan, wide_keys

SGD = optax.sgd(1.0)


def table(name="item", dim=2, **more) -> TableSpec:
    return TableSpec(name, dim, SGD, **more)


def make(features, mesh="1x1", **more) -> EmbeddingCollection:
    return EmbeddingCollection(features, mesh=make_mesh(mesh), **more)


def bags(*lists, weights=None) -> Jagged:
    flat = [key % 2**64 for bag in lists for key in bag]
    lengths = np.array([len(bag) for bag in lists])
    return Jagged(np.array(flat, np.uint64), lengths, weights)


def train_and_read(collection, values, batch):
    """The plan of a training batch, the state with its rows, and what a model sees."""
    plan = collection.plan(values, batch, train=True)
    state = collection.apply_fills(collection.init(), plan)
    return plan, state, run_plan(collection, state, plan, batch)


def assert_same_plan(a, b):
    assert (a.examples, a.groups, a.sequence) == (b.examples, b.groups, b.sequence)
    assert a.counters == b.counters
    assert a.arrays.keys() == b.arrays.keys()
    for name, array in a.arrays.items():
        np.testing.assert_array_equal(array, b.arrays[name], err_msg=name)
    assert len(a.fills) == len(b.fills)
    for x, y in zip(a.fills, b.fills, strict=True):
        np.testing.assert_array_equal(x.slots, y.slots)
        np.testing.assert_array_equal(x.words, y.words)


# Ids outside a fixed vocabulary.

BAD_IDS = [5, -1, 2**31, 2**32, 2**32 + 1, 2**53 + 1, 2**63 - 1, -(2**63)]


@pytest.mark.parametrize("train", [True, False])
def test_bad_ids_are_an_error(train):
    collection = make({"x": FeatureSpec(table(vocabulary=5))})
    message = (
        r"feature 'x': 8 ids outside the vocabulary \[0, 5\) of table 'item', the first"
        r" is 5. Enlarge `vocabulary`, or set `on_bad_id` of the feature to 'zero' or"
    )
    with pytest.raises(PlanError, match=message):
        collection.plan({"x": np.array([0, *BAD_IDS])}, 9, train=train)


@pytest.mark.parametrize("bad", BAD_IDS)
def test_each_bad_id_is_an_error(bad):
    collection = make({"x": FeatureSpec(table(vocabulary=5), "mean")})
    with pytest.raises(PlanError, match=rf"1 ids outside .* the first is {bad}\."):
        collection.plan({"x": bags([4], [0, bad])}, 2, train=True)


@pytest.mark.parametrize("mesh_shape", ["1x1", "2x4"])
def test_bad_ids_read_zeros_or_nothing(mesh_shape):
    spec = table(
        vocabulary=5, initializer=lambda key, shape, dtype: np.ones(shape, dtype)
    )
    features = {
        f"{combiner}/{bad}": FeatureSpec(spec, combiner, on_bad_id=bad)
        for combiner in ("mean", "none")
        for bad in ("zero", "drop")
    }
    features |= {
        f"one/{bad}": FeatureSpec(spec, on_bad_id=bad) for bad in ("zero", "drop")
    }
    collection = make(features, mesh_shape)
    value = bags([0, -1, 4], [5, 2**32], [2])
    values = {name: value for name in features if not name.startswith("one")}
    values |= {
        name: np.array([0, -1, 2]) for name in features if name.startswith("one")
    }
    plan, state, got = train_and_read(collection, values, 3)
    assert plan.counters["bad_ids"] == 4 * 3 + 2
    assert sorted(collection.keys("item").tolist()) == [0, 2, 4]
    assert plan.counters["inserted"] == 3
    np.testing.assert_allclose(got["mean/zero"][:, 0], [2 / 3, 0, 1], rtol=1e-6)
    np.testing.assert_array_equal(got["mean/drop"][:, 0], [1, 0, 1])
    np.testing.assert_array_equal(got["one/zero"][:, 0], [1, 0, 1])
    np.testing.assert_array_equal(got["one/drop"][:, 0], [1, 0, 1])
    zero, drop = got["none/zero"], got["none/drop"]
    yes, no = True, False
    np.testing.assert_array_equal(
        zero.mask[:, :3], [[yes] * 3, [yes, yes, no], [yes, no, no]]
    )
    np.testing.assert_array_equal(
        zero.values[:, :3, 0], [[1, 0, 1], [0, 0, 0], [1, 0, 0]]
    )
    np.testing.assert_array_equal(
        drop.mask[:, :3], [[yes, yes, no], [no] * 3, [yes, no, no]]
    )
    np.testing.assert_array_equal(
        drop.values[:, :3, 0], [[1, 1, 0], [0, 0, 0], [1, 0, 0]]
    )


def test_problems_of_all_tables_are_told_at_once():
    collection = make(
        {
            "x": FeatureSpec(table("a", vocabulary=5)),
            "y": FeatureSpec(table("b", capacity=1)),
            "z": FeatureSpec(table("c", vocabulary=2)),
        }
    )
    values = {"x": np.array([9, 9]), "y": np.array([1, 2]), "z": np.array([0, 1])}
    with pytest.raises(PlanError) as error:
        collection.plan(values, 2, train=True)
    lines = str(error.value).split("\n- ")
    assert lines[0] == ""
    assert lines[1].startswith("feature 'x': 2 ids outside the vocabulary [0, 5)")
    assert lines[2].startswith("table 'b' is full: 1 ids of this batch have no row")
    assert len(lines) == 3


# A full table.


def test_a_full_table_is_an_error():
    collection = make({"x": FeatureSpec(table(capacity=3))}, "4x2")
    collection.plan({"x": np.array([1, 2, 3, 1])}, 4, train=True)
    collection.plan({"x": np.array([3, 2, 1, 1])}, 4, train=True)
    message = (
        "table 'item' is full: 3 ids of this batch have no row and its `capacity` is 3."
        " Enlarge `capacity`, or set `on_full` of the table to 'reject'"
    )
    with pytest.raises(PlanError, match=message):
        collection.plan({"x": np.array([4, 1, 4, 5])}, 4, train=True)
    assert len(collection.keys("item")) == 0  # none of the plans has been applied


@pytest.mark.parametrize("mesh_shape", ["1x1", "4x2"])
def test_a_full_table_may_reject(mesh_shape):
    spec = table(capacity=3, on_full="reject")
    collection = make({"x": FeatureSpec(spec)}, mesh_shape)
    values = {"x": np.array([7, 7, 8, 9, 10, 7, 11, 10])}
    plan, state, got = train_and_read(collection, values, 8)
    assert plan.counters["rejected"] == 3
    assert plan.counters["inserted"] == 3
    assert sorted(collection.keys("item").tolist()) == [7, 8, 9]
    rows = collection.lookup_rows(state, "item", np.array([7, 8, 9, 10, 11]))
    np.testing.assert_array_equal(rows["found"], [True, True, True, False, False])
    assert rows["rows"][:3].all()
    at = np.array([0, 0, 1, 2, 3, 0, 4, 3])
    np.testing.assert_array_equal(got["x"], rows["rows"][at])
    again = collection.plan({"x": np.array([10, 9])}, 2, train=True)
    assert (again.counters["rejected"], again.counters["inserted"]) == (1, 0)
    unseen = collection.plan({"x": np.array([10, 9])}, 2, train=False)
    assert (unseen.counters["rejected"], unseen.counters["unseen"]) == (0, 1)


def test_the_capacity_is_reached_exactly():
    keys = wide_keys(1000)
    collection = make({"x": FeatureSpec(table(capacity=1000))}, "3x1")
    collection.plan({"x": keys}, 1000, train=True)
    with pytest.raises(PlanError, match="1 ids of this batch have no row"):
        collection.plan({"x": np.array([5])}, 1, train=True)
    assert collection.plan({"x": keys}, 1000, train=True).counters["inserted"] == 0


# Long sequences.

LONG = bags([1, 2, 3, 4, 5], [6], [], [7, 8, 9])


def test_long_sequences_are_an_error():
    collection = make({"x": FeatureSpec(table(), "none", max_length=4)})
    message = (
        "feature 'x' has 5 keys for example 0 and its `max_length` is 4. Enlarge it, or"
        " set `on_long` to 'first' or 'last'"
    )
    with pytest.raises(ValueError, match=message):
        collection.plan({"x": LONG}, 4, train=True)


@pytest.mark.parametrize(
    ("on_long", "kept"),
    [("first", [[1, 2], [6], [], [7, 8]]), ("last", [[4, 5], [6], [], [8, 9]])],
)
def test_long_sequences_may_be_cut(on_long, kept):
    spec = FeatureSpec(table(), "none", max_length=2, on_long=on_long)
    collection = make({"x": spec}, "2x4")
    plan, state, got = train_and_read(collection, {"x": LONG}, 4)
    assert (plan.counters["truncated"], plan.counters["ids"]) == (4, 5)
    assert sorted(collection.keys("item").tolist()) == sorted(sum(kept, []))
    assert got["x"].values.shape == (4, 2, 2)
    for example, keys in enumerate(kept):
        rows = collection.lookup_rows(state, "item", np.array(keys, np.int64))["rows"]
        n = len(keys)
        np.testing.assert_array_equal(got["x"].mask[example], np.arange(2) < n)
        np.testing.assert_array_equal(got["x"].values[example, :n], rows)
        assert not got["x"].values[example, n:].any()


@pytest.mark.parametrize("on_long", ["error", "first", "last"])
@pytest.mark.parametrize(
    "sequence", [[0, 0, 0, 7, 8], [7, 8, 0, 0, 0], [0, 7, 0, 0, 8]]
)
def test_padding_pushes_no_key_out_of_a_sequence(sequence, on_long):
    spec = FeatureSpec(table(), "none", max_length=2, on_long=on_long, padding_id=0)
    collection = make({"x": spec})
    plan, state, got = train_and_read(collection, {"x": bags(sequence, [0])}, 2)
    counters = {k: plan.counters[k] for k in ("ids", "padding_ids", "truncated")}
    assert counters == {"ids": 6, "padding_ids": 4, "truncated": 0}
    rows = collection.lookup_rows(state, "item", np.array([7, 8]))["rows"]
    np.testing.assert_array_equal(got["x"].mask, [[True, True], [False, False]])
    np.testing.assert_array_equal(got["x"].values, [rows, np.zeros((2, 2))])


def test_lengths_of_sequences_follow_the_longest_seen():
    collection = make({"x": FeatureSpec(table(), "none")})
    lengths = []
    for n in (3, 2, 5, 1):
        plan = collection.plan({"x": bags(range(n))}, 1, train=True)
        lengths.append(plan.groups[0].sequences[0].length)
    assert lengths == [3, 3, 5, 5]


# Padding ids.


@pytest.mark.parametrize("padding", [0, -1, 2**64 - 1, 2**32 + 5, -(2**63)])
def test_padding_reads_nothing(padding):
    spec = table()
    features = {
        "mean": FeatureSpec(spec, "mean", padding_id=padding),
        "sqrtn": FeatureSpec(spec, "sqrtn", padding_id=padding),
        "one": FeatureSpec(spec, padding_id=padding),
        "sequence": FeatureSpec(spec, "none", padding_id=padding),
    }
    collection = make(features)
    value = bags([3, padding], [padding, padding], [4])
    one = np.array([padding % 2**64, 3, 4], np.uint64)
    values = {"mean": value, "sqrtn": value, "one": one, "sequence": value}
    plan, state, got = train_and_read(collection, values, 3)
    assert plan.counters["padding_ids"] == 3 * 3 + 1
    assert sorted(collection.keys("item").tolist()) == [3, 4]
    three, four = collection.lookup_rows(state, "item", np.array([3, 4]))["rows"]
    none = np.zeros(2)
    np.testing.assert_array_equal(got["mean"], [three, none, four])
    np.testing.assert_array_equal(got["sqrtn"], [three, none, four])
    np.testing.assert_array_equal(got["one"], [none, three, four])
    np.testing.assert_array_equal(got["sequence"].mask[:, 0], [True, False, True])
    assert not got["sequence"].mask[:, 1:].any()
    np.testing.assert_array_equal(got["sequence"].values[:, 0], [three, none, four])


def test_every_key_is_legal_without_a_padding_id():
    keys = np.array([0, 2**64 - 1, 2**64 - 2, 2**64 - 3, 2**63], np.uint64)
    collection = make({"x": FeatureSpec(table())})
    plan, state, got = train_and_read(collection, {"x": keys}, 5)
    assert plan.counters["inserted"] == 5
    assert (np.abs(got["x"]).sum(1) > 0).all()
    assert set(collection.keys("item")) == set(keys)


def test_padding_may_lie_outside_the_vocabulary():
    spec = FeatureSpec(table(vocabulary=3), padding_id=-1)
    plan = make({"x": spec}).plan({"x": np.array([2, -1, 0])}, 3, train=True)
    assert plan.counters["padding_ids"] == 1
    assert plan.counters["bad_ids"] == 0


# What a refused batch leaves behind.

TWO = {
    "x": FeatureSpec(table("a", capacity=90), "mean"),
    "y": FeatureSpec(table("b", vocabulary=50)),
    "s": FeatureSpec(table("a", capacity=90), "none", max_length=9),
}


def two_batch(rng, n, *, x=60, y=50):
    value = Jagged(rng.integers(0, x, 2 * n), np.full(n, 2))
    return {"x": value, "y": rng.integers(0, y, n), "s": value}


@pytest.mark.parametrize("mesh_shape", ["1x1", "4x2"])
@pytest.mark.parametrize(
    "failure", ["bad_id", "full", "long", "missing", "float", "size"]
)
def test_a_refused_batch_changes_nothing(mesh_shape, failure):
    tried, twin = make(TWO, mesh_shape), make(TWO, mesh_shape)
    rng = np.random.default_rng(0)
    first = two_batch(rng, 16)
    assert_same_plan(
        tried.plan(first, 16, train=True), twin.plan(first, 16, train=True)
    )
    bad = two_batch(rng, 300)  # larger in all its parts, with many new keys
    if failure == "bad_id":
        bad["y"][250] = 50
    elif failure == "full":
        bad = two_batch(rng, 300, x=4000)
    elif failure == "long":
        bad["s"] = Jagged(np.arange(300 * 10), np.full(300, 10))
    elif failure == "missing":
        del bad["s"]
    elif failure == "float":
        bad["y"] = bad["y"].astype(np.float32)
    else:
        bad["y"] = bad["y"][:-1]
    for train in (True, False):
        if failure == "full" and not train:
            continue
        with pytest.raises((ValueError, TypeError)):
            tried.plan(bad, 300, train=train)
    for n in (8, 40):
        batch = two_batch(rng, n)
        for train in (False, True):
            assert_same_plan(
                tried.plan(batch, n, train=train), twin.plan(batch, n, train=train)
            )


def test_a_refused_first_batch_changes_nothing():
    tried, twin = make(TWO), make(TWO)
    rng = np.random.default_rng(0)
    with pytest.raises(PlanError):
        tried.plan(two_batch(rng, 16, y=999), 16, train=True)
    batch = two_batch(rng, 16)
    assert_same_plan(
        tried.plan(batch, 16, train=True), twin.plan(batch, 16, train=True)
    )


def test_evaluation_changes_nothing():
    tried, twin = make(TWO, "2x4"), make(TWO, "2x4")
    rng = np.random.default_rng(0)
    for n in (16, 8, 40):
        tried.plan(two_batch(rng, 30), 30, train=False)
        batch = two_batch(rng, n)
        assert_same_plan(
            tried.plan(batch, n, train=True), twin.plan(batch, n, train=True)
        )


# Batches that are not what the collection reads.


def test_missing_features_are_named():
    message = (
        r"the batch lacks the features \['y', 's'\]: the collection reads \['x', 'y',"
        r" 's'\], the batch has \['x'\]. Name them among `categorical=` or `bags=` of the"
        r" source, or leave them out of the collection$"
    )
    with pytest.raises(ValueError, match=message):
        make(TWO).plan({"x": np.array([1, 2])}, 2, train=True)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"y": np.array([1.0, 2.0])}, TypeError, "keys of `y` must be integers"),
        ({"y": np.array(["a", "b"])}, TypeError, "keys of `y` must be integers"),
        (
            {"y": np.array([[1], [2]])},
            ValueError,
            r"feature 'y' must have one key per example, shape \(2,\), got \(2, 1\)",
        ),
        ({"y": np.array([1, 2, 3])}, ValueError, r"shape \(2,\), got \(3,\)"),
        (
            {"x": Jagged(np.array([1]), np.array([1]))},
            ValueError,
            "feature 'x' must have 2 `lengths`, one per example, got 1",
        ),
        (
            {"s": Jagged(np.array([1]), np.array([1, 0]), np.array([0.5]))},
            ValueError,
            "feature 's' has combiner 'none' and cannot have weights",
        ),
    ],
)
def test_values_that_do_not_fit_are_refused(change, error, message):
    values = {name: np.array([1, 2]) for name in TWO} | change
    with pytest.raises(error, match=message):
        make(TWO).plan(values, 2, train=True)


# The order of plans.


def test_plans_are_applied_once_and_in_order():
    collection = make({"x": FeatureSpec(table())})
    first, second = (
        collection.plan({"x": np.arange(n)}, n, train=True) for n in (2, 4)
    )
    evaluation = collection.plan({"x": np.arange(3)}, 3, train=False)
    state = collection.apply_fills(collection.init(), second)
    for plan in (second, first):
        message = f"training plan {plan.sequence} cannot be carried out after plan 2"
        with pytest.raises(RuntimeError, match=message):
            collection.apply_fills(state, plan)
    with pytest.raises(RuntimeError, match=r"prepared for evaluation \(train=False\)"):
        collection.apply_fills(state, evaluation)


def test_rows_of_abandoned_plans_are_made():
    """A loop that is left early has planned batches that nobody steps on."""
    collection, twin = (
        make({"x": FeatureSpec(table())}),
        make({"x": FeatureSpec(table())}),
    )
    keys = wide_keys(2000)
    collection.plan({"x": keys}, 2000, train=True)
    plan = collection.plan({"x": keys[:5]}, 5, train=True)
    assert plan.counters["inserted"] == 0
    state = collection.apply_fills(collection.init(), plan)
    _, other, _ = train_and_read(twin, {"x": keys}, 2000)
    got = collection.lookup_rows(state, "item", keys)
    assert got["found"].all()
    np.testing.assert_array_equal(
        got["rows"], twin.lookup_rows(other, "item", keys)["rows"]
    )


@pytest.mark.parametrize("mesh_shape", ["1x1", "8x1"])
def test_rows_that_are_planned_but_not_made_are_not_seen(mesh_shape):
    """Neither evaluation nor lookup_rows looks at slots that hold no row yet."""
    collection = make({"x": FeatureSpec(table(), "mean")}, mesh_shape)
    keys = wide_keys(64)
    plan = collection.plan({"x": bags(keys[:8].tolist())}, 1, train=True)
    empty = jax.tree.map(lambda x: x + np.nan, collection.init())
    state = collection.apply_fills(empty, plan)
    before = collection.lookup_rows(state, "item", keys)
    collection.plan({"x": bags(keys.tolist())}, 1, train=True)  # prefetched
    after = collection.lookup_rows(state, "item", keys)
    np.testing.assert_array_equal(after["found"], np.arange(64) < 8)
    np.testing.assert_array_equal(after["rows"], before["rows"])
    assert set(collection.keys("item")) == set(keys[:8])
    evaluation = collection.plan(
        {"x": bags(keys[[3, 8, 63, 63]].tolist(), keys[8:9].tolist())}, 2, train=False
    )
    assert evaluation.counters["unseen"] == 4
    got = run_plan(collection, state, evaluation, 2)
    np.testing.assert_allclose(
        got["x"], [before["rows"][3] / 4, np.zeros(2)], rtol=1e-6
    )


@pytest.mark.parametrize("mesh_shape", ["1x1", "8x1"])
def test_rows_beyond_the_slab_are_not_read(mesh_shape):
    """A plan may give out more slots than the slab has until it is applied."""
    collection = make({"x": FeatureSpec(table())}, mesh_shape, initial_rows=2)
    keys = wide_keys(64)
    state = collection.init()
    collection.plan({"x": keys}, 64, train=True)
    assert not collection.lookup_rows(state, "item", keys)["found"].any()
    assert not embed_batch(collection, state, {"x": keys}, 64)["x"].any()


def test_evaluation_inserts_nothing_and_unseen_keys_read_zeros(mesh):
    collection = EmbeddingCollection({"x": FeatureSpec(table())}, mesh=mesh)
    keys = wide_keys(20)
    empty = embed_batch(collection, collection.init(), {"x": keys}, 20)
    assert not empty["x"].any()
    plan = collection.plan({"x": keys[::2]}, 10, train=True)
    state = collection.apply_fills(collection.init(), plan)
    evaluation = collection.plan({"x": keys}, 20, train=False)
    assert evaluation.counters["unseen"] == 10
    assert evaluation.counters["inserted"] == 0
    assert evaluation.fills == ()
    got = run_plan(collection, state, evaluation, 20)["x"]
    assert not got[1::2].any()
    rows = collection.lookup_rows(state, "item", keys)["rows"]
    np.testing.assert_array_equal(got, rows)
    assert set(collection.keys("item")) == set(keys[::2])


def test_threads_change_no_plan():
    features = {f"x{i}": FeatureSpec(table(f"t{i}"), "mean") for i in range(5)}
    alone, together = make(features, "4x2"), make(features, "4x2", threads=3)
    rng = np.random.default_rng(0)
    for _ in range(3):
        values = {
            name: Jagged(rng.integers(0, 500, 400), np.full(100, 4))
            for name in features
        }
        assert_same_plan(
            alone.plan(values, 100, train=True), together.plan(values, 100, train=True)
        )
    del together
    gc.collect()  # ends its threads


def test_an_index_may_grow_in_the_middle_of_a_batch(monkeypatch):
    plans = []
    for small, room in ((growth.SMALL, 100_000), (growth.SMALL, 0), (0, 0)):
        monkeypatch.setattr(growth, "SMALL", small)
        collection = make({"x": FeatureSpec(table()), "y": FeatureSpec(table())}, "2x4")
        index = collection.planner.tables[0][0].index
        index.reserve(room)
        homes = [index.homes]
        rng = np.random.default_rng(0)
        plans.append([])
        for _ in range(4):
            values = {n: rng.integers(0, 9000, 3000) for n in ("x", "y")}
            plans[-1].append(collection.plan(values, 3000, train=True))
            homes.append(index.homes)
        assert (homes[0] < homes[1] < homes[-1]) == (room == 0)
    for never, at_once, in_steps in zip(*plans, strict=True):
        assert_same_plan(never, at_once)
        assert_same_plan(never, in_steps)


def test_counters_of_a_batch():
    spec = table(vocabulary=10, initializer=zeros())
    features = {
        "x": FeatureSpec(spec, "mean", padding_id=9, on_bad_id="zero"),
        "y": FeatureSpec(spec),
    }
    collection = make(features, "2x1")
    values = {"x": bags([1, 1, 9], [2], [], [10, 1]), "y": np.array([1, 2, 3, 1])}
    counters = collection.plan(values, 4, train=True).counters
    expected = {
        "ids": 10,
        "unique_ids": 4,  # 1, 2 on the first device; 3, 1 on the second
        "inserted": 3,
        "unseen": 0,
        "rejected": 0,
        "bad_ids": 1,
        "padding_ids": 1,
        "truncated": 0,
    }
    assert {name: counters[name] for name in expected} == expected
    assert 1.0 <= counters["exchange_imbalance"] <= 2.0
    assert counters["padding_rows"] == 2 * 64 - 3


def test_the_batches_of_a_window_share_its_time():
    collection = make({"x": FeatureSpec(table())})
    began = time.perf_counter()
    plans = list(collection.plan_window([({"x": np.arange(n)}, n) for n in (8, 3)]))
    passed = time.perf_counter() - began
    assert plans[0].seconds == plans[1].seconds > 0
    assert plans[0].seconds + plans[1].seconds < passed
    assert collection.plan({"x": np.arange(5)}, 5, train=False).seconds > 0


@pytest.mark.parametrize("placement", ["row_wise", "data_parallel"])
def test_rows_of_plans_that_are_not_applied_are_still_coming(placement):
    spec = table(placement=placement)
    collection = make({"x": FeatureSpec(spec)}, "2x1")
    state = collection.init()
    first = collection.plan({"x": np.arange(700)}, 700, train=True)
    collection.plan({"x": np.arange(600, 1000)}, 400, train=True)
    [stats] = collection.stats().values()
    assert (stats["rows"], stats["coming_rows"]) == (1000, 1000)
    collection.apply_fills(state, first)
    [stats] = collection.stats().values()
    assert (stats["rows"], stats["coming_rows"]) == (1000, 300)
    assert len(collection.keys(spec.name)) == 700


def test_keys_of_features_that_nobody_reads_are_counted():
    collection = make({"item_id": FeatureSpec(table())})
    values = {
        "item_id": np.array([1, 2]),
        "a": np.array([3, 4]),
        "b": bags([5], [6, 7]),
    }
    assert collection.plan(values, 2, train=True).counters["unused_ids"] == 5
    assert (
        collection.plan({"item_id": [1, 2]}, 2, train=True).counters["unused_ids"] == 0
    )
