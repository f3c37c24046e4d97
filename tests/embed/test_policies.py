"""Admission and eviction: who has a row follows a model in plain Python, and where rows
lie changes no bit of it."""

import collections
import dataclasses
import re

import numpy as np
import pytest

from shardjax import train
from shardjax.data import Batch
from shardjax.embed import (
    LFU,
    LRU,
    TTL,
    Always,
    EmbeddingCollection,
    FeatureSpec,
    MinCount,
    Never,
    PlanError,
    Probability,
    ShowClick,
    Storage,
    TableSpec,
    uniform,
)
from shardjax.embed.index import mix64
from shardjax.mesh import make_mesh
from tests.embed.test_tiers import KEYS, OPTIMIZERS, Run, assert_same, batches

POLICIES = {
    "ttl": {"evict": TTL(steps=3, every=5)},
    "lru": {"evict": LRU(rows=60, every=4)},
    "lfu": {"evict": LFU(rows=60, every=4)},
    "show_click": {"evict": ShowClick(0.9, 0.3, every=6)},
    "count": {"admit": MinCount(3)},
    "count, ttl, lfu": {
        "admit": MinCount(2),
        "evict": (TTL(steps=9, every=3), LFU(rows=40, every=6)),
    },
    "chance, lru, show_click": {
        "admit": Probability(0.5),
        "evict": (LRU(rows=80, every=5), ShowClick(0.8, 0.2, every=7)),
    },
}
STORAGES = {
    "devices": None,
    "RAM": {"device_rows": 320},
    "disk": {"device_rows": 320, "host_bytes": "1KB"},
}


class Model:
    """Which keys have a row, and what is known of each, said as plainly as possible."""

    def __init__(self, spec: TableSpec, salt: int):
        self.spec = spec
        self.salt = salt
        self.rows: dict[int, list[int]] = {}  # key -> [last step, tally]
        self.counts: collections.Counter = collections.Counter()
        self.step = 0
        self.evicted: list[int] = []
        self.refused = 0

    def batch(self, keys, clicks):
        """Takes the keys of all ids of a batch, and the label of each one's example."""
        self.step += 1
        due = [
            p
            for p in self.spec.evictions
            if self.step > 1 and p.every and (self.step - 1) % p.every == 0
        ]
        self.evict(due)
        occurs = collections.Counter(keys)
        for key in occurs:
            if key not in self.rows and self.admits(key, occurs[key]):
                self.rows[key] = [0, 0]
        self.refused += sum(n for key, n in occurs.items() if key not in self.rows)
        policy = self.spec.show_click
        for key in occurs:
            if key in self.rows:
                self.rows[key][0] = self.step
                self.rows[key][1] += policy is None
        for key, click in zip(keys, clicks, strict=True):
            if key in self.rows and policy is not None:
                weight = policy.click_weight if click else policy.show_weight
                self.rows[key][1] += round(4096 * weight)

    def admits(self, key, n):
        if isinstance(self.spec.admit, MinCount):
            self.counts[key] += n
            if self.counts[key] < self.spec.admit.count:
                return False
            del self.counts[key]
        return True

    def evict(self, policies):
        for p in policies:
            if isinstance(p, ShowClick):
                for known in self.rows.values():
                    known[1] = int(known[1] * p.decay)
        for p in policies:
            if isinstance(p, TTL):
                gone = [k for k, x in self.rows.items() if self.step - x[0] > p.steps]
            elif isinstance(p, ShowClick):
                gone = [k for k, x in self.rows.items() if x[1] / 4096 < p.threshold]
            else:
                at = 0 if isinstance(p, LRU) else 1
                order = sorted(
                    self.rows, key=lambda k: (self.rows[k][at], hashed(k, self.salt))
                )
                gone = order[: max(len(order) - p.rows, 0)]
            self.evicted += gone
            for key in gone:
                del self.rows[key]


def salt_of(collection, table="item"):
    for group in collection.groups:
        for t in group.tables:
            if t.spec.name == table:
                return int(t.salt)
    raise KeyError(table)


def hashed(key, salt):
    return int(mix64(np.uint64((key + salt) % 2**64)))


def bag_of(batch: Batch):
    """The ids of a batch's bags, and the label of each one's example."""
    bag = batch.jagged["bag"]
    return bag.values.tolist(), np.repeat(batch.labels, bag.lengths).tolist()


