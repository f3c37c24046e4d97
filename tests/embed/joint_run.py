"""A run over tables of every kind, as one process of several or alone; prints JSON.

python -c "<HEADER of tests/cluster.py> from tests.embed import joint_run ..."
"""

import hashlib
import json
import tempfile
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import optax
from flax import nnx

import shardjax as sj
from shardjax import embed, metrics, train
from shardjax.data import Batch, Loader
from shardjax.embed import Jagged
from shardjax.network import from_nnx
from shardjax.sharded import fetch
from shardjax.state import compute_metrics, init_state

ROWS, BATCH = 1000, 110  # 10 batches; neither the devices nor the windows divide them


class Clicks:
    """A source with bags, sequences and ids that are out of range."""

    feature_names = ("user", "item", "seen", "last", "small", "alone")
    n_dense = 2

    def chunks(self, start_chunk=0):
        rng = np.random.default_rng(7)
        for chunk in range(5):
            n = ROWS // 5
            lengths = rng.integers(0, 4, n).astype(np.int32)
            total = int(lengths.sum())
            bag = Jagged(rng.zipf(1.3, total) % 900, lengths, rng.random(total))
            steps = rng.integers(0, 6, n).astype(np.int32)
            last = Jagged(rng.zipf(1.3, int(steps.sum())) % 900, steps)
            fixed = np.stack(
                [
                    rng.zipf(1.2, n) % 5000,
                    rng.zipf(1.2, n) % 900,
                    rng.integers(0, 21, n),  # one of them out of range
                    rng.zipf(1.5, n) % 700,
                ]
            )
            batch = Batch(
                rng.integers(0, 2, n).astype(np.float32),
                rng.random((n, 2), np.float32),
                fixed.astype(np.uint64),
                fixed_names=("user", "item", "small", "alone"),
                jagged={"seen": bag, "last": last},
            )
            if chunk >= start_chunk:
                yield batch


def tables(mesh, storage):
    """Tables of each placement and policy; features that share some."""
    adam, sgd = optax.adam(0.01), optax.sgd(0.1)
    user = embed.TableSpec("user", dim=4, optimizer=adam, admit=embed.MinCount(2))
    item = embed.TableSpec(
        "item",
        dim=4,
        optimizer=adam,
        evict=(embed.TTL(steps=6, every=4), embed.ShowClick(threshold=0.05, every=5)),
    )
    small = embed.TableSpec(
        "small", dim=4, optimizer=sgd, vocabulary=20, placement="data_parallel"
    )
    alone = embed.TableSpec("alone", dim=4, optimizer=sgd, placement="table_wise")
    features = {
        "user": embed.FeatureSpec(user),
        "item": embed.FeatureSpec(item),
        "seen": embed.FeatureSpec(item, combiner="mean"),
        "last": embed.FeatureSpec(item, combiner="none", max_length=5, padding_id=0),
        "small": embed.FeatureSpec(small, on_bad_id="zero"),
        "alone": embed.FeatureSpec(alone),
    }
    return embed.EmbeddingCollection(
        features, mesh=mesh, initial_rows=16, storage=storage
    )


class Model(nnx.Module):
    """Reads pooled vectors and a sequence."""

    def __init__(self, rngs):
        self.mlp = nnx.Linear(2 + 6 * 4, 1, rngs=rngs)

    def __call__(self, dense, embeddings):
        last = embeddings["last"]
        summed = (last.values * last.mask[..., None]).sum(1)
        pooled = [embeddings[n] for n in Clicks.feature_names if n != "last"]
        return self.mlp(jax.numpy.concatenate([dense, *pooled, summed], -1))[:, 0]


def hashed(part) -> str:
    """A fingerprint of rows, whatever their order."""
    order = np.argsort(part["keys"])
    arrays = [part["keys"], part["rows"], *part["row_state"]]
    return hashlib.sha256(b"".join(x[order].tobytes() for x in arrays)).hexdigest()


