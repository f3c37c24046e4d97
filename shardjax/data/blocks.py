"""Blocks of a minibatch: who gets how many, and which ones."""

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from shardjax.data.shuffling import check_count


def assign(
    blocks: int,
    seconds: ArrayLike,
    *,
    ready: ArrayLike | None = None,
    least: ArrayLike = 0,
    most: ArrayLike | None = None,
    order: Sequence[int] | None = None,
) -> np.ndarray:
    """Hands blocks to the processes that are expected to finish them first.

    Args:
      blocks: how many there are, of equal size.
      seconds: that each process needs for a block, positive, [processes].
      ready: seconds until each process can start; 0 if not given.
      least: the number of blocks that each gets in any case, one for all or [processes].
      most: the number of blocks that each may get; any if not given.
      order: the processes, in the order that decides between equal times.

    Returns:
      int64 [processes], the number of blocks of each. No other numbers have the last
      process finish earlier.

    Raises:
      TypeError: if a number of blocks is not an integer.
      ValueError: if there is no process, a time is negative or not finite, or `least` and
        `most` leave no split.

    Example:
      >>> assign(16, [1.0, 1.0, 1.0, 3.0]).tolist()
      [5, 5, 5, 1]
      >>> assign(4, [1.0, 1.0], ready=[0.0, 2.5]).tolist()
      [3, 1]
    """
    check_count("blocks", blocks, least=0)
    taken = check_times("seconds", seconds, positive=True)
    processes = len(taken)
    starts = check_times(
        "ready", [0.0] * processes if ready is None else ready, processes
    )
    starts = starts.tolist()
    low = check_counts("least", least, processes)
    high = (
        np.maximum(low, blocks)
        if most is None
        else check_counts("most", most, processes)
    )
    if wrong := np.flatnonzero(low > high).tolist():
        raise ValueError(
            f"`least` must not exceed `most`, got {low[wrong[0]]} and {high[wrong[0]]} for"
            f" process {wrong[0]}. Lower the one, or raise the other"
        )
    if not low.sum() <= blocks <= high.sum():
        raise ValueError(
            f"`blocks` must lie between the sums of `least` and `most`, got {blocks},"
            f" {low.sum()} and {high.sum()}. Cut the minibatch into another number of"
            " blocks, or let processes take more"
        )
    if order is None:
        order = range(processes)
    elif sorted(order) != list(range(processes)):
        raise ValueError(
            f"`order` must have each of {processes} processes once, got {list(order)}. Give"
            f" the numbers 0 to {processes - 1} in an order"
        )
    counts, limits, pace = low.tolist(), high.tolist(), taken.tolist()

    def finish(process: int) -> float:  # of one block more
        return starts[process] + (counts[process] + 1) * pace[process]

    heap = [(finish(p), n, p) for n, p in enumerate(order) if counts[p] < limits[p]]
    heapq.heapify(heap)
    for _ in range(blocks - sum(counts)):
        _, place, process = heap[0]
        counts[process] += 1
        if counts[process] < limits[process]:
            heapq.heapreplace(heap, (finish(process), place, process))
        else:
            heapq.heappop(heap)
    return np.array(counts, np.int64)


def block_ranges(counts: ArrayLike) -> list[range]:
    """Says which blocks of a minibatch, by number, each process has.

    Args:
      counts: the number of blocks of each process.

    Returns:
      A range per process; together all blocks, each once, in order.

    Example:
      >>> block_ranges([2, 0, 1])
      [range(0, 2), range(2, 2), range(2, 3)]
    """
    ends = np.cumsum(check_counts("counts", counts)).tolist()
    return [range(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def check_times(
    name: str, times: ArrayLike, processes: int | None = None, positive: bool = False
) -> np.ndarray:
    """Refuses times that are not those of all processes, not finite or negative.

    Args:
      name: what to call them in an error.
      times: seconds of each process.
      processes: how many there must be.
      positive: whether 0 is refused too.

    Returns:
      float64 [processes].

    Raises:
      ValueError: if they are not.

    Example:
      >>> check_times("seconds", [1, 2]).tolist()
      [1.0, 2.0]
    """
    found = np.asarray(times, np.float64)
    rule = "one or more" if processes is None else f"{processes}"
    if found.ndim != 1 or not found.size or processes not in (None, found.size):
        raise ValueError(
            f"`{name}` must be numbers of {rule} processes, one each, got an array of"
            f" shape {found.shape}. Gather those of all processes"
        )
    bad = ~np.isfinite(found) | (found <= 0 if positive else found < 0)
    if bad.any():
        first = int(bad.argmax())
        raise ValueError(
            f"`{name}` must be finite and {'positive' if positive else 'not negative'},"
            f" got {found[first]} of process {first}. Measure it there, by a clock that"
            " does not go back"
        )
    return found


def check_counts(
    name: str, counts: ArrayLike, processes: int | None = None
) -> np.ndarray:
    """Refuses numbers of blocks or examples that are not those of all processes.

    Args:
      name: what to call them in an error.
      counts: integers, one per process; or one for all, where `processes` is given.
      processes: how many there must be.

    Returns:
      int64 [processes].

    Raises:
      TypeError: if they are not integers.
      ValueError: if one is negative, or they are not those of all processes.

    Example:
      >>> check_counts("limits", 3, processes=2).tolist()
      [3, 3]
    """
    found = np.asarray(counts)
    if not np.issubdtype(found.dtype, np.integer) and found.size:
        raise TypeError(
            f"`{name}` must be integers, got {counts!r}. Give whole numbers"
        )
    if found.ndim == 0 and processes is not None:
        found = np.full(processes, found)
    if found.ndim != 1 or not found.size or processes not in (None, found.size):
        raise ValueError(
            f"`{name}` must be numbers of"
            f" {'one or more' if processes is None else processes} processes, one each, got"
            f" an array of shape {found.shape}. Give those of all processes"
        )
    if (found < 0).any():
        first = int((found < 0).argmax())
        raise ValueError(
            f"`{name}` must not be negative, got {found[first]} of process {first}. Give"
            " 0 for one that has none"
        )
    return found.astype(np.int64)
