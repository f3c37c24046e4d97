"""What a checkpoint costs: training with and without, and other ways to save the same state.

    python benchmarks/checkpoint.py

The DLRM step of benchmarks/ctr.py with 10 M rows of 16 floats and row-wise Adagrad's one, all
known beforehand. First `interval="auto"` tunes itself. Then, by turns in one process, the same
number of steps is taken with a save at their start and without one: by shardjax, by Orbax
(waited for, and in the background), numpy.savez and, where it is installed, torch.save. What
a save costs is the difference; a part of the interval that was chosen, it is the overhead. A
plain writer and a save without training tell the bandwidth; steps that touch one row in twenty
come before an increment; and the state is read again. Prints tables, and as the last line JSON.
"""

import argparse
import gc
import importlib.util
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import zipf  # noqa: E402
from ctr import NAMES  # noqa: E402
from larger_than_ram import memory  # noqa: E402
from zipf import DENSE, DIM  # noqa: E402

MB = 1e6


class Peak:
    """The greatest memory that is no file's, above what there was at first, in a context."""

    def __enter__(self):
        self._stop = threading.Event()
        self._base = self.bytes = memory(os.getpid())["RssAnon"]
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._stop.wait(0.05):
            self.bytes = max(self.bytes, memory(os.getpid())["RssAnon"])

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        self.above = self.bytes - self._base


class Run:
    """Training on batches that repeat, prepared as they are due."""

    def __init__(self, a):
        import jax
        import optax
        from flax import nnx

        import shardjax as sj
        from shardjax import data, embed, models, train
        from shardjax.network import from_nnx
        from shardjax.state import init_state

        self.jax, self.train = jax, train
        self.rows = a.rows
        self.mesh = sj.make_mesh(a.mesh)
        rows = embed.rowwise_adagrad(0.05)  # one for all: they lie in one slab
        tables = {
            n: embed.FeatureSpec(embed.TableSpec(n, DIM, optimizer=rows)) for n in NAMES
        }
        self.collection = embed.EmbeddingCollection(
            tables, mesh=self.mesh, initial_rows=a.rows // self.mesh.size + 20_000
        )
        network = from_nnx(
            models.DLRM(features=NAMES, n_dense=DENSE, dim=DIM, rngs=nnx.Rngs(0))
        )
        tx = optax.adam(1e-3)
        self.state = init_state(network, tx, self.collection)
        self.step = train.make_train_step(
            network, tx, self.collection, microbatch_size=512
        )
        self.made = [
            data.Batch(labels, dense, ids.astype(np.uint64), NAMES)
            for dense, ids, labels in zipf.batches(a.rows, a.batch, 64)
        ]
        self.taken = 0
        self.labels = self.made[0].labels

    def know_all(self):
        """Gives all keys their rows."""
        size, chunk = zipf.table_rows(self.rows), 20_000
        for start in range(0, size, chunk):
            keys = np.arange(start, min(start + chunk, size), dtype=np.uint64)
            plan = self.collection.plan(
                dict.fromkeys(NAMES, keys), len(keys), train=True
            )
            tables = self.collection.apply_fills(self.state.tables, plan)
            self.state = self.state.replace(tables=tables)
            self.jax.block_until_ready(tables)
        self.collection.planner.forget_sizes()

    def steps(self, n, after=lambda: None, made=None):
        """Takes n steps; returns seconds."""
        made = self.made if made is None else made
        recent, start = [], time.perf_counter()
        for _ in range(n):
            batch = made[self.taken % len(made)]
            prepared = self.train.prepare(self.collection, batch, train=True)
            self.state, info = self.step(self.state, prepared)
            self.taken += 1
            recent = [*recent[-2:], info["loss"]]
            self.jax.block_until_ready(recent[0])
            after()
        self.jax.block_until_ready(recent)
        return time.perf_counter() - start

    def touching(self, share):
        """Batches with each key of a part of all once."""
        from shardjax import data

        size = zipf.table_rows(self.rows)
        keys = np.random.default_rng(0).permutation(size)[: int(size * share)]
        keys = keys.astype(np.uint64)
        batch = len(self.labels)
        return [
            data.Batch(
                self.labels,
                self.made[0].dense,
                np.tile(np.resize(keys[at : at + batch], batch), (len(NAMES), 1)),
                NAMES,
            )
            for at in range(0, len(keys), batch)
        ]  # fmt: skip


def tune(run, folder, a):
    """Trains with `interval="auto"` until it has saved a few times; returns its figures."""
    from shardjax.checkpoint import Checkpointer

    with Checkpointer(
        folder / "auto", interval="auto", keep=1, collection=run.collection
    ) as checkpointer:
        checkpointer.maybe_save(0, run.state)
        first, saves = run.taken, 0

        def after():
            nonlocal saves
            saves += checkpointer.maybe_save(run.taken - first, run.state)

        while saves < a.saves and run.taken - first < a.most_steps:
            run.steps(1, after)
        checkpointer.wait(run.state)
        return checkpointer.policy.figures()


