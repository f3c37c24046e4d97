"""Rows in RAM: what moves changes no bit, and nothing is lost on the way."""

import errno
import gc

import jax
import numpy as np
import optax
import pytest

from shardjax import train
from shardjax.data import Batch, Loader
from shardjax.embed import (
    EmbeddingCollection,
    FeatureSpec,
    Jagged,
    MinCount,
    PlanError,
    Storage,
    TableSpec,
    rowwise_adagrad,
    uniform,
)
from shardjax.embed.moves import WriteBack
from shardjax.mesh import make_mesh
from shardjax.network import Network
from shardjax.state import init_state, stack_metrics

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "rowwise_adagrad": rowwise_adagrad(0.1),
    "adam": optax.adam(0.01),
}
BATCH, KEYS, STEPS = 48, 400, 40


def network() -> Network:
    """A model whose parameters and rows all matter."""

    def apply(params, state, dense, embeddings, *, train):
        user, bag = embeddings["user"], embeddings["bag"]
        hidden = jax.numpy.tanh(user @ params["w"] + bag + dense)
        return hidden.sum(1), state

    return Network(apply, {"w": np.eye(4, dtype=np.float32)}, {})


def batches(n=STEPS, keys=KEYS, seed=0, power=1.0):
    """Batches with Zipf keys, bags and duplicates."""
    rng = np.random.default_rng(seed)
    chance = (1.0 + np.arange(keys)) ** -power
    chance /= chance.sum()
    made = []
    for _ in range(n):
        lengths = rng.permutation(np.resize([2, 0, 3, 1], BATCH))
        bag = Jagged(rng.choice(keys, int(lengths.sum()), p=chance), lengths)
        users = rng.choice(keys, BATCH, p=chance).astype(np.uint64)[None]
        labels = rng.integers(0, 2, BATCH).astype(np.float32)
        dense = rng.normal(size=(BATCH, 4)).astype(np.float32)
        made.append(Batch(labels, dense, users, ("user",), {"bag": bag}))
    return made


class Run:
    """Training with or without a storage."""

    def __init__(
        self,
        mesh,
        optimizer,
        storage=None,
        window=1,
        two_tables=True,
        item=None,
        **more,
    ):
        tx = OPTIMIZERS[optimizer]
        user = TableSpec("user", 4, tx)
        more |= item or {}
        item = TableSpec("item", 4, tx, **more) if two_tables else user
        self.features = {
            "user": FeatureSpec(user),
            "bag": FeatureSpec(item, combiner="mean"),
        }
        self.collection = EmbeddingCollection(
            self.features, mesh=make_mesh(mesh), storage=storage
        )
        net = network()
        self.state = init_state(net, optax.adam(0.01), self.collection)
        self.step = train.make_train_step(net, optax.adam(0.01), self.collection)
        self.evaluate = train.make_eval_step(net, self.collection)
        self.window = window
        self.counters = {}
        self.losses = []

    def train(self, made):
        for start in range(0, len(made), self.window):
            part = made[start : start + self.window]
            for batch in train.prepare_window(self.collection, part):
                self.take(batch)

    def take(self, batch):
        self.state, info = self.step(self.state, batch)
        self.losses.append(float(info["loss"]))
        train.add_counters(self.counters, batch.counters)

    def predict(self, batch):
        prepared = train.prepare(self.collection, batch, train=False)
        stacked = stack_metrics({}, self.collection.mesh)
        _, predictions = self.evaluate(self.state, stacked, prepared)
        return np.asarray(predictions), prepared.counters["unseen"]

    def rows(self, keys=KEYS):
        out = []
        for table in sorted({f.table.name for f in self.features.values()}):
            read = self.collection.lookup_rows(
                self.state.tables, table, np.arange(keys)
            )
            out += [read["found"], read["rows"], *read["row_state"]]
        shared = [x for slab in self.state.tables for x in slab.shared]
        return [np.asarray(x) for x in (*out, *shared)]

    def params(self):
        return np.asarray(self.state.params["w"])


def assert_same(a: Run, b: Run, keys=KEYS):
    assert a.losses == b.losses
    np.testing.assert_array_equal(a.params(), b.params())
    for x, y in zip(a.rows(keys), b.rows(keys), strict=True):
        np.testing.assert_array_equal(x, y)


MESHES = ("1x1", "8x1", "4x2")
WINDOWS = ((1, "lfu"), (2, "lru"), (7, "lfu"), (50, "lfu"))


