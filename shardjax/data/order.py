"""The order of an epoch: which rows make up which batch, and reading a process's part of them.

Where rows can be had by number, an epoch is put into order as numbers, and only a process's
own rows are read, those of several batches at once::

    numbers ─▶ shuffle ─▶ batches of numbers ─▶ own part ─▶ rows of `run` batches ─▶ parts

Otherwise rows themselves are put into order, and each process cuts its part out of them.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Literal

import numpy as np

from shardjax.data.batch import Batch
from shardjax.data.block_share import BlockShare
from shardjax.data.indexable import (
    is_numbered,
    number_batch,
    numbers_of,
    row_numbers,
)
from shardjax.data.permutation import Permutation
from shardjax.data.share import Dealing, Part, Share
from shardjax.data.shuffling import Piece, Position, chunk_pieces, shuffled_pieces
from shardjax.data.source import Indexable, Source

Shuffle = Literal["window", "global"]
"""How far rows move: within windows of chunks, or to any place of the epoch."""

_log = logging.getLogger(__name__)

_PIECE_ROWS = 8192  # rows to put into order at once, for small batches


def check_shuffle(shuffle: str, seed: int | None, source: Source) -> None:
    """Refuses a way of shuffling that is none, or that the source does not allow.

    Args:
      shuffle: the way.
      seed: of the order, or None for the order of the source.
      source: what to shuffle.

    Raises:
      ValueError: if it is not a `Shuffle`, or "global" without a seed.
      TypeError: if it is "global" and rows of the source cannot be had by number.

    Example:
      >>> from shardjax.data import Synthetic
      >>> check_shuffle("global", 0, Synthetic(rows=10))
    """
    if shuffle not in ("window", "global"):
        raise ValueError(f"`shuffle` must be 'window' or 'global', got {shuffle!r}")
    if shuffle == "window":
        return
    if seed is None:
        raise ValueError(
            "shuffle='global' needs a `shuffle_seed`, got None. Give one, such as 0."
        )
    if not isinstance(source, Indexable):
        raise TypeError(
            "shuffle='global' needs a source whose rows can be had by number (Synthetic,"
            " InMemory, Parquet and Arrow IPC files with on_bad_line='error', ranges of"
            f" these), got {source!r}. Wrap it in InMemory, convert it, or give"
            " shuffle='window'."
        )


def reads_numbers(
    source: Source, shuffle: Shuffle, share: Share | BlockShare | None
) -> bool:
    """Says whether an epoch is put into order as numbers of rows.

    Args:
      source: where rows come from.
      shuffle: how rows are shuffled, if they are.
      share: which part of each batch is wanted, None for all.

    Returns:
      Whether it is; otherwise all rows are read, whatever the share.
    """
    return shuffle == "global" or (share is not None and is_numbered(source))


def check_share(share: Share | BlockShare, source: Source, batch_size: int) -> None:
    """Refuses what is no share, or has no room for a batch; says in the log if one costs
    that all rows are read.

    Args:
      share: which part of each batch is wanted.
      source: where rows come from.
      batch_size: rows of a whole batch.

    Raises:
      TypeError: if it is neither a Share nor a BlockShare.
      ValueError: if all processes together have not enough room.

    Example:
      >>> from shardjax.data import Synthetic
      >>> check_share(Share(0, 2), Synthetic(rows=10), 4)
    """
    if isinstance(share, BlockShare):
        share.room(batch_size)
    elif not isinstance(share, Share):
        raise TypeError(
            f"`share` must be a Share, got {type(share).__name__}. Give"
            " Share(jax.process_index(), jax.process_count(), devices)."
        )
    if share.processes > 1 and not isinstance(source, Indexable):
        _log.warning(
            "each of %d processes reads all rows and keeps its part, as those of %s cannot"
            " be had by number. Give Parquet or Arrow IPC files to read only what is kept.",
            share.processes,
            type(source).__name__,
        )


def epoch_pieces(
    source: Source,
    shuffle: Shuffle,
    seed: int | None,
    epoch: int,
    window_rows: int,
    batch_size: int,
    start: Position,
    numbers: bool,
) -> Iterator[Piece]:
    """Puts an epoch into order.

    Args:
      source: where rows come from.
      shuffle: how to shuffle.
      seed: of the order; None for the order of the source.
      epoch: number of the epoch.
      window_rows: rows of a shuffling window.
      batch_size: rows of a batch.
      start: the position of the first row to emit.
      numbers: whether to give numbers of rows, as `groups`, in place of rows.

    Returns:
      An iterator over consecutive pieces.
    """
    piece_rows = batch_size * max(1, _PIECE_ROWS // batch_size)
    if shuffle == "global":
        assert isinstance(source, Indexable) and seed is not None
        rows = source.row_count()
        return _global_pieces(Permutation(rows, seed, epoch), piece_rows, start)
    chunks = (row_numbers(source) if numbers else source).chunks(start.chunk)
    if seed is None:
        return chunk_pieces(chunks, start)
    return shuffled_pieces(chunks, window_rows, seed, epoch, piece_rows, start)


def _global_pieces(
    order: Permutation, piece_rows: int, start: Position
) -> Iterator[Piece]:
    if start.row > order.rows:
        raise ValueError(
            f"cannot go on after row {start.row} of an epoch of {order.rows} rows. The data"
            " changed since the position was saved; give the same source as then."
        )
    for at in range(start.row, order.rows, piece_rows):
        places = np.arange(at, min(at + piece_rows, order.rows))
        yield Piece(number_batch(order(places)), Position(0, at), 0)


Cut = tuple[Batch, Position, int]
"""A batch, the position after it, and the bad lines up to there, as `shuffling.cut` gives."""


def read_parts(
    cuts: Iterable[Cut],
    source: Source,
    dealing: Dealing | None,
    batch_size: int,
    rows_at_once: int,
    numbers: bool,
) -> Iterator[tuple[Batch | Part, int, Position, int]]:
    """Makes of batches in order what a process is to get.

    Args:
      cuts: whole batches, of rows or of numbers.
      source: where rows come from.
      dealing: cuts out what is wanted of each batch; None for all.
      batch_size: rows of a whole batch that is not the last.
      rows_at_once: how many rows to take from the source at most, or those of a batch.
      numbers: whether batches are of numbers.

    Yields:
      The batch (a `Part` if something is cut out), how many rows the whole one has, the
      position after it, and the bad lines up to there.
    """
    cut_out = dealing or Share(0, 1).start(batch_size)
    run, table = 1, None
    if numbers:
        assert isinstance(source, Indexable)
        table = source
        run = min(rows_at_once, source.rows_at_once) // max(1, cut_out.rows)
    cuts = iter(cuts)
    while several := list(islice(cuts, cut_out.ahead(max(1, run)))):
        parts = [cut_out.part(batch) for batch, *_ in several]
        if table is not None:
            parts = _take(table, parts)
        for part, (batch, after, bad_lines) in zip(parts, several, strict=True):
            given = part.batch if dealing is None else part
            yield given, batch.size, after, bad_lines


def _take(source: Indexable, parts: list[Part]) -> list[Part]:
    """Parts with the rows whose numbers they have, all of them read at once."""
    rows = source.take(np.concatenate([numbers_of(part.batch) for part in parts]))
    out, at = [], 0
    for part in parts:
        own = rows.slice(at, at + part.batch.size)
        at += own.size
        own = replace(own, bad_lines=part.batch.bad_lines)
        out.append(replace(part, batch=own))
    return out
