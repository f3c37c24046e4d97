"""Snapshots of rows: of one moment, whatever goes on meanwhile, and training goes on from
them as if nothing had been."""

import threading

import jax
import numpy as np
import pytest

from shardjax import train
from shardjax.data import Loader
from shardjax.embed import LFU, LRU, TTL, MinCount, Probability, ShowClick, Storage
from tests.embed.test_tiers import BATCH, Run, assert_same, batches

MOMENT, STEPS = 18, 40
POLICIES = {
    "none": {},
    "evict": {"evict": (TTL(9, every=4), LRU(rows=120, every=6))},
    "count": {"admit": MinCount(2), "evict": LFU(rows=150, every=7)},
    "filter": {"admit": MinCount(2, most_keys=5000, false_positive_rate=0.01)},
    "chance": {"admit": Probability(0.3)},
    "show_click": {"evict": ShowClick(0.9, 0.3, every=5)},
}


class Made:
    """A source of batches that have been made."""

    feature_names, n_dense = ("user",), 4

    def __init__(self, batches):
        self.batches = batches

    def chunks(self, start_chunk=0):
        yield from self.batches[start_chunk:]


def loader(run, made, window):
    return Loader(
        Made(made),
        BATCH,
        map=lambda many: train.prepare_window(run.collection, many),
        window=window,
    )


class Taken:
    """A snapshot being read in a thread of its own."""

    def __init__(self, run: Run):
        self.snapshot, self.described = run.collection.snapshots.take(run.state.tables)
        self.counts = self.snapshot.outline.counts
        self.records: list = []
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.read, name="reader")
        self.thread.start()
        # a copy of all else, before the next step gives it away
        self.dense = jax.device_get(run.state.replace(tables=()))
        self.shared = jax.device_get([slab.shared for slab in run.state.tables])

    def read(self):
        try:
            for g, records in self.snapshot.records():
                self.records.append((g, records.copy()))
        except BaseException as error:
            self.error = error

    def end(self, run: Run):
        """Waits for it."""
        self.snapshot.complete(run.state.tables)
        self.thread.join()
        self.snapshot.close()
        if self.error is not None:
            raise self.error

    def restored(self, *args, **options) -> Run:
        """A new run that goes on from it."""
        run = Run(*args, **options)
        slabs, _ = run.collection.snapshots.restore(
            run.state.tables, self.described, self.records, self.counts
        )
        slabs = tuple(
            slab.__class__(
                slab.rows,
                slab.row_state,
                [
                    jax.device_put(x, old.sharding)
                    for x, old in zip(shared, slab.shared, strict=True)
                ],
            )
            for slab, shared in zip(slabs, self.shared, strict=True)
        )
        here = run.state.replace(tables=())
        dense = jax.tree.map(
            lambda x, old: jax.device_put(x, old.sharding), self.dense, here
        )
        run.state = dense.replace(tables=slabs)
        return run


def run_with_snapshot(run, made, window):
    """Trains on all, with a snapshot after MOMENT of them."""
    taken = None
    for n, batch in enumerate(loader(run, made, window), 1):
        run.take(batch)
        if n == 2:
            assert run.collection.snapshots.announce(MOMENT - n) == MOMENT - n
        if n == MOMENT:
            taken = Taken(run)
    assert taken is not None
    taken.end(run)
    return taken


def storage_of(kind, folder):
    return {
        "devices": None,
        "RAM": Storage(device_rows=320),
        "disk": Storage(device_rows=320, host_bytes="20KB", disk=folder),
    }[kind]


def assert_goes_on(run, taken, made, *args, **options):
    """A run from the snapshot ends as the one that it is of."""
    again = taken.restored(*args, **options)
    before = run.losses[:MOMENT]
    again.losses = list(before)
    for batch in loader(again, made[MOMENT:], again.window):
        again.take(batch)
    assert_same(run, again)
    for table in ("user", "item"):
        keys = [np.sort(x.collection.keys(table)) for x in (run, again)]
        np.testing.assert_array_equal(*keys)
    again.collection.close()


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        ("none", "devices"),
        ("evict", "devices"),
        ("evict", "disk"),
        ("count", "RAM"),
        ("count", "disk"),
        ("filter", "devices"),
        ("chance", "disk"),
        ("show_click", "RAM"),
        ("show_click", "disk"),
    ],
)
def test_training_goes_on_from_a_snapshot_without_a_changed_bit(policy, kind, tmp_path):
    made = batches(STEPS, keys=400)
    more = {"item": POLICIES[policy]}
    run = Run("2x1", "adam", storage_of(kind, tmp_path / "a"), 3, **more)
    taken = run_with_snapshot(run, made, 3)
    assert_goes_on(
        run, taken, made, "2x1", "adam", storage_of(kind, tmp_path / "b"), 4, **more
    )
    run.collection.close()


@pytest.mark.parametrize(
    ("mesh", "optimizer"),
    [("1x1", "sgd"), ("8x1", "rowwise_adagrad"), ("4x2", "adam"), ("2x4", "sgd")],
)
def test_meshes_and_optimizers(mesh, optimizer, tmp_path):
    made = batches(STEPS, keys=400)
    run = Run(mesh, optimizer, storage_of("disk", tmp_path / "a"), 7)
    taken = run_with_snapshot(run, made, 7)
    assert_goes_on(
        run, taken, made, mesh, optimizer, storage_of("disk", tmp_path / "b"), 2
    )
    run.collection.close()