def half_of_windows(mesh, optimizer):
    """Each mesh has each window with one optimizer at least, each optimizer with a mesh."""
    return WINDOWS[(MESHES.index(mesh) + list(OPTIMIZERS).index(optimizer)) % 2 :: 2]


def test_half_of_the_windows_have_each_pair():
    for mesh in MESHES:
        assert {w for o in OPTIMIZERS for w in half_of_windows(mesh, o)} == {*WINDOWS}
    for o in OPTIMIZERS:
        assert {w for mesh in MESHES for w in half_of_windows(mesh, o)} == {*WINDOWS}


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("mesh", MESHES)
def test_moving_rows_changes_no_bit(mesh, optimizer, request):
    made = batches()
    plain = Run(mesh, optimizer)
    plain.train(made)
    everything = request.config.getoption("--all-combinations")
    windows = WINDOWS if everything else half_of_windows(mesh, optimizer)
    for window, keep in windows:
        tiered = Run(mesh, optimizer, Storage(device_rows=320, keep=keep), window)
        tiered.train(made)
        assert_same(plain, tiered)
        assert tiered.counters["written_back_rows"] > 0
        assert tiered.counters["fetched_rows"] > 0
        assert tiered.counters["inserted"] == plain.counters["inserted"]
        if window == 50:
            assert tiered.counters["shortened_windows"] > 0


STORAGE = Storage(device_rows=320)


@pytest.fixture(params=["RAM", "disk"])
def storage(request, tmp_path):
    """With and without a disk tier that holds most rows."""
    if request.param == "RAM":
        return STORAGE
    return Storage(device_rows=320, host_bytes="45KB", disk=tmp_path)


@pytest.mark.parametrize(
    ("mesh", "optimizer", "window"),
    [  # others than in a usual run of test_tiers_at_length
        ("1x1", "adam", 2),
        ("8x1", "rowwise_adagrad", 2),
        ("8x1", "adam", 50),
        ("4x2", "rowwise_adagrad", 1),
        ("4x2", "sgd", 7),
    ],
)
def test_rows_on_disk_change_no_bit(mesh, optimizer, window, tmp_path):
    made = batches(60, keys=1500)
    plain = Run(mesh, optimizer)
    plain.train(made)
    storage = Storage(device_rows=320, host_bytes="50KB", disk=tmp_path)
    tiered = Run(mesh, optimizer, storage, window)
    tiered.train(made)
    assert_same(plain, tiered, keys=1500)
    assert tiered.counters["disk_hits"] > 0
    assert tiered.counters["host_hits"] > 0
    assert tiered.counters["inserted"] == plain.counters["inserted"]
    assert len(tiered.collection.planner.tiers[0].disk) > 0
    for table in ("user", "item"):
        keys = tiered.collection.keys(table)
        assert len(np.unique(keys)) == len(keys)
        expected = np.sort(plain.collection.keys(table))
        np.testing.assert_array_equal(np.sort(keys), expected)


def warm(mesh, storage=STORAGE, window=3, n=12, **more):
    """A plain and a tiered run after the same batches."""
    runs = Run(mesh, "adam", **more), Run(mesh, "adam", storage, window, **more)
    for run in runs:
        run.train(batches(n))
    return runs


@pytest.mark.parametrize("mesh", ["1x1", "4x2"])
def test_evaluation_reads_rows_wherever_they_are(mesh, storage):
    plain, tiered = warm(mesh, storage)
    held_out = batches(3, keys=KEYS + 50, seed=9)
    for batch in held_out:
        expected, unseen = plain.predict(batch)
        assert unseen > 0
        for _ in range(2):  # and changes nothing
            found, same = tiered.predict(batch)
            np.testing.assert_array_equal(found, expected)
            assert same == unseen
    for run in (plain, tiered):
        run.train(batches(6, seed=3))
    assert_same(plain, tiered)


