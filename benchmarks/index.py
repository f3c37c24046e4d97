"""The key index beside pandas' hash table and a Python dict, on one core.

    python benchmarks/index.py

Look-ups of all keys in random order, inserts of fresh keys into an index with room for them
and into one that grows from nothing, in batches. pandas gets the keys of its table in one
piece, which is its fastest way. The rounds interleave the variants, each of which has a
table of its own. A pause is the longest that one batch of inserts keeps the core busy while
an index grows; beside it, what it takes to move all entries at once into a table twice as
large. Ratios are of CPU time, medians over the rounds. Needs pandas; prints tables and, as
the last line, JSON.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent.parent)]


class Clock:
    """Keeps what parts of a benchmark take, by name: (seconds, of the CPU)."""

    def __init__(self):
        self.seconds: dict[str, list[tuple[float, float]]] = {}

    def __call__(self, name, work):
        start, begin = time.perf_counter(), time.thread_time()
        made = work()
        spent = time.perf_counter() - start, time.thread_time() - begin
        self.seconds.setdefault(name, []).append(spent)
        return made


def fill(index, keys, slots, batch):
    """Inserts in batches; returns the CPU seconds of each batch."""
    seconds = []
    for start in range(0, len(keys), batch):
        part = slice(start, start + batch)
        begin = time.thread_time()
        index.insert(keys[part], slots[part])
        seconds.append(time.thread_time() - begin)
    return seconds


def search(index, keys, batch):
    """Looks up in batches."""
    parts = range(0, len(keys), batch)
    return np.concatenate([index.lookup(keys[s : s + batch]) for s in parts])


def ours(clock, keys, slots, order, batch):
    """A round of ours; returns the longest pause, and the bytes per key."""
    from shardjax.embed import Index

    n, asked = len(keys), keys[order]
    roomy = Index(n)
    clock("insert, ours", lambda: fill(roomy, keys, slots, batch))
    found = clock("look-up, ours", lambda: search(roomy, asked, batch))
    np.testing.assert_array_equal(found, slots[order])
    index = Index()
    pauses = clock("insert and grow, ours", lambda: fill(index, keys, slots, batch))
    found = clock("look-up after growth, ours", lambda: search(index, asked, batch))
    np.testing.assert_array_equal(found, slots[order])
    larger, (known, places) = Index(2 * n), index.items()
    clock("all at once", lambda: larger.insert(known, places))
    return max(pauses), index.nbytes / n


def pandas(clock, keys, slots, order):
    """A round of pandas' hash table."""
    from pandas._libs.hashtable import UInt64HashTable

    asked = keys[order]
    roomy, table = UInt64HashTable(len(keys)), UInt64HashTable()
    clock("insert, pandas", lambda: roomy.map_locations(keys))
    found = clock("look-up, pandas", lambda: roomy.lookup(asked))
    np.testing.assert_array_equal(found, slots[order])
    clock("insert and grow, pandas", lambda: table.map_locations(keys))


def plain(clock, keys, slots, order):
    """A round of a dict."""
    keys, asked, values = keys.tolist(), keys[order].tolist(), range(len(keys))
    table = clock("insert and grow, dict", lambda: dict(zip(keys, values, strict=True)))
    found = clock("look-up, dict", lambda: [table[k] for k in asked])
    np.testing.assert_array_equal(found, slots[order])


def measure(clock, keys, slots, order, batch):
    """One round of all."""
    pandas(clock, keys, slots, order)
    plain(clock, keys, slots, order)
    return ours(clock, keys, slots, order, batch)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    a = parser.parse_args()
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**64, a.keys, dtype=np.uint64)
    slots = np.arange(a.keys, dtype=np.int32)
    few = min(a.keys, 100_000)
    measure(Clock(), keys[:few], slots[:few], rng.permutation(few), a.batch)
    clock, pauses, per_key = Clock(), [], 0.0
    for _ in range(a.rounds):
        order = rng.permutation(a.keys)
        pause, per_key = measure(clock, keys, slots, order, a.batch)
        pauses.append(pause)
    at_once = clock.seconds.pop("all at once")
    result = {"benchmark": "index", "keys": a.keys, "batch": a.batch}
    print("what | M keys/s, median (min-max) | M keys per CPU second | of ours")
    for name, seconds in clock.seconds.items():
        rates = a.keys / np.array(seconds) / 1e6
        work = name.split(",")[0]
        ours = a.keys / np.array(clock.seconds[f"{work}, ours"]) / 1e6
        ratio = float(np.median(rates[:, 1] / ours[:, 1]))
        mid, per_cpu = np.median(rates, axis=0)
        low, high = rates[:, 0].min(), rates[:, 0].max()
        print(
            f"{name} | {mid:.1f} ({low:.1f}-{high:.1f}) | {per_cpu:.1f} | {ratio:.2f}x"
        )
        result[name] = round(float(mid), 2)
        result[f"{name}, per CPU second"] = round(float(per_cpu), 2)
        if not name.endswith("ours"):
            result[f"{name} of ours"] = round(ratio, 3)
    result["longest pause, ms"] = round(float(np.median(pauses)) * 1e3, 2)
    result["all at once, ms"] = round(float(np.median(at_once, axis=0)[1]) * 1e3, 1)
    result["bytes per key"] = round(per_key, 1)
    print("longest pause of a batch | all entries at once | bytes per key")
    print(
        f"{result['longest pause, ms']} ms | {result['all at once, ms']} ms |"
        f" {result['bytes per key']}"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
