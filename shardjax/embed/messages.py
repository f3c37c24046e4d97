"""What requesters ask owners for, as words that travel between devices.

Each requester device has one message for each owner device: for every batch of a window
and every group of tables a *block* ::

    keys of each table, T words | the keys, 2 C words | how many ids, C | scores, C

of room C for keys, which all processes have agreed on. Rows of a replicated group have no
single owner: each process gets the whole list, dealt in turn to its devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np

from shardjax.embed.inputs import AskedKeys


@dataclass(frozen=True)
class Block:
    """Where the keys of one batch and group are in each message.

    Attributes:
      offset: first word.
      tables: of the group.
      room: for keys.
      amounts: words per key beside itself: 0, 1 (how many ids) or 2 (and scores).
    """

    offset: int
    tables: int
    room: int
    amounts: int

    @property
    def words(self) -> int:
        """How long it is."""
        return self.tables + self.room * (2 + self.amounts)

    @property
    def end(self) -> int:
        """The first word after it."""
        return self.offset + self.words


def lay_out(shapes: Sequence[tuple[int, int, int]]) -> list[Block]:
    """Blocks of (tables, room, amounts) one after the other.

    Example:
      >>> [block.offset for block in lay_out([(2, 3, 0), (1, 2, 1)])]
      [0, 8]
    """
    blocks, offset = [], 0
    for shape in shapes:
        blocks.append(Block(offset, *shape))
        offset = blocks[-1].end
    return blocks


@numba.njit(nogil=True, cache=True)
def _write(
    keys, owners, counts, scores, offset, tables, table, room, amounts, used, out
):
    """Appends one table's keys of one requester to its messages, int32 [owners, words].

    Args:
      keys: uint64 [n]; `owners` int32 [n]; `counts`, `scores` int64 [n].
      used: int64 [owners], in and out: keys that the block has.
    """
    first = offset + tables
    for i in range(keys.shape[0]):
        o = owners[i]
        n = used[o]
        used[o] = n + 1
        out[o, offset + table] += 1
        at = first + 2 * n
        out[o, at] = np.int32(np.uint32(keys[i] & np.uint64(0xFFFFFFFF)))
        out[o, at + 1] = np.int32(np.uint32(keys[i] >> np.uint64(32)))
        if amounts > 0:
            out[o, first + 2 * room + n] = np.int32(np.uint32(counts[i]))
        if amounts > 1:
            out[o, first + 3 * room + n] = np.int32(np.uint32(scores[i]))


@numba.njit(nogil=True, cache=True)
def _read(
    messages, offset, tables, room, amounts, table, turns, keys, counts, scores, lengths
):
    """Takes one table's keys out of messages, int32 [owners, requesters, words].

    Args:
      turns: whether the keys of a requester were dealt to the owners in turn.
      keys: uint64 [..]; `counts`, `scores` int64 [..], out.
      lengths: int32 [requesters], out: how many are from each.
    """
    owners = messages.shape[0]
    first = offset + tables
    total = 0
    for r in range(messages.shape[1]):
        before = total
        for o in range(1 if turns else owners):
            start = 0
            for t in range(table):
                for other in range(o, owners if turns else o + 1):
                    start += messages[other, r, offset + t]
            stop = start
            for other in range(o, owners if turns else o + 1):
                stop += messages[other, r, offset + table]
            for i in range(start, stop):
                words = messages[i % owners if turns else o, r]
                at = i // owners if turns else i
                low = np.uint64(np.uint32(words[first + 2 * at]))
                high = np.uint64(np.uint32(words[first + 2 * at + 1]))
                keys[total] = (high << np.uint64(32)) | low
                if amounts > 0:
                    counts[total] = np.uint32(words[first + 2 * room + at])
                if amounts > 1:
                    scores[total] = np.uint32(words[first + 3 * room + at])
                total += 1
        lengths[r] = total - before


def write_keys(
    block: Block,
    table: int,
    keys: np.ndarray,
    owners: np.ndarray,
    counts: np.ndarray,
    scores: np.ndarray,
    used: np.ndarray,
    messages: np.ndarray,
) -> None:
    """Appends one table's unique keys of one requester to its messages.

    Args:
      block: of the batch and group.
      table: its number in the group; tables come in this order.
      keys, owners: uint64 and int32 [n].
      counts, scores: int64 [n] each, as far as the block has amounts.
      used: int64 [owners], in and out: keys that the block has by now.
      messages: int32 [owners, words], in and out.
    """
    nothing = np.zeros(0, np.int64)
    _write(
        keys, owners, counts if block.amounts > 0 else nothing,
        scores if block.amounts > 1 else nothing, block.offset, block.tables, table,
        block.room, block.amounts, used, messages,
    )  # fmt: skip


def read_keys(
    block: Block, table: int, messages: np.ndarray, in_turn: bool
) -> AskedKeys:
    """One table's keys out of the messages to the owners of this process.

    Args:
      block: of the batch and group.
      table: its number in the group.
      messages: int32 [owners, requesters, words].
      in_turn: whether the group is replicated.

    Returns:
      The keys of all requesters, each one's in the order in which it named them; of
      several owners, those of the first one before those of the next.
    """
    column = messages[:, :, block.offset + table]
    n = int(column.sum())
    keys, lengths = np.empty(n, np.uint64), np.empty(messages.shape[1], np.int32)
    counts = np.empty(n if block.amounts > 0 else 0, np.int64)
    scores = np.empty(n if block.amounts > 1 else 0, np.int64)
    _read(
        messages, block.offset, block.tables, block.room, block.amounts, table, in_turn,
        keys, counts, scores, lengths,
    )  # fmt: skip
    return AskedKeys(
        keys, lengths, None, counts if block.amounts > 0 else None,
        scores if block.amounts > 1 else None,
    )  # fmt: skip