@pytest.mark.parametrize("mesh", ["1x1", "8x1"])
def test_evaluation_sees_what_has_been_trained_not_what_is_planned(mesh, storage):
    """The loader is several windows ahead when an evaluation comes between."""
    made, held_out = batches(20), batches(2, keys=KEYS + 50, seed=9)
    plain = Run(mesh, "adam")
    tiered = Run(mesh, "adam", storage, 2)
    prepared = []
    for start in range(0, 20, 2):
        prepared += train.prepare_window(tiered.collection, made[start : start + 2])
    for n, batch in enumerate(prepared):
        if n % 5 == 3:
            for held in held_out:
                expected, unseen = plain.predict(held)
                found, same = tiered.predict(held)
                np.testing.assert_array_equal(found, expected)
                assert same == unseen
            np.testing.assert_array_equal(
                np.sort(plain.collection.keys("item")),
                np.sort(tiered.collection.keys("item")),
            )
            for x, y in zip(plain.rows(), tiered.rows(), strict=True):
                np.testing.assert_array_equal(x, y)
        plain.train([made[n]])
        tiered.take(batch)
    assert tiered.counters["written_back_rows"] > 0
    assert_same(plain, tiered)


def test_an_evaluation_batch_is_refused_once_rows_have_moved():
    _, tiered = warm("1x1")
    prepared = train.prepare(tiered.collection, batches(1, seed=5)[0], train=False)
    tiered.train(batches(8, seed=3))
    stacked = stack_metrics({}, tiered.collection.mesh)
    with pytest.raises(RuntimeError, match="prepared before training went on"):
        tiered.evaluate(tiered.state, stacked, prepared)


@pytest.mark.parametrize("mesh", ["1x1", "2x4"])
def test_batches_that_nobody_steps_on_lose_no_row(mesh, storage):
    plain, tiered = warm(mesh, storage)
    for run in (plain, tiered):
        for seed in (11, 12):  # planned, then abandoned
            list(train.prepare_window(run.collection, batches(4, seed=seed)))
        run.train(batches(6, seed=3))
    assert_same(plain, tiered)


@pytest.mark.parametrize("window", [1, 4])
def test_a_loader_plans_windows_ahead(window):
    made = batches(13)
    plain = Run("8x1", "adam")
    plain.train(made + made)
    tiered = Run("8x1", "adam", STORAGE)
    loader = Loader(
        Chunks(made),
        BATCH,
        map=lambda several: train.prepare_window(tiered.collection, several),
        window=window,
    )
    for _ in range(2):
        for batch in loader:
            tiered.take(batch)
    assert tiered.counters["windows"] >= 2 * -(-13 // window)
    assert_same(plain, tiered)


class Chunks:
    """Batches as a source."""

    feature_names, n_dense = ("user", "bag"), 4

    def __init__(self, made):
        self.made = made

    def chunks(self, start_chunk=0):
        yield from self.made[start_chunk:]


def test_a_batch_that_does_not_fit_says_what_it_needs():
    tiered = Run("1x1", "sgd", Storage(device_rows=20))
    keys = np.arange(BATCH, dtype=np.uint64)
    big = Batch(
        np.zeros(BATCH, np.float32),
        np.zeros((BATCH, 4), np.float32),
        keys[None],
        ("user",),
        {"bag": Jagged(keys, np.ones(BATCH, np.int32))},
    )
    message = (
        r"needs 96 rows of the tables 'user', 'item' on one device, and `device_rows` of"
        r" the storage gives each 20\. Give at least device_rows=96, or smaller batches"
    )
    with pytest.raises(PlanError, match=message):
        train.prepare(tiered.collection, big, train=True)
    assert len(tiered.collection.keys("user")) == 0
    small = batches(1, keys=8)[0]
    tiered.train([small])  # nothing has changed
    plain = Run("1x1", "sgd")
    plain.train([small])
    assert_same(plain, tiered)


def test_an_error_in_a_window_comes_after_the_batches_before_it():
    plain, tiered = warm("1x1")
    good, bad = batches(3, seed=3), batches(1, seed=4)[0]
    bad = Batch(bad.labels, bad.dense, bad.fixed, ("other",), bad.jagged)
    taken = train.prepare_window(tiered.collection, [*good, bad, *good])
    for _ in good:
        tiered.take(next(taken))
    with pytest.raises(ValueError, match=r"lacks the features \['user'\]"):
        next(taken)
    plain.train(good)
    for run in (plain, tiered):
        run.train(batches(4, seed=5))
    assert_same(plain, tiered)


def test_a_batch_of_exactly_all_slots_fits():
    """The next window shares no row with it (a cache of exactly one batch)."""
    tiered = Run("1x1", "adam", Storage(device_rows=BATCH), two_tables=False)
    plain = Run("1x1", "adam", two_tables=False)
    made = []
    for n in range(6):
        keys = np.arange(BATCH, dtype=np.uint64) + (n % 3) * BATCH
        bag = Jagged(keys, np.ones(BATCH, np.int32))
        labels = (keys % 2).astype(np.float32)
        dense = np.ones((BATCH, 4), np.float32)
        made.append(Batch(labels, dense, keys[None], ("user",), {"bag": bag}))
    prepared = [train.prepare(tiered.collection, b, train=True) for b in made]
    for batch in prepared:
        tiered.take(batch)
    plain.train(made)
    assert_same(plain, tiered)
    assert tiered.counters["written_back_rows"] == 5 * BATCH
    assert tiered.counters["shortened_windows"] == 0
    # windows of three hold one batch each: the first two of three are ended early
    again = Run("1x1", "adam", Storage(device_rows=BATCH), 3, two_tables=False)
    again.train(made)
    assert_same(plain, again)
    assert again.counters["windows"] == 6
    assert again.counters["shortened_windows"] == 4


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"device_rows": 0}, ValueError, r"`device_rows` must be in \[1, .*got 0"),
        ({"device_rows": 1.5}, TypeError, "`device_rows` must be an integer, got 1.5"),
        (
            {"device_rows": 9, "keep": "mru"},
            ValueError,
            "`keep` must be 'lfu' or 'lru'",
        ),
    ],
)
def test_bad_storages_are_refused(values, error, message):
    with pytest.raises(error, match=message):
        Storage(**values)


