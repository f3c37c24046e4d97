"""Folders that one process at a time writes to."""

import logging
import os
import weakref
from pathlib import Path

_log = logging.getLogger(__name__)
_LOCK = "shardjax.lock"


class LockedFolder:
    """A folder that is locked against other processes, until `close`.

    Args:
      path: made if it is not there.
      use: what it is for, in messages.
      owner: what of this process may have the folder, in messages.

    Raises:
      OSError: if the folder cannot be written to, or is in use, by another process or by
        this one.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as path:
      ...     folder = LockedFolder(path, "checkpointing", "a StepFolder")
      ...     folder.close()
    """

    def __init__(self, path: str | os.PathLike, use: str, owner: str):
        import fcntl  # not on Windows

        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise type(error)(
                f"{use} needs a folder that it can write to, and {str(path)!r} is"
                f" none: {error.strerror}. Give another one"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            user = os.pread(self._lock, 32, 0).decode().strip() or "unknown"
            os.close(self._lock)
            if user == str(os.getpid()):
                raise BlockingIOError(
                    f"the folder {str(path)!r} of {use} is in use by this very"
                    f" process: {owner} that has not been closed has it."
                    " Call its `close` first, or give each a folder of its own"
                ) from error
            raise BlockingIOError(
                f"the folder {str(path)!r} of {use} is in use by process {user}."
                " Give each process a folder of its own"
            ) from error
        # also when nobody closes it: the folder must not stay locked for this process
        self._end = weakref.finalize(self, os.close, self._lock)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)

    def close(self) -> None:
        """Lets others use the folder."""
        self._end()


class OwnFolder(LockedFolder):
    """A folder that one process uses for files that are good only while it lives.

    Files that a process which has ended has left are removed.

    Args:
      path: made if it is not there.
      pattern: of the names of the files.
      use: what they are for, in messages.
      owner: what of this process may have the folder, in messages.

    Raises:
      OSError: if the folder cannot be written to, or is in use, by another process or by
        this one.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as path:
      ...     folder = OwnFolder(path, "*.state", "the disk level", "an optimizer")
      ...     folder.close()
    """

    def __init__(self, path: str | os.PathLike, pattern: str, use: str, owner: str):
        super().__init__(path, use, owner)
        left = list(self.path.glob(pattern))
        for file in left:
            file.unlink()
        if left:
            _log.info(
                "%s: removed %d files of a process that has ended", self.path, len(left)
            )