def orbax_save(run, folder, wait):
    """A save by Orbax of the state as it is; returns what waits for it, and closes it."""
    import orbax.checkpoint as ocp

    saver = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
    saver.save(folder, args=ocp.args.StandardSave(run.state))
    if wait:
        saver.wait_until_finished()

    def finish():
        saver.wait_until_finished()
        saver.close()

    return finish


def savez(run, folder, wait):
    """numpy.savez of a copy."""
    leaves = [np.asarray(x) for x in run.jax.tree.leaves(run.state)]
    folder.mkdir()
    with (folder / "state.npz").open("wb") as file:
        np.savez(file, *leaves)
        file.flush()
        os.fsync(file.fileno())
    return lambda: None


def torch_save(run, folder, wait):
    """torch.save of a copy."""
    import torch

    leaves = [np.array(x) for x in run.jax.tree.leaves(run.state)]
    folder.mkdir()
    with (folder / "state.pt").open("wb") as file:
        torch.save([torch.from_numpy(np.atleast_1d(x)) for x in leaves], file)
        file.flush()
        os.fsync(file.fileno())
    return lambda: None


def ours(run, folder, wait):
    """A save by shardjax."""
    from shardjax.checkpoint import Checkpointer

    saving = Checkpointer(folder, collection=run.collection)
    saving.save(run.taken, run.state)
    if wait:
        saving.wait(run.state)
    return lambda: saving.close(run.state)


