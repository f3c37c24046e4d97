"""libsvm text: every legal form against plain Python, every wrong one named."""

import gzip
import random
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_svmlight_file

from shardjax.data import Batch, Source, libsvm

SHARED = Path(__file__).parents[3] / "shared" / "data"


def write(tmp_path, text, name="a.txt"):
    path = tmp_path / name
    data = text.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def read(path, **options):
    return Batch.concat(list(libsvm(path, **options).chunks()))


def bags_of(bags):
    """Each example's keys and weights."""
    ends = bags.offsets
    return [
        list(zip(bags.values[a:b].tolist(), bags.weights[a:b].tolist(), strict=True))
        for a, b in zip(ends, ends[1:], strict=False)
    ]


def test_lines_against_plain_python(tmp_path):
    rng = random.Random(0)
    lines, expected = [], []
    for _ in range(500):
        label = rng.choice([0, 1])
        pairs = [
            (rng.choice([0, 1, 7, 2**31, 2**53 + 1, 2**64 - 1]), rng.choice(VALUES))
            for _ in range(rng.randrange(6))
        ]
        comment = rng.choice(["", "", " # 9:9", "#"])
        blank = rng.choice([" ", "\t", "  "])
        words = [str(label), *(f"{key}:{value}" for key, value in pairs)]
        lines.append(blank.join(words) + rng.choice(["", " "]) + comment)
        expected.append((label, [(key, np.float32(value)) for key, value in pairs]))
        if rng.random() < 0.2:
            lines.append(rng.choice(["", "  ", "# nothing", "\t#"]))
    for end, final in (("\n", True), ("\r\n", True), ("\n", False)):
        for name, block_bytes, threads in (
            ("a.txt", 1 << 20, 1),
            ("a.txt", 100, 3),
            ("a.txt.gz", 1000, 1),
        ):
            path = write(tmp_path, end.join(lines) + end * final, name)
            batch = read(path, block_bytes=block_bytes, threads=threads)
            assert batch.labels.tolist() == [label for label, _ in expected]
            assert bags_of(batch.jagged["features"]) == [bag for _, bag in expected]


VALUES = ["1", "0", "-1", "0.5", "1e-3", "2.50E2", "+3", "-.5", "4."]


def test_a_source_says_what_it_gives(tmp_path):
    source = libsvm(write(tmp_path, "1 3:1\n"))
    batch = next(source.chunks())
    assert isinstance(source, Source)
    assert source.feature_names == batch.feature_names == ("features",)
    assert source.n_dense == batch.n_dense == 0
    assert batch.groups is None
    assert batch.jagged["features"].weights.dtype == np.float32


def test_chunks_can_be_passed_over(tmp_path):
    path = write(tmp_path, "".join(f"{i % 2} {i}:1\n" for i in range(100)))
    source = libsvm(path, block_bytes=60)
    sizes = [chunk.size for chunk in source.chunks()]
    rest = Batch.concat(list(source.chunks(start_chunk=3)))
    assert rest.jagged["features"].values[0] == sum(sizes[:3])


@pytest.mark.parametrize("name", ["train", "test"])
def test_agaricus_as_scikit_learn_reads_it(name):
    path = SHARED / "agaricus" / f"agaricus_{name}.txt"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    batch = read(path, block_bytes=50_000)
    x, y = load_svmlight_file(str(path), zero_based=True)
    np.testing.assert_array_equal(batch.labels, y)
    bags = batch.jagged["features"]
    np.testing.assert_array_equal(bags.values, x.indices)
    np.testing.assert_array_equal(bags.offsets, x.indptr)
    np.testing.assert_array_equal(bags.weights, x.data)


def test_labels_may_be_signed(tmp_path):
    assert read(write(tmp_path, "-1 1:1\n+1 2:1\n1.0\n")).labels.tolist() == [0, 1, 1]


def test_labels_may_be_numbers_with_a_threshold(tmp_path):
    path = write(tmp_path, "3.5 1:1\n4 2:1\n-7 3:1\n")
    assert read(path, label_threshold=4).labels.tolist() == [0, 1, 0]


def test_query_ids_become_groups(tmp_path):
    path = write(tmp_path, "1 qid:7 1:1\n0 qid:18446744073709551615\n1 qid:7 2:1 3:1\n")
    batch = read(path)
    assert batch.groups.tolist() == [7, 2**64 - 1, 7]
    assert batch.jagged["features"].lengths.tolist() == [1, 0, 2]


def test_fields_become_features(tmp_path):
    lines = ["1 0:5:1 2:7:0.5 0:6:2", "0 10:5:1", "1"]
    path = write(tmp_path, "\n".join(lines))
    source = libsvm(path)
    assert source.feature_names == ("field_0", "field_2", "field_10")
    batch = next(source.chunks())
    assert batch.labels.tolist() == [1, 0, 1]
    assert {name: bags_of(bags) for name, bags in batch.jagged.items()} == {
        "field_0": [[(5, 1), (6, 2)], [], []],
        "field_2": [[(7, 0.5)], [], []],
        "field_10": [[], [(5, 1)], []],
    }


def test_fields_that_come_later(tmp_path):
    path = write(tmp_path, "1 0:5:1\n" * 9 + "0 1:6:1 0:7:1\n")
    source = libsvm(path, block_bytes=20)
    with pytest.raises(
        ValueError, match=r"a.txt, line 10: '1:6:1' is of a field .* 0\."
    ):
        list(source.chunks())
    # A field that is not known is no fault of the line.
    with pytest.raises(ValueError, match="line 10"):
        list(libsvm(path, block_bytes=20, on_bad_line="skip").chunks())
    source = libsvm(path, block_bytes=20, unknown_fields="drop")
    batch = Batch.concat(list(source.chunks()))
    assert batch.jagged["field_0"].values.tolist() == [5] * 9 + [7]
    assert source.dropped_keys == 1
    batch = read(path, block_bytes=20, fields=[1, 0])
    assert batch.feature_names == ("field_1", "field_0")
    assert batch.jagged["field_1"].values.tolist() == [6]


