"""Training with most rows off the devices, beside all rows on them, on the same cores.

    python benchmarks/tiers.py

The DLRM step of benchmarks/ctr.py on fresh Zipf(1.1) batches, all keys known beforehand.
Variants, each in a process of its own, by turns (benchmarks/turns.py):

device    all rows on the devices
K=8, ...  a tenth of the keys on the devices, the rest in RAM, windows of K batches planned
          while the devices train
disk      the same with all but a fifth of the keys on disk, page cache warm
bare      a cache without look-ahead: each batch planned and moved only when it is due

Prints a table of medians over the rounds, the ratios within a round, and as the last line JSON.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import turns  # noqa: E402
import zipf  # noqa: E402
from ctr import NAMES  # noqa: E402
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
    ahead = 4 * a.windows[0]  # planned in the last round, and not run
    count = a.warm + a.rounds * a.steps + ahead
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
    turns.in_turns(run, stream, a.warm, a.rounds, a.steps)
    report = {}
    if storage is not None:
        hits = ("device_hits", "host_hits", "disk_hits", "inserted")
        uses = sum(counters[name] for name in hits)
        report["hit_rate"] = counters["device_hits"] / uses
        run_steps = count - ahead
        report["moved_rows_per_step"] = counters["fetched_rows"] / run_steps
        report["disk_rows_per_step"] = counters["disk_hits"] / run_steps
        disk_rows = collection.planner.tiers[0].disk
        report["on_disk"] = 0 if disk_rows is None else len(disk_rows) / total
        collection.close()
    return report


def command(a, variant, optimizer):
    """What runs one variant."""
    options = []
    for name in ("rows", "batch", "rounds", "steps", "warm", "share", "mesh"):
        options += [f"--{name}", str(getattr(a, name))]
    options += ["--windows", str(a.windows[0])]
    return [
        sys.executable, __file__, "--worker", variant, "--optimizer", optimizer, *options
    ]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10**7, help="keys, all tables")
    parser.add_argument("--share", type=float, default=0.1, help="on the devices")
    parser.add_argument("--windows", type=int, nargs="+", default=[8])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=16, help="of a turn")
    parser.add_argument("--warm", type=int, default=40, help="steps before the first")
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
    commands = {(v, optimizer): command(a, v, optimizer) for v, optimizer in variants}
    found = turns.take_turns(commands, a.rounds, a.platform)
    times = {k: np.array([t["step_ms"] for t in own]) for k, (own, _) in found.items()}
    print(
        "variant | optimizer | examples/s, median (quarter-three quarters) | CPU ms | of"
        " device, median (quarter-three quarters) | hits"
    )
    result = {"benchmark": "tiers", "rows": a.rows, "share": a.share, "batch": a.batch}
    for (variant, optimizer), (own, report) in found.items():
        speed = a.batch / times[variant, optimizer] * 1e3
        ratios = times["device", optimizer] / times[variant, optimizer]
        low, middle, high = np.quantile(speed, (0.25, 0.5, 0.75))
        worse, ratio, better = np.quantile(ratios, (0.25, 0.5, 0.75))
        cpu = np.median([t["cpu_ms"] for t in own])
        print(
            f"{variant} | {optimizer} | {middle:.0f} ({low:.0f}-{high:.0f}) | {cpu:.0f} |"
            f" {ratio:.2f}x ({worse:.2f}-{better:.2f}) | {report.get('hit_rate', 1):.3f}"
        )
        result[f"{optimizer}/{variant}"] = {
            "examples_per_s": round(middle),
            "cpu_ms": round(cpu, 1),
            "of device": round(ratio, 3),
        } | {k: round(v, 3) for k, v in report.items()}
    k = str(a.windows[0])
    ratio = np.median(times[k, "adam"] / times[k, "rowwise"])
    result["adam over rowwise, step time"] = round(float(ratio), 3)
    ratio = np.median(times["bare", "rowwise"] / times[k, "rowwise"])
    result["windows over bare"] = round(float(ratio), 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
