"""Where the numbers of a run go: JSON lines, TensorBoard, a progress bar.

A writer takes `write(step, {"train/loss": 0.4, "eval/auc": 0.78})` and is closed at the
end; it is a context manager. Names are paths such as ``train/loss``, ``eval/auc`` or
``planner/unique_ids``.

Only one process of a run should write. Each writer takes `enabled`, and one that is not
enabled opens nothing, reads no value and writes nothing, so all processes run the same
code::

    enabled = jax.process_index() == 0
    writer = MultiWriter([
        JsonlWriter("runs/a/metrics.jsonl", enabled=enabled),
        ProgressBar(1000, batch_size=8192, enabled=enabled),
    ])
"""

import abc
import json
import math
import operator
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, SupportsIndex, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from tqdm import tqdm


class Writer(abc.ABC):
    """What all writers share: checks of steps and values, `enabled`, closing.

    A subclass implements `_write` and `_close`; they are called only if it is enabled.

    Args:
      enabled: whether to write at all; true on one process of a run.

    Example:
      >>> class Printer(Writer):
      ...     def _write(self, step, values):
      ...         print(step, values)
      ...     def _close(self):
      ...         print("closed")
      >>> with Printer() as writer:
      ...     writer.write(1, {"train/loss": np.float32(0.5)})
      1 {'train/loss': 0.5}
      closed
    """

    def __init__(self, *, enabled: bool = True):
        self.enabled = enabled
        self._closed = False

    def write(self, step: SupportsIndex, values: Mapping[str, ArrayLike]) -> None:
        """Writes the values of a step.

        Args:
          step: the step, an integer.
          values: real numbers by name: Python, numpy or JAX scalars.

        Raises:
          TypeError: if the step is not an integer, a name not a string, or a value not
            a real scalar.
          ValueError: if a name is empty or "step", or the writer is closed.

        Example:
          >>> with MultiWriter([]) as writer:
          ...     writer.write(1, {"train/loss": 0.5})
        """
        if self._closed:
            raise ValueError(
                f"{type(self).__name__} is closed, got values of step {step}. Write"
                " inside the `with` block."
            )
        if self.enabled:
            self._write(
                _as_step(step), {k: _as_number(k, v) for k, v in values.items()}
            )

    def close(self) -> None:
        """Writes what is left and closes; a second call does nothing.

        Example:
          >>> writer = MultiWriter([])
          >>> writer.close()
        """
        if not self._closed:
            self._closed = True
            if self.enabled:
                self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error) -> None:
        self.close()

    @abc.abstractmethod
    def _write(self, step: int, values: dict[str, int | float]) -> None: ...

    @abc.abstractmethod
    def _close(self) -> None: ...


