"""Two processes, one of them slower: equal parts beside parts by speed.

    python benchmarks/balance.py                       a device that takes longer
    python benchmarks/balance.py --sleep 0 0 --busy 1  a core that others use too

Each process has one device. With `--sleep` a device takes so many ms more for each block,
without the core, as an accelerator would: what other programs do on this machine then
matters little. With `--busy` so many programs compute all the time on the core that the
second process is bound to, which needs a machine with nothing else to do.

A DLRM is trained with equal parts and with parts by speed in turns, a segment each, in the
same processes; the first of each segments are left out. What a segment takes is from its
first batch to the end of its last step, with all that measuring and telling each other
costs. Prints JSON, last.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import numpy as np  # noqa: E402
import zipf  # noqa: E402

NAMES = tuple(f"C{i}" for i in range(zipf.FEATURES))
BUSY = "while True: pass"


def bind(core: int) -> None:
    """Binds all threads of this process to a core; XLA has as many as there were cores when
    it began, and needs more than one where programs wait for other processes."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), {core})


def slowed(network, seconds: float):
    """A network that takes so much longer for each block."""
    import jax

    from shardjax.network import Network

    def sleep(x):
        time.sleep(seconds)
        return x

    def apply(params, state, dense, embeddings, *, train):
        shape = jax.ShapeDtypeStruct(dense.shape, dense.dtype)
        dense = jax.pure_callback(sleep, shape, dense)
        return network.apply(params, state, dense, embeddings, train=train)

    return Network(apply, network.params, network.state) if seconds else network


def work(args, stack) -> dict:
    """One of the processes."""
    import jax
    import optax
    from flax import nnx

    import shardjax as sj
    from shardjax import models, processes, train
    from shardjax.data import Batch, BlockShare, InMemory, Loader, Share
    from shardjax.network import from_nnx
    from shardjax.probing import make_probe
    from shardjax.state import init_state

    class Source:
        feature_names, n_dense = NAMES, zipf.DENSE

        def chunks(self, start_chunk=0):
            made = zipf.batches(args.rows, args.batch, args.steps)
            for dense, ids, labels in made[start_chunk:]:
                yield Batch(labels, dense, ids.astype(np.uint64), fixed_names=NAMES)

    processes.start_processes(args.coordinator, 2, args.process)
    stack.enter_context(processes.watch())
    sj.ensure_devices("2x1")
    mesh = sj.make_mesh("2x1")
    own, source = Share(args.process, 2), InMemory(Source())
    block = -(-args.batch // (2 * args.blocks))

    class Variant:
        """Tables, network and loader of its own."""

        def __init__(self, share):
            tx = sj.embed.rowwise_adagrad(0.05)
            specs = {
                n: sj.embed.FeatureSpec(sj.embed.TableSpec(n, zipf.DIM, optimizer=tx))
                for n in NAMES
            }
            collection = sj.embed.EmbeddingCollection(
                specs, mesh=mesh, initial_rows=args.rows
            )
            network = from_nnx(
                models.DLRM(
                    features=NAMES,
                    n_dense=zipf.DENSE,
                    dim=zipf.DIM,
                    rngs=nnx.Rngs(0),
                )
            )
            network = slowed(network, 1e-3 * args.sleep[args.process])
            tx = optax.adam(1e-3)
            self.share, self.probe, self.every = share, None, 0
            if isinstance(share, BlockShare):
                self.every = share.every
                self.probe = make_probe(
                    network, collection, n_dense=zipf.DENSE, block_size=block
                )
            self.state = init_state(network, tx, collection)
            self.step = train.make_train_step(
                network,
                tx,
                collection,
                microbatch_size=block,
                skip_padding=self.probe is not None,
            )
            self.loader = Loader(
                source,
                args.batch,
                share=share,
                stream=train.prepare_stream(collection, train=True),
                window=2,
            )

        def segment(self) -> tuple[float, float, float]:
            """Milliseconds per step, the last loss, and seconds of all probes."""
            begun, probing = 0.0, 0.0
            for taken, batch in enumerate(self.loader):
                begun = begun or time.perf_counter()
                self.state, info = self.step(self.state, batch)
                if self.probe is not None and taken % self.every == 0:
                    jax.block_until_ready(info["loss"])
                    seconds = self.probe()
                    self.share.observe(seconds, 4)
                    probing += seconds
            loss = float(info["loss"])
            return 1e3 * (time.perf_counter() - begun) / args.steps, loss, probing

    variants = {
        "equal": Variant(own),
        "balanced": Variant(BlockShare(own, block, every=args.every)),
    }
    found: dict = {"equal": [], "balanced": [], "counts": [], "expected_ms": []}
    losses: dict = {}
    for _ in range(args.segments):
        for name, variant in variants.items():
            if args.busy:
                bind(args.cores[args.process])
            milliseconds, losses[name], probing = variant.segment()
            found[name].append(milliseconds)
        share = variants["balanced"].share
        assert isinstance(share, BlockShare)
        found["counts"].append(share.counts.tolist())
        found["expected_ms"].append((1e3 * share.expected()).round(1).tolist())
        found["probing_ms_per_step"] = 1e3 * probing / args.steps
        if args.process == 0:
            print(
                {k: x[-1] for k, x in found.items() if isinstance(x, list)},
                file=sys.stderr,
            )
    return found | {"losses": losses}


def main() -> None:
    """Runs both processes, and what keeps the second core busy."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=50_000, help="keys in all tables")
    parser.add_argument("--batch", type=int, default=1024, help="examples, all devices")
    parser.add_argument("--blocks", type=int, default=8, help="per process, on average")
    parser.add_argument("--every", type=int, default=16)
    parser.add_argument("--steps", type=int, default=32, help="of a segment")
    parser.add_argument("--segments", type=int, default=5, help="of each")
    parser.add_argument("--busy", type=int, default=0, help="programs beside process 1")
    parser.add_argument(
        "--sleep",
        type=float,
        nargs=2,
        default=[10, 40],
        help="ms per block, by process",
    )
    parser.add_argument("--cores", type=int, nargs=2, default=[0, 1])
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.process is not None:
        with contextlib.ExitStack() as stack:
            print(json.dumps(work(args, stack)))
        return
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, __file__, *sys.argv[1:]]
    command += ["--coordinator", f"localhost:{port}", "--process"]
    busy = [
        subprocess.Popen(
            ["taskset", "-c", str(args.cores[1]), sys.executable, "-c", BUSY]
        )
        for _ in range(args.busy)
    ]
    try:
        running = [
            subprocess.Popen([*command, str(p)], stdout=subprocess.PIPE, text=True)
            for p in range(2)
        ]
        texts = [process.communicate()[0] for process in running]
    finally:
        for process in busy:
            process.kill()
            process.wait()
    if any(process.returncode for process in running):
        raise SystemExit("a process failed")
    found = json.loads(texts[0].splitlines()[-1])
    kept = {name: found[name][1:] for name in ("equal", "balanced")}
    ratios = [b / e for b, e in zip(kept["balanced"], kept["equal"], strict=True)]
    result = {
        "benchmark": "balance",
        "batch": args.batch,
        "busy": args.busy,
        "sleep_ms": args.sleep,
        **{f"{name}_ms": round(statistics.median(x), 1) for name, x in kept.items()},
        "balanced_over_equal": round(statistics.median(ratios), 3),
        "ratios": [round(x, 3) for x in ratios],
        "counts": found["counts"][1:],
        "expected_ms": found["expected_ms"][1:],
        "probing_ms_per_step": round(found["probing_ms_per_step"], 2),
        "losses": found["losses"],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
