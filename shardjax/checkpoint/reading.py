"""The checkpoints of a run, as one reads them."""

import logging
import operator
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, SupportsIndex

from shardjax.checkpoint.files import compare
from shardjax.checkpoint.manifest import (
    MANIFEST,
    CorruptCheckpointError,
    Manifest,
    corrupt,
    read_manifest,
)

_log = logging.getLogger(__name__)
_STEP = re.compile(r"step_(0|[1-9][0-9]*)", re.ASCII)
_MOST_NAMED = 20  # steps, in a message


class StepReader:
    """What `StepFolder` can do without changing anything.

    Args:
      path: of the folder.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)

    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        found = [_STEP.fullmatch(name) for name in os.listdir(self.path)]
        steps = (int(match[1]) for match in found if match)
        return sorted(step for step in steps if self._has(step))

    def read(self, step: SupportsIndex) -> Manifest:
        """What is known of a step, without a look at its files.

        Raises:
          FileNotFoundError: if there is no such step.
          CorruptCheckpointError: if the manifest is not what was written.
          ValueError: if it has a format that this version does not know.
        """
        step = as_step(step)
        self._check_there(step)
        try:
            return read_manifest(self._directory(step), step)
        except FileNotFoundError:  # another process removes it at this moment
            self._check_there(step)
            raise

    def verify(
        self, step: SupportsIndex, progress: Callable[[int], object] | None = None
    ) -> None:
        """Reads all files of a step, and compares them with what was written.

        Args:
          step: its number.
          progress: told how many bytes have been read, a part at a time.

        Raises:
          FileNotFoundError: if there is no such step.
          CorruptCheckpointError: if a file is missing, too many or has changed, or a
            step is missing that this one needs.
          ValueError: if it has a format that this version does not know.
        """
        manifest = self.read(step)
        try:
            for other in manifest.needs:
                if not self._has(other):
                    what = f"step {other}, which it needs, is missing"
                    raise corrupt(manifest.path, manifest.step, what)
            compare(manifest, progress)
        except (CorruptCheckpointError, FileNotFoundError):
            self._check_there(manifest.step)  # else another process has removed it
            raise

    def newest_valid(
        self, on_corrupt: Literal["error", "fallback"] = "error"
    ) -> int | None:
        """The newest step that is what was written, with all that it needs.

        Args:
          on_corrupt: "error" raises if the newest step is not; "fallback" warns, and
            looks at the one before.

        Returns:
          The step; None if there is none at all.

        Raises:
          CorruptCheckpointError: if the newest is not what was written, or for
            "fallback" none is.
          ValueError: if `on_corrupt` is another, or a step has a format that this
            version does not know.
        """
        if on_corrupt not in ("error", "fallback"):
            raise ValueError(
                "`on_corrupt` of `newest_valid` must be 'error' or 'fallback', got"
                f" {on_corrupt!r}"
            )
        good: set[int] = set()
        bad: dict[int, CorruptCheckpointError] = {}
        while left := [step for step in self.steps() if step not in bad]:
            try:
                for step in sorted(self._chain(left[-1]), reverse=True):
                    if step not in good:
                        self.verify(step)
                        good.add(step)
                return left[-1]
            except FileNotFoundError:
                good.clear()  # another process has removed some: look again
            except CorruptCheckpointError as error:
                if on_corrupt == "error":
                    raise
                _log.warning("step %d is passed over: %s", left[-1], error)
                bad[left[-1]] = error
        if not bad:
            return None
        newest = max(bad)
        raise CorruptCheckpointError(
            f"none of the steps in {str(self.path)!r} is what was written:"
            f" {_named(bad)}. Restore one from a copy, or begin anew in another folder."
            f" Of the newest: {bad[newest]}"
        ) from bad[newest]

    def _chain(self, step: int, needed=None) -> set[int]:
        """A step and all that it needs, directly or not."""
        if needed is None:
            needed = self._needs
        found, left = set(), [step]
        while left:
            step = left.pop()
            if step not in found:
                found.add(step)
                left += needed(step)
        return found

    def _needs(self, step: int) -> tuple[int, ...]:
        return self.read(step).needs if self._has(step) else ()

    def _directory(self, step: int) -> Path:
        return self.path / f"step_{step}"

    def _has(self, step: int) -> bool:
        return (self._directory(step) / MANIFEST).is_file()

    def _check_there(self, step: int, why: str = "") -> None:
        if not self._has(step):
            raise FileNotFoundError(
                f"{why}there is no step {step} in {str(self.path)!r}; there"
                f" {_named(self.steps())}. Give one of them"
            )


def _named(steps: Iterable[int]) -> str:
    steps = sorted(steps)
    if not steps:
        return "are none"
    names = ", ".join(str(step) for step in steps[-_MOST_NAMED:])
    before = len(steps) - _MOST_NAMED
    return f"are {before} older ones and {names}" if before > 0 else f"are {names}"


def as_step(step: SupportsIndex) -> int:
    """A step as an int, if it is a number that a step can have."""
    try:
        if isinstance(step, bool):
            raise TypeError
        number = operator.index(step)
    except TypeError as error:
        raise TypeError(
            f"a step must be an integer, got {step!r}. Give the number of steps that the"
            " run has made"
        ) from error
    if number < 0:
        raise ValueError(
            f"a step must not be negative, got {number}. Give the number of steps that"
            " the run has made"
        )
    return number
