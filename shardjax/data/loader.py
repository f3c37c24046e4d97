"""Batches made ready ahead of the consumer, in threads.

One thread reads, shuffles and cuts batches. Where there is a `map`, such as planning
the rows of embedding tables, a second thread applies it, batch by batch and in order::

    source ─▶ shuffle ─▶ batches ─▶ [2] ─▶ map ─▶ [prefetch] ─▶ consumer
    └────── reading thread ───────┘     mapping thread          the `for` loop

The queues are bounded, so the threads are at most `prefetch + 4` batches ahead.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from shardjax.data.block_share import BlockShare
from shardjax.data.order import (
    Shuffle,
    check_share,
    check_shuffle,
    epoch_pieces,
    read_parts,
    reads_numbers,
)
from shardjax.data.share import Dealing, Share
from shardjax.data.shuffling import Position, check_count, cut
from shardjax.data.source import Source
from shardjax.errands import Errand

T = TypeVar("T")

_READ_AHEAD = 2  # batches between the two threads: one in hand, one ready
_MEANWHILE = 0.001  # seconds between two calls of `meanwhile`


class Loader(Generic[T]):
    """Iterates over the batches of a source; each `for` loop is one epoch.

    The loader is its position: `get_state` says what the consumer has received, and a
    `for` loop goes on from there. After a loop that was left early, by `break` or an
    exception, the next loop thus gives the rest of the epoch; `skip_epoch` goes to the
    next one instead. A batch that was prefetched but not received when a loop was left
    is made again, and **`map` is called on it again**. A `map` with side effects, such
    as a planner that inserts keys, must bear that it sees up to `prefetch + 1` batches
    that the consumer never gets, and sees them once more later.

    An error in a thread is raised in the consumer, with its type and traceback, at the
    step it belongs to: all batches before it are given first. Leaving a loop in any way
    stops the threads and waits for them.

    Args:
      source: where the rows come from.
      batch_size: rows of each batch; the last batch of an epoch may have fewer.
      shuffle_seed: seed of the order of the rows, another one in each epoch; None for
        the order of the source.
      shuffle_rows: rows of a shuffling window, see `shardjax.data.shuffling`; with
        shuffle="global", how many rows to read at once at most, for which files have to
        be read so many times fewer.
      shuffle: "window" moves rows within windows of chunks; "global" to any place of the
        epoch, for sources that are `Indexable`.
      share: gives this process's part of each batch, a `Part`, in place of a Batch: with
        a `Share` an equal one, with a `BlockShare` one by its speed; `batch_size` is that
        of all processes. Batches and states do not depend on how many processes there
        are. Where the source is `Indexable` and knows its chunks'
        sizes, no process reads rows that are not its own.
      map: called on every batch in the order of the batches; what it returns is what
        the loop gets.
      window: with it, `map` is called on lists of so many batches that follow one another
        (fewer at the end of an epoch) and gives an iterable of what the loop gets, one
        for each.
      stream: instead of `map`, a function of an iterator over lists of so many batches
        (one each without `window`) which gives what the loop gets, one for each batch, in
        order. It runs in a thread, and may thus look at lists ahead. Items of it that are
        a `shardjax.errands.Errand` are run in the consumer's thread. If the iterator that
        it returns has a method `abandon`, that is called when a loop is left: what waits
        in the iterator must end then.
      prefetch: how many finished batches may wait for the consumer; at least a window.
      meanwhile: called every millisecond or so while the consumer waits for a batch, in the
        consumer's thread; it should take no time.
      drop_last: leave out the rows at the end of an epoch that do not fill a batch.
        `dropped_rows` counts them.

    Attributes:
      epoch: number of the epoch that the next batch belongs to, from 0.
      batches: how many batches of this epoch the consumer has received.
      wait_seconds: how long the consumer has waited for batches, in seconds.
      bad_lines: how many lines were skipped as malformed, up to the window of rows that
        the last batch is from.
      dropped_rows: how many rows `drop_last` has left out.

    Raises:
      TypeError: if a number is not an integer, `share` is no share, or the source is not
        `Indexable` with shuffle="global".
      ValueError: if a number is out of range, or a BlockShare has not enough room.

    Example:
      >>> from shardjax.data import Share, Synthetic
      >>> loader = Loader(Synthetic(rows=1000), batch_size=400)
      >>> [batch.size for batch in loader], loader.epoch
      ([400, 400, 200], 1)
      >>> share = Share(process=1, processes=2)
      >>> parts = Loader(
      ...     Synthetic(rows=1000), 400, shuffle_seed=0, shuffle="global", share=share
      ... )
      >>> [(part.first_row, part.batch.size, part.global_rows) for part in parts]
      [(200, 200, 400), (200, 200, 400), (200, 0, 200)]
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        *,
        shuffle_seed: int | None = None,
        shuffle_rows: int = 262_144,
        shuffle: Shuffle = "window",
        share: Share | BlockShare | None = None,
        map: Callable[[Any], Any] | None = None,
        window: int | None = None,
        stream: Callable[[Iterator[list[Any]]], Iterator[Any]] | None = None,
        prefetch: int = 4,
        meanwhile: Callable[[], object] | None = None,
        drop_last: bool = False,
    ):
        check_count("batch_size", batch_size)
        check_count("shuffle_rows", shuffle_rows)
        check_count("prefetch", prefetch)
        if shuffle_seed is not None:
            check_count("shuffle_seed", shuffle_seed, least=0)
        check_shuffle(shuffle, shuffle_seed, source)
        if share is not None:
            check_share(share, source, batch_size)
        if window is not None:
            check_count("window", window)
            if map is None and stream is None:
                raise ValueError(
                    f"`window` is how many batches `map` is called on, got {window} and no"
                    " `map`"
                )
        if map is not None and stream is not None:
            raise ValueError(
                "a Loader has a `map` or a `stream`, got both. Leave out one"
            )
        self.source = source
        self.batch_size = batch_size
        self.shuffle_seed = shuffle_seed
        self.shuffle_rows = shuffle_rows
        self.shuffle: Shuffle = shuffle
        self.share = share
        self.prefetch = prefetch
        self.drop_last = drop_last
        self.window = window
        self._stream = stream if map is None else _each(map, window)
        self._meanwhile = meanwhile
        self.epoch = 0
        self.batches = 0
        self.wait_seconds = 0.0
        self.bad_lines = 0
        self.dropped_rows = 0
        self._epoch_bad_lines = 0
        self._position = Position()
        self._running = False

    def __iter__(self) -> Iterator[T]:
        """Gives the batches of the present epoch from the present position on."""
        self._check_idle("iterate over the loader twice at a time")
        return self._run_epoch()

    def skip_epoch(self) -> None:
        """Goes to the start of the next epoch, whatever is left of this one.

        Raises:
          RuntimeError: if a loop over the loader is under way.

        Example:
          >>> from shardjax.data import Synthetic
          >>> loader = Loader(Synthetic(rows=1000), batch_size=400)
          >>> for batch in loader:
          ...     break
          >>> loader.skip_epoch()
          >>> loader.epoch, loader.batches
          (1, 0)
        """
        self._check_idle("skip the epoch")
        self._next_epoch()

    def get_state(self) -> dict[str, int | bool | str | None]:
        """Says what the consumer has received, for `set_state`.

        Returns:
          A small dict that can be written as JSON.

        Example:
          >>> from shardjax.data import Synthetic
          >>> Loader(Synthetic(rows=1000), batch_size=400).get_state()["batches"]
          0
        """
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "chunk": self._position.chunk,
            "row": self._position.row,
            "chunk_bad_lines": self._position.bad_lines,
            "epoch_bad_lines": self._epoch_bad_lines,
            "bad_lines": self.bad_lines,
            "dropped_rows": self.dropped_rows,
            **self._settings(),
        }

    def set_state(self, state: Mapping[str, object]) -> None:
        """Goes to where `get_state` was taken.

        The batches that follow are those that an uninterrupted loader over the same
        source would give. Reading starts at the chunk or shuffling window of the next
        row; what is skipped does not go through `map`.

        Args:
          state: what `get_state` of a loader with the same settings returned.

        Raises:
          ValueError: if the state lacks entries or has unknown ones, or was taken with
            another batch size or order.
          RuntimeError: if a loop over the loader is under way.

        Example:
          >>> from shardjax.data import Synthetic
          >>> loader = Loader(Synthetic(rows=1000), batch_size=400)
          >>> for batch in loader:
          ...     break
          >>> again = Loader(Synthetic(rows=1000), batch_size=400)
          >>> again.set_state(loader.get_state())
          >>> [batch.size for batch in again]
          [400, 200]
        """
        self._check_idle("set the state")
        expected = self.get_state()
        if (was := state.get("shuffle", "window")) != self.shuffle:
            raise ValueError(
                f"`shuffle` must be what it was when the loader's state was taken,"
                f" {was!r}, got {self.shuffle!r}. Make the loader with shuffle={was!r}."
            )
        missing = sorted(expected.keys() - state.keys())
        unknown = sorted(state.keys() - expected.keys())
        if missing or unknown:
            raise ValueError(
                f"a loader state must have the entries {sorted(expected)}, got one that"
                f" lacks {missing} and has the unknown {unknown}. Give what get_state"
                " returned."
            )
        for name, value in self._settings().items():
            if state[name] != value:
                raise ValueError(
                    f"`{name}` must be what it was when the loader's state was taken,"
                    f" {state[name]!r}, got {value!r}. Make the loader with"
                    f" {name}={state[name]!r}."
                )
        counts = {
            name: check_count(name, state[name], least=0)
            for name in expected.keys() - self._settings().keys()
        }
        self.epoch = counts["epoch"]
        self.batches = counts["batches"]
        self.bad_lines = counts["bad_lines"]
        self.dropped_rows = counts["dropped_rows"]
        self._epoch_bad_lines = counts["epoch_bad_lines"]
        self._position = Position(
            counts["chunk"], counts["row"], counts["chunk_bad_lines"]
        )

    def _settings(self) -> dict[str, int | bool | str | None]:
        """What determines which rows make up which batch."""
        windows = self.shuffle_seed is not None and self.shuffle == "window"
        settings = {
            "batch_size": self.batch_size,
            "shuffle_seed": self.shuffle_seed,
            "shuffle_rows": self.shuffle_rows if windows else None,
            "drop_last": self.drop_last,
        }
        # Not there for windows: states that were saved before do not have it.
        return settings | ({"shuffle": "global"} if self.shuffle == "global" else {})

    def _check_idle(self, what: str) -> None:
        if self._running:
            raise RuntimeError(
                f"cannot {what}: a loop over it is under way, in epoch {self.epoch}"
                f" after {self.batches} batches. Let it end, or close its iterator."
            )

    def _next_epoch(self) -> None:
        self.epoch += 1
        self.batches = 0
        self._epoch_bad_lines = 0
        self._position = Position()

    def _read(self, dealing: Dealing | None) -> Iterator["_Ready"]:
        """The batches from the present position on; runs in the reading thread."""
        numbers = reads_numbers(self.source, self.shuffle, self.share)
        pieces = epoch_pieces(
            self.source,
            self.shuffle,
            self.shuffle_seed,
            self.epoch,
            self.shuffle_rows,
            self.batch_size,
            self._position,
            numbers,
        )
        rows, bad_lines = 0, self._epoch_bad_lines

        def counted():
            nonlocal rows, bad_lines
            for piece in pieces:
                rows += piece.batch.size
                bad_lines = piece.bad_lines
                yield piece

        given, seen = 0, self._epoch_bad_lines

        def whole():
            nonlocal seen
            for batch, after, upto in cut(counted(), self.batch_size, self.drop_last):
                batch, seen = replace(batch, bad_lines=upto - seen), upto
                yield batch, after, upto

        for batch, size, after, upto in read_parts(
            whole(),
            self.source,
            dealing,
            self.batch_size,
            self.shuffle_rows,
            numbers,
        ):
            given += size
            yield _Ready(batch, after, upto)
        if given == 0 and self.batches == 0:
            rule = f" with drop_last=True and batch_size={self.batch_size}" * (rows > 0)
            raise ValueError(
                f"the source must give at least one batch an epoch, got {rows} rows in"
                f" epoch {self.epoch}{rule}. Check its paths and its range of rows:"
                f" {self.source!r}"
            )
        yield _Ready(bad_lines=bad_lines, dropped_rows=rows - given, end=True)

    def _run_epoch(self) -> Iterator[T]:
        self._check_idle("iterate over the loader twice at a time")
        self._running = True
        mapped = _Channel(max(self.prefetch, self.window or 1))
        channels, threads = [mapped], []
        abandon = None
        dealing = self.share and self.share.start(self.batch_size)
        try:
            batches = self._read(dealing)
            if self._stream is None:
                threads.append(_start(_read_into, batches, mapped))
            else:
                read = _Channel(_READ_AHEAD)
                channels.append(read)
                threads.append(_start(_read_into, batches, read))
                windows = _Windows(read, self.window or 1)
                items = self._stream(windows)
                abandon = getattr(items, "abandon", None)
                threads.append(_start(_map_into, items, windows, mapped))
            while True:
                began = time.perf_counter()
                if self._meanwhile is not None:
                    while not mapped.has_item(_MEANWHILE):
                        self._meanwhile()
                ready = mapped.get()
                self.wait_seconds += time.perf_counter() - began
                if ready.error is not None:
                    raise ready.error
                if isinstance(ready.value, Errand):
                    ready.value.run()
                    continue
                self.bad_lines += ready.bad_lines - self._epoch_bad_lines
                self._epoch_bad_lines = ready.bad_lines
                if ready.end:
                    break
                self._position = ready.after
                self.batches += 1
                yield ready.value
            self.dropped_rows += ready.dropped_rows
            self._next_epoch()
        finally:
            ready = None  # an error and its traceback would keep each other alive
            for channel in channels:
                channel.close()
            if abandon is not None:
                abandon()
            if dealing is not None:
                dealing.close()
            for thread in threads:
                # The garbage collector may close this generator in any thread.
                if thread is not threading.current_thread():
                    thread.join()
            self._running = False


