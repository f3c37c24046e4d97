"""What fails half-way leaves a collection as it was, or one that says that it cannot go on."""

import errno
import os

import numpy as np
import pytest

from shardjax import train
from shardjax.data import Loader
from shardjax.embed import LRU, TTL, PlanError, ShowClick, Storage, uniform
from tests.embed.test_policies import (
    STORAGES,
    Model,
    bag_of,
    collection_of,
    salt_of,
    storage_of,
    train_on,
)
from tests.embed.test_tiers import BATCH, Chunks, Run, assert_same, batches


class Refuses:
    """An `on_evict` that raises an error until it is told not to."""

    def __init__(self):
        self.raises = True
        self.handed = {}
        self.calls = 0

    def __call__(self, table, keys, rows, row_state):
        self.calls += 1
        if self.raises:
            raise ValueError("no room in my file")
        self.handed |= {
            (table, key): [row.tolist(), [x[i].tolist() for x in row_state]]
            for i, (key, row) in enumerate(zip(keys.tolist(), rows, strict=True))
        }


MESSAGE = (
    r"`on_evict` of table 'item' raised ValueError\('no room in my file'\) when it was"
    r" given \d+ rows\. Nothing has changed"
)


@pytest.mark.parametrize("storage", list(STORAGES))
def test_an_on_evict_that_raises_changes_nothing(storage, tmp_path):
    """Rows that leave are there, and are given again with the next step."""
    policy = LRU(rows=30, every=4)
    refuses, takes = Refuses(), Refuses()
    takes.raises = False
    place = storage_of(storage, tmp_path)
    run = Run("4x2", "adam", place, 2, evict=policy, on_evict=refuses)
    plain = Run("4x2", "adam", evict=policy, on_evict=takes)
    made = batches(12)
    for start in range(0, 12, 2):
        for batch in train.prepare_window(run.collection, made[start : start + 2]):
            if start in (4, 8) and refuses.raises:
                keys = np.sort(run.collection.keys("item"))
                before = run.rows()
                for n in (1, 2):
                    refuses.calls = 0
                    with pytest.raises(RuntimeError, match=MESSAGE):
                        run.take(batch)
                    assert refuses.calls == 1, n
                np.testing.assert_array_equal(
                    np.sort(run.collection.keys("item")), keys
                )
                for x, y in zip(before, run.rows(), strict=True):
                    np.testing.assert_array_equal(x, y)
                refuses.raises = False
            run.take(batch)
        refuses.raises = start == 6
    plain.train(made)
    assert_same(plain, run)
    assert len(takes.handed) > 100
    assert refuses.handed == takes.handed
    run.collection.close()


@pytest.mark.parametrize("storage", list(STORAGES))
def test_rows_that_leave_after_batches_that_nobody_stepped_on(storage, tmp_path):
    """They leave from where those batches bring them; a refusal changes nothing still."""
    refuses = Refuses()
    policy = {"evict": TTL(1, every=4), "on_evict": refuses}
    place = storage_of(storage, tmp_path)
    if place is not None:
        place = Storage(8, place.host_bytes, place.disk)
    found = []
    for where in (None, place):
        refuses.raises = True
        collection = collection_of(where, "1x1", initializer=uniform(1.0), **policy)
        state, _ = train_on(collection, collection.init(), range(4), range(4, 8))
        collection.plan({"item": np.r_[0:2, 8:10]}, 4, train=True)  # step 3, abandoned
        for keys in (np.r_[10:14], np.r_[14:18]):  # 2 to 7 leave before step 5
            plan = collection.plan({"item": keys}, 4, train=True)
        held = collection.lookup_rows(state, "item", np.arange(18))
        with pytest.raises(RuntimeError, match=MESSAGE):
            collection.apply_fills(state, plan)
        again = collection.lookup_rows(state, "item", np.arange(18))
        np.testing.assert_array_equal(held["rows"], again["rows"])
        assert (
            held["found"].tolist()
            == again["found"].tolist()
            == [True] * 8 + [False] * 10
        )
        refuses.raises, refuses.handed = False, {}
        state = collection.apply_fills(state, plan)
        after = collection.lookup_rows(state, "item", np.arange(18))
        found.append((refuses.handed, after["rows"].tolist(), after["found"].tolist()))
        gone = np.flatnonzero(np.logical_not(after["found"])).tolist()
        assert sorted(k for _, k in refuses.handed) == gone != []
        collection.close()
    assert found[0] == found[1]


