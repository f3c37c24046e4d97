"""A global shuffle of rows that lie with the processes, each of which reads its own.

The rows travel, in windows: of each window every process reads a part, says how many rows
it has, and works out from the seed which place of the window each of them goes to, and so
which process's part of which batch. One exchange carries them there::

    own rows of window w ─▶ counts agreed ─▶ places ─▶ exchange ─▶ own parts of batches

Where every process can take rows by number, windows are drawn at random from all its rows, and
are a part of each process's rows in proportion, so that any row can land anywhere in the
epoch, and all run out together. Otherwise rows are read in the order of the source, the same
number in each process, until all have run out: one that has takes part with nothing.
"""

from collections import deque
from collections.abc import Iterator, Mapping

from shardjax.data.local_windows import Begin, Windows
from shardjax.data.share import Part, Share
from shardjax.data.shuffling import Piece, Position, check_count, cut_one
from shardjax.data.source import Source
from shardjax.data.transport import Exchange


class LocalShuffle:
    """Iterates over this process's parts of global batches; each `for` loop is one epoch.

    Every process has one, with the same options, and gets the same number of parts. All
    processes take the same steps: one that leaves a loop early keeps the others waiting. An
    error in reading is raised in all of them. Rows are exchanged in the thread that
    iterates, and read ahead, a window at most, in another.

    Like a `Loader`, it is its position: a loop goes on where the last one was left.

    Args:
      source: this process's rows; they may be none.
      batch_size: rows of a batch of all processes.
      share: which process this is.
      exchange: carries bytes between processes, such as a `DeviceExchange`.
      shuffle_seed: with the epoch it determines the order.
      window_rows: rows of a window, in all processes; a process holds about three times
        its part of them.
      drop_last: leave out the rows at the end of an epoch that do not fill a batch.

    Attributes:
      epoch: number of the epoch that the next part belongs to, from 0.
      batches: how many parts of this epoch the consumer has received.
      bad_lines: lines skipped as malformed, in all processes, up to the window of the last
        batch.
      dropped_rows: rows that `drop_last` has left out, of all processes.
      most_rows_held: the most rows that this process has held at a time.

    Raises:
      TypeError: if a number is not an integer.
      ValueError: if a number is out of range.

    Example:
      >>> from shardjax.data import Synthetic
      >>> local = LocalShuffle(
      ...     Synthetic(rows=1000), 400, Share(0, 1), exchange=list, shuffle_seed=0
      ... )
      >>> [part.batch.size for part in local], local.epoch
      ([400, 400, 200], 1)
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        share: Share,
        exchange: Exchange,
        *,
        shuffle_seed: int,
        window_rows: int = 262_144,
        drop_last: bool = False,
    ):
        check_count("batch_size", batch_size)
        check_count("shuffle_seed", shuffle_seed, least=0)
        check_count("window_rows", window_rows)
        self.source = source
        self.batch_size = batch_size
        self.share = share
        self.shuffle_seed = shuffle_seed
        self.window_rows = window_rows
        self.drop_last = drop_last
        self._exchange = exchange
        self.epoch = 0
        self.batches = 0
        self.bad_lines = 0
        self.dropped_rows = 0
        self.most_rows_held = 0
        self._begin = Begin()
        self._running = False

    def __iter__(self) -> Iterator[Part]:
        """Gives the parts of the present epoch from the present position on."""
        self._check_idle("iterate over it twice at a time")
        return self._run_epoch()

    def get_state(self) -> dict[str, int | bool]:
        """Says what the consumer has received, for `set_state`.

        Returns:
          A small dict that can be written as JSON, the same in every process.
        """
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "window": self._begin.window,
            "window_place": self._begin.place,
            "window_bad_lines": self._begin.bad_lines,
            "bad_lines": self.bad_lines,
            "dropped_rows": self.dropped_rows,
            **self._settings(),
        }

    def set_state(self, state: Mapping[str, object]) -> None:
        """Goes to where `get_state` was taken, in every process.

        Args:
          state: what `get_state` returned, with the same settings and as many processes,
            each of which has the same rows as then.

        Raises:
          ValueError: if the state has other entries, or was taken with other settings.
          RuntimeError: if a loop is under way.
        """
        self._check_idle("set its state")
        expected = self.get_state()
        if expected.keys() != state.keys():
            raise ValueError(
                f"the state of a LocalShuffle must have the entries {sorted(expected)}, got"
                f" {sorted(state)}. Give what get_state returned."
            )
        for name, value in self._settings().items():
            if state[name] != value:
                raise ValueError(
                    f"`{name}` must be what it was when the state of the LocalShuffle was"
                    f" taken, {state[name]!r}, got {value!r}. Rows that lie with the"
                    " processes keep their order with the same settings only."
                )
        counts = {
            name: check_count(name, state[name], least=0)
            for name in expected.keys() - self._settings().keys()
        }
        self.epoch, self.batches = counts["epoch"], counts["batches"]
        self.bad_lines, self.dropped_rows = counts["bad_lines"], counts["dropped_rows"]
        self._begin = Begin(
            counts["window"], counts["window_place"], counts["window_bad_lines"]
        )

    def _settings(self) -> dict[str, int | bool]:
        """What determines which rows make up which batch, and which part of it."""
        return {
            "batch_size": self.batch_size,
            "shuffle_seed": self.shuffle_seed,
            "window_rows": self.window_rows,
            "drop_last": self.drop_last,
            "processes": self.share.processes,
            "devices": self.share.devices,
        }

    def _check_idle(self, what: str) -> None:
        if self._running:
            raise RuntimeError(
                f"cannot {what}: a loop over this LocalShuffle is under way, in epoch"
                f" {self.epoch} after {self.batches} batches. Let it end, or close it."
            )

    def _run_epoch(self) -> Iterator[Part]:
        self._check_idle("iterate over it twice at a time")
        self._running = True
        size, begin = self.batch_size, self._begin
        done, place = self.batches * size, begin.place  # in all processes
        begins = deque([begin])
        held: deque[Piece] = deque()
        used = 0  # rows of the first held piece that were given already
        windows = Windows(
            self.source,
            self.share,
            self._exchange,
            size,
            self.window_rows,
            self.shuffle_seed,
            self.epoch,
        )

        def part_of(rows: int, bad_lines: int) -> Part:
            """The part of a batch of so many rows."""
            nonlocal used, done
            done += rows
            while len(begins) > 1 and begins[1].place <= done:
                begins.popleft()
            start, stop = self.share.rows(size, rows)
            batch = held[0].batch.slice(0, 0)
            if stop > start:
                batch, used = cut_one(held, used, stop - start)
            self._begin, self.bad_lines = begins[0], bad_lines
            self.batches += 1
            return Part(batch, rows, start, self.share.examples(size))

        settings = self._settings() | {"epoch": self.epoch, "batches": self.batches}
        running = windows.run(begin, done, settings)
        try:
            for window in running:
                held.append(Piece(window.rows, Position(), 0))
                rows = sum(piece.batch.size for piece in held)
                # With those that are sent, and read ahead.
                self.most_rows_held = max(self.most_rows_held, rows + 2 * window.read)
                begins.append(window.after)
                place = window.after.place
                while place - done >= size:
                    yield part_of(size, window.after.bad_lines)
            if place == 0:
                raise ValueError(
                    "the sources of all processes must give at least one row an epoch, got"
                    f" none in epoch {self.epoch}. This process's is {self.source!r}"
                )
            left = max(0, place - done)
            if left and self.drop_last:
                self.dropped_rows += left
            elif left:
                yield part_of(left, begins[-1].bad_lines)
            self.bad_lines = begins[-1].bad_lines
            self.epoch, self.batches = self.epoch + 1, 0
            self._begin = Begin(bad_lines=self.bad_lines)
        finally:
            running.close()
            self._running = False