def run(mesh_shape: str, tiers: bool, disk: str | None = None) -> dict:
    """Trains and evaluates; what it returns is the same in all processes."""
    mesh = sj.make_mesh(mesh_shape)
    storage = None
    if tiers:
        disk = disk or tempfile.mkdtemp()
        storage = embed.Storage(device_rows=640, host_bytes="60KB", disk=disk)
    collection = tables(mesh, storage)
    if not collection.span.is_whole:
        here = jax.process_index()
        for name, changed in (
            ("dim", {"dim": 4 + here}),
            ("admit", {"admit": embed.MinCount(2 + here)}),
            ("optimizer", {"optimizer": optax.sgd(0.1 + here)}),
            ("initializer", {"initializer": embed.uniform(0.1 + here)}),
        ):
            table = embed.TableSpec("item", **({"dim": 4} | changed))
            try:
                embed.EmbeddingCollection({"x": embed.FeatureSpec(table)}, mesh=mesh)
            except ValueError as problem:
                told = str(problem)
            assert f"`collection.tables.item.{name}` is " in told, told
            others = {"admit", "optimizer", "initializer"} - {name}
            if name != "dim":
                assert not [x for x in others if f"item.{x}` is" in told], told
    network = from_nnx(Model(nnx.Rngs(0)))
    tx = optax.adam(1e-3)
    measured = {"loss": metrics.LogLoss(), "auc": metrics.AUC()}
    state = init_state(network, tx, collection, measured)
    step = train.make_train_step(network, tx, collection)
    out: dict = {"losses": [], "counters": {}}
    if not collection.span.is_whole:
        with ThreadPoolExecutor(1) as pool:
            empty = {name: np.zeros(0, np.int64) for name in collection.features}
            error = pool.submit(collection.plan, empty, 0, train=True).exception()
        assert "batches are planned in the main thread" in str(error), error
    loaded = np.arange(100, 130)
    values = np.arange(120.0).reshape(30, 4)
    slabs = collection.load_rows(state.tables, "alone", loaded, values)
    state = state.replace(tables=slabs)
    loader = Loader(
        Clicks(),
        BATCH,
        shuffle_seed=3,
        stream=train.prepare_stream(collection, train=True),
        window=4,
    )
    while loader.epoch < 2:
        for batch in loader:
            state, info = step(state, batch)
            out["losses"].append(float(info["loss"]))
            train.add_counters(out["counters"], batch.counters)
    evaluator = train.make_eval_step(network, collection)
    other = Loader(Clicks(), 400, stream=train.prepare_stream(collection, train=False))
    found, unseen = train.evaluate(
        evaluator, state, other, {"auc": metrics.AUC()}, mesh
    )
    out["eval"] = compute_metrics(found) | {"unseen": unseen["unseen"]}
    out["train"] = compute_metrics(state.metrics)
    out["shrunk"] = collection.shrink()
    keys = np.arange(900)
    read = collection.lookup_rows(state.tables, "item", keys)
    out["found"] = int(read["found"].sum())
    out["item"] = np.asarray(read["rows"]).astype(float).round(6).tolist()
    out["small"] = collection.lookup_rows(state.tables, "small", keys[:20])[
        "rows"
    ].tolist()  # type: ignore[union-attr]
    out["params"] = [
        np.asarray(x).tolist() for x in jax.tree.leaves(fetch(state.params))
    ]
    out["keys"] = {
        name: len(collection.keys(name)) for name in ("user", "item", "alone", "small")
    }
    out["exported"] = {
        name: sum(len(p.keys) for p in collection.export(state.tables, name))
        for name in out["keys"]
    }
    for name in ("planner_ms",):
        del out["counters"][name]
    collection.close()
    return out


def main(*args) -> None:
    """Prints what `run` returns."""
    print("FOUND " + json.dumps(run(*args)))