def test_a_full_ram_tier_without_a_disk_is_an_error():
    storage = Storage(device_rows=320, host_bytes=40_000)
    tiered = Run("1x1", "adam", storage)
    with pytest.raises(
        PlanError, match=r"the RAM tier is full: .*Give more, or a folder"
    ):
        tiered.train(batches(60, keys=3000))
    rows = tiered.rows(3000)
    taken = len(tiered.losses)
    plain = Run("1x1", "adam")
    plain.train(batches(60, keys=3000)[:taken])
    for x, y in zip(plain.rows(3000), rows, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_full_disk_is_an_error_and_loses_no_row(tmp_path, monkeypatch):
    storage = Storage(device_rows=320, host_bytes="45KB", disk=tmp_path)
    made = batches(60, keys=1500)
    tiered, plain = Run("1x1", "adam", storage), Run("1x1", "adam")
    disk = tiered.collection.planner.tiers[0].disk

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "add", full)
    with pytest.raises(OSError, match="No space left"):
        tiered.train(made)
    taken = len(tiered.losses)
    assert 0 < taken < 60
    monkeypatch.undo()
    plain.train(made[:taken])
    for run in (plain, tiered):
        run.train(made[taken:])
    assert_same(plain, tiered, 1500)
    assert len(disk) > 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"disk": "x"}, "`disk` is for the rows that RAM does not hold, got 'x'"),
        ({"host_bytes": 0}, "`host_bytes` must be positive, got 0"),
        ({"host_bytes": "8 apples"}, "`host_bytes` must be a number and a unit"),
        ({"host_bytes": -5}, "`host_bytes` must be positive, got -5"),
        ({"merge_rate": 0}, "`merge_rate` must be positive, got 0"),
        (
            {"merge_rate": "9MB"},
            "`merge_rate` is about the files in `disk`, got 9000000",
        ),
    ],
)
def test_bad_budgets_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Storage(device_rows=9, **values)


def test_bytes_are_a_number_or_a_text():
    for text, size in (("8GB", 8 * 10**9), ("1.5 kib", 1536), ("77", 77), (5, 5)):
        assert Storage(device_rows=1, host_bytes=text).host_bytes == size
    with pytest.raises(TypeError, match="number of bytes or a text such as '8GB'"):
        Storage(device_rows=1, host_bytes=1.5)


def test_a_corrupt_file_ends_training(tmp_path):
    storage = Storage(device_rows=320, host_bytes="45KB", disk=tmp_path)
    tiered = Run("1x1", "adam", storage)
    made = batches(60, keys=1500)
    tiered.train(made[:50])
    for file in tmp_path.glob("*rows"):
        size = file.stat().st_size
        file.write_bytes(bytes(size))
    with pytest.raises(OSError, match=r"shardjax-rows: record \d+ .* has changed"):
        tiered.train(made[50:])
    with pytest.raises(RuntimeError, match=r"moving rows failed half-way.*has changed"):
        tiered.train(made[50:])
    tiered.collection.close()