@dataclass
class _Ready:
    """What travels between the threads: a batch, the end of the epoch or an error."""

    value: Any = None
    after: Position = Position()
    bad_lines: int = 0
    dropped_rows: int = 0
    end: bool = False
    error: BaseException | None = None


class _Channel:
    """A bounded queue whose both ends wake up when it is closed."""

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._items: deque[_Ready] = deque()
        self._closed = False
        self._changed = threading.Condition()

    def put(self, item: _Ready) -> bool:
        """Waits for room, but for an errand; returns False, without the item taken, once
        closed."""
        with self._changed:
            while (
                len(self._items) >= self._capacity
                and not isinstance(item.value, Errand)
                and not self._closed
            ):
                self._changed.wait()
            if not self._closed:
                self._items.append(item)
                self._changed.notify_all()
            return not self._closed

    def has_item(self, seconds: float) -> bool:
        """Waits so long at most; whether `get` would give something at once."""
        with self._changed:
            return self._changed.wait_for(
                lambda: bool(self._items) or self._closed, seconds
            )

    def get(self) -> _Ready:
        """Waits for an item; once closed there is nothing but the end."""
        with self._changed:
            while not self._items and not self._closed:
                self._changed.wait()
            if self._closed:
                return _Ready(end=True)
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


def _read_into(batches: Iterator[_Ready], out: _Channel) -> None:
    """The reading thread: puts batches, then the end or an error."""
    try:
        for ready in batches:
            if not out.put(ready):
                break
    except BaseException as error:  # whatever it is, it belongs to the consumer
        out.put(_Ready(error=error))


