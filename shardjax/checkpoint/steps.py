"""Checkpoints of a run as directories of files, one per step.

A step is written in a directory of its own, `.step_N.partial`, which gets its name
`step_N` once everything in it is on the disk: whenever a process is killed or a disk is
full, each step that is listed is whole. Its manifest holds size and checksum of every
file, so that what has changed since is noticed.
"""

import io
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self, SupportsIndex

from shardjax.checkpoint.files import seal
from shardjax.checkpoint.manifest import (
    MANIFEST,
    CorruptCheckpointError,
    check_details,
    write_manifest,
)
from shardjax.checkpoint.reading import StepReader, as_step
from shardjax.folders import LockedFolder, sync

_log = logging.getLogger(__name__)
_LEFT_OVER = re.compile(
    r"\.step_[0-9]+\.(partial|removing|again)|\.shared_[0-9a-f]{16}", re.ASCII
)
_AGAIN = re.compile(r"\.step_([0-9]+)\.again", re.ASCII)


class StepFolder(StepReader):
    """The folder of the checkpoints of one run.

    One process writes, others may read meanwhile. What a process that was killed has
    left is removed when the folder is opened for writing.

    Args:
      path: of the folder; made if it is not there and `write`.
      write: whether steps are to be written or removed. If not, nothing is changed.

    Raises:
      OSError: if the folder cannot be written to, or is in use, by another process or by
        this one; if it is not there and not `write`.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as path, StepFolder(path, write=True) as run:
      ...     directory = run.begin(5)
      ...     _ = (directory / "weights.bin").write_bytes(b"abc")
      ...     run.commit(5, {"seed": 1})
      ...     run.steps(), run.newest_valid(), run.read(5).details
      ([5], 5, {'seed': 1})
    """

    def __init__(self, path: str | os.PathLike, *, write: bool):
        super().__init__(path)
        self._begun: dict[int, bool] = {}  # whether the step is there already
        self._closed = False
        self._lock = None
        if write:
            self._lock = LockedFolder(path, "checkpointing", "a StepFolder")
            self._clean_up()
        elif not self.path.is_dir():
            raise FileNotFoundError(
                f"checkpoints are read from a folder, and {str(path)!r} is none. Give the"
                " folder that they have been written to"
            )

    def _clean_up(self) -> None:
        """Removes what killed processes have left, and ends what they had all but ended."""
        for path in list(self.path.iterdir()):
            match = _AGAIN.fullmatch(path.name)
            if match and not self._directory(int(match[1])).exists():
                os.rename(path, self._directory(int(match[1])))
                sync(self.path)
        left = [p for p in self.path.iterdir() if _LEFT_OVER.fullmatch(p.name)]
        for path in left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if left:
            _log.info(
                "%s: removed %d directories that a process which was killed had not"
                " finished writing or removing",
                self.path,
                len(left),
            )

    def begin(self, step: SupportsIndex, *, again: bool = False) -> Path:
        """Makes a fresh directory for the files of a step.

        Args:
          step: its number.
          again: whether the step is there, and is to be written anew: it stays as it is
            until `commit`.

        Returns:
          The directory: write in it, and then call `commit`, or `discard`.

        Raises:
          FileExistsError: if the step is there, or has been begun.
          FileNotFoundError: if it is not there, and is to be written `again`.
          TypeError, ValueError: if the step is no integer, or negative.
          OSError: if the directory cannot be made.

        Example:
          >>> import tempfile
          >>> with tempfile.TemporaryDirectory() as path:
          ...     with StepFolder(path, write=True) as run:
          ...         run.begin(5).name
          '.step_5.partial'
        """
        self._check_writing()
        step = as_step(step)
        if again:
            self._check_there(step)
        elif self._has(step):
            raise FileExistsError(
                f"step {step} in {str(self.path)!r} is committed already, and no step is"
                " overwritten. Give another step, or `remove` it first"
            )
        elif self._directory(step).exists():
            raise FileExistsError(
                f"step {step} needs the name {str(self._directory(step))!r}, which"
                f" something has that is no checkpoint: it has no {MANIFEST!r}. Move it"
                " away"
            )
        try:
            self._partial(step).mkdir()
        except FileExistsError as error:
            raise FileExistsError(
                f"step {step} in {str(self.path)!r} has been begun already. `commit` or"
                " `discard` it first"
            ) from error
        self._begun[step] = again
        return self._partial(step)

    def commit(
        self,
        step: SupportsIndex,
        details: dict[str, Any],
        known: Mapping[str, tuple[int, int]] = {},
        needs: Iterable[SupportsIndex] = (),
    ) -> None:
        """Makes what has been written a step, once it is on the disk.

        Args:
          step: that has been begun.
          details: what to keep with it; a dict that JSON can hold.
          known: size and CRC-32 (`zlib.crc32`) of files, by path in the directory with
            "/", that are known from writing them: these files are not read.
          needs: other steps that it takes to read this one, such as the full one that
            increments follow.

        Raises:
          ValueError, TypeError: if the step has not been begun, `details` are not for
            JSON, or there is something that is not a file. It can be tried again.
          OSError: if there is no space left or the disk fails; then `discard` the step.
            Other steps are as they were.
          CorruptCheckpointError: if `known` says otherwise than the disk.

        Example:
          >>> import tempfile
          >>> with tempfile.TemporaryDirectory() as path:
          ...     with StepFolder(path, write=True) as run:
          ...         _ = (run.begin(5) / "a").write_bytes(b"abc")
          ...         run.commit(5, {"seed": 1})
          ...         run.read(5).files
          {'a': (3, 891568578)}
        """
        self._check_writing()
        step = as_step(step)
        if step not in self._begun:
            raise ValueError(
                f"step {step} in {str(self.path)!r} has not been begun, or has failed to"
                " be committed. Call `begin` first, and after a failure `discard` before"
            )
        needs = [as_step(n) for n in needs]
        for other in needs:
            self._check_there(other, f"step {step} needs step {other}, and ")
            if other >= step:
                raise ValueError(
                    f"step {step} may need steps before it only, got {other} in `needs`."
                    " Leave it away"
                )
        check_details(step, details)
        try:
            self._commit(step, details, known, needs)
        except CorruptCheckpointError:
            self._begun.pop(step)
            raise
        except OSError as error:
            # nor is it tried again: the system forgets which writes have failed
            self._begun.pop(step)
            raise OSError(
                error.errno,
                f"step {step} cannot be committed to {str(self.path)!r}:"
                f" {error.strerror}. The steps before are intact. `discard` this one, free"
                " space or take another folder, and save again",
            ) from error
        self._begun.pop(step)

    def _commit(self, step, details, known, needs) -> None:
        partial = self._partial(step)
        files, directories = seal(partial, step, known)
        write_manifest(partial, step, details, needs, files)
        for path in directories:
            sync(partial / path)
        if self._begun[step]:
            self._replace(step)
            return
        os.rename(partial, self._directory(step))
        try:
            sync(self.path)
        except OSError:
            os.rename(self._directory(step), partial)
            raise

    def _replace(self, step: int) -> None:
        """Puts a step that is whole in the place of the one that is there. At no moment is
        there neither: see `_clean_up`."""
        again = self.path / f".step_{step}.again"
        if again.exists():
            shutil.rmtree(again)
        os.rename(self._partial(step), again)
        sync(self.path)
        self._move_away(step)
        os.rename(again, self._directory(step))
        sync(self.path)
        shutil.rmtree(self._removing(step))

    def discard(self, step: SupportsIndex) -> None:
        """Removes what has been written of a step that is not committed, if anything.

        Example:
          >>> import tempfile
          >>> with tempfile.TemporaryDirectory() as path:
          ...     with StepFolder(path, write=True) as run:
          ...         partial = run.begin(5)
          ...         run.discard(5)
          ...         partial.exists()
          False
        """
        self._check_writing()
        step = as_step(step)
        self._begun.pop(step, None)
        if self._partial(step).exists():
            shutil.rmtree(self._partial(step))

    def remove(self, step: SupportsIndex) -> None:
        """Removes a step, also one that others need.

        Raises:
          FileNotFoundError: if there is no such step.
        """
        self._check_writing()
        step = as_step(step)
        self._check_there(step)
        self._move_away(step)
        sync(self.path)  # before the first file goes
        shutil.rmtree(self._removing(step))

    def _move_away(self, step: int) -> None:
        """Gives a step another name, under which nobody finds it."""
        removing = self._removing(step)
        if removing.exists():
            shutil.rmtree(removing)
        os.rename(self._directory(step), removing)

    def leave(self, steps: Iterable[SupportsIndex]) -> None:
        """Gives steps names, `left_step_N`, under which they are no steps of the run: for
        those after one that it has gone back to. Nothing removes them.

        Raises:
          FileNotFoundError: if there is no such step.

        Example:
          >>> import tempfile
          >>> with tempfile.TemporaryDirectory() as path:
          ...     with StepFolder(path, write=True) as run:
          ...         for step in 5, 10:
          ...             _ = run.begin(step)
          ...             run.commit(step, {})
          ...         run.leave([10])
          ...         run.steps(), (run.path / "left_step_10").is_dir()
          ([5], True)
        """
        self._check_writing()
        for step in sorted(map(as_step, steps), reverse=True):  # the newest counts
            self._check_there(step)
            name, number = f"left_step_{step}", 1
            while (self.path / name).exists():
                number += 1
                name = f"left_step_{step}.{number}"
            os.rename(self._directory(step), self.path / name)
            sync(self.path)
            _log.warning(
                "the run has gone back to a step before %d, which is called %r from now"
                " on; remove it if you do not need it",
                step,
                str(self.path / name),
            )

    def prune(
        self, keep: int, needed: Callable[[int], Iterable[int]] | None = None
    ) -> list[int]:
        """Removes all steps but the newest, and those that these need.

        A step whose manifest has changed stays, and does not count.

        Args:
          keep: how many steps stay.
          needed: which others a step needs; by default those that `commit` was told.

        Returns:
          The steps that are gone, ascending.

        Example:
          >>> import tempfile
          >>> with tempfile.TemporaryDirectory() as path:
          ...     with StepFolder(path, write=True) as run:
          ...         for step, needs in (1, []), (2, []), (3, [2]):
          ...             _ = run.begin(step)
          ...             run.commit(step, {}, needs=needs)
          ...         run.prune(1), run.steps()
          ([1], [2, 3])
        """
        self._check_writing()
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ValueError(
                f"`keep` of `prune` must be an integer of at least 1, got {keep!r}. Give"
                " how many of the newest steps stay; `remove` removes also the last one"
            )
        steps, stay, count = self.steps(), set(), 0
        for step in reversed(steps):
            if count == keep:
                break
            stay.add(step)
            try:
                stay |= self._chain(step, needed)
                count += 1
            except CorruptCheckpointError as error:
                _log.warning("step %d stays and does not count: %s", step, error)
        gone = [step for step in steps if step not in stay]
        for step in reversed(gone):  # those that need others first
            self.remove(step)
        return gone

    def close(self) -> None:
        """Lets others write in the folder; twice does no harm."""
        self._closed = True
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def _partial(self, step: int) -> Path:
        return self.path / f".step_{step}.partial"

    def _removing(self, step: int) -> Path:
        return self.path / f".step_{step}.removing"

    def _check_writing(self) -> None:
        if self._lock is None:
            raise io.UnsupportedOperation(
                f"this StepFolder of {str(self.path)!r} only reads. Open it with"
                " `write=True` to change anything"
            )
        if self._closed:
            raise ValueError(
                f"this StepFolder of {str(self.path)!r} is closed. Open another one"
            )
