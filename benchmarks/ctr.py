"""A whole DLRM training step, ours beside what else one would use, on the same cores.

    python benchmarks/ctr.py                               ours and flax
    python benchmarks/ctr.py --torch path/to/python        and PyTorch, FBGEMM

Batch 8192, bottom MLP 13-64-16, dot interaction of 27 vectors, top MLP 256-128-1, dim
16, 26 features with Zipf(1.1) ids, row-wise Adagrad for the rows and Adam for the rest,
batches in memory. Each variant runs in a process of its own; the rounds interleave them.

ours: shardjax, planning in its loader's thread; on a CPU, a simulated device per
core (--mesh). flax: nnx.Embed, dense gradients,
optax.adagrad. tbe, bag: see benchmarks/torch_ctr.py. Prints a table of medians and
ratios, and as the last line JSON.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import workers  # noqa: E402
import zipf  # noqa: E402
from zipf import DENSE, DIM, FEATURES  # noqa: E402

NAMES = tuple(f"C{i}" for i in range(FEATURES))


def time_steps(step, batches, warm, steps, batch):
    """Runs warm + steps steps; `step` returns something to wait for."""
    import jax

    start = cpu = 0.0
    recent = []
    for i, data in enumerate(batches):
        if i == warm:
            jax.block_until_ready(recent)
            start, cpu = time.perf_counter(), time.process_time()
        recent = [*recent[-2:], step(data)]
        jax.block_until_ready(recent[0])  # at most two steps are in flight
    jax.block_until_ready(recent)
    wall = time.perf_counter() - start
    return {
        "examples_per_s": steps * batch / wall,
        "step_ms": wall / steps * 1e3,
        "cpu_ms": (time.process_time() - cpu) / steps * 1e3,
    }


def ours(a):
    """This library."""
    import optax
    from flax import nnx

    import shardjax as sj
    from shardjax import data, embed, models, train
    from shardjax.network import from_nnx
    from shardjax.state import init_state

    sj.ensure_devices(a.mesh)
    mesh = sj.make_mesh(a.mesh)
    rows = embed.rowwise_adagrad(0.05)
    collection = embed.EmbeddingCollection(
        {n: embed.FeatureSpec(embed.TableSpec(n, DIM, optimizer=rows)) for n in NAMES},
        mesh=mesh,
        initial_rows=a.rows // mesh.size + 20_000,
    )
    network = from_nnx(
        models.DLRM(features=NAMES, n_dense=DENSE, dim=DIM, rngs=nnx.Rngs(0))
    )
    tx = optax.adam(1e-3)
    made = zipf.batches(a.rows, a.batch, 16)
    kept = [
        data.Batch(labels, dense, ids.astype(np.uint64), NAMES)
        for dense, ids, labels in made
    ]

    class Source:
        feature_names, n_dense = NAMES, DENSE

        def chunks(self, start_chunk=0):
            for i in range(a.warm + a.steps):
                yield kept[i % len(kept)]

    # every id has its row before the clock starts, as in the other variants
    size = zipf.table_rows(a.rows)
    everything = {n: np.arange(size, dtype=np.uint64) for n in NAMES}
    plan = collection.plan(everything, size, train=True)
    collection.planner.forget_sizes()
    state = init_state(network, tx, collection)
    state = state.replace(tables=collection.apply_fills(state.tables, plan))
    step = train.make_train_step(network, tx, collection, microbatch_size=a.microbatch)

    def run(batch):
        nonlocal state
        state, info = step(state, batch)
        return info["loss"]

    loader = data.Loader(
        Source(), a.batch, map=lambda b: train.prepare(collection, b, train=True)
    )
    return time_steps(run, loader, a.warm, a.steps, a.batch)


def flax(a):
    """What a JAX user writes today."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    from shardjax import models

    class Model(nnx.Module):
        def __init__(self, rngs):
            size = zipf.table_rows(a.rows)
            init = jax.nn.initializers.uniform(0.02)
            self.tables = nnx.List(
                [nnx.Embed(size, DIM, embedding_init=init, rngs=rngs) for _ in NAMES]
            )
            self.head = models.DLRM(features=NAMES, n_dense=DENSE, dim=DIM, rngs=rngs)

        def __call__(self, dense, ids):
            pairs = zip(NAMES, self.tables, ids, strict=True)
            return self.head(dense, {n: table(i) for n, table, i in pairs})

    model = Model(nnx.Rngs(0))

    def label(params):
        return jax.tree.map_with_path(
            lambda p, _: "rows" if "tables" in jax.tree_util.keystr(p[:1]) else "rest",
            params,
        )

    tx = optax.multi_transform(
        {
            "rows": optax.adagrad(0.05, initial_accumulator_value=0.0),
            "rest": optax.adam(1e-3),
        },
        label,
    )
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, dense, ids, labels):
        def loss(model):
            logits = model(dense, ids)
            return optax.sigmoid_binary_cross_entropy(logits, labels).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    made = [
        (dense, ids.astype(np.int32), labels)
        for dense, ids, labels in zipf.batches(a.rows, a.batch, 16)
    ]
    stream = (made[i % len(made)] for i in range(a.warm + a.steps))

    def run(batch):
        dense, ids, labels = batch
        return step(model, optimizer, jnp.asarray(dense), jnp.asarray(ids), labels)

    return time_steps(run, stream, a.warm, a.steps, a.batch)