class JsonlWriter(Writer):
    """One JSON object per line: "step" first, then the values as given.

    Numbers that JSON does not have (nan, inf) become null. A line is written in one
    piece and flushed, so a run that is killed leaves at most one partial last line.

    Args:
      path: the file; its folder is made if need be.
      mode: "append" goes on after the lines of an earlier run (a partial last line is
        cut off first), "create" refuses to touch an existing file. A resumed run
        repeats the steps after its checkpoint: of two lines with one step and name the
        later one holds.
      enabled: see `Writer`.

    Raises:
      ValueError: if `mode` is another.
      FileExistsError: if the file exists and `mode` is "create".

    Example:
      >>> import tempfile
      >>> path = os.path.join(tempfile.mkdtemp(), "metrics.jsonl")
      >>> with JsonlWriter(path) as writer:
      ...     writer.write(1, {"train/loss": 0.5, "eval/auc": math.nan})
      >>> print(Path(path).read_text(), end="")
      {"step": 1, "train/loss": 0.5, "eval/auc": null}
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        mode: Literal["append", "create"] = "append",
        enabled: bool = True,
    ):
        super().__init__(enabled=enabled)
        if mode not in ("append", "create"):
            raise ValueError(f'`mode` must be "append" or "create", got {mode!r}.')
        if not enabled:
            return
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if mode == "create" and path.exists():
            raise FileExistsError(
                f"{path} exists already, and mode 'create' does not overwrite. Give"
                ' another path, remove the file, or use mode "append".'
            )
        if path.exists():
            _cut_partial_line(path)
        self._file = path.open("ab" if mode == "append" else "xb", buffering=0)

    def _write(self, step, values):
        row = {"step": step}
        row |= {k: v if math.isfinite(v) else None for k, v in values.items()}
        line = json.dumps(row, allow_nan=False) + "\n"
        self._file.write(line.encode())

    def _close(self):
        self._file.close()


class TensorBoardWriter(Writer):
    """Scalars for TensorBoard, one per name. Needs the extra ``shardjax[tensorboard]``.

    TensorBoard keeps float32: integers above 2**24 are rounded.

    Args:
      directory: where the event file goes; made if need be. Each run adds a file.
      enabled: see `Writer`.

    Raises:
      ImportError: if tensorboardX is not installed.

    Example:
      >>> TensorBoardWriter("runs/a", enabled=False).write(1, {"train/loss": 0.5})
    """

    def __init__(self, directory: str | os.PathLike, *, enabled: bool = True):
        super().__init__(enabled=enabled)
        if not enabled:
            return
        try:
            import tensorboardX
        except ImportError as error:
            raise ImportError(
                "TensorBoardWriter needs the package tensorboardX, which is not"
                " installed. Run: pip install 'shardjax[tensorboard]'"
            ) from error
        # A live view need not lag by the default of two minutes.
        self._events = tensorboardX.SummaryWriter(os.fspath(directory), flush_secs=10)

    def _write(self, step, values):
        for name, value in values.items():
            self._events.add_scalar(name, value, step)

    def _close(self):
        self._events.close()


class _Bar(tqdm):
    # No thread that wakes up bars: it would outlive them, and with miniters=1 there is
    # nothing to wake.
    monitor_interval = 0


class ProgressBar(Writer):
    """Progress on a terminal: examples, examples/s, time left and chosen values.

    Where the stream is not a terminal (a log file), one plain line at most every
    `interval` seconds, and one at the end. The rate counts from the first `write`, so
    that compilation, before it, does not count.

    Args:
      total: the number of steps, or None if not known.
      batch_size: examples per step; 1 counts steps.
      show: names of the values to show, the last one of each.
      interval: seconds between two plain lines.
      stream: where to write, by default stderr.
      enabled: see `Writer`.

    Raises:
      ValueError: if `batch_size` is not positive.

    Example:
      >>> with ProgressBar(10, batch_size=32, stream=sys.stdout) as bar:
      ...     bar.write(10, {"train/loss": 0.25})
      step 10/10 train/loss=0.25
    """

    def __init__(
        self,
        total: int | None,
        *,
        batch_size: int = 1,
        show: Sequence[str] = ("train/loss", "eval/auc"),
        interval: float = 10.0,
        stream: TextIO | None = None,
        enabled: bool = True,
    ):
        super().__init__(enabled=enabled)
        if batch_size < 1:
            raise ValueError(
                f"`batch_size` of ProgressBar must be positive, got {batch_size}. Give"
                " the examples per step, or 1 to count steps."
            )
        self._total, self._batch_size, self._interval = total, batch_size, interval
        self._unit = "steps" if batch_size == 1 else "examples"
        self._show = tuple(show)
        self._shown: dict[str, int | float] = {}
        self._start: tuple[int, float] | None = None
        self._step = 0
        self._stream = sys.stderr if stream is None else stream
        self._bar: tqdm | None = None

    def _write(self, step, values):
        now = time.monotonic()
        if self._start is None:
            self._start = self._last = (step, now)
            self._step = step
            if self._stream.isatty():
                self._bar = self._make_bar(step)
        self._shown |= {name: values[name] for name in self._show if name in values}
        # Evaluation may write values of an earlier step; progress does not go back.
        moved, self._step = max(0, step - self._step), max(step, self._step)
        if self._bar is not None:
            self._bar.set_postfix_str(self._values(), refresh=False)
            self._bar.update(moved * self._batch_size)
        elif now - self._last[1] >= self._interval:
            self._print_line(since=self._last, now=now)
            self._last = (self._step, now)

    def _close(self):
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()
        elif self._start is not None:
            self._print_line(since=self._start, now=time.monotonic())

    def _print_line(self, since: tuple[int, float], now: float) -> None:
        parts = [f"step {self._step}" + (f"/{self._total}" if self._total else "")]
        step, then = since
        if self._step > step and now > then:
            rate = (self._step - step) * self._batch_size / (now - then)
            parts.append(f"{_short(rate)} {self._unit}/s")
        print(*parts, self._values(), file=self._stream, flush=True)

    def _values(self) -> str:
        shown = (n for n in self._show if n in self._shown)
        return " ".join(f"{name}={self._shown[name]:.4g}" for name in shown)

    def _make_bar(self, step: int) -> tqdm:
        size = self._batch_size
        return _Bar(
            total=None if self._total is None else self._total * size,
            initial=step * size,
            unit=f" {self._unit}",
            unit_scale=True,
            file=self._stream,
            dynamic_ncols=True,
            miniters=1,
        )


class MultiWriter(Writer):
    """Passes everything on to several writers; values are read from the device once.

    Args:
      writers: the writers, which it closes.

    Raises:
      ExceptionGroup: on closing, if some of them could not be closed; all are tried.

    Example:
      >>> with MultiWriter([JsonlWriter("a.jsonl", enabled=False)]) as writer:
      ...     writer.write(1, {"train/loss": 0.5})
    """

    def __init__(self, writers: Iterable[Writer]):
        self._writers = tuple(writers)
        super().__init__(enabled=any(w.enabled for w in self._writers))

    def _write(self, step, values):
        for writer in self._writers:
            writer.write(step, values)

    def _close(self):
        errors = []
        for writer in self._writers:
            try:
                writer.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise ExceptionGroup("some writers could not be closed", errors)


def read_rows(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Reads what a `JsonlWriter` wrote.

    Args:
      path: the file. A partial last line, left by a run that was killed, is not read.

    Returns:
      One dict per line: "step" and the values; None where they were nan or infinite.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if a line is not such an object; the message has its number.

    Example:
      >>> import tempfile
      >>> path = os.path.join(tempfile.mkdtemp(), "metrics.jsonl")
      >>> with JsonlWriter(path) as writer:
      ...     writer.write(1, {"train/loss": 0.5})
      >>> read_rows(path)
      [{'step': 1, 'train/loss': 0.5}]
    """
    rows = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or "step" not in row:
            raise ValueError(
                f"{path}:{number}: a line must be a JSON object with a step, got"
                f" {line[:80].decode(errors='replace')!r}. Give a file that JsonlWriter"
                " wrote."
            )
        rows.append(row)
    return rows


