"""How fast click logs become batches: ours beside pandas and pyarrow alone.

    python -m benchmarks.reading
    python -m benchmarks.reading --path data/train --rounds 5

reads PATH.tsv (Criteo lines) and PATH.parquet (the same rows), or a log made for the
purpose in a temporary folder. All readers take turns in each round; figures are medians
over rounds, ratios those within a round. "alone" means the peer's own tables (strings
stay strings, nothing is transformed); "to batches" adds what makes the same arrays as
ours with NumPy. On one core first, then with as many threads as there are cores. Ours
inferred the columns of CSV and Parquet before, which takes a fraction of a second.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import tyro

from shardjax.data import MISSING_KEY, criteo, csv, parquet

DENSE = [f"I{i}" for i in range(1, 14)]
CATEGORICAL = [f"C{i}" for i in range(1, 27)]
NAMES = ["label", *DENSE, *CATEGORICAL]
OURS = "shardjax"


@dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    path: str | None = None
    """Reads PATH.tsv and PATH.parquet; by default a log is made."""
    rows: int = 500_000
    """Rows of the log that is made."""
    rounds: int = 3
    """How often all readers take their turn."""
    core: bool = False
    """Used on one core alone; by default one core, then all, each in a process."""
    threads: int = 0
    """Threads of each reader; set by the parent process."""


def make_log(path: str, rows: int, seed: int = 0) -> None:
    """Writes PATH.tsv and PATH.parquet with Criteo's columns and share of gaps."""
    rng = np.random.default_rng(seed)
    columns = {"label": pa.array(rng.random(rows) < 0.25).cast(pa.int8())}
    texts = dict(columns)
    for name in DENSE:
        counts = rng.geometric(0.02, rows).astype(np.int32) - 2
        columns[name] = texts[name] = pa.array(counts, mask=rng.random(rows) < 0.2)
    for name in CATEGORICAL:
        ids = rng.zipf(1.2, rows).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        ids = (ids >> np.uint64(32)).astype(np.uint32)
        missing = rng.random(rows) < 0.05
        columns[name] = pa.array(ids, mask=missing)
        digits = ids[:, None] >> np.arange(28, -4, -4, dtype=np.uint32) & np.uint32(15)
        letters = np.frombuffer(b"0123456789abcdef", np.uint8)[digits]
        hexes = letters.view("S8")[:, 0].astype(str)
        texts[name] = pa.array(hexes, mask=missing)
    pq.write_table(pa.table(columns), f"{path}.parquet", row_group_size=1 << 17)
    options = pa_csv.WriteOptions(
        include_header=False, delimiter="\t", quoting_style="none"
    )
    pa_csv.write_csv(pa.table(texts), f"{path}.tsv", options)


def pyarrow_tsv(path: str, threads: int) -> Iterator[pa.RecordBatch]:
    """Parses Criteo lines with pyarrow, ids as text."""
    types = {name: pa.binary() for name in NAMES}
    types |= {"label": pa.int8()} | dict.fromkeys(DENSE, pa.int32())
    return pa_csv.open_csv(
        path,
        pa_csv.ReadOptions(
            column_names=NAMES, block_size=8 << 20, use_threads=threads > 1
        ),
        pa_csv.ParseOptions(delimiter="\t", quote_char=False),
        pa_csv.ConvertOptions(column_types=types, strings_can_be_null=False),
    )


def pyarrow_parquet(path: str, threads: int) -> Iterator[pa.RecordBatch]:
    """Decodes Parquet with pyarrow."""
    file = pq.ParquetFile(path, memory_map=True)
    return file.iter_batches(1 << 16, use_threads=threads > 1)


_HEX_PAIRS = np.zeros(1 << 16, np.uint64)
_HEX_PAIRS[
    np.frombuffer("".join(f"{i:02x}" for i in range(256)).encode(), np.uint16)
] = np.arange(256)


def unhex(column: pa.Array) -> np.ndarray:
    """Turns text of 8 hexadecimal digits, or none, into keys, with NumPy alone."""
    _, offsets, data = column.buffers()
    offsets = np.frombuffer(offsets, np.int32)
    offsets = offsets[column.offset : column.offset + len(column) + 1]
    digits = np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]]
    pairs = _HEX_PAIRS[digits.view(np.uint16).reshape(-1, 4)]
    keys = np.full(len(column), MISSING_KEY, np.uint64)
    shifts = np.array([24, 16, 8, 0], np.uint64)
    keys[offsets[1:] > offsets[:-1]] = (pairs << shifts).sum(1)
    return keys