def test_examples_without_features(tmp_path):
    batch = read(write(tmp_path, "1\n0\n"))
    assert batch.labels.tolist() == [1, 0]
    assert batch.jagged["features"].lengths.tolist() == [0, 0]


GOOD = "1 1:1\n0 2:1\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2 1:1", "'2' is not a label, 0 or 1 or -1"),
        ("nan 1:1", "'nan' is not a label"),
        ("1:1 2:1", "'1:1' is not a label"),
        ("-1 1:1", "'-1' is not a label beside 1 and 0, with which the files begin"),
        ("1 7", "'7' is not index:value"),
        ("1 1:2:3", "'1:2:3' is not index:value"),
        ("1 :2", "':2' is not index:value: no index from 0 to 2\\*\\*64 - 1"),
        ("1 -3:2", "'-3:2' is not index:value: no index"),
        ("1 18446744073709551616:1", ".*' is not index:value: no index"),
        ("1 99999999999999999999:1", ".*' is not index:value: no index"),
        ("1 1.5:2", "'1.5:2' is not index:value: no index"),
        ("1 x:2", "'x:2' is not index:value: no index"),
        ("1 3:", "'3:' is not index:value: no finite value"),
        ("1 3:x", "'3:x' is not index:value: no finite value"),
        ("1 3:inf", "'3:inf' is not index:value: no finite value"),
        ("1 3:nan", "'3:nan' is not index:value: no finite value"),
        ("1 3:1e39", "'3:1e39' is not index:value: no finite value"),
        ("1 qid:3 1:1", "'qid:3' must be in all lines, and is not in the first one"),
        ("1 " + "9" * 99, "'9{57}\\.\\.\\.' is not index:value"),
    ],
)
def test_malformed_lines(tmp_path, line, message):
    path = write(tmp_path, f"{GOOD}# a comment\n\n{line}\n{GOOD}{line}\n")
    with pytest.raises(ValueError, match=rf"a\.txt, line 5: {message}") as caught:
        read(path)
    assert "on_bad_line='skip'" in str(caught.value)
    batch = read(path, on_bad_line="skip")
    assert batch.bad_lines == 2
    assert batch.labels.tolist() == [1, 0, 1, 0]
    assert batch.jagged["features"].values.tolist() == [1, 2, 1, 2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0 1:1", "there must be a qid, as in the first line"),
        ("0", "there must be a qid, as in the first line"),
        ("0 1:1 qid:3", "'qid:3' must come once, and right after the label"),
        ("0 qid:3 qid:4", "'qid:4' must come once, and right after the label"),
        ("0 qid:x", "'qid:x' is not qid:n, n from 0 to 2\\*\\*64 - 1"),
        ("0 qid:-1", "'qid:-1' is not qid:n"),
    ],
)
def test_malformed_groups(tmp_path, line, message):
    path = write(tmp_path, f"1 qid:1 1:1\n{line}\n0 qid:2 2:1\n")
    with pytest.raises(ValueError, match=f"line 2: {message}"):
        read(path)
    batch = read(path, on_bad_line="skip")
    assert (batch.bad_lines, batch.groups.tolist()) == (1, [1, 2])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0 1:1", "'1:1' is not field:index:value"),
        ("0 1:1:1:1", "'1:1:1:1' is not field:index:value"),
        ("0 x:1:1", "'x:1:1' is not field:index:value: no number of a field"),
        ("0 1:x:1", "'1:x:1' is not field:index:value: no index"),
        ("0 1:1:x", "'1:1:x' is not field:index:value: no finite value"),
    ],
)
def test_malformed_fields(tmp_path, line, message):
    path = write(tmp_path, f"1 1:1:1\n{line}\n0 1:2:1\n")
    with pytest.raises(ValueError, match=f"line 2: {message}"):
        read(path)
    batch = read(path, on_bad_line="skip")
    assert batch.bad_lines == 1
    assert batch.jagged["field_1"].values.tolist() == [1, 2]


def test_bad_lines_are_counted_where_there_is_nothing_else(tmp_path):
    path = write(tmp_path, "1 1:1\n" + "x\n" * 9)
    chunks = list(libsvm(path, on_bad_line="skip", block_bytes=6).chunks())
    assert [chunk.size for chunk in chunks][:3] == [1, 0, 0]
    assert sum(chunk.bad_lines for chunk in chunks) == 9


def test_bad_options(tmp_path):
    path = write(tmp_path, GOOD)
    with pytest.raises(ValueError, match="`on_bad_line` must be 'error' or 'skip'"):
        libsvm(path, on_bad_line="ignore")
    with pytest.raises(ValueError, match="`unknown_fields` must be 'error' or 'drop'"):
        libsvm(path, unknown_fields="ignore")
    with pytest.raises(ValueError, match="`fields` must be numbers of fields"):
        libsvm(path, fields=["a"])
    with pytest.raises(ValueError, match="`fields` must be numbers .* at least one"):
        libsvm(path, fields=[])
    with pytest.raises(ValueError, match="`fields` must differ"):
        libsvm(path, fields=[1, 1])
    with pytest.raises(ValueError, match="there must be a line to tell the form from"):
        libsvm(write(tmp_path, "# nothing\n\n", "b.txt"))
    with pytest.raises(FileNotFoundError, match="no such file"):
        libsvm(tmp_path / "c.txt")