def run_worker(a, variant, rows):
    """One variant in a process of its own."""
    options = ["--rows", str(rows), "--batch", str(a.batch)]
    steps = max(a.steps // 3, 8) if variant == "flax" and rows > 3e6 else a.steps
    options += ["--steps", str(steps), "--warm", str(a.warm)]
    if variant in ("tbe", "bag"):
        command = [a.torch, str(HERE / "torch_ctr.py"), "--variant", variant]
    else:
        command = [sys.executable, __file__, "--worker", variant]
        options += ["--microbatch", str(a.microbatch), "--mesh", a.mesh]
    return workers.run_worker(variant, [*command, *options], a.platform)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch", help="a Python with torch and fbgemm-gpu-cpu")
    parser.add_argument("--table-rows", type=int, nargs="+", default=[10**7])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--microbatch", type=int, default=512)
    parser.add_argument("--mesh", default="2x1", help="of ours; a device per core")
    parser.add_argument("--platform", default="cpu")
    parser.add_argument("--worker", choices=["ours", "flax"], help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.worker:
        print(json.dumps({"ours": ours, "flax": flax}[a.worker](a)))
        return
    variants = ["ours", "flax", *(["tbe", "bag"] if a.torch else [])]
    found = {}
    for _ in range(a.rounds):
        for rows in a.table_rows:
            for v in variants:
                report = run_worker(a, v, rows)
                found.setdefault((rows, v), []).append(report)
                speed, cpu = report["examples_per_s"], report["cpu_ms"]
                line = f"{rows:.0e} {v}: {speed:.0f} examples/s, CPU {cpu:.0f} ms/step"
                print(line, file=sys.stderr, flush=True)
    print("table rows | variant | examples/s, median (min-max) | CPU ms/step | ours is")
    result = {"benchmark": "ctr", "batch": a.batch, "rounds": a.rounds}
    for rows in a.table_rows:
        mine = [r["examples_per_s"] for r in found[rows, "ours"]]
        for v in variants:
            speed = [r["examples_per_s"] for r in found[rows, v]]
            ratio = float(np.median([m / s for m, s in zip(mine, speed, strict=True)]))
            cpu = np.median([r["cpu_ms"] for r in found[rows, v]])
            print(
                f"{rows:.0e} | {v} | {np.median(speed):.0f} ({min(speed):.0f}-"
                f"{max(speed):.0f}) | {cpu:.0f} | {ratio:.2f}x"
            )
            result[f"{v}/{rows}"] = round(float(np.median(speed)))
            result[f"ours_over_{v}/{rows}"] = round(ratio, 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
