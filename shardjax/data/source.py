"""What every source of batches offers, and the mode that keeps one in memory."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from shardjax.data.batch import Batch

OnBadLine = Literal["error", "skip"]
"""What to do with a line that cannot be read: raise, or skip it and count it."""


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


@dataclass(frozen=True)
class InMemory:
    """A source that reads another one once and serves its chunks again and again.

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
        if not self._kept:
            # Not extended chunk by chunk: a pass that fails must keep nothing.
            self._kept.extend(list(self.source.chunks()))
        yield from self._kept[start_chunk:]


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
