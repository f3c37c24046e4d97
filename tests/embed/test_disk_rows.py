"""The disk tier: no row lost, doubled or mixed up, and faults are told."""

import errno
import mmap
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from shardjax.embed.disk_rows import DiskBudget, DiskFolder, DiskRows
from shardjax.embed.rate import Rate
from shardjax.embed.segments import CorruptSegmentError, Segment
from tests.embed.reference import unmix64

ROOT = Path(__file__).parent.parent.parent
WORDS = 3


@pytest.fixture
def folder(tmp_path):
    folder = DiskFolder(tmp_path / "disk")
    yield folder
    folder.close()


@pytest.fixture(params=[1 << 30, 0], ids=["mapped", "by_calls"])
def disk(folder, request):
    budget = DiskBudget(folder, map_bytes=request.param)
    disk = DiskRows(budget, "group0", WORDS, merge_bytes=1 << 14)
    yield disk
    disk.close()


def u64(keys):
    return np.array(list(keys), np.uint64)


def add(disk, keys, tables=None, version=0):
    """Adds rows that say whose they are."""
    keys = u64(keys)
    tables = np.zeros(len(keys), np.int32) if tables is None else tables
    disk.add(keys, tables, *row_of(keys, tables, version))


def row_of(keys, tables, version):
    """last_step, tallies and numbers of rows, functions of key, table and version."""
    low = (keys & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32)
    rows = np.stack([low, tables, np.full(len(keys), version, np.int32)], 1)
    steps = (tables * 7 + version).astype(np.int32)
    return steps, steps.astype(np.uint32) + np.uint32(2**31), rows


def check(found, keys, tables, version, mask):
    np.testing.assert_array_equal(found.mask, mask)
    steps, used, rows = row_of(keys, tables, version)
    np.testing.assert_array_equal(found.rows[mask], rows[mask])
    np.testing.assert_array_equal(found.last_step[mask], steps[mask])
    np.testing.assert_array_equal(found.tallies[mask], used[mask])


KEYS = st.one_of(st.integers(0, 40), st.integers(2**64 - 5, 2**64 - 1))
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "take", "read", "wait"]),
        st.lists(st.tuples(KEYS, st.integers(0, 2)), max_size=30, unique=True),
    ),
    max_size=25,
)


