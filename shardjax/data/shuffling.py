"""Local shuffling, and cutting a stream of chunks into batches of one size.

Shuffling works on *windows*: as many whole chunks as it takes to have `buffer_rows`
rows, put into one random order. The window that is being emitted and the one that is
being read advance in step, so reading does not come in bursts::

    chunks   0 1 2 | 3 4 5 | 6 7        a window is a run of chunks
             window  window  window     each in a random order of its own
             emitted reading            at the same pace

A window depends on nothing but its chunks, the seed, the epoch and the number of its
first chunk. A stopped run can therefore start again at the window it was in, without
reading what came before it.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from shardjax.data.batch import Batch


@dataclass(frozen=True)
class Position:
    """Where in an epoch the next row is.

    Attributes:
      chunk: number of the first chunk of the window that holds the row.
      row: how many rows of that window come before it, in the order of the window.
      bad_lines: how many bad lines were skipped before that window.
    """

    chunk: int = 0
    row: int = 0
    bad_lines: int = 0


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of one window, and where they are.

    Attributes:
      batch: the rows.
      start: the position of the first row.
      bad_lines: how many bad lines were skipped up to the end of the window.
    """

    batch: Batch
    start: Position
    bad_lines: int


def shuffle(
    chunks: Iterable[Batch],
    buffer_rows: int,
    seed: int,
    epoch: int = 0,
    *,
    piece_rows: int = 8192,
) -> Iterator[Batch]:
    """Puts the rows of each window of chunks into a random order.

    Every row comes out exactly once. A row moves within its window only: data that is
    sorted over more than `buffer_rows` rows stays sorted on that scale.

    Args:
      chunks: batches of any sizes and the same features.
      buffer_rows: a window ends with the chunk that brings it to this many rows. Up to
        three times as many rows are held in memory.
      seed: non-negative; with `epoch` it determines the order.
      epoch: non-negative; each epoch has an order of its own.
      piece_rows: how many rows an emitted batch has, the last of a window excepted.

    Yields:
      Batches of the rows in their new order. The bad lines of a window are counted on
      its first batch.

    Raises:
      ValueError: if a count is not positive or a seed is negative.

    Example:
      >>> chunk = Batch(np.arange(4), np.zeros((4, 0)), np.zeros((0, 4), int))
      >>> [int(y) for b in shuffle([chunk, chunk], 8, seed=1) for y in b.labels]
      [1, 0, 1, 0, 2, 2, 3, 3]
    """
    check_count("buffer_rows", buffer_rows)
    check_count("piece_rows", piece_rows)
    check_count("seed", seed, least=0)
    check_count("epoch", epoch, least=0)

    def batches():
        pieces = shuffled_pieces(chunks, buffer_rows, seed, epoch, piece_rows)
        counted = 0
        for piece in pieces:
            yield replace(piece.batch, bad_lines=piece.bad_lines - counted)
            counted = piece.bad_lines

    return batches()


def rebatch(
    chunks: Iterable[Batch], batch_size: int, drop_last: bool = False
) -> Iterator[Batch]:
    """Cuts a stream of batches into batches of exactly `batch_size` rows.

    Args:
      chunks: batches of any sizes, also empty ones, and the same features.
      batch_size: rows of each batch.
      drop_last: whether to leave out the rows at the end that do not fill a batch;
        otherwise they are the last batch.

    Yields:
      Batches; arrays are views of the chunks where they can be. `bad_lines` is carried
      along, but for those after the last row.

    Raises:
      ValueError: if `batch_size` is not positive.

    Example:
      >>> chunk = Batch(np.arange(5), np.zeros((5, 0)), np.zeros((0, 5), int))
      >>> [batch.size for batch in rebatch([chunk, chunk], 4)]
      [4, 4, 2]
    """
    check_count("batch_size", batch_size)
    pieces = chunk_pieces(chunks)
    return (batch for batch, *_ in cut(pieces, batch_size, drop_last))


def chunk_pieces(
    chunks: Iterable[Batch], start: Position | None = None
) -> Iterator[Piece]:
    """Numbers chunks in the order they come; each is a window of its own.

    Args:
      chunks: the chunks from number `start.chunk` on.
      start: the position of the first row to emit; by default the very first.

    Yields:
      Pieces, also empty ones.
    """
    start = Position() if start is None else start
    bad_lines = start.bad_lines
    for number, chunk in enumerate(chunks, start.chunk):
        before, bad_lines = bad_lines, bad_lines + chunk.bad_lines
        skip = start.row if number == start.chunk else 0
        if skip:
            _check_window(chunk.size, start)
            chunk = chunk.slice(skip, chunk.size)
        yield Piece(chunk, Position(number, skip, before), bad_lines)


