"""Ranges of rows: the same rows as by slicing everything, whatever the chunks."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardjax.data import (
    Batch,
    Source,
    Synthetic,
    count_rows,
    row_range,
    split_rows,
)


class Numbers:
    """A source whose labels are the rows' numbers; it notes which chunks are read."""

    feature_names = ()
    n_dense = 0

    def __init__(self, sizes, bad_lines=0):
        self.sizes = sizes
        self.bad_lines = bad_lines
        self.read = []

    def chunks(self, start_chunk=0):
        firsts = np.cumsum([0, *self.sizes])
        for number in range(start_chunk, len(self.sizes)):
            self.read.append(number)
            size = self.sizes[number]
            labels = firsts[number] + np.arange(size)
            yield Batch(
                labels,
                np.zeros((size, 0)),
                np.zeros((0, size), int),
                bad_lines=self.bad_lines,
            )


def rows_of(source, start_chunk=0):
    return [int(row) for chunk in source.chunks(start_chunk) for row in chunk.labels]


@given(st.lists(st.integers(0, 5), max_size=8), st.data())
def test_a_range_is_a_slice(sizes, data):
    total = sum(sizes)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.none() | st.integers(start, total))
    rows = row_range(Numbers(sizes), start, stop)
    expected = list(range(start, total if stop is None else stop))
    chunks = [chunk.labels.tolist() for chunk in rows.chunks()]
    assert sum(chunks, []) == expected
    # Again, now that sizes are known; and from each chunk on, known or not.
    for fresh in (False, True):
        for skip in range(len(chunks) + 2):
            if fresh:
                rows = row_range(Numbers(sizes), start, stop)
            assert rows_of(rows, skip) == sum(chunks[skip:], [])
    assert count_rows(rows) == len(expected)


def test_a_later_pass_starts_at_the_first_chunk_it_needs():
    source = Numbers([10] * 6)
    rows = row_range(source, 25, 45)
    assert rows_of(rows) == list(range(25, 45))
    assert source.read == [0, 1, 2, 3, 4]
    source.read.clear()
    assert rows_of(rows) == list(range(25, 45))
    assert source.read == [2, 3, 4]
    source.read.clear()
    assert rows_of(rows, start_chunk=1) == list(range(30, 45))
    assert source.read == [3, 4]


def test_a_split_reads_once_to_count():
    source = Numbers([10] * 6)
    train, evaluation = split_rows(source, 0.2)
    assert source.read == list(range(6))
    source.read.clear()
    assert rows_of(evaluation) == list(range(48, 60))
    assert source.read == [4, 5]
    source.read.clear()
    assert rows_of(train) == list(range(48))
    assert source.read == [0, 1, 2, 3, 4]
    source.read.clear()
    assert (count_rows(train), count_rows(evaluation)) == (48, 12)
    assert source.read == []


def test_bad_lines_are_counted_on_one_side_of_a_split():
    source = Numbers([0, 10, 0, 10, 0], bad_lines=1)
    train, evaluation = split_rows(source, 0.5)
    assert sum(chunk.bad_lines for chunk in train.chunks()) == 2
    assert sum(chunk.bad_lines for chunk in evaluation.chunks()) == 3


@pytest.mark.parametrize(("rows", "n_eval"), [(7, 1), (8, 2), (39_948, 7990)])
def test_a_split_rounds(rows, n_eval):
    train, evaluation = split_rows(Numbers([rows]), 0.2)
    assert (count_rows(train), count_rows(evaluation)) == (rows - n_eval, n_eval)


def test_a_source_that_knows_its_sizes_is_not_read():
    class Unread(Synthetic):
        def chunks(self, start_chunk=0):
            raise AssertionError("read")

    source = Unread(rows=100_000)
    train, evaluation = split_rows(source, 0.2)
    assert (count_rows(source), count_rows(train)) == (100_000, 80_000)
    assert count_rows(evaluation) == 20_000
    assert count_rows(row_range(source, 5)) == 99_995


def test_a_range_is_a_source():
    source = Synthetic(rows=10)
    rows = row_range(source, 2, 5)
    assert isinstance(rows, Source)
    assert rows.feature_names == source.feature_names
    assert rows.n_dense == source.n_dense
    np.testing.assert_array_equal(
        next(rows.chunks()).fixed, next(source.chunks()).fixed[:, 2:5]
    )


def test_ranges_that_are_not_there():
    with pytest.raises(ValueError, match="`start` must be at least 0, got -1"):
        row_range(Numbers([5]), -1)
    with pytest.raises(ValueError, match="`stop` must be at least 3, got 2"):
        row_range(Numbers([5]), 3, 2)
    with pytest.raises(TypeError, match="`start` must be an integer, got 0.5"):
        row_range(Numbers([5]), 0.5)
    with pytest.raises(ValueError, match="rows 2 to 9 must be within .* has 5 rows"):
        rows_of(row_range(Numbers([5]), 2, 9))
    with pytest.raises(ValueError, match="rows 7 to the end must be .* has 5 rows"):
        rows_of(row_range(Numbers([5]), 7))


def test_splits_that_leave_nothing():
    for fraction in (0, 1, -0.2, float("nan")):
        with pytest.raises(ValueError, match="`eval_fraction` must lie between"):
            split_rows(Numbers([5]), fraction)
    with pytest.raises(ValueError, match="must leave rows .* which makes 3 and 0"):
        split_rows(Numbers([3]), 0.1)
