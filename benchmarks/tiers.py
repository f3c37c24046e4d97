"""Training with most rows off the devices, beside all rows on them, on the same cores.

    python benchmarks/tiers.py

The DLRM step of benchmarks/ctr.py on fresh Zipf(1.1) batches, all keys known beforehand.
Variants, each in a process of its own, rounds interleaved:

device    all rows on the devices
K=8, ...  a tenth of the keys on the devices, the rest in RAM, windows of K batches planned
          while the devices train
disk      the same with all but a fifth of the keys on disk, page cache warm
bare      a cache without look-ahead: each batch planned and moved only when it is due

Prints a table of medians and ratios, and as the last line JSON.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import workers  # noqa: E402
import zipf  # noqa: E402
from ctr import NAMES, time_steps  # noqa: E402
from zipf import DENSE, DIM  # noqa: E402


def worker(a):
    """One variant."""
    import jax
    import optax
    from flax import nnx

    import shardjax as sj
    from shardjax import data, embed, models, train
    from shardjax.network import from_nnx
    from shardjax.state import init_state

    sj.ensure_devices(a.mesh)
    mesh = sj.make_mesh(a.mesh)
    rows = embed.rowwise_adagrad(0.05) if a.optimizer == "rowwise" else optax.adam(1e-3)
    size = zipf.table_rows(a.rows)
    storage = None
    total = size * len(NAMES)
    disk = tempfile.TemporaryDirectory()
    if a.worker == "disk":
        row_bytes = 4 * (DIM + (2 * DIM if a.optimizer == "adam" else 1)) + 36
        known = embed.Index(int(size * (a.share + 0.1)) + 5000)
        index = len(NAMES) * known.nbytes + 2 * total
        storage = embed.Storage(
            device_rows=int(total * a.share),
            host_bytes=int(0.1 * total * row_bytes + index),
            disk=disk.name,
        )
    elif a.worker != "device":
        storage = embed.Storage(device_rows=int(total * a.share))
    collection = embed.EmbeddingCollection(
        {n: embed.FeatureSpec(embed.TableSpec(n, DIM, optimizer=rows)) for n in NAMES},
        mesh=mesh,
        initial_rows=a.rows // mesh.size + 20_000,
        storage=storage,
    )
    network = from_nnx(
        models.DLRM(features=NAMES, n_dense=DENSE, dim=DIM, rngs=nnx.Rngs(0))
    )
    tx = optax.adam(1e-3)
    count = a.warm + a.steps
    kept = [
        data.Batch(labels, dense, ids.astype(np.uint64), NAMES)
        for dense, ids, labels in zipf.batches(a.rows, a.batch, count)
    ]
    state = init_state(network, tx, collection)
    chunk = 20_000
    for start in range(0, size, chunk):
        keys = np.arange(start, min(start + chunk, size), dtype=np.uint64)
        plan = collection.plan(dict.fromkeys(NAMES, keys), len(keys), train=True)
        state = state.replace(tables=collection.apply_fills(state.tables, plan))
        jax.block_until_ready(state.tables)
    collection.planner.forget_sizes()
    step = train.make_train_step(network, tx, collection, microbatch_size=512)
    counters = {}

    def run(batch):
        nonlocal state
        train.add_counters(counters, batch.counters)
        state, info = step(state, batch)
        return info["loss"]

    class Source:
        feature_names, n_dense = NAMES, DENSE

        def chunks(self, start_chunk=0):
            yield from kept

    if a.worker == "bare":
        stream = (train.prepare(collection, b, train=True) for b in kept)
    else:
        window = {"device": 1, "disk": a.windows[0]}.get(a.worker) or int(a.worker)
        stream = data.Loader(
            Source(),
            a.batch,
            map=lambda many: train.prepare_window(collection, many),
            window=window,
        )
    report = time_steps(run, stream, a.warm, a.steps, a.batch)
    if storage is not None:
        hits = ("device_hits", "host_hits", "disk_hits", "inserted")
        uses = sum(counters[name] for name in hits)
        report["hit_rate"] = counters["device_hits"] / uses
        report["moved_rows_per_step"] = counters["fetched_rows"] / count
        report["disk_rows_per_step"] = counters["disk_hits"] / count
        disk_rows = collection.planner.tiers[0].disk
        report["on_disk"] = 0 if disk_rows is None else len(disk_rows) / total
        collection.close()
    return report


def run_worker(a, variant, optimizer):
    """One variant in a process of its own."""
    options = []
    for name in ("rows", "batch", "steps", "warm", "share", "mesh"):
        options += [f"--{name}", str(getattr(a, name))]
    options += ["--windows", str(a.windows[0])]
    command = [sys.executable, __file__, "--worker", variant, "--optimizer", optimizer]
    return workers.run_worker(variant, [*command, *options], a.platform)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10**7, help="keys, all tables")
    parser.add_argument("--share", type=float, default=0.1, help="on the devices")
    parser.add_argument("--windows", type=int, nargs="+", default=[8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--warm", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--mesh", default="2x1")
    parser.add_argument("--platform", default="cpu")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--optimizer", default="rowwise", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.worker:
        print(json.dumps(worker(a)))
        return
    variants = [("device", "rowwise"), ("bare", "rowwise")]
    variants += [(str(k), "rowwise") for k in a.windows]
    variants += [("disk", "rowwise"), ("device", "adam"), (str(a.windows[0]), "adam")]
    found = {}
    for _ in range(a.rounds):
        for variant, optimizer in variants:
            report = run_worker(a, variant, optimizer)
            found.setdefault((variant, optimizer), []).append(report)
            print(variant, optimizer, report, file=sys.stderr, flush=True)
    print(
        "variant | optimizer | examples/s, median (min-max) | CPU ms | of device | hits"
    )
    result = {"benchmark": "tiers", "rows": a.rows, "share": a.share, "batch": a.batch}
    for variant, optimizer in variants:
        reports = found[variant, optimizer]
        speed = [r["examples_per_s"] for r in reports]
        base = [r["examples_per_s"] for r in found["device", optimizer]]
        ratio = float(np.median([s / b for s, b in zip(speed, base, strict=True)]))
        hits = np.median([r.get("hit_rate", 1.0) for r in reports])
        cpu = np.median([r["cpu_ms"] for r in reports])
        print(
            f"{variant} | {optimizer} | {np.median(speed):.0f} ({min(speed):.0f}-"
            f"{max(speed):.0f}) | {cpu:.0f} | {ratio:.2f}x | {hits:.3f}"
        )
        result[f"{optimizer}/{variant}"] = round(float(np.median(speed)))
        result[f"{optimizer}/{variant} of device"] = round(ratio, 3)
    k = str(a.windows[0])
    adam = np.median([r["step_ms"] for r in found[k, "adam"]])
    rowwise = np.median([r["step_ms"] for r in found[k, "rowwise"]])
    result["adam over rowwise, step time"] = round(float(adam / rowwise), 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