def _as_step(step: Any) -> int:
    try:
        return operator.index(step)
    except TypeError:
        raise TypeError(
            f"`step` must be an integer, got {type(step).__name__} {step!r}. Count the"
            " optimizer steps."
        ) from None


def _as_number(name: Any, value: Any) -> int | float:
    """A Python number of a value, which may still be on a device."""
    if not isinstance(name, str):
        raise TypeError(
            f"names of values must be strings, got {type(name).__name__} {name!r}. Use"
            " a path such as 'train/loss'."
        )
    if name in ("", "step"):
        raise ValueError(
            f"a value must have a name other than 'step', got {name!r}. Use a path such"
            " as 'train/loss'; the step is the first argument."
        )
    array = np.asarray(jax.device_get(value))
    if array.ndim:
        raise TypeError(
            f"value {name!r} must be a scalar, got an array of shape {array.shape}."
            " Reduce it first, or write its entries under names of their own."
        )
    if jnp.issubdtype(array.dtype, np.integer) or array.dtype == bool:
        return int(array)
    if jnp.issubdtype(array.dtype, np.floating):
        return float(array)
    raise TypeError(
        f"value {name!r} must be a real number, got {type(value).__name__} of dtype"
        f" {array.dtype}. Write for example its absolute value, or leave it out."
    )


def _cut_partial_line(path: Path) -> None:
    """Truncates a file after its last line break."""
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 65536)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                file.truncate(start + found + 1)
                return
            end = start
        file.truncate(0)


def _short(number: float) -> str:
    """1234567 as 1.23M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"
