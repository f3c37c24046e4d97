"""The files of a step: put on the disk with their checksums, and compared with them."""

import errno
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardjax.checkpoint.manifest import (
    MANIFEST,
    CorruptCheckpointError,
    Manifest,
    corrupt,
)
from shardjax.folders import sync

_PART_BYTES = 4 << 20


def seal(
    directory: Path, step: int, known: Mapping[str, tuple[int, int]]
) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """Puts the files of a step on the disk.

    Args:
      directory: that has the files.
      step: its number, for messages.
      known: see `StepFolder.commit`.

    Returns:
      Size and CRC-32 of all files, and the directories, which are yet to be put there.

    Raises:
      ValueError: if something is not a regular file, or has the name of the manifest.
      CorruptCheckpointError: if `known` says otherwise than the disk.
      OSError: if the disk is full or fails.
    """
    tree = walk(directory)
    if tree.others:
        raise ValueError(
            f"step {step} may have regular files only, and"
            f" {str(directory / tree.others[0])!r} is none. Write a file in its place, or"
            " leave it away"
        )
    if MANIFEST in tree.files:
        raise ValueError(
            f"step {step} has a file {MANIFEST!r}, and that name is for the manifest. Give"
            " it another name"
        )
    if unknown := sorted(set(known) - set(tree.files)):
        raise _unlike(step, f"{unknown[0]!r}, which is `known`, is missing")
    files = {}
    for path in tree.files:
        if path not in known:
            files[path] = checksum(directory / path, write=True)
            continue
        size, crc = known[path]
        if (found := sync(directory / path)) != size:
            what = f"{path!r} has {found} bytes, and {size} are `known` to be written"
            raise _unlike(step, what)
        files[path] = int(size), int(crc)
    return files, tree.directories


def _unlike(step: int, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"step {step} cannot be committed: {what}. `discard` it and write it again"
    )


def compare(
    manifest: Manifest, progress: Callable[[int], object] | None = None
) -> None:
    """Raises unless the files of a step are what its manifest says.

    Args:
      manifest: of the step.
      progress: told how many bytes have been read, a part at a time.

    Raises:
      CorruptCheckpointError: for the first file that is not.
    """
    tree = walk(manifest.path)
    there = {*tree.files, *tree.others} - {MANIFEST}
    for path in sorted({*manifest.files, *there}):
        if path not in there:
            what = f"{path!r} is missing"
        elif path not in manifest.files:
            what = f"{path!r} does not belong to it"
        elif path in tree.others:
            what = f"{path!r} is not a regular file any more"
        else:
            what = _difference(manifest.path / path, path, manifest, progress)
        if what:
            raise corrupt(manifest.path, manifest.step, what)


def _difference(file: Path, path: str, manifest: Manifest, progress) -> str:
    """What is wrong with a file, or nothing."""
    size, crc = manifest.files[path]
    if (found := file.stat().st_size) != size:
        return f"{path!r} has {found} bytes, and {size} were written"
    try:
        same = checksum(file, progress) == (size, crc)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return f"{path!r} cannot be read ({error.strerror})"
    return "" if same else f"bytes of {path!r} have changed"


@dataclass(frozen=True)
class Tree:
    """What lies below a directory, by paths in it.

    Attributes:
      files: regular files, in order.
      directories: all, the directory itself (".") last.
      others: symbolic links and whatever else there may be.
    """

    files: list[str]
    directories: list[str]
    others: list[str]


def walk(root: Path) -> Tree:
    """Looks at all that lies below a directory, without following links."""
    tree = Tree([], [], [])
    _walk(root, "", tree)
    tree.files.sort()
    return tree


def _walk(root: Path, below: str, tree: Tree) -> None:
    with os.scandir(root / below) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            path = f"{below}/{entry.name}" if below else entry.name
            if entry.is_dir(follow_symlinks=False):
                _walk(root, path, tree)
            elif entry.is_file(follow_symlinks=False):
                tree.files.append(path)
            else:
                tree.others.append(path)
    tree.directories.append(below or ".")


def checksum(
    path: Path,
    progress: Callable[[int], object] | None = None,
    *,
    write: bool = False,
) -> tuple[int, int]:
    """Reads a file.

    Args:
      path: of the file.
      progress: told how many bytes have been read, a part at a time.
      write: whether to have the system write the file to the disk, too.

    Returns:
      Its size and CRC-32.
    """
    part = memoryview(bytearray(_PART_BYTES))
    size = crc = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(part):
            crc = zlib.crc32(part[:count], crc)
            size += count
            if progress is not None:
                progress(count)
        if write:
            os.fsync(file.fileno())
    return size, crc
