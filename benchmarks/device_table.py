"""The hash table on devices beside the key index of the host.

    python benchmarks/device_table.py

Both hold the same keys; batches come in random order. On the device: look-ups of keys that
are there and of others, `find_or_insert` where all keys are there, where one in a hundred is
new (and is erased again in between, outside of the time), and of fresh keys until the load is
reached, erasing all, and look-ups of batches of one key. On the host, `Index`: look-ups and
inserts, with room for all. The rounds interleave the variants. Rates are of the wall, medians
over the rounds, and per CPU second of the whole process where the device is the CPU. Prints a
table and, as the last line, JSON.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import jax
import numpy as np

sys.path[:0] = [str(Path(__file__).parent.parent)]

from shardjax.embed import (  # noqa: E402
    Index,
    device_table,
    init_device_table,
    split_keys,
)


class Clock:
    """Keeps what each part takes, by name: keys, (seconds, of the CPU) per round."""

    def __init__(self):
        self.rates: dict[str, list[tuple[float, float]]] = {}

    def __call__(self, name, keys, work):
        start, begin = time.perf_counter(), time.process_time()
        made = jax.block_until_ready(work())
        spent = time.perf_counter() - start, time.process_time() - begin
        self.rates.setdefault(name, []).append(tuple(keys / x / 1e6 for x in spent))
        return made


def batches(keys, batch):
    """Words of keys on the device, a batch at a time; what is left over is left out."""
    stop = len(keys) // batch * batch
    parts = [split_keys(keys[i : i + batch]) for i in range(0, stop, batch)]
    return jax.block_until_ready(jax.device_put(parts))


def find_all(table, parts):
    return [device_table.find(table, part) for part in parts]


def insert_all(table, parts):
    """The table, and how many keys got no slot."""
    full = []
    for part in parts:
        table, _, _, more = device_table.find_or_insert(table, part)
        full.append(more)
    return table, full


def erase_all(table, parts):
    for part in parts:
        table, _ = device_table.erase(table, part)
    return table


def on_device(clock, capacity, keys, others, batch, rng):
    """A round on the device."""
    n = len(keys)
    fresh, asked = batches(keys, batch), batches(keys[rng.permutation(n)], batch)
    absent = batches(others[:n], batch)
    one = [tuple(np.broadcast_to(w[:1], w.shape) for w in part) for part in fresh]
    one = jax.block_until_ready(jax.device_put(one))
    table = init_device_table(capacity)
    table, full = clock("insert, device", n, lambda: insert_all(table, fresh))
    assert sum(map(int, full)) == 0
    assert int(table.count[0]) == n
    found = clock("look-up, device", n, lambda: find_all(table, asked))
    assert all(int(x.min()) >= 0 for x in found)
    found = clock("look-up of others, device", n, lambda: find_all(table, absent))
    assert all(int(x.max()) == -1 for x in found)
    clock("look-up of one key, device", n, lambda: find_all(table, one))
    table, _ = clock("find or insert, device", n, lambda: insert_all(table, asked))
    new = batch // 100
    for part in asked[: max(len(asked) // 4, 1)]:
        mixed = tuple(
            x.at[:new].set(y[:new]) for x, y in zip(part, absent[0], strict=True)
        )
        name = "find or insert, 1 % new, device"
        table, _ = clock(name, batch, lambda t=table, m=mixed: insert_all(t, [m]))
        gone = np.arange(batch) < new
        table, _ = device_table.erase(table, mixed, gone)
        jax.block_until_ready(table)
    table = clock("erase, device", n, lambda: erase_all(table, asked))
    assert int(table.count[0]) == 0


def on_host(clock, keys, others, batch, rng):
    """A round of the index."""
    n = len(keys)
    slots, order = np.arange(n, dtype=np.int32), rng.permutation(n)
    asked, parts = keys[order], [slice(i, i + batch) for i in range(0, n, batch)]
    index = Index(n)
    clock("insert, host", n, lambda: [index.insert(keys[p], slots[p]) for p in parts])
    found = clock("look-up, host", n, lambda: [index.lookup(asked[p]) for p in parts])
    np.testing.assert_array_equal(np.concatenate(found), order)
    clock(
        "look-up of others, host",
        n,
        lambda: [index.lookup(others[:n][p]) for p in parts],
    )
    clock("erase, host", n, lambda: [index.remove(asked[p]) for p in parts])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--capacity", type=int, default=2_000_000)
    parser.add_argument("--load", type=float, nargs="+", default=[0.5, 0.9])
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    a = parser.parse_args()
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, 2**64, 2 * a.capacity, dtype=np.uint64)
    keys, others = drawn[: a.capacity], drawn[a.capacity :]
    result = {
        "benchmark": "device_table",
        "device": jax.devices()[0].device_kind,
        "capacity": a.capacity,
        "batch": a.batch,
    }
    for load in a.load:
        n = int(load * a.capacity) // a.batch * a.batch
        few = min(n, 4 * a.batch)
        on_device(Clock(), a.capacity, keys[:few], others, a.batch, rng)
        on_host(Clock(), keys[:few], others, a.batch, rng)
        clock = Clock()
        for _ in range(a.rounds):
            on_device(clock, a.capacity, keys[:n], others, a.batch, rng)
            on_host(clock, keys[:n], others, a.batch, rng)
        print(f"load {load} | M keys/s, median (min-max) | M keys per CPU second")
        for name, rates in clock.rates.items():
            wall, per_cpu = np.array(rates).T
            mid = float(np.median(wall))
            print(
                f"{name} | {mid:.2f} ({wall.min():.2f}-{wall.max():.2f}) |"
                f" {np.median(per_cpu):.2f}"
            )
            result[f"load {load}, {name}"] = round(mid, 3)
            result[f"load {load}, {name}, per CPU second"] = round(
                float(np.median(per_cpu)), 3
            )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
