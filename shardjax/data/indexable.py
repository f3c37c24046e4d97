"""Sources whose rows can be had by number, in any order.

What knows the sizes of its chunks as well gives its order as numbers of rows
(`row_numbers`), so that shuffling and cutting into batches can be done before anything is
read: each process then reads its own rows of a batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from shardjax.data.batch import Batch
from shardjax.data.permutation import check_rows
from shardjax.data.source import Indexable, Source
from shardjax.data.split import RowRange, SizedSource


def is_numbered(source: Source) -> TypeGuard[Indexable]:
    """Says whether `row_numbers` gives the order of a source.

    Args:
      source: any source.

    Returns:
      Whether it is indexable and knows the sizes of its chunks without reading them.

    Example:
      >>> from shardjax.data import Synthetic
      >>> is_numbered(Synthetic(rows=100))
      True
    """
    if isinstance(source, RowRange):
        return isinstance(source, Indexable) and is_numbered(source.source)
    return isinstance(source, Indexable) and isinstance(source, SizedSource)


def row_numbers(source: Source) -> Source:
    """Gives the numbers of a source's rows in place of the rows, chunk by chunk.

    Args:
      source: what `is_numbered`.

    Returns:
      A source of the same chunks, whose only feature is the number of the row, as
      `groups`.

    Example:
      >>> from shardjax.data import Synthetic
      >>> chunks = row_numbers(Synthetic(rows=5, chunk_rows=3)).chunks()
      >>> [chunk.groups.tolist() for chunk in chunks]
      [[0, 1, 2], [3, 4]]
    """
    if isinstance(source, RowRange):
        inner = RowRange(row_numbers(source.source), source.start, source.stop)
        return _Numbers(inner, source.start)
    assert isinstance(source, SizedSource)
    return _Numbers(source, 0)


def number_batch(numbers: np.ndarray) -> Batch:
    """Makes a batch of nothing but numbers of rows.

    Args:
      numbers: int64 [n].

    Returns:
      A batch with the numbers as `groups`.

    Example:
      >>> number_batch(np.array([3, 1])).groups
      array([3, 1], dtype=uint64)
    """
    n = len(numbers)
    empty = np.zeros((0, n), np.uint64)
    return Batch(np.zeros(n, np.float32), np.zeros((n, 0)), empty, groups=numbers)


def numbers_of(batch: Batch) -> np.ndarray:
    """Gives the numbers of which `number_batch` made a batch.

    Args:
      batch: the batch, or rows of it.

    Returns:
      int64 [n].

    Example:
      >>> numbers_of(number_batch(np.array([3, 1])))
      array([3, 1])
    """
    assert batch.groups is not None
    return batch.groups.astype(np.int64)


@dataclass(frozen=True)
class _Numbers:
    """The numbers of rows: of a sized source, or what `first` leaves of other numbers."""

    source: Source
    first: int
    feature_names: tuple[str, ...] = ()
    n_dense: int = 0

    def chunks(self, start_chunk: int = 0) -> Iterator[Batch]:
        if isinstance(self.source, SizedSource):
            row = 0
            for number, size in enumerate(self.source.chunk_sizes()):
                if number >= start_chunk:
                    yield number_batch(np.arange(row, row + size))
                row += size
        else:
            for chunk in self.source.chunks(start_chunk):
                yield number_batch(numbers_of(chunk) - self.first)


def gather(
    index: np.ndarray,
    begins: np.ndarray,
    read: Callable[[Sequence[tuple[int, np.ndarray]]], Batch],
) -> Batch:
    """Takes rows that lie in several parts, each part looked at once.

    Args:
      index: int64 [n], numbers of rows, in any order; n must be positive.
      begins: int64 [parts + 1], the first row of each part; the last is the number of
        rows.
      read: called once with the parts that have such rows, in ascending order, each with
        the rows wanted, counted from the part's first; gives them one after the other.

    Returns:
      The rows in the order of `index`.

    Raises:
      IndexError: if there is no such row.

    Example:
      >>> parts = [number_batch(np.arange(3)), number_batch(np.arange(3, 5))]
      >>> def read(wanted):
      ...     return Batch.concat([parts[p].take(rows) for p, rows in wanted])
      >>> gather(np.array([4, 0, 3]), np.array([0, 3, 5]), read).groups
      array([4, 0, 3], dtype=uint64)
    """
    index = check_rows(index, int(begins[-1]))
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    parts = np.searchsorted(begins, ordered, side="right") - 1
    starts = np.flatnonzero(np.diff(parts, prepend=-1))
    ends = np.append(starts[1:], len(parts))
    wanted = [
        (int(parts[start]), ordered[start:end] - begins[parts[start]])
        for start, end in zip(starts, ends, strict=True)
    ]
    rows = read(wanted)
    if (np.diff(order) == 1).all():
        return rows
    back = np.empty(len(order), np.int64)
    back[order] = np.arange(len(order))
    return rows.take(back)
