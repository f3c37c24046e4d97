"""The embedding work of a step alone: gather, exchange, pool, backward, update.

    python benchmarks/exchange.py

On 1 and on 8 (simulated) devices, with Zipf(1.1), uniform and all-equal ids; the plan is
made before the clock starts. Beside it, unsharded: jnp.take of a table and a dense
gradient with optax.adagrad. Interleaved rounds; prints medians and, last, JSON.
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

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import zipf  # noqa: E402

import shardjax as sj  # noqa: E402

NAMES = tuple(f"C{i}" for i in range(zipf.FEATURES))


def ids_of(kind: str, rows: int, batch: int) -> np.ndarray:
    """uint64 [26, batch] ids of one table each."""
    size = zipf.table_rows(rows)
    if kind == "equal":
        return np.full((zipf.FEATURES, batch), 7, np.uint64)
    if kind == "uniform":
        rng = np.random.default_rng(0)
        return rng.integers(0, size, (zipf.FEATURES, batch)).astype(np.uint64)
    return zipf.batches(rows, batch, 1)[0][1].astype(np.uint64)


def ours(mesh: str, kind: str, rows: int, batch: int):
    """A function that does one step's embedding work."""
    from shardjax import embed
    from shardjax.embed.layout import pack

    tx = embed.rowwise_adagrad(0.05)
    collection = embed.EmbeddingCollection(
        {
            n: embed.FeatureSpec(embed.TableSpec(n, zipf.DIM, optimizer=tx))
            for n in NAMES
        },
        mesh=sj.make_mesh(mesh),
        initial_rows=rows // int(np.prod([int(x) for x in mesh.split("x")])) + 4096,
    )
    features = dict(zip(NAMES, ids_of(kind, rows, batch), strict=True))
    plan = collection.plan(features, batch, train=True)
    state = collection.apply_fills(collection.init(), plan)
    packed, layout = pack(collection.devices, plan.examples, plan.groups, plan.arrays)
    spec = collection.state_spec()

    @partial(jax.jit, donate_argnums=0)
    @partial(
        jax.shard_map,
        mesh=collection.mesh,
        in_specs=(spec, jax.P(collection.axes)),
        out_specs=spec,
        check_vma=False,
    )
    def step(state, packed):
        arrays = layout.unpack(packed[0])
        found = collection.gather_rows(state, arrays)
        blocks, pull = jax.vjp(lambda r: collection.embed(r, arrays, layout), found)
        (grads,) = pull(jax.tree.map(lambda x: x * 1e-3, blocks))
        return collection.update_rows(state, found, grads, arrays)

    sharding = jax.NamedSharding(collection.mesh, jax.P(collection.axes))
    packed = jax.device_put(packed, sharding)

    def run():
        nonlocal state
        state = step(state, packed)
        jax.block_until_ready(state)

    return run


def dense(kind: str, rows: int, batch: int):
    """The same with a dense gradient of the whole table."""
    size = zipf.table_rows(rows)
    ids = ids_of(kind, rows, batch).astype(np.int32)
    flat = jnp.asarray(
        (ids + np.arange(zipf.FEATURES, dtype=np.int32)[:, None] * size).T
    )
    tx = optax.adagrad(0.05, initial_accumulator_value=0.0)
    table = jnp.zeros((size * zipf.FEATURES, zipf.DIM))
    state = (table, tx.init(table))

    @partial(jax.jit, donate_argnums=0)
    def step(state, ids):
        table, opt = state
        out, pull = jax.vjp(lambda t: jnp.take(t, ids, axis=0, mode="clip"), table)
        (grad,) = pull(out * 1e-3)
        updates, opt = tx.update(grad, opt, table)
        return optax.apply_updates(table, updates), opt

    def run():
        nonlocal state
        state = step(state, flat)
        jax.block_until_ready(state)

    return run


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=15)
    a = parser.parse_args()
    sj.ensure_devices("8x1")
    kinds = ("zipf", "uniform", "equal")
    runs = {
        f"{mesh} {kind}": ours(mesh, kind, a.rows, a.batch)
        for mesh in ("1x1", "8x1")
        for kind in kinds
    }
    runs["dense gradient, zipf"] = dense("zipf", a.rows, a.batch)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(a.rounds + 2):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e3)
    result = {"benchmark": "exchange", "rows": a.rows, "batch": a.batch}
    print("what | ms, median (min-max)")
    for name, ms in times.items():
        kept = ms[2:]
        print(f"{name} | {np.median(kept):.1f} ({min(kept):.1f}-{max(kept):.1f})")
        result[name] = round(float(np.median(kept)), 2)
    for mesh in ("1x1", "8x1"):
        ratio = [
            e / u
            for e, u in zip(
                times[f"{mesh} equal"][2:], times[f"{mesh} uniform"][2:], strict=True
            )
        ]
        result[f"{mesh} equal over uniform"] = round(float(np.median(ratio)), 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
