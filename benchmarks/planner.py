"""Ids per second through the host plan: dedup, key lookup, routing, merge index.

    python benchmarks/planner.py

26 features of Zipf(1.1) ids over 10 M resident keys, batch 8192, one requester and one
core unless said otherwise. Beside it: np.unique and a Python dict, and the bare lookup of
random keys in the index. Interleaved rounds; prints medians and, last, JSON.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import zipf  # noqa: E402

NAMES = tuple(f"C{i}" for i in range(zipf.FEATURES))


def planner(keys: int, devices: int, threads: int):
    """A planner whose tables have `keys` keys in all; needs no device."""
    from shardjax import embed
    from shardjax.embed.groups import plan_groups
    from shardjax.embed.plan import Planner

    rows = embed.rowwise_adagrad(0.05)
    features = {
        n: embed.FeatureSpec(embed.TableSpec(n, zipf.DIM, optimizer=rows))
        for n in NAMES
    }
    made = Planner(
        plan_groups(features, devices), features, devices, 0, threads=threads
    )
    size = zipf.table_rows(keys)
    made.plan({n: np.arange(size, dtype=np.uint64) for n in NAMES}, size, train=True)
    made.forget_sizes()
    return made


def with_numpy(index: dict, ids: np.ndarray) -> np.ndarray:
    """Unique keys and inverse by sorting, slots by a dict: the plain way."""
    unique, inverse = np.unique(ids, return_inverse=True)
    slots = np.array([index[k] for k in unique.tolist()], np.int32)
    return slots[inverse]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=15)
    a = parser.parse_args()
    from shardjax.embed import Index

    data = zipf.batches(a.keys, a.batch, a.rounds)
    batches = [ids.astype(np.uint64) for _, ids, _ in data]
    plans = {
        "plan, 1 thread": planner(a.keys, 1, 1),
        "plan, 2 threads": planner(a.keys, 1, 2),
        "plan, 8 devices": planner(a.keys, 8, 1),
    }
    random = np.random.default_rng(0)
    index = Index(a.keys)
    keys = random.integers(0, 2**64, a.keys, dtype=np.uint64)
    index.insert(keys, np.arange(a.keys, dtype=np.int32))
    table = zipf.table_rows(a.keys)
    plain = dict(zip(range(table), range(table), strict=True))
    times: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}

    def clock(name, work):
        start, begin = time.perf_counter(), time.process_time()
        work()
        times.setdefault(name, []).append(time.perf_counter() - start)
        cpu.setdefault(name, []).append(time.process_time() - begin)

    for ids in batches:
        features = dict(zip(NAMES, ids, strict=True))
        for name, made in plans.items():
            clock(name, lambda m=made, f=features: m.plan(f, a.batch, train=True))
        some = keys[random.integers(0, a.keys, ids.size)]
        clock("bare lookup, random keys", lambda s=some: index.lookup(s))
        clock("np.unique and dict", lambda i=ids: [with_numpy(plain, x) for x in i])
    count = a.batch * zipf.FEATURES
    result = {"benchmark": "planner", "keys": a.keys, "batch": a.batch}
    print("what | M ids/s, median (min-max) | M ids per CPU second")
    for name, seconds in times.items():
        kept = count / np.array(seconds[2:]) / 1e6
        per_cpu = count / np.median(cpu[name][2:]) / 1e6
        print(
            f"{name} | {np.median(kept):.1f} ({kept.min():.1f}-{kept.max():.1f}) |"
            f" {per_cpu:.1f}"
        )
        result[name] = round(float(np.median(kept)), 2)
        result[f"{name}, per CPU second"] = round(float(per_cpu), 2)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