def costs(run, folder, a):
    """What each way to save costs: seconds of `span` steps with a save at their start, by
    turns, less those of as many without one; how long they stand still at first, when all
    is written, and how much more memory there is meanwhile."""
    ways = {
        "none": (lambda *_: lambda: None, False),
        "shardjax": (ours, False),
        "Orbax, waited for": (orbax_save, True),
        "Orbax in the background": (orbax_save, False),
        "numpy.savez": (savez, True),
    }
    if importlib.util.find_spec("torch"):
        ways["torch.save"] = (torch_save, True)
    ways = {n: way for n, way in ways.items() if n in ("none", *(a.ways or ways))}
    keys = ("took", "cpu", "stall", "there", "memory")
    found = {n: {key: [] for key in keys} for n in ways}
    names = list(ways)
    for turn in range(a.rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            way, wait = ways[name]
            path = folder / f"{turn}_{names.index(name)}"
            with Peak() as peak:
                start, cpu = time.perf_counter(), time.process_time()
                finish = way(run, path, wait)
                stall = time.perf_counter() - start
                run.steps(a.span)
                took = time.perf_counter() - start
                finish()
                there = stall if wait else time.perf_counter() - start
                cpu = time.process_time() - cpu
            values = (took + max(there - took, 0), cpu, stall, there, peak.above)
            for key, value in zip(keys, values):  # noqa: B905
                found[name][key].append(value)
            shutil.rmtree(path, ignore_errors=True)
            gc.collect()
    return found


def bandwidth(run, folder, a):
    """Bytes per second of saves without training, and of a plain writer of as many."""
    from shardjax.checkpoint import Checkpointer

    found: dict[str, Any] = {"save": [], "plain": [], "bytes": 0}
    block = np.random.default_rng(0).integers(0, 256, 16 << 20, np.uint8)
    with Checkpointer(folder / "idle", keep=1, collection=run.collection) as saving:
        for turn in range(a.other_rounds + 1):
            start = time.perf_counter()
            saving.save(turn, run.state)
            saving.wait(run.state)
            found["save"].append(time.perf_counter() - start)
            size = saving.inspect(turn).size
            start = time.perf_counter()
            with (folder / "plain").open("wb", buffering=0) as file:
                for at in range(0, size, block.nbytes):
                    file.write(block[: size - at])
                os.fsync(file.fileno())
            found["plain"].append(time.perf_counter() - start)
            (folder / "plain").unlink()
        found["bytes"] = size
    return found


def increments(run, folder, a):
    """Size and seconds of saves after steps that touch a part of the rows."""
    from shardjax.checkpoint import Checkpointer

    found: dict[str, Any] = {"full": [], "increment": [], "sizes": [], "share": []}
    made = run.touching(a.share)
    with Checkpointer(
        folder / "increments", keep=None, full_every=99, collection=run.collection
    ) as saving:
        for turn in range(a.other_rounds + 1):
            start = time.perf_counter()
            saving.save(turn, run.state)
            saving.wait(run.state)
            seconds = time.perf_counter() - start
            manifest = saving.inspect(turn)
            found["increment" if turn else "full"].append(seconds)
            found["sizes"].append(manifest.size)
            written = sum(manifest.details["rows"]["written"])
            found["share"].append(written / run.rows)
            run.steps(len(made), made=made)
    return found


def reading(run, folder, a):
    """Seconds to restore a full step, a chain of increments, and what Orbax wrote."""
    import orbax.checkpoint as ocp

    from shardjax.checkpoint import Checkpointer

    found = {}
    steps = {"a step with all rows": 0, f"a chain of {a.other_rounds + 1}": None}
    for name, step in steps.items():
        again = Run(a)
        with Checkpointer(folder / "increments", collection=again.collection) as reader:
            start = time.perf_counter()
            again.jax.block_until_ready(reader.restore(again.state, step).state)
            found[name] = time.perf_counter() - start
        del again
        gc.collect()
    orbax_save(run, folder / "orbax", True)()
    start = time.perf_counter()
    target = run.jax.tree.map(
        lambda x: run.jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        run.state,
    )
    with ocp.StandardCheckpointer() as reader:
        run.jax.block_until_ready(reader.restore(folder / "orbax", target))
    found["Orbax (checks nothing)"] = time.perf_counter() - start
    return found


def show_costs(run, folder, a):
    """What saves cost, and how much of the interval that auto has chosen."""
    auto = tune(run, folder, a)
    interval = int(auto["interval"])
    if not interval:
        sys.exit(
            f"auto has not settled in {a.most_steps} steps: give more --most-steps"
        )
    print("auto:", json.dumps({k: round(v, 4) for k, v in auto.items()}))
    found = costs(run, folder, a)
    usual = found["none"]
    step = statistics.median(usual["took"]) / a.span
    print(
        f"{a.span} steps with a save, {a.rounds} turns, medians; a step: {step:.4f} s"
    )
    heads = ("costs s", "CPU s", "stall s", "there after s", "memory MB")
    print(f"{'':26}" + "".join(f"{head:>15}" for head in heads))
    for name, x in found.items():
        x["cost"] = [y - z for y, z in zip(x["took"], usual["took"])]  # noqa: B905
        x["cpu cost"] = [y - z for y, z in zip(x["cpu"], usual["cpu"])]  # noqa: B905
        more = statistics.median(x["memory"]) - statistics.median(usual["memory"])
        shown = ("cost", "cpu cost", "stall", "there")
        cells = [*(statistics.median(x[key]) for key in shown), more / MB]
        print(f"{name:26}" + "".join(f"{cell:>15.2f}" for cell in cells))
    cpu = statistics.median(usual["cpu"]) / a.span
    for what, key, each in (("time", "cost", step), ("CPU time", "cpu cost", cpu)):
        shares = [100 * cost / (interval * each) for cost in found["shardjax"][key]]
        print(
            f"every {interval} steps, shardjax costs {statistics.median(shares):.1f} % of"
            f" the {what} (turns: {', '.join(f'{x:.1f}' for x in sorted(shares))})"
        )
    return {"auto": auto, "ways": found}


def show_bandwidth(run, folder, a):
    """Bytes per second without training."""
    band = bandwidth(run, folder, a)
    rates = [band["bytes"] / statistics.median(band[k][1:]) for k in ("save", "plain")]
    print(
        f"without training: {band['bytes'] / MB:.0f} MB at {rates[0] / MB:.0f} MB/s; a"
        f" plain writer {rates[1] / MB:.0f} MB/s: {rates[0] / rates[1]:.2f}x"
    )
    return band


def show_increments(run, folder, a):
    """Increments beside steps with all rows, and how long it takes to read both."""
    inc = increments(run, folder, a)
    full = statistics.median(inc["full"])
    print(
        f"{100 * inc['share'][1]:.1f} % of the rows changed: increment"
        f" {inc['sizes'][1] / MB:.1f} MB of {inc['sizes'][0] / MB:.1f}"
        f" ({100 * inc['sizes'][1] / inc['sizes'][0]:.1f} %),"
        f" {statistics.median(inc['increment']):.2f} s of {full:.2f}"
        f" ({100 * statistics.median(inc['increment']) / full:.1f} %)"
    )
    inc["reading"] = reading(run, folder, a)
    for name, seconds in inc["reading"].items():
        print(f"restoring {name}: {seconds:.2f} s")
    return inc


PARTS = {
    "costs": show_costs,
    "bandwidth": show_bandwidth,
    "increments": show_increments,
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000_000, help="of all tables")
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--mesh", default="2x1")
    parser.add_argument("--saves", type=int, default=5, help="until auto has settled")
    parser.add_argument("--most-steps", type=int, default=4000, help="until then")
    parser.add_argument("--rounds", type=int, default=5, help="of all ways to save")
    parser.add_argument("--other-rounds", type=int, default=3, help="of the rest")
    parser.add_argument("--span", type=int, default=300, help="steps after a save")
    parser.add_argument("--share", type=float, default=0.05, help="of rows that change")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure"
    )
    parser.add_argument("--ways", nargs="+", help="to save; all without")
    parser.add_argument("--folder", help="where to write; a temporary one")
    a = parser.parse_args()
    import shardjax as sj

    sj.ensure_devices(a.mesh)
    folder = Path(tempfile.mkdtemp(dir=a.folder))
    try:
        run = Run(a)
        run.know_all()
        run.steps(len(run.made))  # all that is to be compiled
        report: dict[str, Any] = {}
        for part in a.parts:
            report[part] = PARTS[part](run, folder, a)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
