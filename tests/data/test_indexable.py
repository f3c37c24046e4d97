"""Rows by number: those that a pass over the source would give, whatever the format."""

import decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardjax.data import (
    Batch,
    Indexable,
    InMemory,
    Synthetic,
    arrow,
    count_rows,
    csv,
    parquet,
    row_range,
    split_rows,
)
from shardjax.data.arrow_rows import ArrowRows
from shardjax.data.indexable import is_numbered, row_numbers

ROWS = 50


def table(start=0, rows=ROWS, dictionary=False):
    at = np.arange(start, start + rows)
    text = pa.array([f"t{i}" for i in at])
    return pa.table(
        {
            "label": at % 2,
            "number": at,
            "price": pa.array([decimal.Decimal(int(i)) for i in at]),
            "item": text.dictionary_encode() if dictionary else text,
            "tags": pa.array([list(range(i % 4)) or None for i in at.tolist()]),
            "unused": text,
            "view": text.cast(pa.string_view()),
        }
    )


def write(folder, format):
    """Three files of uneven row groups, the last with rows of other types of column."""
    paths = [str(folder / f"{i}.{format}") for i in range(3)]
    data = [table(0, 20), table(20, 1), table(21, 29, dictionary=True)]
    for path, part in zip(paths, data, strict=True):
        if format == "parquet":
            pq.write_table(part.drop_columns("view"), path, row_group_size=7)
        else:
            with pa.ipc.new_file(path, part.schema) as writer:
                writer.write_table(part, max_chunksize=7)
    options = {"label": "label", "drop": ["unused"], "group": "number", "chunk_rows": 3}
    return (parquet if format == "parquet" else arrow)(paths, **options)


def assert_same(batch, expected):
    np.testing.assert_array_equal(batch.labels, expected.labels)
    np.testing.assert_array_equal(batch.dense, expected.dense)
    np.testing.assert_array_equal(batch.fixed, expected.fixed)
    assert batch.feature_names == expected.feature_names
    for name, bags in expected.jagged.items():
        np.testing.assert_array_equal(batch.jagged[name].values, bags.values)
        np.testing.assert_array_equal(batch.jagged[name].lengths, bags.lengths)
    assert (batch.groups is None) == (expected.groups is None)
    if expected.groups is not None:
        np.testing.assert_array_equal(batch.groups, expected.groups)


@pytest.fixture(params=["parquet", "arrow", "synthetic", "memory", "range", "nested"])
def source(request, tmp_path):
    if request.param in ("parquet", "arrow"):
        return write(tmp_path, request.param)
    synthetic = Synthetic(rows=ROWS, chunk_rows=7, vocabulary=(5, 9))
    if request.param == "synthetic":
        return synthetic
    if request.param == "memory":
        return InMemory(write(tmp_path, "parquet"))
    if request.param == "range":
        return row_range(synthetic, 5, 31)
    return row_range(row_range(InMemory(synthetic), 3), 4, 40)


def test_rows_by_number_are_those_of_a_pass(source):
    everything = Batch.concat(list(source.chunks()))
    assert isinstance(source, Indexable)
    rows = everything.size
    assert source.row_count() == count_rows(source) == rows
    random = np.random.default_rng(0)
    some = random.permutation(rows)
    for index in (some, some[:3], np.arange(4, 9), np.array([2, 2, 0]), some[:0]):
        assert_same(source.take(index), everything.take(index))
    # A pass is the same as before, also when its rows were joined.
    assert_same(Batch.concat(list(source.chunks())), everything)
    for bad in (rows, -1):
        with pytest.raises(IndexError, match=f"must be at least 0 .* got {bad}"):
            source.take(np.array([0, bad]))


def test_numbers_of_rows_come_in_the_chunks_of_the_source(source):
    if not is_numbered(source):
        assert "InMemory" in repr(source)
        return
    for start in range(3):
        sizes = [chunk.size for chunk in source.chunks(start)]
        numbers = [chunk.groups for chunk in row_numbers(source).chunks(start)]
        assert [len(part) for part in numbers] == sizes
        first = source.row_count() - sum(sizes)
        np.testing.assert_array_equal(
            np.concatenate(numbers), np.arange(first, source.row_count())
        )


def test_sizes_of_files_are_known_without_reading(tmp_path):
    source = write(tmp_path, "parquet")
    assert list(source.chunk_sizes()) == [chunk.size for chunk in source.chunks()]
    train, held_out = split_rows(source, 0.2)
    assert (train.row_count(), held_out.row_count()) == (40, 10)
    assert held_out.take(np.array([9])).groups.tolist() == [49]


def test_text_and_streams_and_skipped_rows_have_no_numbers(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("label,item\n1,a\n0,b\n")
    assert not isinstance(csv(path), Indexable)
    assert not isinstance(row_range(csv(path), 0, 1), Indexable)
    pq.write_table(table().drop_columns("view"), tmp_path / "a.parquet")
    skipping = parquet(tmp_path / "a.parquet", label="label", on_bad_line="skip")
    assert not isinstance(skipping, Indexable)
    with pa.ipc.new_stream(tmp_path / "a.stream", table().schema) as writer:
        writer.write_table(table())
    assert not isinstance(arrow(tmp_path / "a.stream", label="label"), Indexable)


def test_few_groups_are_kept(tmp_path, monkeypatch):
    source = write(tmp_path, "parquet")
    bytes_ = 2 * pq.read_table(source.files[0]).nbytes // 3
    rows = ArrowRows(source.files, source.columns, "parquet", cache_bytes=bytes_)
    everything = Batch.concat(list(source.chunks()))
    assert_same(rows.take(np.arange(50)), everything)
    assert 0 < sum(group.nbytes for group in rows._cache.values()) <= bytes_
    none = ArrowRows(source.files, source.columns, "parquet", cache_bytes=0)
    assert_same(none.take(np.arange(50)[::-1]), everything.take(np.arange(50)[::-1]))
    assert not none._cache


def test_a_bad_row_is_named_by_its_place(tmp_path):
    path = str(tmp_path / "a.parquet")
    data = pa.table({"label": [0.0, 1.0, float("nan"), 1.0], "item": [1, 2, 3, 4]})
    pq.write_table(data, path, row_group_size=2)
    source = parquet(path, label="label", chunk_rows=1)
    assert source.take(np.array([3, 0])).labels.tolist() == [1, 0]
    with pytest.raises(ValueError, match="a.parquet, row 3, column 'label'"):
        source.take(np.array([3, 2]))


def test_a_file_that_is_broken_later_is_named(tmp_path):
    source = write(tmp_path, "parquet")
    with open(source.files[1], "wb") as file:
        file.write(b"nothing of the sort")
    with pytest.raises(ValueError, match="1.parquet: cannot be read as parquet"):
        source.row_count()
    with pytest.raises(ValueError, match="got none of"):
        InMemory(row_range(Synthetic(rows=0), 0)).take(np.array([0]))