def storage_of(name, tmp_path):
    options = STORAGES[name]
    if options is None:
        return None
    disk = tmp_path / "rows" if name == "disk" else None
    return Storage(**options, disk=disk)


@pytest.mark.parametrize("policy", [p for p in POLICIES if "chance" not in p])
@pytest.mark.parametrize("storage", list(STORAGES))
def test_who_has_a_row_follows_the_model(policy, storage, tmp_path):
    run = Run("4x2", "sgd", storage_of(storage, tmp_path), 3, **POLICIES[policy])
    spec = run.features["bag"].table
    model = Model(spec, salt_of(run.collection))
    made = batches(40)
    for start in range(0, len(made), 3):
        run.train(made[start : start + 3])
        for batch in made[start : start + 3]:
            model.batch(*bag_of(batch))
        assert set(run.collection.keys("item").tolist()) == set(model.rows)
    assert (run.counters.get("disk_hits", 0) > 0) == (storage == "disk")
    assert run.counters["evicted_rows"] == len(model.evicted)
    assert run.counters["refused"] == model.refused
    assert (model.evicted != []) == ("evict" in POLICIES[policy])
    assert (model.refused > 0) == ("admit" in POLICIES[policy])
    users = len(run.collection.keys("user"))
    rows = sum(s["rows"] for s in run.collection.stats().values())
    assert rows == len(model.rows) + users
    run.collection.close()


def keys_of(collection):
    """How many keys of the two tables have a row now, by `stats`."""
    stats = collection.stats().values()
    return sum(s["rows"] - s["coming_rows"] + s["leaving_rows"] for s in stats)


@pytest.mark.parametrize(
    ("mesh", "policy"),
    [*(("4x2", p) for p in POLICIES), ("1x1", "count, ttl, lfu"), ("8x1", "lru")],
)
def test_policies_act_alike_wherever_rows_lie_and_however_far_planning_is_ahead(
    mesh, policy, tmp_path
):
    made, probe = batches(24), batches(1, seed=9)[0]
    seen = []
    plain = Run(mesh, "adam", **POLICIES[policy])
    for batch in made:
        plain.train([batch])
        keys = [len(plain.collection.keys(t)) for t in ("user", "item")]
        seen.append((*plain.predict(probe), sum(keys)))
    for number, (name, window) in enumerate([("RAM", 7), ("disk", 3)]):
        path = tmp_path / str(number)
        run = Run(mesh, "adam", storage_of(name, path), window, **POLICIES[policy])
        step = 0
        for start in range(0, len(made), window):
            part = made[start : start + window]
            for batch in list(train.prepare_window(run.collection, part)):
                run.take(batch)
                predictions, unseen = run.predict(probe)
                np.testing.assert_array_equal(predictions, seen[step][0])
                assert keys_of(run.collection) == seen[step][2]
                assert unseen == seen[step][1]
                step += 1
        assert_same(plain, run)
        for counter in ("evicted_rows", "refused", "forgotten_candidates", "inserted"):
            assert run.counters[counter] == plain.counters[counter], counter
        run.collection.close()


@pytest.mark.parametrize("storage", list(STORAGES))
def test_rows_that_leave_are_handed_over_as_they_were(storage, tmp_path):
    handed = []

    def take(table, keys, rows, row_state):
        assert table == "item"
        order = np.argsort(keys)
        handed.append((keys[order], rows[order], [x[order] for x in row_state]))

    policies = {"evict": (TTL(2, every=4), LFU(rows=50, every=8)), "on_evict": take}
    run = Run("4x2", "adam", storage_of(storage, tmp_path), 1, **policies)
    spec = run.features["bag"].table
    model = Model(spec, salt_of(run.collection))
    for batch in batches(25):
        before = run.collection.lookup_rows(
            run.state.tables, "item", np.arange(KEYS, dtype=np.uint64)
        )
        handed.clear()
        model.evicted.clear()
        run.train([batch])
        model.batch(*bag_of(batch))
        keys = np.concatenate([np.zeros(0, np.uint64), *(k for k, *_ in handed)])
        assert sorted(keys.tolist()) == sorted(model.evicted)
        for keys, rows, row_state in handed:
            at = keys.astype(np.int64)
            assert before["found"][at].all()
            np.testing.assert_array_equal(rows, before["rows"][at])
            for x, y in zip(row_state, before["row_state"], strict=True):
                np.testing.assert_array_equal(x, y[at])
    assert run.counters["evicted_rows"] > 0
    run.collection.close()


