"""Rows in RAM: what moves changes no bit, and nothing is lost on the way."""

import jax
import numpy as np
import optax
import pytest

from shardjax import train
from shardjax.data import Batch, InMemory, Loader, iterable
from shardjax.embed import (
    EmbeddingCollection,
    FeatureSpec,
    Jagged,
    PlanError,
    Storage,
    TableSpec,
    rowwise_adagrad,
)
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


def batches(n=STEPS, keys=KEYS, seed=0):
    """Batches with Zipf keys, bags and duplicates."""
    rng = np.random.default_rng(seed)
    chance = 1 / (1 + np.arange(keys))
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

    def __init__(self, mesh, optimizer, storage=None, window=1, two_tables=True):
        tx = OPTIMIZERS[optimizer]
        user = TableSpec("user", 4, tx)
        item = TableSpec("item", 4, tx) if two_tables else user
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
            read = self.collection.read_rows(self.state.tables, table, np.arange(keys))
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


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("mesh", ["1x1", "8x1", "4x2"])
def test_moving_rows_changes_no_bit(mesh, optimizer):
    made = batches()
    plain = Run(mesh, optimizer)
    plain.train(made)
    for window, keep in ((1, "lfu"), (2, "lru"), (7, "lfu"), (50, "lfu")):
        tiered = Run(mesh, optimizer, Storage(device_rows=320, keep=keep), window)
        tiered.train(made)
        assert_same(plain, tiered)
        assert tiered.counters["written_back_rows"] > 0
        assert tiered.counters["fetched_rows"] > 0
        assert tiered.counters["inserted"] == plain.counters["inserted"]
        if window == 50:
            assert tiered.counters["shortened_windows"] > 0
