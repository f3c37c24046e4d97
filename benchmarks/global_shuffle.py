"""What a global order costs, beside windows and the order of the source.

    python benchmarks/global_shuffle.py
    python benchmarks/global_shuffle.py --rows 1000000 --rounds 5

A Loader gives all batches of an epoch, with nothing else to do: of rows that are drawn
(Synthetic), in memory, in a Parquet file, and in Arrow IPC files, uncompressed and mapped.
The orders take turns in each round. "1 of 4" is a process's part of each batch in a global
order: its rows alone are read, so it has to be fast per row of its own. Figures are rows per
second of CPU time, in thousands, medians over rounds; ratios are to the window shuffle of the
same round. "parquet, kept" keeps all row groups once they are decoded; "parquet" an eighth of
them, so that the file is decoded as a whole for each `--rows-at-once` rows of a global order.
A LocalShuffle that sends all rows to itself shows what carrying them takes beside the wire.
"permutation" is the numbers alone, over 1e9 rows. Prints a table, and JSON as the
last line.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path[:0] = [str(Path(__file__).parent.parent)]

from shardjax.data import (  # noqa: E402
    Batch,
    InMemory,
    Loader,
    LocalShuffle,
    Permutation,
    Share,
    Synthetic,
    arrow,
    parquet,
)

FEATURES, DENSE = 26, 13


def orders_of(rows_at_once: int) -> dict[str, dict]:
    """Options of a Loader, by the order they make."""
    everywhere = {"shuffle": "global", "shuffle_seed": 0, "shuffle_rows": rows_at_once}
    return {
        "none": {},
        "window": {"shuffle_seed": 0},
        "global": everywhere,
        "global, 1 of 4": everywhere | {"share": Share(1, 4)},
    }


def sources_of(folder: str, rows: int) -> dict:
    """The same rows in every form."""
    drawn = Synthetic(rows=rows, vocabulary=(100_000,) * FEATURES, n_dense=DENSE)
    columns: dict = {"label": [], **{f"x{i}": [] for i in range(DENSE)}}
    columns |= {f"id{i}": [] for i in range(FEATURES)}
    whole = Batch.concat(list(drawn.chunks()))
    columns["label"] = whole.labels
    for i in range(DENSE):
        columns[f"x{i}"] = whole.dense[:, i]
    for i in range(FEATURES):
        columns[f"id{i}"] = whole.fixed[i]
    table = pa.table(columns)
    path = f"{folder}/rows"
    pq.write_table(table, f"{path}.parquet", row_group_size=1 << 16)
    with pa.ipc.new_file(f"{path}.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=1 << 16)
    options = {
        "label": "label",
        "dense": [f"x{i}" for i in range(DENSE)],
        "categorical": [f"id{i}" for i in range(FEATURES)],
    }
    packed: Any = parquet(f"{path}.parquet", **options)
    return {
        "synthetic": drawn,
        "in memory": InMemory(drawn),
        "parquet, kept": replace(packed, cache_bytes=2 * table.nbytes),
        "parquet": replace(packed, cache_bytes=table.nbytes // 8),
        "arrow": arrow(f"{path}.arrow", **options),
    }


def epoch(source, batch: int, options: dict) -> tuple[float, float, int]:
    """Rows per second of CPU time and of the clock, and how many rows came."""
    loader = Loader(source, batch, **options)
    clock, busy = time.perf_counter(), time.process_time()
    rows = 0
    for item in loader:
        rows += item.size if isinstance(item, Batch) else item.batch.size
    return (
        rows / (time.process_time() - busy),
        rows / (time.perf_counter() - clock),
        rows,
    )


def carried(source, batch: int, rows_at_once: int) -> float:
    """Rows per second of CPU time of a LocalShuffle that sends all rows to itself."""
    options: dict = {"shuffle_seed": 0, "window_rows": rows_at_once}
    begin, rows = time.process_time(), 0
    for part in LocalShuffle(source, batch, Share(0, 1), list, **options):
        rows += part.batch.size
    return rows / (time.process_time() - begin)


def permutation(rows: int) -> dict[str, float]:
    """Numbers per second of CPU time."""
    order, places = Permutation(10**9, seed=0), np.arange(rows)
    found = {}
    for name, work in (("forward", order), ("inverse", order.inverse)):
        work(places[:10])
        begin = time.process_time()
        work(places)
        found[name] = round(rows / (time.process_time() - begin) / 1e6, 1)
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=600_000)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows-at-once", type=int, default=131_072)
    a = parser.parse_args()
    results: dict = {"benchmark": "global_shuffle", **vars(a)}
    results["permutation_millions_per_s"] = permutation(4_000_000)
    print("permutation of 1e9, M/s:", results["permutation_millions_per_s"])
    with tempfile.TemporaryDirectory() as folder:
        sources, orders = sources_of(folder, a.rows), orders_of(a.rows_at_once)
        print(
            f"{'source':13} {'order':16} {'k rows/CPU s':>12} {'k rows/s':>9} of window"
        )
        for name, source in sources.items():
            rates = {order: [] for order in orders}
            epoch(source, a.batch, orders["global"])  # compiles, and fills memory
            for _ in range(a.rounds):
                for order, options in orders.items():
                    rates[order].append(epoch(source, a.batch, options))
            for order, found in rates.items():
                cpu, clock = (statistics.median(f[i] for f in found) for i in (0, 1))
                windows = [f[0] for f in rates["window"]]
                own = [f[0] for f in found]
                ratio = statistics.median(map(float.__truediv__, own, windows))
                results[f"{name}/{order}"] = {
                    "rows_per_cpu_s": round(cpu),
                    "rows_per_s": round(clock),
                    "of_window": round(ratio, 3),
                    "rows": found[0][2],
                }
                print(
                    f"{name:13} {order:16} {cpu / 1e3:12,.0f} {clock / 1e3:9,.0f}"
                    f" {ratio:9.2f}"
                )
        memory = sources["in memory"]
        speed = [carried(memory, a.batch, a.rows_at_once) for _ in range(a.rounds)]
        results["in memory/carried"] = {
            "rows_per_cpu_s": round(statistics.median(speed))
        }
        print(f"in memory, LocalShuffle: {statistics.median(speed) / 1e3:,.0f} k/CPU s")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
