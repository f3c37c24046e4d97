"""Paths and globs, gzip, and blocks that hold whole lines wherever they are cut."""

import gzip
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardjax.data import Batch, InMemory, Source
from shardjax.data.files import find_files, map_in_order, open_bytes, read_blocks
from shardjax.data.source import check_on_bad_line


def touch(folder: Path, *names: str):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x\n")


def names_of(folder, paths):
    return [os.path.relpath(path, folder) for path in find_files(paths)]


def test_the_files_of_a_glob_come_in_natural_order(tmp_path):
    touch(
        tmp_path, "day_10.tsv", "day_2.tsv", "day_1.tsv", "sub/day_3.tsv", "other.csv"
    )
    assert names_of(tmp_path, f"{tmp_path}/day_*.tsv") == [
        "day_1.tsv",
        "day_2.tsv",
        "day_10.tsv",
    ]
    assert "sub/day_3.tsv" in names_of(tmp_path, f"{tmp_path}/**/day_*.tsv")
    # A folder that matches is not a file.
    assert "sub" not in names_of(tmp_path, f"{tmp_path}/*")


def test_several_paths_keep_their_order(tmp_path):
    touch(tmp_path, "b", "a", "c1", "c2")
    paths = [tmp_path / "b", f"{tmp_path}/c*", str(tmp_path / "a")]
    assert names_of(tmp_path, paths) == ["b", "c1", "c2", "a"]


def test_a_name_that_looks_like_a_glob_is_taken_literally_if_it_exists(tmp_path):
    touch(tmp_path, "a[1].tsv", "a1.tsv")
    assert names_of(tmp_path, tmp_path / "a[1].tsv") == ["a[1].tsv"]


def test_files_that_are_not_there_are_named(tmp_path):
    touch(tmp_path, "a")
    with pytest.raises(FileNotFoundError, match="no such file: '.*missing.tsv'"):
        find_files([tmp_path / "a", tmp_path / "missing.tsv"])
    with pytest.raises(FileNotFoundError, match=r"no file matches '.*day_\*.tsv'"):
        find_files(f"{tmp_path}/day_*.tsv")
    with pytest.raises(IsADirectoryError, match="is a folder. Give its files, such as"):
        find_files(tmp_path)
    for nothing in ([], "", ["a", ""]):
        with pytest.raises(ValueError, match="`paths` must name at least one file"):
            find_files(nothing)


def blocks_of(path, block_bytes):
    return [
        (block.first_line, block.data[: block.size].tobytes())
        for block in read_blocks(str(path), block_bytes)
    ]


