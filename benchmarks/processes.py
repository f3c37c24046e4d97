"""One, two and four processes that train the same tables, and what they send each other.

    python benchmarks/processes.py

All on this machine, 8 simulated devices in all, so more processes have no more cores: the
times say what the processes cost, not what they gain. Bytes are those of the programs
that were compiled, and of the keys that are sent ahead, beside the least there could be:
each unique row of another device there and its gradient back. The model is of 8 to 512
devices: plans of as many requesters and owners, made on the host. Prints JSON, last.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import zipf  # noqa: E402

import shardjax as sj  # noqa: E402

NAMES = tuple(f"C{i}" for i in range(zipf.FEATURES))
WINDOW = 4


def features():
    """26 tables, one key per example each."""
    tx = sj.embed.rowwise_adagrad(0.05)
    return {
        n: sj.embed.FeatureSpec(sj.embed.TableSpec(n, zipf.DIM, optimizer=tx))
        for n in NAMES
    }


def batches(args):
    """`sj.data.Batch`es that follow one another."""
    from shardjax.data import Batch

    for dense, ids, labels in zipf.batches(args.rows, args.batch, args.steps):
        yield Batch(labels, dense, ids.astype(np.uint64), fixed_names=NAMES)


class Source:
    """Batches as chunks."""

    feature_names, n_dense = NAMES, zipf.DENSE

    def __init__(self, args):
        self.args = args

    def chunks(self, start_chunk=0):
        for n, batch in enumerate(batches(self.args)):
            if n >= start_chunk:
                yield batch


def work(args) -> dict:
    """A run of one process of several."""
    from flax import nnx

    from shardjax import models, processes, train
    from shardjax.data import Loader
    from shardjax.network import from_nnx
    from shardjax.profiling import collectives, wire_bytes
    from shardjax.state import init_state

    if args.processes > 1:
        processes.start_processes(args.coordinator, args.processes, args.process)
    sj.ensure_devices("8x1")
    mesh = sj.make_mesh("8x1")
    collection = sj.embed.EmbeddingCollection(
        features(), mesh=mesh, initial_rows=args.rows // 8 + 4096
    )
    network = from_nnx(
        models.DLRM(features=NAMES, n_dense=zipf.DENSE, dim=zipf.DIM, rngs=nnx.Rngs(0))
    )
    tx = optax.adam(1e-3)
    state = init_state(network, tx, collection)
    step = train.make_train_step(network, tx, collection, microbatch_size=512)
    loader = Loader(
        Source(args),
        args.batch,
        stream=train.prepare_stream(collection, train=True),
        window=WINDOW,
    )
    times, remote, unique = [], [], []
    before, sent = time.perf_counter(), 0
    for batch in loader:
        state, info = step(state, batch)
        jax.block_until_ready(info["loss"])
        now = time.perf_counter()
        times.append(now - before)
        before = now
        remote.append(remote_rows(collection, batch.plan))
        unique.append(batch.counters["unique_ids"])
    if args.processes > 1:
        sent = collection.sent_key_bytes / args.steps / collection.span.count
    program = step.jitted.lower(state, batch.packed, layout=batch.layout).compile()
    found = collectives(program, devices=8)
    rows = [c for c in found if c.kind == "all-to-all"]
    return {
        "step_ms": 1e3 * statistics.median(times[2 * WINDOW :]),
        "remote_rows": statistics.mean(remote),
        "unique_rows": statistics.mean(unique),
        "key_bytes": sent,
        "row_bytes": wire_bytes(rows).total,
        "all_bytes": wire_bytes(found).total,
        "loss": float(info["loss"]),
    }


def remote_rows(collection, plan) -> int:
    """Rows that this process's devices send to other devices in a step."""
    count = 0
    for group in plan.groups:
        merge = plan.arrays[f"{group.name}/merge"]
        sent = merge < group.rows
        own = np.arange(len(merge))
        count += int(sent.sum()) - int(sent[own, collection.span.first + own].sum())
    return count


def run(args, processes: int) -> list[dict]:
    """What each process of a run found."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, __file__, "--rows", str(args.rows)]
    command += ["--batch", str(args.batch), "--steps", str(args.steps)]
    command += ["--processes", str(processes)]
    if processes > 1:
        command += ["--coordinator", f"localhost:{port}"]
    running = [
        subprocess.Popen(
            [*command, "--process", str(n)], stdout=subprocess.PIPE, text=True
        )
        for n in range(processes)
    ]
    texts = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit(f"a run of {processes} processes failed")
    return [json.loads(text.splitlines()[-1]) for text in texts]


def model(devices: int, per_device: int, rows: int, params: int) -> dict:
    """MB that a device sends per step, by the plan of a batch on so many devices."""
    from shardjax.embed.groups import plan_groups
    from shardjax.embed.plan import Planner

    specs = features()
    planner = Planner(plan_groups(specs, devices), specs, devices, 0)
    batch = devices * per_device
    _, ids, _ = zipf.batches(rows, batch, 1)[0]
    plan = planner.plan(
        dict(zip(NAMES, ids.astype(np.uint64), strict=True)), batch, train=True
    )
    [group] = plan.groups
    merge = plan.arrays[f"{group.name}/merge"]
    sent = merge < group.rows
    own = np.arange(devices)
    remote = (sent.sum() - sent[own, own].sum()) / devices
    others = devices - 1
    most = int(sent.sum(-1).max())
    keys = others * (len(NAMES) + 2 * most) * 4
    moved = 2 * others * group.send * zipf.DIM * 4
    least = 2 * remote * zipf.DIM * 4
    return {
        "devices": devices,
        "batch": batch,
        "remote_rows": round(float(remote)),
        "least_MB": round(float(least) / 1e6, 3),
        "keys_MB": round(keys / 1e6, 3),
        "rows_MB": round(moved / 1e6, 3),
        "ratio": round(float((keys + moved) / least), 3),
        "dense_MB": round(2 * params * 4 * others / devices / 1e6, 3),
    }


def main() -> None:
    """Runs all, or one process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--rows", type=int, default=1_000_000, help="keys in all tables"
    )
    parser.add_argument("--batch", type=int, default=8192, help="examples, all devices")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    parser.add_argument("--coordinator")
    args = parser.parse_args()
    if args.processes:
        print(json.dumps(work(args)))
        return
    result: dict = {"benchmark": "processes", "rows": args.rows, "batch": args.batch}
    for count in (1, 2, 4):
        found = run(args, count)
        remote = sum(x["remote_rows"] for x in found) / 8
        least = 2 * remote * zipf.DIM * 4
        one = found[0]
        sent = one["key_bytes"] * 7 / 8 + one["row_bytes"]
        result[f"{count} processes"] = {
            "step_ms": round(max(x["step_ms"] for x in found), 1),
            "loss": one["loss"],
            "least_bytes": round(least),
            "key_bytes": round(one["key_bytes"] * 7 / 8),
            "row_bytes": round(one["row_bytes"]),
            "ratio": round(sent / least, 3),
        }
        print(count, result[f"{count} processes"], file=sys.stderr)
    result["model"] = [
        model(devices, args.batch // 8, args.rows, 500_000)
        for devices in (8, 16, 32, 64, 128, 256, 512)
    ]
    for row in result["model"]:
        print(row, file=sys.stderr)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