def shuffled_pieces(
    chunks: Iterable[Batch],
    buffer_rows: int,
    seed: int,
    epoch: int,
    piece_rows: int,
    start: Position | None = None,
) -> Iterator[Piece]:
    """Puts the rows of each window into a random order; see `shuffle`.

    Args:
      chunks: the chunks from number `start.chunk` on.
      buffer_rows: rows that complete a window.
      seed: non-negative.
      epoch: non-negative.
      piece_rows: rows of a piece.
      start: the position of the first row to emit; by default the very first.

    Yields:
      Pieces.
    """
    start = Position() if start is None else start
    window = _Window(iter(chunks), start.chunk, start.bad_lines, buffer_rows)
    window.read(buffer_rows)
    skip = start.row
    while window.parts:
        first, before = window.first, window.bad_lines_before
        rows, bad_lines = window.rows, window.bad_lines
        if skip:
            _check_window(rows, start)
        joined = Batch.concat(window.parts)
        window.restart()
        order = np.random.default_rng([seed, epoch, first]).permutation(rows)
        if rows == 0:
            yield Piece(joined, Position(first, 0, before), bad_lines)
        for at in range(skip, rows, piece_rows):
            piece = joined.take(order[at : at + piece_rows])
            yield Piece(piece, Position(first, at, before), bad_lines)
            # The next window is read at the pace at which this one is emitted.
            window.read(at + piece_rows)
        window.read(buffer_rows)
        skip = 0


class _Window:
    """The chunks of the window that is being read."""

    def __init__(self, chunks, first, bad_lines, buffer_rows):
        self._chunks = chunks
        self._buffer_rows = buffer_rows
        self._next = first
        self.bad_lines = bad_lines
        self.restart()

    def restart(self):
        """Begins the window after the present one."""
        self.parts: list[Batch] = []
        self.rows = 0
        self.first = self._next
        self.bad_lines_before = self.bad_lines

    def read(self, rows):
        """Reads until the window has `rows` rows, is complete or the chunks end."""
        while self.rows < min(rows, self._buffer_rows):
            chunk = next(self._chunks, None)
            if chunk is None:
                return
            self._next += 1
            self.bad_lines += chunk.bad_lines
            self.rows += chunk.size
            self.parts.append(chunk)


def cut(
    pieces: Iterable[Piece], batch_size: int, drop_last: bool
) -> Iterator[tuple[Batch, Position, int]]:
    """Cuts pieces into batches of one size.

    Args:
      pieces: consecutive pieces.
      batch_size: rows of each batch.
      drop_last: whether to leave out the rows at the end that do not fill a batch.

    Yields:
      The batch, the position of the row after it, and the number of bad lines skipped
      up to the end of the window its last row is from.
    """
    held: deque[Piece] = deque()
    used = 0  # rows of the first held piece that were given already
    held_rows = 0
    for piece in pieces:
        held.append(piece)
        held_rows += piece.batch.size
        while held_rows >= batch_size:
            held_rows -= batch_size
            batch, used = cut_one(held, used, batch_size)
            yield batch, *_after(held[0], used)
    if held_rows and not drop_last:
        batch, used = cut_one(held, used, held_rows)
        yield batch, *_after(held[0], used)


def cut_one(held: deque[Piece], used: int, rows: int) -> tuple[Batch, int]:
    """Takes the next rows off the held pieces; the first one left has the last row.

    Args:
      held: consecutive pieces, of as many rows at least.
      used: rows of the first one that were taken already.
      rows: how many to take, positive.

    Returns:
      The rows, and how many of the first piece left are taken then.
    """
    parts = []
    while True:
        batch = held[0].batch
        taken = min(rows, batch.size - used)
        if taken or batch.bad_lines:
            parts.append(batch.slice(used, used + taken))
        rows -= taken
        used += taken
        if rows == 0:
            return Batch.concat(parts), used
        held.popleft()
        used = 0


def _after(piece: Piece, used: int) -> tuple[Position, int]:
    start = piece.start
    return replace(start, row=start.row + used), piece.bad_lines


def _check_window(rows: int, start: Position) -> None:
    if start.row > rows:
        raise ValueError(
            f"cannot go on after row {start.row} of the window that starts at chunk"
            f" {start.chunk}, as it has {rows} rows. The data or its chunk size changed"
            " since the position was saved; give the same source as then."
        )


def check_count(name: str, value: object, least: int = 1) -> int:
    """Refuses what is not an integer, or too small.

    Args:
      name: what to call it in an error.
      value: what to check.
      least: the smallest it may be.

    Returns:
      The value.

    Raises:
      TypeError: if it is not an integer.
      ValueError: if it is too small.

    Example:
      >>> check_count("batch_size", 2)
      2
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"`{name}` must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"`{name}` must be at least {least}, got {value}")
    return int(value)
