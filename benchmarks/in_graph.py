"""A DLRM step whose model looks its tables up itself, beside the two ways around it.

    python benchmarks/in_graph.py --table-rows 100000 1000000

host: the tables of an EmbeddingCollection, planned on the host (its planning is told
apart, plan_ms: in training a loader's thread does it). graph: `shardjax.embed.Embed` and
`make_model_step`. equal: the same with all ids of a batch equal. dense: `nnx.Embed`, dense
gradients, optax.adagrad. All have the batch, model and ids of benchmarks/ctr.py, and
Adagrad for rows; one device, one process; their steps take turns, so that what else the
machine does meets all of them. Prints medians in ms and, as the last line, JSON.
"""

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import zipf  # noqa: E402
from zipf import DENSE, DIM, FEATURES  # noqa: E402

import shardjax as sj  # noqa: E402
from shardjax import data, embed, models, train  # noqa: E402
from shardjax.state import init_state  # noqa: E402

NAMES = tuple(f"C{i}" for i in range(FEATURES))
ROWS = optax.adagrad(0.05, initial_accumulator_value=0.0)


def make_head(rngs):
    """The DLRM, which is the same everywhere."""
    return models.DLRM(features=NAMES, n_dense=DENSE, dim=DIM, rngs=rngs)


class Model(nnx.Module):
    """The DLRM with its tables inside."""

    def __init__(self, Embed, rows, rngs):
        init = jax.nn.initializers.uniform(0.02)
        self.tables = nnx.List(
            [Embed(rows, DIM, embedding_init=init, rngs=rngs) for _ in NAMES]
        )
        self.head = make_head(rngs)

    def __call__(self, dense, ids):
        pairs = zip(NAMES, self.tables, ids.T, strict=True)
        return self.head(dense, {name: table(i) for name, table, i in pairs})


def losses_of(logits, labels):
    return optax.sigmoid_binary_cross_entropy(logits, labels)


def host(a, rows, made, planning):
    """A step on a batch that is planned already; `planning` gets the ms of that."""
    mesh = sj.make_mesh("1x1")
    tables = {n: embed.TableSpec(n, DIM, optimizer=ROWS) for n in NAMES}
    collection = embed.EmbeddingCollection(
        {n: embed.FeatureSpec(t) for n, t in tables.items()},
        mesh=mesh,
        initial_rows=rows * FEATURES + 1000,
    )
    network, tx = sj.from_nnx(make_head(nnx.Rngs(0))), optax.adam(1e-3)
    everything = {n: np.arange(rows, dtype=np.uint64) for n in NAMES}
    plan = collection.plan(everything, rows, train=True)
    collection.planner.forget_sizes()
    state = init_state(network, tx, collection)
    state = state.replace(tables=collection.apply_fills(state.tables, plan))
    step = train.make_train_step(
        network, tx, collection, microbatch_size=a.batch // a.microbatches
    )

    def ready(i):
        dense, ids, labels = made[i % len(made)]
        begin = time.perf_counter()
        batch = data.Batch(labels, dense, ids.astype(np.uint64), NAMES)
        batch = train.prepare(collection, batch, train=True)
        planning.append((time.perf_counter() - begin) * 1e3)

        def run():
            nonlocal state
            state, info = step(state, batch)
            return info["loss"]

        return run

    return ready


def graph(a, rows, made):
    """A step of the model with its own tables."""
    model, mesh, tx = (
        Model(embed.Embed, rows, nnx.Rngs(0)),
        sj.make_mesh("1x1"),
        optax.adam(1e-3),
    )
    variables, params, rest = nnx.split(model, nnx.Param, ...)
    tables = embed.plan_tables(params, embed.table_paths(model), ROWS, mesh=mesh)
    zero = sj.zero.plan_zero(tables.split(params), tx, mesh, 0, axes=tables.axes)

    def loss(params, batch):
        dense, ids, labels = batch
        logits = nnx.merge(variables, params, rest)(dense, ids)
        return losses_of(logits, labels).sum(), jnp.float32(len(labels))

    state = sj.init_model_state(params, tx, tables, zero)
    step = sj.make_model_step(loss, tx, tables, zero, microbatches=a.microbatches)
    batches = on_device(made)

    def run(batch):
        nonlocal state
        state, info = step(state, batch)
        return info["loss"]

    return lambda i: partial(run, batches[i % len(batches)])


def dense(a, rows, made):
    """What a JAX user writes today."""
    del a
    model = Model(nnx.Embed, rows, nnx.Rngs(0))

    def label(params):
        return jax.tree.map_with_path(
            lambda p, _: "rows" if "tables" in jax.tree_util.keystr(p[:1]) else "rest",
            params,
        )

    tx = optax.multi_transform({"rows": ROWS, "rest": optax.adam(1e-3)}, label)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, batch):
        def loss(model):
            dense, ids, labels = batch
            return losses_of(model(dense, ids), labels).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    batches = on_device(made)
    return lambda i: partial(step, model, optimizer, batches[i % len(batches)])


def on_device(made):
    return [
        jax.device_put((dense, ids.T.astype(np.int32), labels))
        for dense, ids, labels in made
    ]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table-rows", type=int, nargs="+", default=[10**5, 10**6])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument(
        "--variants", nargs="+", default=["host", "graph", "equal", "dense"]
    )
    a = parser.parse_args()
    result: dict[str, object] = {"benchmark": "in_graph", "batch": a.batch}
    result["device"] = jax.devices()[0].device_kind
    for total in a.table_rows:
        rows = zipf.table_rows(total)
        made = zipf.batches(total, a.batch, 8)
        equal = [(d, np.full_like(ids, 3), labels) for d, ids, labels in made]
        runs, planning = {}, []
        if "host" in a.variants:
            runs["host"] = host(a, rows, made, planning)
        if "graph" in a.variants:
            runs["graph"] = graph(a, rows, made)
        if "equal" in a.variants:
            runs["equal"] = graph(a, rows, equal)
        if "dense" in a.variants:
            runs["dense"] = dense(a, rows, made)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for i in range(3 + a.steps):
            for name, run in runs.items():
                ready = run(i)
                begin = time.perf_counter()
                jax.block_until_ready(ready())
                if i >= 3:
                    times[name].append(time.perf_counter() - begin)
        medians = {name: float(np.median(t) * 1e3) for name, t in times.items()}
        if "host" in a.variants:
            medians["plan"] = float(np.median(planning[3:]))
        result |= {f"{name}_ms/{total}": round(m, 2) for name, m in medians.items()}
        print(
            f"{total:.0e} rows: "
            + ", ".join(f"{n} {m:.1f} ms" for n, m in medians.items())
        )
        for over in ("host", "dense"):
            if over in medians and "graph" in medians:
                ratios = np.array(times["graph"]) / np.array(times[over])
                result[f"graph_over_{over}/{total}"] = round(
                    float(np.median(ratios)), 3
                )
        if "equal" in medians and "graph" in medians:
            ratios = np.array(times["equal"]) / np.array(times["graph"])
            result[f"equal_over_graph/{total}"] = round(float(np.median(ratios)), 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
