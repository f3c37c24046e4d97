"""Looking up rows on disk: our segments beside RocksDB, LMDB and a bare pread loop.

    python benchmarks/segments.py

10 M rows of 128 B; each look-up asks for 20,000 random keys at a time. Warm: the page
cache holds the files, and each variant has just looked up the same keys. Cold: the cache is
dropped before each look-up (posix_fadvise), for ours and for the pread loop. "by calls" is
ours as it reads the files beyond those that it may map. The rounds interleave the variants.
Needs rocksdict and lmdb; prints a table and, as the last line, JSON.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent.parent)]
WORDS = 32


def chunks(n, size=1_000_000):
    """Keys and rows, a million at a time."""
    rng = np.random.default_rng(0)
    for start in range(0, n, size):
        count = min(size, n - start)
        keys = np.arange(start, start + count, dtype=np.uint64) * np.uint64(0x9E3779B9)
        yield keys, rng.integers(-(2**31), 2**31, (count, WORDS)).astype(np.int32)


class Ours:
    """This library's disk tier."""

    def __init__(self, path, n):
        from shardjax.embed.disk_rows import DiskBudget, DiskFolder, DiskRows

        self.disk = DiskRows(DiskBudget(DiskFolder(path)), "rows", WORDS)
        for keys, rows in chunks(n):
            zeros = np.zeros(len(keys), np.int32)
            self.disk.add(keys, zeros, zeros, zeros.astype(np.uint32), rows)
        self.disk.wait()
        self.ram = self.disk.ram_bytes / n

    def read(self, keys):
        found = self.disk.read(keys, np.zeros(len(keys), np.int32))
        assert found.mask.all()
        return found.rows

    def drop_cache(self):
        from shardjax.embed.segments import unmapped

        for s in self.disk.segments:
            s.mapped = unmapped(s.words)  # what is mapped stays in the cache
            os.fsync(s.fd)
            os.posix_fadvise(s.fd, 0, 0, os.POSIX_FADV_DONTNEED)
            s.map()


class Calls(Ours):
    """The same files, none of them mapped."""

    def __init__(self, ours):
        from shardjax.embed.disk_rows import DiskBudget, DiskRows
        from shardjax.embed.segments import unmapped

        self.disk = DiskRows(
            DiskBudget(ours.disk.budget.folder, map_bytes=0), "calls", WORDS
        )
        for s in ours.disk.segments:
            self.disk.segments.append(replace(s, mapped=unmapped(s.words)))


class Pread:
    """A loop of preads of one record each, at known places, in threads."""

    def __init__(self, ours):
        self.segments = ours.disk.segments
        self.pool = ThreadPoolExecutor(4)
        self.rng = np.random.default_rng(5)

    def read(self, keys):
        size = self.segments[0].words * 4
        which = self.rng.integers(len(self.segments), size=len(keys))

        def loop(s):
            fd, count = self.segments[s].fd, self.segments[s].count
            at = np.sort(self.rng.integers(count, size=(which == s).sum())) * size
            return [os.pread(fd, size, x) for x in at.tolist()]

        return list(self.pool.map(loop, range(len(self.segments))))


class Rocks:
    """RocksDB with default options, a batched get."""

    def __init__(self, path, n):
        from rocksdict import Options, Rdict, WriteBatch

        self.db = Rdict(str(path), Options(raw_mode=True))
        for keys, rows in chunks(n):
            batch = WriteBatch(raw_mode=True)
            for key, row in zip(keys.tolist(), rows, strict=True):
                batch[key.to_bytes(8, "big")] = row.tobytes()
            self.db.write(batch)
        self.db.flush()

    def read(self, keys):
        names = [k.to_bytes(8, "big") for k in keys.tolist()]
        found: list = self.db[names]  # pyright: ignore[reportAssignmentType]
        return np.frombuffer(b"".join(found), np.int32).reshape(-1, WORDS)


class Lmdb:
    """LMDB, one get after the other in a read transaction."""

    def __init__(self, path, n):
        import lmdb

        self.env = lmdb.open(str(path), map_size=16 << 30, sync=False)
        for keys, rows in chunks(n):
            with self.env.begin(write=True) as txn:
                cursor = txn.cursor()
                order = np.argsort(keys)
                cursor.putmulti(
                    (int(keys[i]).to_bytes(8, "big"), rows[i].tobytes()) for i in order
                )

    def read(self, keys):
        with self.env.begin(buffers=False) as txn:
            found = [txn.get(k.to_bytes(8, "big")) for k in keys.tolist()]
        return np.frombuffer(b"".join(filter(None, found)), np.int32).reshape(-1, WORDS)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--keys", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", help="where to put the files")
    a = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=a.dir))
    try:
        ours = Ours(root / "ours", a.rows)
        variants = {"shardjax": ours, "shardjax, by calls": Calls(ours)}
        variants["pread loop"] = Pread(ours)
        variants["lmdb"] = Lmdb(root / "lmdb", a.rows)
        variants["rocksdb"] = Rocks(root / "rocks", a.rows)
        found = {}
        rng = np.random.default_rng(1)
        for r in range(a.rounds + 1):
            picked = rng.choice(a.rows, a.keys, replace=False).astype(np.uint64)
            keys = picked * np.uint64(0x9E3779B9)
            answers = {}
            for name, v in variants.items():
                v.read(keys)
                start = time.perf_counter()
                answers[name] = v.read(keys)
                if r:
                    spent = time.perf_counter() - start
                    found.setdefault(name, []).append(a.keys / spent)
            for name in ("lmdb", "rocksdb"):
                np.testing.assert_array_equal(answers["shardjax"], answers[name])
            for name in ("shardjax", "shardjax, by calls", "pread loop"):
                ours.drop_cache()
                start = time.perf_counter()
                variants[name].read(keys)
                if r:
                    spent = time.perf_counter() - start
                    found.setdefault(f"{name}, cold", []).append(a.keys / spent)
        print("variant | M rows/s, median (min-max)")
        result = {"benchmark": "segments", "rows": a.rows, "ram_per_key": ours.ram}
        for name, rates in found.items():
            low, mid, high = np.percentile(rates, [0, 50, 100]) / 1e6
            print(f"{name} | {mid:.3f} ({low:.3f}-{high:.3f})")
            result[name] = round(float(mid), 3)
        for name in ("rocksdb", "lmdb"):
            for ours in ("shardjax", "shardjax, by calls"):
                result[f"{ours} over {name}"] = round(result[ours] / result[name], 2)
        cold = result["shardjax, cold"] / result["pread loop, cold"]
        result["cold, shardjax over pread loop"] = round(cold, 2)
        print(json.dumps(result))
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
