"""Rows of a source by number: how many, a range of them, the last to evaluate on."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from shardjax.data.batch import Batch
from shardjax.data.permutation import check_rows
from shardjax.data.shuffling import check_count
from shardjax.data.source import Indexable, Source


@runtime_checkable
class SizedSource(Source, Protocol):
    """Protocol: a source that knows the sizes of its chunks without reading them."""

    def chunk_sizes(self) -> Iterable[int]:
        """Gives the number of rows of each chunk, in order."""
        ...


@dataclass
class _Begins:
    """The row at which each chunk of a source begins, as far as known.

    Attributes:
      rows: by number of the chunk, from 0 without a gap. Passes in several threads may
        fill in the same.
      complete: whether the last entry is the end of the last chunk.
    """

    rows: dict[int, int] = field(default_factory=lambda: {0: 0})
    complete: bool = False

    @staticmethod
    def of(source: Source) -> "_Begins":
        """Finds all, by a pass over the source if there is no other way."""
        if isinstance(source, SizedSource):
            sizes = source.chunk_sizes()
        else:
            sizes = (chunk.size for chunk in source.chunks())
        begins = _Begins(complete=True)
        for number, size in enumerate(sizes):
            begins.rows[number + 1] = begins.rows[number] + size
        return begins

    @property
    def last(self) -> int:
        """The last row known to begin a chunk."""
        return self.rows[len(self.rows) - 1]


@dataclass(frozen=True)
class RowRange:
    """The rows `start` to `stop` of another source, in its order; a `Source`.

    Its chunks are the parts of the source's chunks. What it learns of the sizes of
    chunks it keeps, so that a later pass starts at the first chunk it needs.

    Attributes:
      source: where the rows come from.
      start: number of the first row, from 0.
      stop: one past the last row; None for all rows there are.

    Raises:
      TypeError: if a row number is not an integer.
      ValueError: if the row numbers are negative or in the wrong order; while reading,
        if the source has fewer rows than `stop`.

    Example:
      >>> from shardjax.data import Synthetic
      >>> rows = RowRange(Synthetic(rows=100, chunk_rows=40), 30, 90)
      >>> [chunk.size for chunk in rows.chunks()]
      [10, 40, 10]
    """

    source: Source
    start: int
    stop: int | None = None
    _begins: _Begins = field(default_factory=_Begins, repr=False, compare=False)

    def __post_init__(self):
        check_count("start", self.start, least=0)
        if self.stop is not None:
            check_count("stop", self.stop, least=self.start)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The names of the keyed features."""
        return self.source.feature_names

    @property
    def n_dense(self) -> int:
        """The number of dense features."""
        return self.source.n_dense

    def chunks(self, start_chunk: int = 0) -> Iterator[Batch]:
        """Starts a fresh pass over the range.

        Args:
          start_chunk: how many of the range's chunks to pass over. They are read only
            where their sizes are not known yet.

        Yields:
          Chunks; the first and the last one are cut to the range.
        """
        begins = self._begins.rows
        # The first chunk that holds rows of the range, or begins where it does.
        first = bisect_left(range(len(begins)), self.start, key=begins.__getitem__)
        if first == len(begins) or begins[first] > self.start:
            first -= 1
        begin, index = first, 0
        if begins[first] == self.start or first + 1 < len(begins):
            begin = min(first + start_chunk, len(begins) - 1)
            index = begin - first
        row = begins[begin]
        if self.stop is not None and row >= self.stop:
            return
        for number, chunk in enumerate(self.source.chunks(begin), begin):
            end = row + chunk.size
            begins[number + 1] = end
            if row >= self.start or end > self.start:
                if index >= start_chunk:
                    stop = end if self.stop is None else min(self.stop, end)
                    yield chunk.slice(max(self.start, row) - row, stop - row)
                index += 1
            row = end
            if self.stop is not None and row >= self.stop:
                return
        self._begins.complete = True
        if row < (self.start if self.stop is None else self.stop):
            raise ValueError(
                f"rows {self.start} to {self.stop or 'the end'} must be within the"
                f" source, which has {row} rows: {self.source!r}"
            )