def collection_of(storage=None, mesh="1x1", **more):
    item = TableSpec("item", 4, OPTIMIZERS["adam"], **more)
    return EmbeddingCollection(
        {"item": FeatureSpec(item)}, mesh=make_mesh(mesh), storage=storage
    )


def train_on(collection, state, *batches, clicks=None):
    """Brings the rows of batches, one after the other; returns counters of the last."""
    counters = {}
    for keys in batches:
        keys = np.asarray(keys)
        labels = None if clicks is None else np.broadcast_to(clicks, len(keys))
        plan = collection.plan({"item": keys}, len(keys), labels, train=True)
        state = collection.apply_fills(state, plan)
        counters = plan.counters
    return state, counters


def test_a_key_that_comes_back_starts_anew_in_a_slot_that_is_reset():
    keys = np.arange(8)
    collection = collection_of(evict=TTL(1, every=3), initializer=uniform(1.0))
    state, _ = train_on(collection, collection.init(), keys)
    first = collection.lookup_rows(state, "item", keys)
    slab = state[0]
    dirty = [x + 1 for x in (slab.rows, *slab.row_state)]  # all slots, as if trained
    state = (type(slab)(dirty[0], dirty[1:], slab.shared),)
    others = np.arange(100, 108)
    state, _ = train_on(collection, state, others[:4], others[:4])
    assert collection.lookup_rows(state, "item", keys)["found"].all()
    state, counters = train_on(collection, state, others)  # step 4: 1 was 3 steps ago
    assert counters["evicted_rows"] == 8
    assert not collection.lookup_rows(state, "item", keys)["found"].any()
    # their slots have been given to others, which start as those do everywhere
    fresh = collection_of(evict=TTL(1, every=3), initializer=uniform(1.0))
    expected, _ = train_on(fresh, fresh.init(), others)
    ours = collection.lookup_rows(state, "item", others[4:])
    theirs = fresh.lookup_rows(expected, "item", others[4:])
    np.testing.assert_array_equal(ours["rows"], theirs["rows"])
    for x, y in zip(ours["row_state"], theirs["row_state"], strict=True):
        np.testing.assert_array_equal(x, y)
    state, counters = train_on(collection, state, keys)
    assert counters["inserted"] == 8
    again = collection.lookup_rows(state, "item", keys)
    np.testing.assert_array_equal(again["rows"], first["rows"])
    assert collection.stats()["group0"]["rows"] == 16
    assert collection.slots(state, 0) == 1024  # freed slots are used again


def test_a_key_that_comes_back_does_not_inherit_its_count():
    """RecSys-style caches have let a reclaimed slot keep the old key's frequency."""
    collection = collection_of(evict=LFU(rows=1, every=101))
    state, _ = train_on(collection, collection.init(), *[[7]] * 100, [8, 8, 9])
    state, counters = train_on(collection, state, [8])  # step 102: 7 was used most
    assert counters["evicted_rows"] == 2 and counters["inserted"] == 1
    assert collection.keys("item").tolist() == [7, 8] or set(
        collection.keys("item").tolist()
    ) == {7, 8}
    tallies = collection.planner.tiers[0].residents.slots
    known = tallies[tallies["last_step"] >= 0]
    assert sorted(known["tally"].tolist()) == [1, 100]


@pytest.mark.parametrize(("age", "stays"), [(3, True), (4, False)])
def test_a_row_that_was_used_exactly_as_long_ago_as_permitted_stays(age, stays):
    collection = collection_of(evict=TTL(steps=3, every=1))
    state, _ = train_on(collection, collection.init(), [1], *[[2]] * age)
    assert collection.lookup_rows(state, "item", np.array([1]))["found"][0] == stays


