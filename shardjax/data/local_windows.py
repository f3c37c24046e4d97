"""Windows of rows that lie with the processes: read, counted, and carried to their places."""

import json
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardjax.data.batch import Batch
from shardjax.data.permutation import Permutation
from shardjax.data.share import Share
from shardjax.data.source import Indexable, Source
from shardjax.data.transport import Exchange
from shardjax.data.wire import layout_of, no_rows, pack, unpack


@dataclass(frozen=True)
class Begin:
    """Where a window begins.

    Attributes:
      window: its number in the epoch.
      place: rows of the epoch before it, in all processes.
      bad_lines: skipped before it, in all processes and epochs.
    """

    window: int = 0
    place: int = 0
    bad_lines: int = 0


@dataclass(frozen=True)
class Window:
    """What a process gets of a window.

    Attributes:
      rows: the rows for its parts of batches, in the order of their places.
      read: how many rows it has read for the window.
      after: where the next window begins.
    """

    rows: Batch
    read: int
    after: Begin


class Windows:
    """The windows of an epoch, in step with those of the other processes.

    Args:
      source: this process's rows.
      share: which process this is.
      exchange: carries bytes between processes.
      batch_size: rows of a batch of all processes.
      window_rows: rows of a window, in all processes.
      seed: with the epoch it determines the order.
      epoch: number of the epoch.
    """

    def __init__(
        self,
        source: Source,
        share: Share,
        exchange: Exchange,
        batch_size: int,
        window_rows: int,
        seed: int,
        epoch: int,
    ):
        self._source = source
        self._share = share
        self._exchange = exchange
        self._batch_size = batch_size
        self._window_rows = window_rows
        self._seed, self._epoch = seed, epoch

    def run(self, begin: Begin, done: int, settings: dict) -> Generator[Window]:
        """Exchanges windows until all processes have run out.

        Args:
          begin: where the first one begins.
          done: rows of the epoch, in all processes, that are not wanted any more.
          settings: what must be the same in all processes; JSON can hold it.

        Yields:
          Windows; some rows of the first are left out if `done` is beyond its beginning.

        Raises:
          ValueError: if processes have other settings or features.
          RuntimeError: if another process could not read its rows.
        """
        windows, reads = self._agree(settings, begin.window)
        layout = None
        with ThreadPoolExecutor(1, "local_windows") as pool:
            ahead = pool.submit(next, reads, None)
            while windows is None or begin.window < windows:
                rows, error = None, None
                try:
                    rows = ahead.result()
                except Exception as caught:  # told to all, so that none waits for ever
                    error = caught
                ahead = pool.submit(next, reads, None)
                size = 0 if rows is None else rows.size
                told = self._tell(
                    {
                        "rows": size,
                        "bad_lines": 0 if rows is None else rows.bad_lines,
                        "layout": None if rows is None else layout_of(rows),
                    },
                    error,
                )
                layout = _same_layout([other["layout"] for other in told], layout)
                if windows is None and all(other["layout"] is None for other in told):
                    return
                counts = np.array([other["rows"] for other in told])
                bad_lines = sum(other["bad_lines"] for other in told)
                after = Begin(
                    begin.window + 1,
                    begin.place + int(counts.sum()),
                    begin.bad_lines + bad_lines,
                )
                if layout is not None:
                    rows = no_rows(layout) if rows is None else rows
                    yield Window(self._carry(rows, counts, begin, done), size, after)
                begin = after

    def _agree(
        self, settings: dict, first: int
    ) -> tuple[int | None, Iterator[Batch | None]]:
        """How many windows there are, if that is known; and own rows of each from one on."""
        count, error = None, None
        try:
            if isinstance(self._source, Indexable):
                count = self._source.row_count()
        except Exception as caught:
            error = caught
        settings = {
            **settings,
            "features": sorted(self._source.feature_names),
            "n_dense": self._source.n_dense,
        }
        told = self._tell({"settings": settings, "count": count}, error)
        for process, other in enumerate(told):
            for name, value in settings.items():
                if (got := other["settings"].get(name)) != value:
                    raise ValueError(
                        f"`{name}` must be the same in all processes, got {value!r} in"
                        f" process {self._share.process} and {got!r} in process {process}"
                    )
        counts = [other["count"] for other in told]
        if None in counts:
            each = max(1, self._window_rows // self._share.processes)
            return None, _in_turn(self._source, each, first)
        windows = -(-sum(counts) // self._window_rows)
        return windows, self._at_random(counts[self._share.process], windows, first)

    def _at_random(
        self, count: int, windows: int, first: int
    ) -> Iterator[Batch | None]:
        """Own rows of each window: the same part of all of them, drawn at random."""
        source = self._source
        assert isinstance(source, Indexable)
        seed = derived_seed(self._seed, 1, self._share.process)
        order = Permutation(count, seed, self._epoch)
        for window in range(first, windows):
            start, stop = (count * w // windows for w in (window, window + 1))
            yield source.take(order(np.arange(start, stop))) if stop > start else None

    def _carry(self, rows: Batch, counts: np.ndarray, begin: Begin, done: int) -> Batch:
        """Sends rows to where they belong; gives own ones in order, from `done` on."""
        process, total = self._share.process, int(counts.sum())
        seed = derived_seed(self._seed, 2, begin.window)
        order = Permutation(total, seed, self._epoch)
        firsts = np.concatenate([[0], np.cumsum(counts)])
        places = order.inverse(np.arange(firsts[process], firsts[process + 1]))
        owners = self._owners(places + begin.place)
        received = self._exchange(
            [
                pack(rows.take(np.flatnonzero(owners == other)))
                for other in range(self._share.processes)
            ]
        )
        mine = np.arange(total)
        mine = mine[self._owners(mine + begin.place) == process]
        # Rows come by process, those of each in the order it has read them.
        sent = order(mine)
        came = np.argsort(sent)
        at = np.empty(len(mine), np.int64)
        at[came] = np.arange(len(mine))
        joined = Batch.concat([unpack(data) for data in received])
        if joined.size != len(mine):
            raise RuntimeError(
                f"process {process} must receive {len(mine)} rows of window"
                f" {begin.window}, got {joined.size}. `exchange` must give each process"
                " the bytes that are for it, by the process they are from."
            )
        return joined.take(at[mine + begin.place >= done])

    def _owners(self, places: np.ndarray) -> np.ndarray:
        """The process whose part of a batch each place of the epoch is in."""
        share = self._share
        each = replace(share, process=0).rows(self._batch_size, self._batch_size)[1]
        return places % self._batch_size // each

    def _tell(self, entry: dict, error: Exception | None) -> list[Any]:
        """Tells all processes, and hears what they tell, by process."""
        share = self._share
        problem = None if error is None else f"{type(error).__name__}: {error}"
        data = json.dumps(
            {**entry, "process": share.process, "error": problem}
        ).encode()
        told = [json.loads(d) for d in self._exchange([data] * share.processes)]
        if error is not None:
            raise error
        if (got := [other["process"] for other in told]) != list(range(len(told))):
            raise RuntimeError(
                f"`exchange` must give what was received by process, {share.processes} of"
                f" them in order, got that of processes {got} in process {share.process}"
            )
        for process, other in enumerate(told):
            if other["error"] is not None:
                raise RuntimeError(
                    f"process {process} could not read its rows: {other['error']}"
                )
        return told


def derived_seed(seed: int, *numbers: int) -> int:
    """Makes a seed of a seed and what it is for.

    Args:
      seed: non-negative.
      *numbers: non-negative.

    Returns:
      A seed below 2**64.

    Example:
      >>> derived_seed(0, 1) != derived_seed(0, 2)
      True
    """
    return int(np.random.SeedSequence([seed, *numbers]).generate_state(1, np.uint64)[0])


def _in_turn(source: Source, each: int, first: int) -> Iterator[Batch]:
    """Rows of a source in its order, so many at a time, from the `first` time on."""
    held: list[Batch] = []
    have, skip = 0, first * each
    for chunk in source.chunks():
        if skip and chunk.size <= skip:
            skip -= chunk.size
            continue
        if skip:
            chunk, skip = replace(chunk.slice(skip, chunk.size), bad_lines=0), 0
        held.append(chunk)
        have += chunk.size
        while have >= each:
            rows = Batch.concat(held)
            yield rows.slice(0, each)
            have -= each
            held = [rows.slice(each, rows.size)] if have else []
    if held:
        yield Batch.concat(held)


def _same_layout(layouts: list[dict | None], before: dict | None) -> dict | None:
    """The layout that rows of all processes have, if there were any."""
    for process, layout in enumerate(layouts):
        if layout is not None and before is not None and layout != before:
            raise ValueError(
                "rows of all processes must have the same arrays, got"
                f" {json.dumps(before)} and, in process {process}, {json.dumps(layout)}"
            )
        before = before or layout
    return before
