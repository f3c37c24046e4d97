"""A profiler trace of some steps of a run."""

import re
from pathlib import Path
from typing import Any, Self

import jax


class TraceWindow:
    """Records a profiler trace from one step to another, both included.

    In a loop of your own, call `before` and `after` each step, inside `with`, which ends
    the trace also where the loop ends early. As a hook of `shardjax.fit`, which calls
    hooks after each step, it is the object itself; where the window begins with the
    first step, call `before` with it ahead of `fit`.

    Show the trace with TensorBoard's profile plug-in, or the file ending in
    ``trace.json.gz`` in Perfetto. Only one trace can run in a process at a time.

    Args:
      window: "10:15" for the steps 10 to 15.
      folder: where the trace goes; it is made if need be.

    Attributes:
      first: the first step.
      last: the last step.
      folder: where the trace goes.

    Raises:
      TypeError: if `window` is not a string.
      ValueError: if it does not have that form or ends before it starts.

    Example:
      >>> import tempfile, jax.numpy as jnp
      >>> folder = tempfile.TemporaryDirectory()
      >>> with folder, TraceWindow("1:2", folder.name) as trace:
      ...     for step in range(4):
      ...         trace.before(step)
      ...         loss = jnp.ones(3) + step
      ...         trace.after(step, loss)
      ...     len(list(Path(folder.name).rglob("*.xplane.pb")))
      1
    """

    def __init__(self, window: str, folder: str | Path):
        self.first, self.last = _parse_window(window)
        self.folder = Path(folder)
        self._running = self._done = False

    def before(self, step: int) -> None:
        """Starts the trace if a step is in the window and it does not run yet.

        A run that resumes inside the window is traced from there; one that resumes
        after it is not traced.

        Args:
          step: about to be taken.
        """
        due = self.first <= step <= self.last
        if due and not self._running and not self._done:
            self.folder.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(str(self.folder))
            self._running = True

    def after(self, step: int, result: Any = None) -> None:
        """Ends the trace after the last step of the window.

        Args:
          step: just taken.
          result: arrays of that step, waited for before the trace ends so that all of
            it is in there.
        """
        if self._running and step >= self.last:
            jax.block_until_ready(result)
            self.close()

    def __call__(self, step: int, state: Any, info: Any) -> None:
        """Is the hook of `fit`: after a step, and before the next.

        Args:
          step: just taken.
          state: of the run, waited for where the trace starts or ends.
          info: of the step, not used.
        """
        self.after(step, state)
        if step + 1 == self.first:
            jax.block_until_ready(state)
        self.before(step + 1)

    def close(self) -> None:
        """Ends the trace if it runs; there will be no other."""
        if self._running:
            self._running, self._done = False, True
            jax.profiler.stop_trace()

    def __enter__(self) -> Self:
        """Starts nothing yet: see `before`."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the trace if it runs."""
        self.close()


def _parse_window(window: Any) -> tuple[int, int]:
    if not isinstance(window, str):
        raise TypeError(
            "`window` must be a string such as '10:15', got"
            f" {type(window).__name__} {window!r}. Write the first and the last step,"
            " joined by a colon."
        )
    match = re.fullmatch(r"([0-9]+):([0-9]+)", window)
    if match is None:
        raise ValueError(
            "`window` must be FIRST:LAST, two steps, got"
            f" {window!r}. Write for example '10:15' to trace the steps 10 to 15."
        )
    first, last = int(match[1]), int(match[2])
    if first > last:
        raise ValueError(
            f"`window` must not end before it starts, got {window!r}. Write the first"
            f" step first: '{last}:{first}'."
        )
    return first, last