@pytest.mark.parametrize(("score", "stays"), [(0.5, True), (0.49, False)])
def test_a_score_that_equals_the_threshold_stays(score, stays):
    policy = ShowClick(decay=1.0, threshold=0.5, show_weight=0.0)
    collection = collection_of(evict=policy)
    state, _ = train_on(collection, collection.init(), [1], clicks=score)
    assert collection.shrink() == {"item": 0 if stays else 1}
    state, counters = train_on(collection, state, [2], clicks=1)
    assert counters["evicted_rows"] == (0 if stays else 1)
    assert collection.lookup_rows(state, "item", np.array([1]))["found"][0] == stays


@pytest.mark.parametrize("storage", list(STORAGES))
def test_scores_decay_with_each_shrink_wherever_rows_lie(storage, tmp_path):
    policy = ShowClick(decay=0.5, threshold=0.25, show_weight=0.0, click_weight=1.0)
    run = Run("1x1", "sgd", storage_of(storage, tmp_path), 5, evict=policy)
    model = Model(run.features["bag"].table, salt_of(run.collection))
    for day in range(6):
        made = batches(5, seed=day)
        run.train(made)
        for batch in made:
            model.batch(*bag_of(batch))
        before = len(model.rows)
        model.evict([policy])
        assert run.collection.shrink() == {"item": before - len(model.rows)}
        # until a step has been made without them they are there
        assert len(run.collection.keys("item")) == before
    run.train(batches(1, seed=99))
    model.batch(*bag_of(batches(1, seed=99)[0]))
    assert set(run.collection.keys("item").tolist()) == set(model.rows)
    assert len(model.evicted) > 50
    run.collection.close()


def test_scores_stop_at_their_bound():
    policy = ShowClick(decay=1.0, threshold=0, click_weight=1000)
    collection = collection_of(evict=policy)
    state, _ = train_on(collection, collection.init(), *[[1] * 400] * 3, clicks=1)
    assert collection.planner.tiers[0].residents.slots["tally"][0, 0] == 2**32 - 1


def test_occurrences_within_a_batch_count_one_by_one():
    collection = collection_of(admit=MinCount(3))
    state, counters = train_on(collection, collection.init(), [1, 1, 2, 2, 2])
    assert counters["refused"] == 2 and counters["inserted"] == 1
    assert collection.keys("item").tolist() == [2]
    state, counters = train_on(collection, state, [1])
    assert counters["refused"] == 0 and counters["inserted"] == 1
    assert collection.stats()["group0"]["candidates"] == 0


def test_a_key_without_a_row_reads_zeros_and_trains_nothing():
    run = Run("1x1", "sgd", admit=MinCount(10**6))
    made = batches(3)
    run.train(made)
    assert len(run.collection.keys("item")) == 0
    assert run.counters["refused"] == sum(len(b.jagged["bag"].values) for b in made)
    plain = Run("1x1", "sgd")
    user, _ = plain.predict(made[0])
    assert np.isfinite(run.losses).all()
    shape = run.state.tables[0].rows.shape
    assert shape == plain.state.tables[0].rows.shape  # no slot was taken for them


def test_a_batch_that_cannot_be_planned_counts_for_nothing():
    item = TableSpec("item", 4, admit=MinCount(2))
    small = TableSpec("small", 4, vocabulary=3)
    features = {"item": FeatureSpec(item), "small": FeatureSpec(small)}
    collection = EmbeddingCollection(features, mesh=make_mesh("1x1"))
    bad = {"item": np.array([5]), "small": np.array([9])}
    for _ in range(3):
        with pytest.raises(PlanError, match="ids outside the vocabulary"):
            collection.plan(bad, 1, train=True)
    good = {"item": np.array([5]), "small": np.array([1])}
    assert collection.plan(good, 1, train=True).counters["refused"] == 1
    assert collection.plan(good, 1, train=True).counters["refused"] == 0


def test_the_least_frequent_candidates_are_forgotten_when_there_are_too_many():
    collection = collection_of(admit=MinCount(3, most_keys=10))
    state, counters = train_on(collection, collection.init(), [1, 1, 2, 2])
    assert counters["forgotten_candidates"] == 0
    state, counters = train_on(collection, state, np.arange(100, 109))
    assert counters["forgotten_candidates"] == 6  # 11 candidates, 5 stay
    assert collection.stats()["group0"]["candidates"] == 5
    state, counters = train_on(collection, state, [1, 2])  # were kept: third time
    assert counters["refused"] == 0


