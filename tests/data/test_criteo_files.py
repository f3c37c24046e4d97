"""Criteo logs: every legal form of a line, and every wrong one named where it is."""

import gzip
import math
import random
import tracemalloc
from typing import Any

import numpy as np
import pytest

from shardjax.data import MISSING_KEY, Batch, InMemory, Source, criteo
from shardjax.data.criteo_files import _explain


def make_line(rng: random.Random, *, missing=0.2):
    """One line's 40 fields."""

    def or_missing(text):
        return "" if rng.random() < missing else text

    integers = [
        or_missing(str(rng.choice([0, -1, -7, 3, 4095, 4096, 123_456, 2**40])))
        for _ in range(13)
    ]
    digits = [rng.choice([8, 8, 8, 1, 5, 9, 16]) for _ in range(26)]
    ids = [or_missing(f"{rng.getrandbits(4 * n):0{n}x}") for n in digits]
    return [str(rng.randint(0, 1)), *integers, *ids]


def expected_row(fields, transform="log"):
    """What a line means, in plain Python."""

    def dense(text):
        x = int(text or 0)
        return x if transform == "none" else math.copysign(math.log1p(abs(x)), x)

    keys = [int(text, 16) if text else MISSING_KEY for text in fields[14:]]
    return float(fields[0]), [dense(text) for text in fields[1:14]], keys


def check(batch, lines, transform="log"):
    expected = [expected_row(fields, transform) for fields in lines]
    assert batch.size == len(lines)
    assert batch.labels.tolist() == [row[0] for row in expected]
    np.testing.assert_array_equal(
        batch.dense, np.array([r[1] for r in expected], np.float32).reshape(-1, 13)
    )
    assert batch.fixed.T.tolist() == [row[2] for row in expected]


@pytest.fixture
def lines():
    rng = random.Random(0)
    return [make_line(rng) for _ in range(300)]


def write(path, lines, *, end="\n", final=True):
    text = end.join("\t".join(fields) for fields in lines) + (end if final else "")
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def read(path, **options):
    return Batch.concat(list(criteo(path, **options).chunks()))


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\t\n", "\t\r\n", "\n\n", "\r\n\r\n"])
@pytest.mark.parametrize("final", [True, False])
def test_every_way_to_end_a_line(tmp_path, lines, name, end, final):
    check(read(write(tmp_path / name, lines, end=end, final=final)), lines)