@dataclass(frozen=True)
class IndexableRange(RowRange):
    """A range of the rows of an `Indexable` source; `row_range` makes it.

    Example:
      >>> from shardjax.data import Synthetic
      >>> rows = row_range(Synthetic(rows=100), 30, 90)
      >>> rows.row_count(), rows.take([59, 0]).size
      (60, 2)
    """

    @property
    def rows_at_once(self) -> int:
        """How many rows a `take` should ask for."""
        return self._indexable.rows_at_once

    def row_count(self) -> int:
        """Gives the number of rows."""
        stop = self._indexable.row_count() if self.stop is None else self.stop
        return max(0, stop - self.start)

    def take(self, index: np.ndarray) -> Batch:
        """Gives rows by number, in the order asked for.

        Args:
          index: integers [n], counted from `start`.

        Returns:
          A batch of n rows.

        Raises:
          IndexError: if there is no such row in the range.
        """
        return self._indexable.take(check_rows(index, self.row_count()) + self.start)

    @property
    def _indexable(self) -> Indexable:
        assert isinstance(self.source, Indexable)
        return self.source


def count_rows(source: Source) -> int:
    """Counts the rows of a source, by a pass over it if there is no other way.

    Args:
      source: what to count.

    Returns:
      The number of rows; bad lines that are skipped do not count.

    Example:
      >>> from shardjax.data import Synthetic
      >>> count_rows(Synthetic(rows=100))
      100
    """
    if isinstance(source, Indexable):
        return source.row_count()
    if not isinstance(source, RowRange):
        return _Begins.of(source).last
    if source.stop is not None:
        return source.stop - source.start
    if source._begins.complete:
        return source._begins.last - source.start
    return _Begins.of(source).last


def row_range(source: Source, start: int, stop: int | None = None) -> RowRange:
    """Takes a range of the rows of a source, in its order.

    Args:
      source: where the rows come from.
      start: number of the first row, from 0.
      stop: one past the last row; None for all rows there are.

    Returns:
      A source of these rows; `Indexable` if `source` is.

    Raises:
      TypeError: if a row number is not an integer.
      ValueError: if the row numbers are negative or in the wrong order.

    Example:
      >>> from shardjax.data import Synthetic
      >>> count_rows(row_range(Synthetic(rows=100), 30, 90))
      60
    """
    known = _Begins.of(source) if isinstance(source, SizedSource) else _Begins()
    return _range_of(source)(source, start, stop, known)


def split_rows(source: Source, eval_fraction: float) -> tuple[RowRange, RowRange]:
    """Splits a source in its order: first the rows to train on, then those to evaluate.

    A source that does not know its size is read once to count its rows.

    Args:
      source: what to split.
      eval_fraction: the share of the last rows to evaluate on, between 0 and 1; of n
        rows, these are the last round(eval_fraction * n).

    Returns:
      Two sources.

    Raises:
      ValueError: if `eval_fraction` is not between 0 and 1, or leaves no row to train
        or to evaluate on.

    Example:
      >>> from shardjax.data import Synthetic
      >>> train, evaluation = split_rows(Synthetic(rows=100), 0.2)
      >>> count_rows(train), count_rows(evaluation)
      (80, 20)
    """
    if not 0 < eval_fraction < 1:
        raise ValueError(
            f"`eval_fraction` must lie between 0 and 1, got {eval_fraction}"
        )
    begins = _Begins.of(source)
    rows = begins.last
    n_eval = round(eval_fraction * rows)
    if not 0 < n_eval < rows:
        raise ValueError(
            f"`eval_fraction` must leave rows to train and to evaluate on, got"
            f" {eval_fraction} of {rows} rows, which makes {rows - n_eval} and {n_eval}"
        )
    middle = rows - n_eval
    kind = _range_of(source)
    return kind(source, 0, middle, begins), kind(source, middle, None, begins)


def _range_of(source: Source) -> type[RowRange]:
    return IndexableRange if isinstance(source, Indexable) else RowRange