def _each(map: Callable, window: int | None) -> Callable:
    """A `stream` that maps batch by batch, or list by list where there is a window."""

    def stream(windows: Iterator[list[Any]]) -> Iterator[Any]:
        for batches in windows:
            if window is None:
                yield map(batches[0])
            else:
                for _, value in zip(batches, map(batches), strict=True):
                    yield value

    return stream


class _Windows:
    """Lists of batches that were read, and what of them has not been mapped yet."""

    def __init__(self, source: _Channel, window: int):
        self._source, self._window = source, window
        self.read: deque[_Ready] = deque()
        self.last: _Ready | None = None

    def __iter__(self) -> "_Windows":
        return self

    def __next__(self) -> list[Any]:
        several = []
        while len(several) < self._window and self.last is None:
            ready = self._source.get()
            if ready.end or ready.error is not None:
                self.last = ready
            else:
                several.append(ready)
        if not several:
            raise StopIteration
        self.read.extend(several)
        return [ready.value for ready in several]


def _map_into(items: Iterator[Any], windows: _Windows, out: _Channel) -> None:
    """The mapping thread: passes everything on in order, batches mapped."""
    try:
        for value in items:
            ready = _Ready()
            if not isinstance(value, Errand):
                ready = windows.read.popleft()
            ready.value = value
            if not out.put(ready):
                return
        last = windows.last or _Ready(end=True)
        if windows.read:
            raise ValueError(
                f"`stream` must give one item for each batch, and gave none for the last"
                f" {len(windows.read)}. Give something for each, and errands besides"
            )
    except BaseException as error:  # whatever it is, it belongs to the consumer
        last = _Ready(error=error)
    out.put(last)


def _start(job: Callable, *args) -> threading.Thread:
    # A daemon, so that a program that exits does not wait for a source that blocks.
    thread = threading.Thread(
        target=job, args=args, name=f"loader{job.__name__}", daemon=True
    )
    thread.start()
    return thread