@pytest.mark.parametrize("transform", ["log", "none"])
@pytest.mark.parametrize("block_bytes", [1, 300, 5000, 1 << 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_blocks_and_threads_change_nothing(
    tmp_path, lines, transform, block_bytes, threads
):
    path = write(tmp_path / "a.tsv", lines)
    options = {"block_bytes": block_bytes, "threads": threads}
    check(read(path, dense_transform=transform, **options), lines, transform)


def test_a_source_says_what_it_gives(tmp_path, lines):
    source = criteo(write(tmp_path / "a.tsv", lines))
    assert isinstance(source, Source)
    assert source.feature_names == tuple(f"C{i}" for i in range(1, 27))
    assert source.n_dense == 13
    batch = next(source.chunks())
    assert batch.fixed_names == batch.feature_names == source.feature_names
    assert (batch.jagged, batch.weights, batch.groups) == ({}, None, None)
    assert batch.bad_lines == 0


def test_a_line_with_nothing_but_a_label(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("1" + "\t" * 39)
    batch = read(path)
    assert batch.labels.tolist() == [1]
    assert (batch.dense == 0).all()
    assert (batch.fixed == MISSING_KEY).all()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("-0", 0),
        ("007", 7),
        ("-1", -1),
        ("4095", 4095),
        ("-4096", -4096),
        (str(2**63 - 1), 2**63 - 1),
        (str(1 - 2**63), 1 - 2**63),
    ],
)
def test_integers_to_the_edge_of_64_bits(tmp_path, text, value):
    path = write(tmp_path / "a.tsv", [["0", *[text] * 13, *[""] * 26]])
    assert (read(path, dense_transform="none").dense == np.float32(value)).all()
    log = np.float32(math.copysign(math.log1p(abs(value)), value))
    assert (read(path).dense == log).all()


@pytest.mark.parametrize("text", ["0", "f", "F", "aBcDeF09", "deadbeef", "0" * 16])
@pytest.mark.parametrize("more", ["", "1", "12345678"])
def test_ids_of_1_to_16_digits_in_either_case(tmp_path, text, more):
    text = (text + more)[:16]
    path = write(tmp_path / "a.tsv", [["0", *[""] * 13, *[text] * 26]])
    assert (read(path).fixed == int(text, 16)).all()


def test_every_byte_is_a_digit_or_refused(tmp_path):
    path = tmp_path / "a.tsv"
    for byte in set(range(256)) - {9, 10, 13}:
        for at in (0, 3, 7, 8):  # Of the 8 digits read at once, and after them.
            id_ = bytearray(b"000000000")
            id_[at] = byte
            path.write_bytes(b"0" + b"\t" * 14 + bytes(id_) + b"\t" * 25 + b"\n")
            batch = read(path, on_bad_line="skip")
            is_digit = chr(byte) in "0123456789abcdefABCDEF"
            assert (batch.size, batch.bad_lines) == (is_digit, not is_digit)


def changed(field, text):
    return lambda fields: [*fields[:field], text, *fields[field + 1 :]]


BAD = {
    "too few": (lambda f: f[:-1], r"expected 40 fields between tabs, got 39"),
    "too many": (lambda f: [*f, "x"], r"expected 40 fields between tabs, got 41"),
    "two empty more": (lambda f: [*f, "", ""], r"40 fields between tabs, got 42"),
    "spaces": (lambda f: ["\u00a0".join(f)], r"expected 40 fields between tabs, got 1"),
    "label": (changed(0, "2"), r"field 1 \(label\): '2' is not 0 or 1"),
    "label 01": (changed(0, "01"), r"field 1 \(label\): '01' is not 0 or 1"),
    "no label": (changed(0, ""), r"field 1 \(label\): '' is not 0 or 1"),
    "letter": (changed(2, "12x"), r"field 3 \(I2\): '12x' is not an integer"),
    "sign": (changed(13, "-"), r"field 14 \(I13\): '-' is not an integer"),
    "float": (changed(1, "1.5"), r"field 2 \(I1\): '1.5' is not an integer"),
    "plus": (changed(1, "+1"), r"field 2 \(I1\): '\+1' is not an integer"),
    "2**63": (changed(4, str(2**63)), r"field 5 \(I4\): '\d+' is not a 64-bit integer"),
    "20 digits": (changed(4, "9" * 20), r"'9{20}' is not a 64-bit integer"),
    "id letter": (changed(14, "xyz"), r"field 15 \(C1\): 'xyz' is not a hexadecimal"),
    "id 0x": (changed(39, "0x1f"), r"field 40 \(C26\): '0x1f' is not a hexadecimal"),
    "id minus": (changed(39, "-1"), r"field 40 \(C26\): '-1' is not a hexadecimal"),
    "id byte": (changed(20, "\xe9" * 8), r"field 21 \(C7\): 'é{8}' is not a hexadec"),
    "17 digits": (changed(15, "a" * 17), r"\(C2\): 'a{17}' has more than 16 hexadec"),
    "return amid": (changed(30, "a\rb"), r"field 31 \(C17\): 'a\\rb' is not a hexadec"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("block_bytes", [1, 1000, 1 << 20])
def test_a_bad_line_is_an_error_that_names_it(
    tmp_path, lines, change, message, block_bytes
):
    lines = [*lines[:16], change(lines[16]), *lines[17:]]
    # The blank line counts: numbers are those of an editor.
    lines.insert(3, [""])
    path = write(tmp_path / "day.tsv", lines)
    source = criteo(path, block_bytes=block_bytes)
    with pytest.raises(ValueError, match=rf"day.tsv, line 18: .*{message}") as caught:
        list(source.chunks())
    assert "on_bad_line='skip'" in str(caught.value)


@pytest.mark.parametrize("block_bytes", [1, 1000, 1 << 20])
def test_skipped_lines_are_counted_where_they_were(tmp_path, lines, block_bytes):
    mixed = list(lines)
    for at, (change, _) in zip(range(0, 300, 12), BAD.values(), strict=False):
        mixed.insert(at, change(make_line(random.Random(1), missing=0)))
    mixed.append(["end"])
    path = write(tmp_path / "day.tsv", mixed)
    source = criteo(path, on_bad_line="skip", block_bytes=block_bytes)
    chunks = list(source.chunks())
    check(Batch.concat(chunks), lines)
    assert sum(chunk.bad_lines for chunk in chunks) == len(BAD) + 1
    assert (len(chunks) == 1) == (chunks[0].bad_lines == len(BAD) + 1)


def test_nothing_but_bad_lines(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("some\ntext\n")
    batch = read(path, on_bad_line="skip")
    assert (batch.size, batch.bad_lines) == (0, 2)


def test_the_kernel_and_the_explanation_agree_on_mangled_lines(tmp_path):
    rng = random.Random(5)
    path = tmp_path / "a.tsv"
    refused = 0
    for _ in range(500):
        line = bytearray("\t".join(make_line(rng)).encode())
        for _ in range(rng.randint(1, 2)):
            at = rng.randrange(len(line))
            line[at : at + rng.randint(0, 2)] = rng.choice(
                [b"", b"\t", b"-", b"0", b"g", b"\r", b"\0", b" ", b"\xff", b"a" * 17]
            )
        path.write_bytes(line)
        batch = read(path, on_bad_line="skip")
        if batch.bad_lines:
            refused += 1
            assert _explain(bytes(line))
        else:
            with pytest.raises(AssertionError):
                _explain(bytes(line))
    assert 50 < refused < 450


def test_files_come_in_order_and_errors_name_the_right_one(tmp_path, lines):
    write(tmp_path / "day_2.tsv", lines[:100])
    write(tmp_path / "day_10.tsv.gz", lines[100:], final=False)
    pattern = f"{tmp_path}/day_*"
    check(read(pattern, block_bytes=2000), lines)
    (tmp_path / "day_11.tsv.gz").write_bytes(gzip.compress(b"bad"))
    with pytest.raises(ValueError, match=r"day_11.tsv.gz, line 1: expected 40 fields"):
        read(pattern)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_pass_can_start_at_any_chunk_and_again(tmp_path, lines, threads):
    paths = [
        write(tmp_path / "a.tsv", lines[:150]),
        write(tmp_path / "b.tsv", lines[150:]),
    ]
    source = criteo(paths, block_bytes=4000, threads=threads)
    chunks = list(source.chunks())
    assert len(chunks) > 10
    for start in (0, 1, len(chunks) - 1, len(chunks), len(chunks) + 5):
        again = list(source.chunks(start))
        assert len(again) == max(0, len(chunks) - start)
        for ours, theirs in zip(chunks[start:], again, strict=True):
            np.testing.assert_array_equal(ours.fixed, theirs.fixed)
            np.testing.assert_array_equal(ours.dense, theirs.dense)
    kept = InMemory(source)
    for _ in range(2):
        check(Batch.concat(list(kept.chunks())), lines)


def test_lines_before_the_start_are_not_parsed(tmp_path, lines):
    path = write(tmp_path / "a.tsv", [["bad"], *lines])
    source = criteo(path, block_bytes=1)
    check(Batch.concat(list(source.chunks(1))), lines)
    with pytest.raises(ValueError, match="line 1:"):
        next(source.chunks())


def test_memory_is_bounded_by_the_block(tmp_path, lines):
    path = write(tmp_path / "a.tsv", lines * 60)  # 4 MB
    source = criteo(path, block_bytes=1 << 16)
    next(source.chunks())
    tracemalloc.start()
    rows = sum(chunk.size for chunk in source.chunks())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows == 18_000
    assert peak < 1 << 20


def test_an_empty_file_has_no_chunks(tmp_path):
    (tmp_path / "a.tsv").touch()
    assert list(criteo(tmp_path / "a.tsv").chunks()) == []


def test_wrong_options_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such file: .*none.tsv"):
        criteo(tmp_path / "none.tsv")
    path = tmp_path / "a.tsv"
    path.touch()
    wrong: Any = "warn"
    with pytest.raises(ValueError, match="`on_bad_line` must be 'error' or 'skip'"):
        criteo(path, on_bad_line=wrong)
    with pytest.raises(ValueError, match="`dense_transform` must be 'log' or 'none'"):
        criteo(path, dense_transform=wrong)
    with pytest.raises(ValueError, match="`threads` must be positive, got 0"):
        list(criteo(path, threads=0).chunks())
    with pytest.raises(ValueError, match="`block_bytes` must be positive, got -1"):
        list(criteo(path, block_bytes=-1).chunks())