def test_a_counting_filter_admits_late_never_and_early_rarely():
    rate, n = 0.02, 20_000
    policy = MinCount(2, most_keys=n, false_positive_rate=rate)
    collection = collection_of(admit=policy)
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**63, (10, n // 10))
    state, early = collection.init(), 0
    for part in keys:
        state, counters = train_on(collection, state, part)
        early += counters["inserted"]
    assert 0 < early < rate * n
    state, counters = train_on(collection, state, keys[0])
    assert counters["refused"] == 0  # all had occurred before


def test_a_counting_filter_says_when_it_has_seen_too_much(caplog):
    policy = MinCount(2, most_keys=100, false_positive_rate=0.01)
    collection = collection_of(admit=policy)
    state, _ = train_on(collection, collection.init(), np.arange(90))
    assert not caplog.records
    state, _ = train_on(collection, state, np.arange(200, 290))
    [record] = caplog.records
    assert "made for most_keys=100 has seen more" in record.getMessage()


@pytest.mark.parametrize("p", [0.1, 1.0])
def test_chance_admits_its_share_of_occurrences(p):
    collection = collection_of(admit=Probability(p))
    n = 20_000
    state, counters = train_on(collection, collection.init(), np.arange(n))
    assert abs(counters["inserted"] - p * n) <= 4 * np.sqrt(n * p * (1 - p))
    assert counters["refused"] == n - counters["inserted"]
    refused = np.setdiff1d(np.arange(n), collection.keys("item"))
    if p < 1:  # twice in a batch: two chances; and the same keys get another one
        twice = np.concatenate([refused, refused])
        state, counters = train_on(collection, state, twice)
        expected = len(refused) * (1 - (1 - p) ** 2)
        assert abs(counters["inserted"] - expected) < 5 * np.sqrt(expected)


def test_loaded_rows_need_no_admission():
    collection = collection_of(admit=MinCount(5))
    rows = np.arange(8.0).reshape(2, 4)
    state = collection.load_rows(collection.init(), "item", np.array([3, 4]), rows)
    found = collection.lookup_rows(state, "item", np.array([3, 4]))
    np.testing.assert_array_equal(found["rows"], rows)


def test_evicted_rows_make_room_in_a_full_table():
    collection = collection_of(capacity=4, evict=TTL(1, every=2))
    state, _ = train_on(collection, collection.init(), [1, 2, 3, 4], [1])
    with pytest.raises(PlanError, match="table 'item' is full"):
        collection.plan({"item": np.arange(10, 15)}, 5, train=True)
    state, counters = train_on(collection, state, [1, 11, 12, 13])  # 2, 3, 4 have gone
    assert counters["inserted"] == 3
    assert sorted(collection.keys("item").tolist()) == [1, 11, 12, 13]


def test_keys_at_the_edges_of_64_bits_leave_and_come_back(tmp_path):
    keys = np.array([0, 2**31, 2**32 + 1, 2**53 + 1, 2**63 - 1, 2**64 - 1], np.uint64)
    handed = []
    policies = {
        "evict": TTL(1, every=3),
        "on_evict": lambda table, keys, rows, state: handed.extend(keys.tolist()),
    }
    storage = Storage(device_rows=8, host_bytes="16KB", disk=tmp_path / "rows")
    collection = collection_of(storage, **policies)
    state, _ = train_on(collection, collection.init(), keys, [5], [6], [7])
    assert sorted(handed) == sorted([5, *keys.tolist()])
    state, counters = train_on(collection, state, keys)
    assert counters["inserted"] == 6
    collection.close()


def test_labels_are_asked_for_where_clicks_are_counted():
    collection = collection_of(evict=ShowClick())
    with pytest.raises(PlanError, match="'item' has the policy ShowClick.*2 examples"):
        collection.plan({"item": np.array([1, 2])}, 2, train=True)
    with pytest.raises(PlanError, match=r"2 labels in \[0, 1\], got shape \(3,\)"):
        collection.plan({"item": np.array([1, 2])}, 2, np.zeros(3), train=True)
    labels = np.array([1.0, np.nan])
    with pytest.raises(PlanError, match=r"2 labels in \[0, 1\], got nan"):
        collection.plan({"item": np.array([1, 2])}, 2, labels, train=True)
    collection.plan({"item": np.array([1, 2])}, 2, train=False)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: MinCount(0), ValueError, "`count` of MinCount must be in [1, 2147483646]"),
        (lambda: MinCount(2.0), TypeError, "`count` of MinCount must be an integer, got 2.0"),
        (lambda: MinCount(300, 10, 0.1), ValueError, "`count` of MinCount must be in [1, 255]"),
        (lambda: MinCount(2, 10, 1.0), ValueError, "must be between 0 and 1, got 1.0"),
        (lambda: MinCount(2, 0), ValueError, "`most_keys` of MinCount must be in"),
        (lambda: Probability(0), ValueError, "`p` of Probability must be in (0, 1], got 0"),
        (lambda: Probability("1"), TypeError, "`p` of Probability must be a number, got '1'"),
        (lambda: TTL(0), ValueError, "`steps` of TTL must be in"),
        (lambda: TTL(5, every=0), ValueError, "`every` of TTL must be in"),
        (lambda: LRU(True), TypeError, "`rows` of LRU must be an integer, got True"),
        (lambda: LFU(9, every=None), TypeError, "`every` of LFU must be an integer"),
        (lambda: ShowClick(1.5), ValueError, "`decay` of ShowClick must be in (0, 1]"),
        (lambda: ShowClick(click_weight=-1), ValueError, "`click_weight` of ShowClick"),
        (lambda: TableSpec("t", 4, admit=2), TypeError, "`admit` of table 't' must be"),
        (lambda: TableSpec("t", 4, evict="lru"), TypeError, "`evict` of table 't' must be"),
        (
            lambda: TableSpec("t", 4, evict=(TTL(3), TTL(4))),
            ValueError,
            "`evict` of table 't' has one kind of policy twice: ['TTL', 'TTL']",
        ),
        (
            lambda: TableSpec("t", 4, evict=TTL(3), on_evict=5),
            TypeError,
            "`on_evict` of table 't' must be a function",
        ),
        (
            lambda: TableSpec("t", 4, evict=Never(), on_evict=print),
            ValueError,
            "`on_evict` of table 't' is never called",
        ),
    ],
)  # fmt: skip
def test_policies_that_make_no_sense_are_errors(make, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make()


def test_a_policy_that_asks_for_nothing_costs_nothing():
    spec = TableSpec("t", 4, admit=Always(), evict=(Never(),))
    assert spec.evictions == ()
    collection = collection_of(admit=MinCount(1))
    assert not collection.planner.tiers[0].residents.tracked
    assert collection.planner.tables[0][0].gate.is_open


@pytest.mark.parametrize(
    ("policy", "gone_at"), [(TTL(3, every=1), 5), (LRU(rows=2, every=1), 4)]
)
def test_evaluation_keeps_no_row_alive(policy, gone_at):
    collection = collection_of(evict=policy)
    state = collection.init()
    for step in range(1, 7):  # key 0 is trained at step 1 alone, and evaluated always
        state, _ = train_on(collection, state, [step - 1])
        plan = collection.plan({"item": np.zeros(3, np.int64)}, 3, train=False)
        assert plan.counters["unseen"] == (3 if step >= gone_at else 0), step


@pytest.mark.parametrize("storage", list(STORAGES))
def test_rows_about_to_leave_are_read_by_all_until_they_are_gone(storage, tmp_path):
    more = storage_of(storage, tmp_path)
    collection = collection_of(more, evict=LRU(rows=2, every=1000))
    state, _ = train_on(collection, collection.init(), np.arange(4), np.arange(4, 9))
    assert collection.shrink() == {"item": 7}
    keys = np.arange(9)
    found = collection.lookup_rows(state, "item", keys)
    assert found["found"].all() and found["rows"].any(1).all()
    plan = collection.plan({"item": keys}, 9, train=False)
    assert plan.counters["unseen"] == 0
    exported = np.concatenate([p.keys for p in collection.export(state, "item")])
    assert sorted(exported.tolist()) == keys.tolist()
    state, _ = train_on(collection, state, [20])
    assert len(collection.keys("item")) == 3
    collection.close()


def test_rows_that_come_and_leave_in_plans_that_wait_are_not_there_yet():
    collection = collection_of(evict=TTL(1, every=1))
    state, _ = train_on(collection, collection.init(), [100])
    for key in range(1, 6):
        collection.plan({"item": np.array([key])}, 1, train=True)
    assert collection.keys("item").tolist() == [100]
    assert [p.keys.tolist() for p in collection.export(state, "item")] == [[100]]
    assert keys_of(collection) == 1


def test_an_evaluation_batch_is_refused_once_a_row_came_back_to_a_free_slot():
    collection = collection_of(Storage(device_rows=4), evict=LRU(rows=5, every=4))
    state, _ = train_on(collection, collection.init(), [1, 2, 3, 4], [5, 6, 7, 8])
    state, _ = train_on(collection, state, [1, 2], [3, 4])
    state, counters = train_on(collection, state, [8])  # 5, 6 and 7 have left
    assert counters["evicted_rows"] == 3
    plan = collection.plan({"item": np.arange(1, 5)}, 4, train=False)
    train_on(collection, state, [1], [2], [3], [4])  # from RAM, to slots that are free
    with pytest.raises(RuntimeError, match="was prepared before training went on"):
        collection.planner.check_current(plan)


def test_loaded_rows_that_find_no_place_are_an_error():
    spec = TableSpec("t", 4, capacity=2, on_full="reject")
    padded = {"f": FeatureSpec(spec, padding_id=0)}
    collection = EmbeddingCollection(padded, mesh=make_mesh("1x1"))
    state = collection.init()
    with pytest.raises(PlanError, match="key 0 cannot be loaded into table 't': it is"):
        collection.load_rows(state, "t", np.array([0, 1]), np.ones((2, 4)))
    with pytest.raises(PlanError, match="table 't' is full: 3 rows to load have 3 new"):
        collection.load_rows(state, "t", np.array([2, 3, 4]), np.ones((3, 4)))
    fixed = TableSpec("t", 4, vocabulary=4)
    features = {"f": FeatureSpec(fixed, on_bad_id="zero")}
    collection = EmbeddingCollection(features, mesh=make_mesh("1x1"))
    with pytest.raises(
        PlanError, match=r"in the vocabulary \[0, 4\) of table 't', got 9"
    ):
        collection.load_rows(collection.init(), "t", np.array([2, 9]), np.ones((2, 4)))


def test_a_loaded_key_is_no_candidate_any_more():
    collection = collection_of(admit=MinCount(3))
    state, _ = train_on(collection, collection.init(), [1, 1])
    assert collection.stats()["group0"]["candidates"] == 1
    collection.load_rows(state, "item", [1], np.ones((1, 4)))
    assert collection.stats()["group0"]["candidates"] == 0


def test_examples_without_weight_may_have_any_label_where_clicks_are_counted():
    run = Run("1x1", "sgd", evict=ShowClick())
    made = batches(1)[0]
    labels, weights = made.labels.copy(), np.ones(len(made.labels), np.float32)
    labels[3], weights[3] = np.nan, 0
    run.train([dataclasses.replace(made, labels=labels, weights=weights)])
    assert np.isfinite(run.losses).all()


def test_keys_without_a_row_are_no_hits():
    collection = collection_of(Storage(device_rows=16), admit=MinCount(2))
    state, counters = train_on(collection, collection.init(), np.arange(8))
    assert counters["refused"] == 8 and counters["device_hits"] == 0
    state, counters = train_on(collection, state, np.arange(10))
    assert counters["refused"] == 2 and counters["inserted"] == 8
    state, counters = train_on(collection, state, np.arange(12))
    assert counters["device_hits"] == 8 and counters["inserted"] == 2


def test_a_key_that_a_full_table_refuses_keeps_its_count():
    collection = collection_of(
        capacity=1, on_full="reject", admit=MinCount(2), evict=TTL(1, every=4)
    )
    state, _ = train_on(collection, collection.init(), [7, 7])
    state, counters = train_on(collection, state, [1, 1])
    assert (counters["rejected"], counters["refused"]) == (2, 0)
    state, _ = train_on(collection, state, [2], [3])
    state, counters = train_on(collection, state, [1])  # 7 has left: there is room
    assert counters["evicted_rows"] == 1
    assert (counters["refused"], counters["inserted"]) == (0, 1)
