"""What every source of batches offers, and the mode that keeps one in memory."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from shardjax.data.batch import Batch
from shardjax.data.permutation import check_rows

OnBadLine = Literal["error", "skip"]
"""What to do with a line that cannot be read: raise, or skip it and count it."""


ROWS_AT_ONCE = 8192
"""How many rows to take at once where each is found by itself."""


@runtime_checkable
class Source(Protocol):
    """Protocol: gives the same sequence of chunks at every pass.

    A chunk is a Batch of whatever size suits the format, in the order of the data; it
    may have no rows. Its `bad_lines` counts the lines skipped while it was made.
    """

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The names of the keyed features, as of every chunk."""
        ...

    @property
    def n_dense(self) -> int:
        """The number of dense features, as of every chunk."""
        ...

    def chunks(self, start_chunk: int = 0) -> Iterator[Batch]:
        """Starts a fresh pass over the data.

        Args:
          start_chunk: how many chunks to pass over, so that a stopped pass goes on
            where it was; cheaper than making them, as they are not parsed.

        Returns:
          An iterator over chunks. It is empty if there are no more.
        """
        ...


@runtime_checkable
class Indexable(Source, Protocol):
    """Protocol: a source whose rows can be had by number, in any order."""

    @property
    def rows_at_once(self) -> int:
        """How many rows a `take` should ask for, if there are so many to ask for.

        Few, where each row is found by itself; many, where rows are stored in blocks
        that are read as a whole.
        """
        ...

    def row_count(self) -> int:
        """Gives the number of rows."""
        ...

    def take(self, index: np.ndarray) -> Batch:
        """Gives rows by number, in the order asked for.

        Args:
          index: int64 [n], each at least 0 and below `row_count()`; n may be 0, and a row
            may come more than once.

        Returns:
          A batch of n rows.

        Raises:
          IndexError: if there is no such row.
        """
        ...


@dataclass(frozen=True)
class InMemory:
    """A source that reads another one once and serves its chunks again and again.

    It is `Indexable`, whatever it reads: the first `take` joins the chunks.

    Attributes:
      source: what to read, at the first pass.

    Example:
      >>> import numpy as np
      >>> class Numbers:
      ...     feature_names, n_dense = (), 0
      ...     def chunks(self, start_chunk=0):
      ...         yield Batch([0, 1], np.zeros((2, 0)), np.zeros((0, 2), int))
      >>> numbers = InMemory(Numbers())
      >>> next(numbers.chunks()) is next(numbers.chunks())
      True
    """

    source: Source
    _kept: list[Batch] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    _joined: list[Batch] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The names of the keyed features."""
        return self.source.feature_names

    @property
    def n_dense(self) -> int:
        """The number of dense features."""
        return self.source.n_dense

    def chunks(self, start_chunk: int = 0) -> Iterator[Batch]:
        """Starts a pass; the first one reads the whole source before it yields.

        Args:
          start_chunk: how many chunks to pass over.

        Returns:
          An iterator over the kept chunks; do not write to their arrays.
        """
        yield from self._chunks()[start_chunk:]

    @property
    def rows_at_once(self) -> int:
        """Few: each row is found by itself."""
        return ROWS_AT_ONCE

    def row_count(self) -> int:
        """Gives the number of rows; reads the source if it was not yet."""
        return sum(chunk.size for chunk in self._chunks())

    def take(self, index: np.ndarray) -> Batch:
        """Gives rows by number, in the order asked for.

        Args:
          index: integers [n], each at least 0 and below the number of rows.

        Returns:
          A batch of n rows.

        Raises:
          IndexError: if there is no such row.
          ValueError: if the source has no chunk, and so no rows to tell its features by.

        Example:
          >>> from shardjax.data import Synthetic
          >>> InMemory(Synthetic(rows=1000)).take([7, 999]).size
          2
        """
        chunks = self._chunks()
        if not self._joined:
            if not chunks:
                raise ValueError(
                    f"rows can be taken of a source that has some, got none of"
                    f" {self.source!r}"
                )
            rows = Batch.concat(chunks)
            self._joined.append(rows)
            # Views of the joined rows as far as can be, so that they are held once.
            ends = np.cumsum([chunk.size for chunk in chunks]).tolist()
            self._kept[:] = [
                replace(rows.slice(end - chunk.size, end), bad_lines=chunk.bad_lines)
                for chunk, end in zip(chunks, ends, strict=True)
            ]
        rows = self._joined[0]
        return rows.take(check_rows(index, rows.size))

    def _chunks(self) -> list[Batch]:
        if not self._kept:
            # Not extended chunk by chunk: a pass that fails must keep nothing.
            self._kept.extend(list(self.source.chunks()))
        return self._kept


def check_on_bad_line(on_bad_line: str) -> None:
    """Refuses a choice that is not an `OnBadLine`.

    Args:
      on_bad_line: the choice.

    Raises:
      ValueError: if it is neither "error" nor "skip".

    Example:
      >>> check_on_bad_line("skip")
    """
    if on_bad_line not in ("error", "skip"):
        raise ValueError(
            f"`on_bad_line` must be 'error' or 'skip', got {on_bad_line!r}"
        )