@given(ACTIONS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_disk_rows_are_a_dict(tmp_path_factory, actions):
    folder = DiskFolder(tmp_path_factory.mktemp("disk"))
    budget = DiskBudget(folder, map_bytes=1 << 11)
    disk = DiskRows(budget, "group0", WORDS, merge_bytes=1 << 10)
    model: dict[tuple[int, int], int] = {}
    for version, (what, items) in enumerate(actions):
        if what == "add":
            items = [x for x in items if x not in model]
        keys = u64(k for k, _ in items)
        tables = np.array([t for _, t in items], np.int32)
        if what == "add":
            add(disk, keys, tables, version)
            model |= dict.fromkeys(items, version)
        elif what == "wait":
            disk.wait()
        else:
            found = (disk.take if what == "take" else disk.read)(keys, tables)
            versions = np.array([model.get(x, -1) for x in items], np.int32)
            check(found, keys, tables, versions, versions >= 0)
            if what == "take":
                for x in items:
                    model.pop(x, None)
        assert len(disk) == len(model)
    disk.close()
    assert not list(folder.path.glob("*rows"))
    folder.close()


def test_many_rows_survive_compaction(disk):
    rng = np.random.default_rng(0)
    keys = np.unique(rng.integers(2**64, size=20_000, dtype=np.uint64))
    tables = np.zeros(len(keys), np.int32)
    where = np.full(len(keys), -1)
    for version in range(40):
        out = np.flatnonzero(where < 0)
        chosen = rng.choice(out, min(len(out), 2000), replace=False)
        add(disk, keys[chosen], tables[chosen], version)
        where[chosen] = version
        asked = rng.choice(len(keys), 1500, replace=False)
        found = disk.take(keys[asked], tables[asked])
        check(found, keys[asked], tables[asked], where[asked], where[asked] >= 0)
        where[asked] = -1
        assert len(disk) == (where >= 0).sum()
        taken = 1500 * 4 * (6 + WORDS)  # since a compaction could last begin
        assert disk.file_bytes <= 2 * (disk.live_bytes + taken) + (1 << 14)
    disk.wait()
    found = disk.read(keys, tables)
    check(found, keys, tables, where, where >= 0)
    assert disk.compactions > 3
    assert (
        sum(f.stat().st_size for f in disk.budget.folder.path.glob("*rows"))
        == disk.file_bytes
    )


def test_less_than_two_bytes_of_ram_per_key(disk):
    add(disk, range(100_000))
    assert disk.ram_bytes <= 2 * 100_000


def test_keys_that_share_all_bits_of_their_hash_that_are_kept(disk):
    """One bucket, equal marks: only the keys tell them apart."""
    keys = u64(unmix64((i << 12) | 5) for i in range(300))
    tables = np.zeros(300, np.int32)
    add(disk, keys)
    absent = u64(unmix64((i << 12) | 5) for i in range(300, 400))
    found = disk.read(np.concatenate([keys, absent]), np.zeros(400, np.int32))
    assert found.mask.tolist() == [True] * 300 + [False] * 100
    check(disk.take(keys, tables), keys, tables, 0, np.ones(300, bool))
    assert len(disk) == 0


def test_equal_keys_of_two_tables_are_two_rows(disk):
    keys, tables = u64([7, 7]), np.array([0, 1], np.int32)
    add(disk, keys, tables)
    check(disk.take(keys[1:], tables[1:]), keys[1:], tables[1:], 0, np.ones(1, bool))
    found = disk.read(keys, tables)
    assert found.mask.tolist() == [True, False]


@pytest.mark.parametrize("word", [0, 1, 2, 3, 4, 5, 6, 8])
def test_a_flipped_bit_is_noticed(disk, word):
    add(disk, range(1000))
    [file] = disk.budget.folder.path.glob("*rows")
    size = 4 * (6 + WORDS)
    with open(file, "r+b") as stream:
        for n in range(1000):
            stream.seek(n * size + 4 * word)
            byte = stream.read(1)[0]
            stream.seek(n * size + 4 * word)
            stream.write(bytes([byte ^ 16]))
    with pytest.raises(CorruptSegmentError, match=r"record \d+ .* has changed"):
        disk.take(u64(range(1000)), np.zeros(1000, np.int32))
    assert len(disk) == 1000


@pytest.mark.parametrize("size", [0, 2000, 4096, 35_999])
def test_a_truncated_file_is_noticed(disk, size):
    add(disk, range(1000))
    [file] = disk.budget.folder.path.glob("*rows")
    os.truncate(file, size)
    message = rf"group0-000001.*record {size // 36} .* is cut off"
    with pytest.raises(CorruptSegmentError, match=message):
        disk.take(u64(range(1000)), np.zeros(1000, np.int32))


def resident(path):
    """Bytes of the files in a folder that are in memory as this process's own."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            counts = str(path) in line
        elif name == "Rss:" and counts:
            total += int(rest[0]) << 10
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux tells")
def test_memory_of_mapped_files_is_bounded(folder):
    budget = DiskBudget(folder, map_bytes=8 << 20)
    disk = DiskRows(budget, "group0", WORDS, merge_bytes=1 << 22)
    everything = range(400_000)
    keys, tables = u64(everything), np.zeros(400_000, np.int32)
    for start in range(0, 400_000, 100_000):
        add(disk, everything[start : start + 100_000])
    check(disk.read(keys, tables), keys, tables, 0, np.ones(400_000, bool))
    assert [len(s.mapped) for s in disk.segments] == [100_000, 100_000, 0, 0]
    assert 7_200_000 <= resident(folder.path) <= 8 << 20
    left = np.arange(400_000) % 4 == 0
    disk.take(keys[~left], tables[~left])
    disk.wait()
    check(disk.read(keys, tables), keys, tables, 0, left)
    assert [len(s.mapped) for s in disk.segments] == [100_000]
    assert 3_600_000 <= resident(folder.path) <= 4 << 20
    disk.close()
    assert resident(folder.path) == 0


def test_a_file_system_without_maps_is_read_by_calls(folder, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    monkeypatch.setattr(mmap, "mmap", refuse)
    disk = DiskRows(DiskBudget(folder), "group0", WORDS)
    add(disk, range(1000))
    keys, tables = u64(range(1100)), np.zeros(1100, np.int32)
    check(disk.read(keys, tables), keys, tables, 0, keys < 1000)
    assert not len(disk.segments[0].mapped)
    disk.close()


def test_what_reads_a_file_keeps_its_memory(folder):
    disk = DiskRows(DiskBudget(folder), "group0", WORDS)
    add(disk, range(1000))
    records = disk.segments[0].mapped
    disk.close()
    assert sorted(records[:, 0].tolist()) == list(range(1000))


def test_no_row_is_uncounted_while_files_are_replaced(folder, monkeypatch):
    counts = []
    disk = DiskRows(DiskBudget(folder), "group0", WORDS)
    map_file = Segment.map
    monkeypatch.setattr(
        Segment, "map", lambda self: (counts.append(len(disk)), map_file(self))
    )
    add(disk, range(1000))
    disk.take(u64(range(500)), np.zeros(500, np.int32))
    disk._compact(list(disk.segments))
    assert counts == [0, 500]
    assert len(disk) == 500
    disk.close()


def test_files_are_merged_once_though_two_threads_let_them_go(disk, monkeypatch):
    """The planner lets files go, and so does the thread that writes a checkpoint: a file
    that was merged twice while somebody read it was closed twice."""
    for n in range(20):
        add(disk, range(10 * n, 10 * n + 10))
    disk.wait()
    keys = u64(range(200))
    compact, both = DiskRows._compact, threading.Barrier(2)

    def choose(self):
        time.sleep(0.05)
        return list(self.segments) if self.compactions == before else []

    def slowly(self, *args, **kwargs):
        time.sleep(0.2)
        compact(self, *args, **kwargs)

    for _ in range(3):
        before = disk.compactions
        held = [[s for s, _, _ in disk.hold()] for _ in range(2)]
        monkeypatch.setattr(DiskRows, "_choose", choose)
        monkeypatch.setattr(DiskRows, "_compact", slowly)

        def at_once(number):
            both.wait()
            disk._start_compaction()  # as at the end of `let_go`

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(at_once, range(2)))
        disk.wait()
        assert disk.compactions == before + 1
        for segments in held:
            disk.let_go(segments)
        disk.wait()
        found = disk.read(keys, np.zeros(200, np.int32))
        check(found, keys, np.zeros(200, np.int32), 0, np.ones(200, bool))


def test_look_ups_while_files_come_and_go(disk):
    """Compaction replaces files all the time; what stays is found all the time."""
    kept = u64(range(2000))
    add(disk, kept)

    def churn():
        for n in range(60):
            passing = range(10_000 + n * 1000, 11_000 + n * 1000)
            add(disk, passing)
            disk.take(u64(passing), np.zeros(1000, np.int32))

    tables = np.zeros(2000, np.int32)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(churn)
        while not done.done():
            check(disk.read(kept, tables), kept, tables, 0, np.ones(2000, bool))
        done.result()
    disk.wait()
    assert disk.compactions > 3
    assert len(disk) == 2000


def test_compaction_notices_a_changed_record_and_says_so_next_time(disk):
    add(disk, range(1000))
    [file] = disk.budget.folder.path.glob("*rows")
    with open(file, "r+b") as stream:
        stream.seek(4 * 6)
        stream.write(b"\xff\xff\xff\xff")
    record = disk.segments[0].live_records(1, 1000)[1][:, 0]  # the others are good
    disk.take(record[:800].astype(np.uint64), np.zeros(800, np.int32))
    with pytest.raises(CorruptSegmentError, match="record 0 "):
        disk.wait()


def test_changes_of_tallies_are_made_when_records_are_read(disk):
    """And written to the files with the next merge, after 16 at the latest."""
    tables = (np.arange(300) % 2).astype(np.int32)
    keys = u64(range(300))
    add(disk, range(300), tables)
    before = disk.read(keys, tables).tallies.astype(np.int64)
    for n in range(1, 16):
        disk.change(0, lambda tallies: tallies // np.uint32(2))
        expected = np.where(tables == 0, before >> n, before)
        np.testing.assert_array_equal(disk.read(keys, tables).tallies, expected)
        assert disk.compactions == 0
        for table in (0, 1):
            [(numbers, tallies)] = [(k, t) for k, _, t in disk.facts(table)]
            np.testing.assert_array_equal(tallies, expected[numbers.astype(int)])
    disk.change(1, lambda tallies: tallies - np.uint32(1))
    disk.wait()
    assert disk.compactions == 1 and not disk.segments[0].changes
    expected = np.where(tables == 0, before >> 15, before - 1)
    found = disk.take(keys, tables)
    np.testing.assert_array_equal(found.tallies, expected)
    np.testing.assert_array_equal(found.rows, row_of(keys, tables, 0)[2])


class Clock:
    """Time that passes while somebody sleeps."""

    def __init__(self):
        self.now = 100.0
        self.slept = []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


def test_a_rate_is_kept_to_and_time_without_work_is_not_saved_up():
    clock = Clock()
    rate = Rate(100, clock)
    assert rate.block_bytes == 10
    for size in (10, 30):
        rate.spend(size, clock.sleep)
    clock.now += 50
    rate.spend(10, clock.sleep)
    assert clock.slept == pytest.approx([0.1, 0.3, 0.1])
    rate.spend(10, lambda seconds: None)  # two threads, at once
    rate.spend(10, clock.sleep)
    assert clock.slept[-1] == pytest.approx(0.2)


def test_a_merge_in_the_background_keeps_to_its_rate(folder):
    clock = Clock()
    rate = Rate(20_000, clock)
    budget = DiskBudget(folder, merge_rate=rate)
    disk = DiskRows(budget, "group0", WORDS)
    disk._hurry.wait = clock.sleep
    for n in range(6):
        add(disk, range(100 * n, 100 * n + 100))
    assert disk._compacting is None and not clock.slept
    add(disk, range(600, 700))  # the seventh small file
    disk._compacting.result(60)
    size = 7 * 100 * 4 * (6 + WORDS)
    assert disk.compactions == 1 and [s.count for s in disk.segments] == [700]
    assert clock.now - 100 == pytest.approx(2 * size / 20_000)  # read and written
    assert len(clock.slept) > 20 and max(clock.slept) <= 0.15  # blocks of 2 kB
    keys, tables = u64(range(700)), np.zeros(700, np.int32)
    check(disk.read(keys, tables), keys, tables, 0, np.ones(700, bool))
    disk.close()


@pytest.mark.parametrize("end", ["wait", "close", "add"])
def test_a_merge_that_somebody_waits_for_hurries(folder, end):
    """At its rate it would take a day."""
    budget = DiskBudget(folder, merge_rate=Rate(1))
    disk = DiskRows(budget, "group0", WORDS, merge_bytes=1 << 15)
    for n in range(7):
        add(disk, range(100 * n, 100 * n + 100))
    assert disk._compacting is not None and not disk._compacting.done()
    merge = disk._compacting
    if end == "add":  # once the files take twice what lives
        disk.take(u64(range(650)), np.zeros(650, np.int32))
        add(disk, range(700, 1000))
        add(disk, range(1000, 1300))
        disk.take(u64(range(700, 1250)), np.zeros(550, np.int32))
        add(disk, range(2000, 2100))
    else:
        getattr(disk, end)()
    assert merge.done() and disk.compactions > 0
    disk.close()


def test_a_full_disk_loses_nothing(disk, monkeypatch):
    add(disk, range(100))
    write = os.write

    def full(fd, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    message = r"cannot write 50 rows \(1800 bytes\) to .*No space left.*where they were"
    with pytest.raises(OSError, match=message):
        add(disk, range(100, 150))
    monkeypatch.setattr(os, "write", write)
    assert len(disk) == 100
    assert len(list(disk.budget.folder.path.glob("*rows"))) == 1
    add(disk, range(100, 150))
    assert disk.read(u64(range(150)), np.zeros(150, np.int32)).mask.all()


def test_a_real_quota_is_a_clear_error(tmp_path):
    """A file-size limit of the process, as a full disk would."""
    program = f"""
import resource, signal, numpy as np
from shardjax.embed.disk_rows import DiskBudget, DiskFolder, DiskRows
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
disk = DiskRows(DiskBudget(DiskFolder({str(tmp_path / "d")!r})), "g", 3)
keys = np.arange(10_000, dtype=np.uint64)
zeros = np.zeros(10_000, np.int32)
try:
    disk.add(keys, zeros, zeros, zeros.astype("u4"), np.zeros((10_000, 3), np.int32))
except OSError as error:
    print(error)
print(len(disk), list(disk.budget.folder.path.glob("*rows")))
"""
    done = run(program)
    assert "cannot write 10000 rows (360000 bytes)" in done.stdout, done.stderr
    assert done.stdout.endswith("0 []\n")


def run(program):
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_folder_is_for_one_process(folder):
    program = f"""
from shardjax.embed.disk_rows import DiskFolder
try:
    DiskFolder({str(folder.path)!r})
except OSError as error:
    print(error)
"""
    assert f"in use by process {os.getpid()}. Give each" in run(program).stdout


def test_a_folder_that_nobody_closed_is_free_again(tmp_path):
    DiskFolder(tmp_path)
    for _ in range(2):
        again = DiskFolder(tmp_path)
        with pytest.raises(BlockingIOError, match="in use by this very process: an"):
            DiskFolder(tmp_path)
        again.close()


def test_files_of_a_killed_process_are_removed(tmp_path):
    program = f"""
import numpy as np, sys, time
from shardjax.embed.disk_rows import DiskBudget, DiskFolder, DiskRows
disk = DiskRows(DiskBudget(DiskFolder({str(tmp_path)!r})), "g", 3, merge_bytes=1 << 16)
zeros = np.zeros(5000, np.int32)
print("ready", flush=True)
for n in range(10**6):
    keys = np.arange(n * 5000, n * 5000 + 5000, dtype=np.uint64)
    disk.add(keys, zeros, zeros, zeros.astype("u4"), np.zeros((5000, 3), np.int32))
    disk.take(keys[:4000], zeros[:4000])
"""
    (tmp_path / "mine.txt").write_text("not ours")
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("*rows"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert list(tmp_path.glob("*rows"))
    folder = DiskFolder(tmp_path)
    assert not list(tmp_path.glob("*rows"))
    assert (tmp_path / "mine.txt").exists()
    folder.close()


def test_a_folder_that_cannot_be_written_to(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(
        OSError, match="needs a folder that it can write to, and .*file"
    ):
        DiskFolder(file)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match="needs a folder that it can write to"):
        DiskFolder(tmp_path)


def test_a_budget_counts_all_slabs_and_is_kept_to(tmp_path):
    folder = DiskFolder(tmp_path)
    record = 4 * (6 + WORDS)
    budget = DiskBudget(folder, 100 * record)
    first, second = (DiskRows(budget, name, WORDS) for name in ("a", "b"))

    def add(disk, start, n):
        keys = np.arange(start, start + n, dtype=np.uint64)
        steps = np.ones(n, np.int32)
        rows = np.zeros((n, WORDS), np.int32)
        disk.add(keys, steps * 0, steps, steps.astype(np.uint32), rows)

    add(first, 0, 60)
    add(second, 0, 40)
    message = (
        f"the disk tier is full: `disk_bytes` of the storage is {100 * record},"
        f" {100 * record} are taken, and 10 rows need {10 * record} more. No row is lost"
    )
    with pytest.raises(OSError, match=re.escape(message)):
        add(second, 40, 10)
    assert (len(first), len(second)) == (60, 40)
    # dead records do not count
    keys = np.arange(30, dtype=np.uint64)
    assert first.take(keys, np.zeros(30, np.int32)).mask.all()
    add(second, 40, 30)
    assert (len(first), len(second)) == (30, 70)
    for disk in (first, second):
        disk.close()
    folder.close()