def test_a_closed_collection_leaves_the_folder_to_others(tmp_path):
    storage = Storage(device_rows=320, host_bytes="45KB", disk=tmp_path)
    first = Run("1x1", "adam", storage)
    first.train(batches(30, keys=1500))
    with pytest.raises(BlockingIOError, match="this very process.*Call its `close`"):
        Run("1x1", "adam", storage)
    assert list(tmp_path.glob("*rows"))
    for _ in range(2):
        first.collection.close()
    assert not list(tmp_path.glob("*rows"))
    Run("1x1", "adam", storage).train(batches(2))


@pytest.mark.parametrize("mesh", ["1x1", "4x2"])
@pytest.mark.parametrize("where", ["devices", "RAM", "disk"])
def test_rows_are_loaded_and_exported(mesh, where, tmp_path, monkeypatch):
    # wait for what goes to RAM, which else goes to disk in a later move only
    there = property(lambda x: x.records is not None)
    monkeypatch.setattr(WriteBack, "has_arrived", there)
    storage = {
        "devices": None,
        "RAM": STORAGE,
        "disk": Storage(device_rows=320, host_bytes="45KB", disk=tmp_path),
    }[where]
    run = Run(mesh, "adam", storage)
    run.train(batches(4))
    before = run.rows(KEYS)
    keys = np.arange(KEYS // 2, KEYS + 1500, dtype=np.uint64)
    values = np.random.default_rng(1).normal(size=(len(keys), 4)).astype(np.float32)
    state = run.collection.load_rows(run.state.tables, "item", keys, values)
    run.state = run.state.replace(tables=state)
    after = run.rows(KEYS)
    for x, y in zip(before, after, strict=True):  # the other rows, all optimizer state
        if x.ndim and len(x) == KEYS and x.dtype != bool:
            np.testing.assert_array_equal(x[: KEYS // 2], y[: KEYS // 2])
    exported = {}
    for part in run.collection.export(run.state.tables, "item", chunk=700):
        assert len(part.keys) <= 700
        exported |= dict(zip(part.keys.tolist(), part.rows, strict=True))
    np.testing.assert_array_equal([exported[int(k)] for k in keys], values)
    moments = [values[::-1], values**2]  # with the rows, Adam's of theirs
    state = run.collection.load_rows(run.state.tables, "item", keys, -values, moments)
    run.state = run.state.replace(tables=state)
    for part in run.collection.export(state, "item"):
        mine = part.take(part.keys >= KEYS // 2)
        at = mine.keys - KEYS // 2
        for x, y in zip([mine.rows, *mine.row_state], [-values, *moments], strict=True):
            np.testing.assert_array_equal(x, y[at])
    stats = run.collection.stats()["group0"]
    users = len(run.collection.keys("user"))
    assert stats["tables"] == 2 and stats["rows"] == len(exported) + users
    assert stats["coming_rows"] == 0
    assert stats["device_rows"] <= (320 if storage else stats["rows"])
    assert (stats["host_rows"] > 0) == (where != "devices")
    assert (stats["disk_rows"] > 0) == (where == "disk") == (stats["disk_bytes"] > 0)
    run.train(batches(4, seed=8))


def test_bad_rows_are_not_loaded():
    run = Run("1x1", "sgd")
    load = run.collection.load_rows
    state = run.state.tables
    with pytest.raises(
        ValueError, match=r"4 numbers per key, got keys of shape \(2,\) and"
    ):
        load(state, "item", np.array([1, 2]), np.zeros((2, 3)))
    with pytest.raises(ValueError, match="must be unique"):
        load(state, "item", np.array([1, 1]), np.zeros((2, 4)))
    with pytest.raises(TypeError, match="must be integers"):
        load(state, "item", np.array([1.0]), np.zeros((1, 4)))
    with pytest.raises(KeyError, match="no table is named 'shop'"):
        load(state, "shop", np.array([1]), np.zeros((1, 4)))
    with pytest.raises(
        ValueError, match=r"of shapes \[\], got \[\(1, 4\)\]. `lookup_rows`"
    ):
        load(state, "item", np.array([1]), np.zeros((1, 4)), [np.zeros((1, 4))])
    assert not run.collection.keys("item").size


@pytest.mark.parametrize("window", [1, 5])
def test_keys_on_disk_count_once_towards_the_capacity(tmp_path, window):
    storage = Storage(device_rows=320, host_bytes="45KB", disk=tmp_path)
    runs = [
        Run("1x1", "adam", s, window, capacity=700, on_full="reject")
        for s in (None, storage)
    ]
    for run in runs:
        run.train(batches(60, keys=1500))
        run.train(batches(20, keys=1500, seed=4))
        assert len(run.collection.keys("item")) == 700
        assert run.counters["rejected"] > 0
    assert runs[0].counters["rejected"] == runs[1].counters["rejected"]
    assert runs[1].counters["disk_hits"] > 0
    assert_same(*runs, 1500)
    runs[1].collection.close()


def test_tables_may_lie_in_places_of_their_own(tmp_path):
    """A table with its own storage, one on the devices, one as the collection says."""
    made = batches(30)
    plain = Run("4x2", "adam")
    plain.train(made)
    tx = OPTIMIZERS["adam"]
    own = Storage(device_rows=200, host_bytes="1KB", disk=tmp_path / "own")
    run = Run("4x2", "adam", Storage(device_rows=400), 3, item={"storage": own})
    run.train(made)
    assert plain.losses == run.losses
    for x, y in zip(plain.rows(), run.rows(), strict=False):  # step counts are per slab
        np.testing.assert_array_equal(x, y)
    stats = run.collection.stats()
    assert len(stats) == 2
    assert stats["group0"]["disk_rows"] == 0
    assert stats["group1"]["disk_rows"] > 0
    run.collection.close()
    user = TableSpec("user", 4, tx, storage="device")
    item = TableSpec("item", 4, tx)
    features = {"user": FeatureSpec(user), "item": FeatureSpec(item)}
    collection = EmbeddingCollection(
        features, mesh=make_mesh("1x1"), storage=Storage(device_rows=9)
    )
    found = [(g.tables[0].spec.name, g.storage is None) for g in collection.groups]
    assert found == [("user", True), ("item", False)]


def test_a_full_disk_budget_is_an_error_and_rows_stay(tmp_path):
    storage = Storage(
        device_rows=320, host_bytes="16KB", disk=tmp_path / "rows", disk_bytes=4000
    )
    run = Run("1x1", "adam", storage)
    with pytest.raises(OSError, match="the disk tier is full: `disk_bytes`"):
        run.train(batches(30, keys=4000))
    keys = run.collection.keys("item")
    read = run.collection.lookup_rows(run.state.tables, "item", keys)
    assert len(keys) and read["found"].all()
    run.collection.close()


def test_threads_copy_the_same_rows():
    """Enough rows per move for each thread to have a part."""
    item = TableSpec("item", 4, OPTIMIZERS["adam"], initializer=uniform(1.0))
    found = []
    for threads in (1, 3):
        collection = EmbeddingCollection(
            {"item": FeatureSpec(item)},
            mesh=make_mesh("1x1"),
            storage=Storage(device_rows=10_000),
            threads=threads,
        )
        state = collection.init()
        for start in (0, 9000, 18_000, 0, 9000, 18_000):
            keys = np.arange(start, start + 9000)
            plan = collection.plan({"item": keys}, 9000, train=True)
            state = collection.apply_fills(state, plan)
        assert collection.stats()["group0"]["host_rows"] == 17_000
        found.append(collection.lookup_rows(state, "item", np.arange(27_000))["rows"])
    np.testing.assert_array_equal(found[0], found[1])
    assert len(np.unique(found[0][:, 0])) > 26_000
    gc.collect()  # ends its threads


@pytest.mark.parametrize("call", ["lookup_rows", "export", "load_rows", "apply_fills"])
def test_a_training_state_is_not_the_state_of_the_tables(call):
    run = Run("1x1", "sgd")
    plan = train.prepare(run.collection, batches(1)[0], train=True).plan
    more = {
        "lookup_rows": ("item", np.arange(3)),
        "export": ("item",),
        "load_rows": ("item", np.arange(3), np.ones((3, 4))),
        "apply_fills": (plan,),
    }[call]
    message = r"tuple of 1 SlabState .* got a TrainState\. .*give `state\.tables`"
    with pytest.raises(TypeError, match=message):
        getattr(run.collection, call)(run.state, *more)
    run.step(run.state, train.prepare(run.collection, batches(1)[0], train=True))


@pytest.mark.parametrize("window", [None, 2])
def test_a_loader_and_a_map_that_do_not_fit_say_so(window):
    run = Run("1x1", "sgd")

    def one(batch):
        return train.prepare(run.collection, batch, train=True)

    def many(batches):
        return train.prepare_window(run.collection, batches)

    if window is None:
        map, message = many, "`prepare_window` takes a list .* one Batch.*`prepare`"
    else:
        map, message = one, "`prepare` takes one batch, got a list.*`prepare_window`"
    loader = Loader(Chunks(batches(3)), BATCH, map=map, window=window)
    with pytest.raises(TypeError, match=message):
        next(iter(loader))


def test_a_closed_collection_says_so(tmp_path):
    run = Run("1x1", "sgd", Storage(device_rows=320, host_bytes="1KB", disk=tmp_path))
    made = batches(4)
    run.train(made)
    run.collection.close()
    for call in (
        lambda: run.train(made),
        lambda: run.predict(made[0]),
        lambda: run.collection.keys("item"),
        lambda: run.rows(),
    ):
        with pytest.raises(RuntimeError, match="this collection has been closed"):
            call()


@pytest.mark.parametrize("more", [{"admit": MinCount(2)}, {"capacity": 500}])
def test_a_file_that_cannot_be_read_in_planning_leaves_no_batch_half_planned(
    more, tmp_path, monkeypatch
):
    item = TableSpec("item", 4, OPTIMIZERS["sgd"], **more)
    storage = Storage(device_rows=16, host_bytes="1KB", disk=tmp_path / "rows")
    collection = EmbeddingCollection(
        {"item": FeatureSpec(item)}, mesh=make_mesh("1x1"), storage=storage
    )

    def window(*starts):
        return [({"item": np.repeat(np.arange(s, s + 8), 2)}, 16) for s in starts]

    state = collection.init()
    for plan in collection.plan_window(window(*range(0, 320, 8))):
        state = collection.apply_fills(state, plan)
    disk = collection.planner.tiers[0].disk
    assert disk is not None and len(disk)

    tables = collection.planner.tables[0][0]
    beyond, calls = tables.beyond, []

    def refuse(*args):
        calls.append(args)
        if "capacity" in more and len(calls) == 1:
            return beyond(*args)
        raise OSError("the disk is gone")

    plans = collection.plan_window(window(312, 1000))
    with monkeypatch.context() as patch:
        # the first batch has no key that is new
        patch.setattr(
            *((disk, "read") if "admit" in more else (tables, "beyond")), refuse
        )
        state = collection.apply_fills(state, next(plans))
        with pytest.raises(OSError, match="the disk is gone"):
            next(plans)
    [plan] = collection.plan_window(window(1000))
    assert plan.counters["inserted"] == 8
    state = collection.apply_fills(state, plan)
    keys = np.r_[0:320, 1000:1008]
    assert collection.lookup_rows(state, "item", keys)["found"].all()
    assert collection.stats()["group0"]["rows"] == 328
    collection.close()


def test_a_merge_that_fails_while_rows_are_written_doubles_no_row(tmp_path):
    """The file for the merged rows finds no room, those for the rows to write do."""
    item = TableSpec("item", 4, OPTIMIZERS["sgd"])
    storage = Storage(device_rows=16, host_bytes="1KB", disk=tmp_path / "rows")
    collection = EmbeddingCollection(
        {"item": FeatureSpec(item)}, mesh=make_mesh("1x1"), storage=storage
    )
    disk = collection.planner.tiers[0].disk
    assert disk is not None
    disk._merge_bytes = 1 << 11
    write = disk._write
    full = [False]

    def limited(count, parts):
        if full[0] and count > 40:
            raise OSError(errno.ENOSPC, "no space")
        return write(count, parts)

    disk._write = limited
    state, rng, errors = collection.init(), np.random.default_rng(0), 0
    for step in range(200):
        full[0] = 40 < step < 120
        keys = rng.choice(300, 12, replace=False)
        while True:
            try:
                plan = collection.plan({"item": keys}, 12, train=True)
                break
            except OSError:
                errors += 1
        state = collection.apply_fills(state, plan)
        on_disk = np.concatenate([np.zeros(0, np.uint64), *(k for k, _ in disk.keys())])
        known = collection.planner.tables[0][0].index.items()[0]
        assert len(np.unique(on_disk)) == len(on_disk)
        assert not len(np.intersect1d(on_disk, known))
    assert errors > 3
    collection.close()
