"""Folders that one process at a time writes to, and folders that appear whole."""

import errno
import fcntl
import logging
import os
import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_log = logging.getLogger(__name__)
_MARKS = ("rows.json", "model.json")  # files that an export has
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


def check_vacant(path: str | os.PathLike, use: str, *, replace: bool = False) -> None:
    """Raises unless `whole_folder` could give a folder this path.

    Args:
      path, use, replace: as of `whole_folder`.

    Raises:
      FileExistsError: if there is something.
    """
    path = Path(path)
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        raise FileExistsError(
            f"{use} needs a folder of its own, and {str(path)!r} is something else. Give"
            " another path"
        )
    names = {entry.name for entry in path.iterdir()}
    if replace and names and not names & set(_MARKS):
        raise FileExistsError(
            f"{use} may take the place of an export alone, which has one of"
            f" {list(_MARKS)}, and {str(path)!r} has other files. Give another path"
        )
    if not replace and names:
        raise FileExistsError(
            f"{use} needs a folder of its own, and {str(path)!r} has files in it. Give"
            " another path, or remove the folder first"
        )


@contextmanager
def whole_folder(
    path: str | os.PathLike, use: str, *, replace: bool = False
) -> Iterator[Path]:
    """A context in which to write a folder that appears whole at its end, or not at all.

    It is written under a hidden name beside its own, ".NAME.partial", which is locked
    meanwhile; what a process that was killed has left there is removed. At the end all files
    are put on the disk. An error in the context leaves everything as it was.

    Args:
      path: of the folder; folders above it are made.
      use: what it is for, in messages.
      replace: whether it may take the place of an earlier export, which is removed once the
        new one is written; else the path must be free, or an empty folder.

    Returns:
      In the context, the path to write below.

    Raises:
      FileExistsError: if there is something already, or something else than an export to
        replace; at the start.
      BlockingIOError: if another process, or this one, is writing the folder.
      OSError: if the folder cannot be written.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as above:
      ...     with whole_folder(Path(above, "a"), "an export") as folder:
      ...         _ = (folder / "x.txt").write_text("x")
      ...     [file.name for file in Path(above, "a").iterdir()]
      ['x.txt']
    """
    path = Path(os.path.abspath(path))
    check_vacant(path, use, replace=replace)
    partial, former = (path.parent / f".{path.name}.{x}" for x in ("partial", "former"))
    with _locked(partial, use):
        try:
            yield partial
            for folder, _, files in os.walk(partial):
                for name in (*files, "."):
                    sync(os.path.join(folder, name))
            check_vacant(path, use, replace=replace)
            shutil.rmtree(former, ignore_errors=True)
            if path.is_dir():
                path.rename(former)
            try:
                partial.rename(path)
            except BaseException:
                if former.is_dir():
                    former.rename(path)
                raise
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        sync(path.parent)
        shutil.rmtree(former, ignore_errors=True)


@contextmanager
def _locked(partial: Path, use: str) -> Iterator[None]:
    """A context with an empty folder that nobody else writes to."""
    partial.parent.mkdir(parents=True, exist_ok=True)
    if partial.is_symlink() or (partial.exists() and not partial.is_dir()):
        raise FileExistsError(
            f"{use} is written to {str(partial)!r} first, and that is no folder. Remove it"
        )
    partial.mkdir(exist_ok=True)
    opened = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            there = os.path.samestat(os.fstat(opened), os.stat(partial))
        except (BlockingIOError, FileNotFoundError):
            there = False  # the other one may have ended in this moment
        if not there:
            raise BlockingIOError(
                errno.EWOULDBLOCK,
                f"{use} is being written to {str(partial)!r} already. Wait for that, or"
                " give another path",
            )
        for entry in partial.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        yield
    finally:
        os.close(opened)


def sync(path: str | os.PathLike) -> int:
    """Has the system write a file or directory to the disk.

    Returns:
      The size.
    """
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
        return os.fstat(opened).st_size
    finally:
        os.close(opened)