def to_arrays(batch: pa.RecordBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Makes the arrays of a Batch of pyarrow columns, with NumPy alone."""
    labels = batch.column(0).to_numpy(zero_copy_only=False).astype(np.float32)
    dense = np.empty((batch.num_rows, len(DENSE)), np.float32)
    for at, name in enumerate(DENSE):
        dense[:, at] = batch.column(name).to_numpy(zero_copy_only=False)
    np.nan_to_num(dense, copy=False)
    dense = np.sign(dense) * np.log1p(np.abs(dense))
    fixed = np.empty((len(CATEGORICAL), batch.num_rows), np.uint64)
    for at, name in enumerate(CATEGORICAL):
        column = batch.column(name)
        if pa.types.is_binary(column.type):
            fixed[at] = unhex(column)
        else:
            missing = column.is_null().to_numpy(zero_copy_only=False)
            fixed[at] = column.fill_null(0).to_numpy()
            fixed[at, missing] = MISSING_KEY
    return labels, dense, fixed


def pandas_tsv(path: str) -> Iterator[pd.DataFrame]:
    """Parses Criteo lines with pandas, ids as text."""
    types: Any = dict.fromkeys(DENSE, np.float32) | dict.fromkeys(CATEGORICAL, str)
    yield from pd.read_csv(
        path,
        sep="\t",
        names=NAMES,
        dtype=types,
        chunksize=1 << 16,
    )


def readers_of(path: str, threads: int) -> dict[str, dict[str, Callable]]:
    """Lists what reads each format, as functions that give something with a length."""
    tsv, packed = f"{path}.tsv", f"{path}.parquet"
    lines = criteo(tsv, threads=threads)
    table = parquet(packed, threads=threads)
    cells = csv(
        tsv, names=NAMES, delimiter="\t", header=False, quote=None, threads=threads
    )
    return {
        "tsv": {
            OURS: lines.chunks,
            "shardjax.data.csv": cells.chunks,
            "pyarrow to batches": lambda: map(to_arrays, pyarrow_tsv(tsv, threads)),
            "pyarrow alone": lambda: pyarrow_tsv(tsv, threads),
            "pandas alone": lambda: pandas_tsv(tsv),
        },
        "parquet": {
            OURS: table.chunks,
            "pyarrow to batches": lambda: map(
                to_arrays, pyarrow_parquet(packed, threads)
            ),
            "pyarrow alone": lambda: pyarrow_parquet(packed, threads),
            "pandas alone": lambda: [pd.read_parquet(packed)],
        },
    }


def rows_in(part) -> int:
    """Counts the rows of a part, whoever made it."""
    if isinstance(part, tuple):
        return len(part[0])
    for attribute in ("size", "num_rows"):
        if not isinstance(part, pd.DataFrame) and hasattr(part, attribute):
            return getattr(part, attribute)
    return len(part)


def measure(config: Config) -> dict:
    """Times all readers in turns; gives rates, CPU seconds and ratios by format."""
    assert config.path is not None
    pa.set_cpu_count(config.threads)
    if config.core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    results = {}
    for format_, readers in readers_of(config.path, config.threads).items():
        for reader in readers.values():
            next(iter(reader()))  # Compiles the kernels, warms the page cache.
        rates = {name: [] for name in readers}
        cpu = {name: [] for name in readers}
        for _ in range(config.rounds):
            for name, reader in readers.items():
                wall, busy = time.perf_counter(), time.process_time()
                rows = sum(map(rows_in, reader()))
                rates[name].append(rows / (time.perf_counter() - wall))
                cpu[name].append((time.process_time() - busy) / rows * 1e6)
        for name in readers:
            ratios = map(float.__truediv__, rates[OURS], rates[name])
            results[f"{format_}/{name}"] = {
                "rows_per_s": round(statistics.median(rates[name])),
                "cpu_s_per_million_rows": round(statistics.median(cpu[name]), 3),
                "ours_over_it": round(statistics.median(ratios), 2),
            }
    return results


def main(config: Config) -> dict:
    """Measures on one core and on all of them, and prints a table and a JSON line."""
    cores = len(os.sched_getaffinity(0))
    results = {"benchmark": "reading", "cores": cores, "rounds": config.rounds}
    with tempfile.TemporaryDirectory() as folder:
        path = config.path
        if path is None:
            path = os.path.join(folder, "log")
            make_log(path, config.rows)
        for title, threads in {"one core": 1, f"{cores} cores": cores}.items():
            options = [f"--path={path}", f"--rounds={config.rounds}"]
            options += [
                f"--threads={threads}",
                "--core" if threads == 1 else "--no-core",
            ]
            command = [sys.executable, "-m", "benchmarks.reading", *options]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            results[title] = json.loads(out.stdout.splitlines()[-1])
    for title in list(results)[3:]:
        print(f"{title:30}  rows/s   CPU s per 1 M rows  ours is x times as fast")
        for name, row in results[title].items():
            print("{:26} {:11,} {:20.2f} {:24.2f}".format(name, *row.values()))
    print(json.dumps(results))
    return results


if __name__ == "__main__":
    _config = tyro.cli(Config, description=__doc__)
    if _config.threads:
        print(json.dumps(measure(_config)))
    else:
        main(_config)