TEXTS = {
    "usual": b"one\ntwo\n\nthree three\nfour\n",
    "no final newline": b"one\ntwo",
    "only newlines": b"\n\n\n",
    "one long line": b"x" * 1000,
    "long line amid": b"a\n" + b"x" * 500 + b"\nb\n",
    "empty": b"",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("packed", [False, True])
def test_blocks_hold_whole_lines_whatever_their_size(tmp_path, text, packed):
    path = tmp_path / "lines"
    path.write_bytes(gzip.compress(text) if packed else text)
    whole = text if not text or text.endswith(b"\n") else text + b"\n"
    for block_bytes in [*range(1, 30), 1 << 20]:
        line = 1
        joined = b""
        for first_line, data in blocks_of(path, block_bytes):
            assert data.endswith(b"\n")
            assert first_line == line
            line += data.count(b"\n")
            joined += data
        assert joined == whole


def test_a_block_ends_with_the_last_line_that_fits(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\nthree\n")
    assert blocks_of(path, 8) == [(1, b"one\ntwo\n"), (3, b"three\n")]
    assert blocks_of(path, 7) == [(1, b"one\n"), (2, b"two\n"), (3, b"three\n")]


def test_words_can_be_read_past_the_end_of_a_block(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\nthree")
    for block in read_blocks(str(path), 9):
        assert len(block.data) == block.size + 32
        assert not block.data[block.size :].any()
        assert block.line_number(block.size) == block.first_line + 2 - (
            block.first_line > 1
        )


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 4, 100])
def test_a_byte_order_mark_is_left_out(tmp_path, block_bytes):
    path = tmp_path / "lines"
    path.write_bytes(b"\xef\xbb\xbfone\ntwo\n")
    assert b"".join(data for _, data in blocks_of(path, block_bytes)) == b"one\ntwo\n"


def test_gzip_is_known_by_its_content(tmp_path):
    plain = tmp_path / "plain.gz"
    plain.write_bytes(b"not packed\n")
    members = tmp_path / "members"
    members.write_bytes(gzip.compress(b"one\ntw") + gzip.compress(b"o\n"))
    with open_bytes(str(plain)) as file:
        assert file.read() == b"not packed\n"
    assert blocks_of(members, 100) == [(1, b"one\ntwo\n")]


def test_a_damaged_gzip_file_is_an_error_that_names_it(tmp_path):
    packed = gzip.compress(os.urandom(10_000).hex().encode())
    for name, data in [
        ("short.gz", packed[:-20]),
        ("flipped.gz", packed[:5000] + b"\0\0\0\0" + packed[5004:]),
    ]:
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(OSError, match=f"{name}: cannot be read: "):
            blocks_of(path, 1 << 20)


def test_reading_is_streamed(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"0123456789\n" * 100_000)
    blocks = read_blocks(str(path), 1000)
    assert next(blocks).size == 990
    path.write_bytes(b"")  # The rest has not been read yet, but for one buffer.
    assert sum(block.size for block in blocks) < 500_000


def test_a_block_needs_room():
    with pytest.raises(ValueError, match="`block_bytes` must be positive, got 0"):
        next(read_blocks(__file__, 0))


def test_a_file_without_lines_is_refused_and_not_swallowed(tmp_path):
    path = tmp_path / "binary"
    with open(path, "wb") as file:
        file.truncate(70 << 20)
    with pytest.raises(ValueError, match="binary: line 1 must end within 64 MiB"):
        blocks_of(path, 1 << 20)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_threaded_map_keeps_order_and_place_of_errors(threads):
    def reciprocal(x):
        return 1 / x

    assert list(map_in_order(reciprocal, range(1, 50), threads)) == [
        1 / x for x in range(1, 50)
    ]
    results = map_in_order(reciprocal, [1, 2, 0, 4], threads)
    assert [next(results), next(results)] == [1, 0.5]
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_a_threaded_map_left_early_stops_and_takes_few_items_ahead():
    taken = []

    def items():
        for i in range(1000):
            taken.append(i)
            yield i

    before = threading.active_count()
    results: Any = map_in_order(abs, items(), 3)
    next(results)
    results.close()
    assert len(taken) <= 5
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="`threads` must be positive, got 0"):
        next(map_in_order(abs, [1], 0))


class Numbers:
    """A source that can be told to fail, and counts its passes."""

    feature_names = ()
    n_dense = 0

    def __init__(self, fail=False):
        self.fail = fail
        self.passes = 0

    def chunks(self, start_chunk=0):
        self.passes += 1
        for i in range(start_chunk, 4):
            yield Batch(
                np.array([i]), np.zeros((1, 0)), np.zeros((0, 1), int), bad_lines=i
            )
            if self.fail:
                raise OSError("gone")


def test_in_memory_reads_once_and_serves_again():
    numbers = Numbers()
    kept = InMemory(numbers)
    assert isinstance(kept, Source)
    for start in (0, 0, 2, 4, 9):
        labels = [int(batch.labels[0]) for batch in kept.chunks(start)]
        assert labels == list(range(start, 4))
    assert numbers.passes == 1
    assert (kept.feature_names, kept.n_dense) == ((), 0)
    assert sum(batch.bad_lines for batch in kept.chunks()) == 6


def test_in_memory_keeps_nothing_of_a_pass_that_failed():
    numbers = Numbers(fail=True)
    kept = InMemory(numbers)
    with pytest.raises(OSError, match="gone"):
        next(kept.chunks())
    numbers.fail = False
    assert len(list(kept.chunks())) == 4


def test_a_choice_for_bad_lines_is_checked():
    check_on_bad_line("skip")
    with pytest.raises(ValueError, match="must be 'error' or 'skip', got 'warn'"):
        check_on_bad_line("warn")