def test_a_full_disk_does_not_stop_a_decay(tmp_path, monkeypatch):
    """Scores on disk decay when they are read: a decay writes nothing."""
    policy = ShowClick(decay=0.5, threshold=0.25, show_weight=0.0, click_weight=1.0)
    run = Run("1x1", "sgd", storage_of("disk", tmp_path), 5, evict=policy)
    model = Model(run.features["bag"].table, salt_of(run.collection))

    def learn(n, seed):
        made = batches(n, seed=seed)
        run.train(made)
        for batch in made:
            model.batch(*bag_of(batch))

    def check():
        [part] = run.collection.export(run.state.tables, "item")
        assert part.scores is not None
        scores = dict(zip(part.keys.tolist(), part.scores.tolist(), strict=True))
        assert model.rows.keys() <= scores.keys()
        for key, (_, tally) in model.rows.items():
            assert scores[key] == tally / 4096

    def full(fd, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    learn(12, 0)
    disk = run.collection.planner.tiers[0].disk
    disk.wait()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for _ in range(2):
            rows = len(model.rows)
            model.evict([policy])
            assert run.collection.shrink() == {"item": rows - len(model.rows)}
            assert run.collection.stats()["group0"]["disk_rows"] > 0
            check()
    learn(5, 1)
    check()
    assert set(run.collection.keys("item").tolist()) == set(model.rows)
    run.collection.close()


@pytest.mark.parametrize("window", [1, 3])
def test_rows_are_not_loaded_before_batches_that_wait(window):
    run = Run("1x1", "adam", Storage(device_rows=320))
    loader = Loader(
        Chunks(batches(9)),
        BATCH,
        map=lambda many: train.prepare_window(run.collection, many),
        window=window,
    )
    keys, values = np.arange(3), np.ones((3, 4), np.float32)
    refused = []

    def load(step, state, info):
        if step in (1, 2):
            message = (
                r"`load_rows` cannot go before \d+ batches that have been prepared"
            )
            with pytest.raises(RuntimeError, match=message) as caught:
                run.collection.load_rows(state.tables, "item", keys, values)
            refused.append(str(caught.value))

    run.state, _ = train.fit(run.step, run.state, loader, steps=4, hooks=[load])
    assert len(refused) == 2
    # the loop was left, so what it had prefetched waits no more
    tables = run.collection.load_rows(run.state.tables, "item", keys, values)
    run.state = run.state.replace(tables=tables)
    found = run.collection.lookup_rows(run.state.tables, "item", keys)
    np.testing.assert_array_equal(found["rows"], values)
    run.state, _ = train.fit(run.step, run.state, loader)
    assert loader.epoch == 1


def test_batches_that_somebody_holds_wait():
    run = Run("1x1", "sgd")
    prepared = train.prepare(run.collection, batches(1)[0], train=True)
    load = (run.state.tables, "item", [1], np.ones((1, 4)))
    with pytest.raises(RuntimeError, match="cannot go before 1 batches"):
        run.collection.load_rows(*load)
    run.take(prepared)
    run.collection.load_rows(run.state.tables, *load[1:])


def test_loading_that_fails_half_way_says_so_from_then_on():
    """The state that was given is gone with the first part."""
    storage = Storage(device_rows=16, host_bytes="45KB")
    collection = collection_of(storage)
    state = collection.init()
    with pytest.raises(PlanError, match="the RAM tier is full"):
        collection.load_rows(state, "item", np.arange(1000), np.ones((1000, 4)))
    with pytest.raises(
        RuntimeError, match="failed half-way, with `load_rows` and Plan"
    ):
        collection.plan({"item": np.arange(3)}, 3, train=True)
