"""A process's part of each global batch, and its share of files.

The rows of a batch are dealt to the devices of all processes in order, `ceil(batch / devices)`
to each, so that only the last ones get fewer. With 10 rows, 2 processes of 2 devices each::

    rows      0 1 2 | 3 4 5 | 6 7 8 | 9
    device    0       1       2       3
    process   0               1

Batches are the same whatever the number of processes; a short last batch may leave a process
without rows: its part has none, but it has one, so that all processes take the same steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, Protocol

from shardjax.data.batch import Batch
from shardjax.data.shuffling import check_count
from shardjax.data.source import Indexable, Source
from shardjax.data.split import row_range


@dataclass(frozen=True)
class Share:
    """Which process this is, of how many.

    Attributes:
      process: its number, from 0.
      processes: how many there are.
      devices: how many devices each process has, over which a batch is split.

    Raises:
      TypeError: if a number is not an integer.
      ValueError: if a number is too small, or `process` is not below `processes`.

    Example:
      >>> Share(process=1, processes=2, devices=2).rows(batch_size=10, size=10)
      (6, 10)
    """

    process: int
    processes: int
    devices: int = 1

    def __post_init__(self):
        check_process(self.process, self.processes)
        check_count("devices", self.devices)

    def examples(self, batch_size: int) -> int:
        """Rows of a batch that each device has, of a short batch perhaps fewer."""
        return -(-batch_size // (self.processes * self.devices))

    def rows(self, batch_size: int, size: int) -> tuple[int, int]:
        """Says which rows of a batch are this process's.

        Args:
          batch_size: rows of a whole batch.
          size: rows of this one; the last of an epoch may have fewer.

        Returns:
          The first row and one past the last.
        """
        each = self.devices * self.examples(batch_size)
        return min(self.process * each, size), min((self.process + 1) * each, size)

    def start(self, batch_size: int) -> "EqualDealing":
        """Begins to cut the batches of a loop."""
        return EqualDealing(self, batch_size)


@dataclass(frozen=True)
class Part:
    """The rows of a global batch that are one process's.

    Attributes:
      batch: the rows; there may be none.
      global_rows: how many rows the whole batch has.
      first_row: the number of the first row of `batch` in the whole one.
      examples: rows that each device has room for.
      dealt: rows that each device of this process gets, in order, before the next one gets
        any; None for as many as it has room for.

    Example:
      >>> import numpy as np
      >>> batch = Batch([0, 1, 2], np.zeros((3, 0)), np.zeros((0, 3), int))
      >>> part = Part.of(batch, Share(1, 2), batch_size=4)
      >>> part.batch.labels, part.global_rows, part.first_row
      (array([2.], dtype=float32), 3, 2)
    """

    batch: Batch
    global_rows: int
    first_row: int
    examples: int
    dealt: int | None = None

    @staticmethod
    def of(batch: Batch, share: Share, batch_size: int) -> "Part":
        """Cuts a process's part out of a batch.

        Args:
          batch: the whole batch.
          share: which process.
          batch_size: rows of a whole batch that is not the last.

        Returns:
          The part.
        """
        start, stop = share.rows(batch_size, batch.size)
        examples = share.examples(batch_size)
        return Part(batch.slice(start, stop), batch.size, start, examples)


class Dealing(Protocol):
    """Cuts a process's parts out of the batches of one loop, in order."""

    @property
    def rows(self) -> int:
        """The most rows of a part."""
        ...

    def ahead(self, wanted: int) -> int:
        """How many batches may be cut without waiting for others, at least 1 and at most
        so many."""
        ...

    def part(self, batch: Batch) -> Part:
        """This process's part of the next batch."""
        ...

    def close(self) -> None:
        """Ends the loop."""
        ...


@dataclass(frozen=True)
class EqualDealing:
    """Cuts the same part out of all batches; a `Dealing`.

    Attributes:
      share: whose part.
      batch_size: rows of a whole batch that is not the last.
    """

    share: Share
    batch_size: int

    @property
    def rows(self) -> int:
        """The most rows of a part."""
        start, stop = self.share.rows(self.batch_size, self.batch_size)
        return stop - start

    def ahead(self, wanted: int) -> int:
        """All of them."""
        return wanted

    def part(self, batch: Batch) -> Part:
        """This process's part of a batch."""
        return Part.of(batch, self.share, self.batch_size)

    def close(self) -> None:
        """Does nothing."""


def share_of(source: Source, process: int, processes: int) -> Source:
    """Splits a source between processes; each row is in the share of exactly one.

    Files are dealt in turns where each process gets one at least. Otherwise the rows are
    cut into equal ranges where they can be had by number, such as those of one Parquet
    file, and else chunks are dealt in turns, for which each process reads all of them.

    Args:
      source: all rows, the same in every process.
      process: number of the process, from 0.
      processes: how many there are.

    Returns:
      The share of the process, a source; it may have no rows.

    Raises:
      TypeError: if a number is not an integer.
      ValueError: if `process` is not below `processes`.

    Example:
      >>> from shardjax.data import Synthetic, count_rows
      >>> source = Synthetic(rows=100)
      >>> [count_rows(share_of(source, process, 3)) for process in range(3)]
      [33, 33, 34]
    """
    check_process(process, processes)
    if processes == 1:
        return source
    files = getattr(source, "files", ())
    if is_dataclass(source) and len(files) >= processes:
        with_files: Any = source
        return replace(with_files, files=tuple(files[process::processes]))
    if isinstance(source, Indexable):
        rows = source.row_count()
        ends = [rows * p // processes for p in (process, process + 1)]
        return row_range(source, *ends)
    return _Turns(source, process, processes)


@dataclass(frozen=True)
class _Turns:
    """Every so many-th chunk of a source."""

    source: Source
    process: int
    processes: int

    @property
    def feature_names(self) -> tuple[str, ...]:
        return self.source.feature_names

    @property
    def n_dense(self) -> int:
        return self.source.n_dense

    def chunks(self, start_chunk: int = 0) -> Iterator[Batch]:
        first = start_chunk * self.processes + self.process
        for number, chunk in enumerate(self.source.chunks(first)):
            if number % self.processes == 0:
                yield chunk


def check_process(process: int, processes: int) -> None:
    """Refuses a process that is none of so many.

    Args:
      process: its number.
      processes: how many there are.

    Raises:
      TypeError: if a number is not an integer.
      ValueError: if there is no such process.

    Example:
      >>> check_process(1, 2)
    """
    check_count("processes", processes)
    check_count("process", process, least=0)
    if process >= processes:
        raise ValueError(
            f"`process` must be below `processes`, as processes count from 0, got"
            f" {process} of {processes}. Give jax.process_index() and"
            " jax.process_count()."
        )
