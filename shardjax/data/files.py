"""Files: which ones a path or glob means, and their bytes in blocks of whole lines."""

import glob
import gzip
import os
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BufferedIOBase
from typing import TypeVar

import numba
import numpy as np

BLOCK_BYTES = 2 << 20
"""How much of a text file is read at once, if not said otherwise."""

_MAX_LINE_BYTES = 64 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NEWLINE = 10
_PADDING = 32

_In = TypeVar("_In")
_Out = TypeVar("_Out")

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A path, a glob such as "day_*.tsv", or several of them."""


def find_files(paths: Paths) -> tuple[str, ...]:
    """Lists the files that paths and globs mean.

    Args:
      paths: one path or glob, or a sequence of them; "~" is the home folder and "**"
        any depth of folders. Several keep the order given; the files of one glob come
        in the order of their names, with numbers by value: day_2 before day_10.

    Returns:
      Paths of files that exist.

    Raises:
      FileNotFoundError: if a file is missing or a glob matches none.
      IsADirectoryError: if a path is a folder.
      ValueError: if `paths` is empty.

    Example:
      >>> find_files("no/such/day_*.tsv")
      Traceback (most recent call last):
      FileNotFoundError: no file matches 'no/such/day_*.tsv'
    """
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    paths = [os.path.expanduser(os.fspath(path)) for path in paths]
    if not paths or "" in paths:
        raise ValueError(f"`paths` must name at least one file, got {paths}")
    found = []
    for path in paths:
        if os.path.isdir(path):
            raise IsADirectoryError(
                f"{path!r} is a folder. Give its files, such as"
                f" {os.path.join(path, '*')!r}."
            )
        if os.path.exists(path):
            found.append(path)
        elif glob.has_magic(path):
            matches = [p for p in glob.glob(path, recursive=True) if os.path.isfile(p)]
            if not matches:
                raise FileNotFoundError(f"no file matches {path!r}")
            found.extend(sorted(matches, key=_natural_order))
        else:
            raise FileNotFoundError(f"no such file: {path!r}")
    return tuple(found)


def open_bytes(path: str) -> BufferedIOBase:
    """Opens a file to read bytes, unpacking it if it is gzip, whatever its name.

    Args:
      path: the file.

    Returns:
      A binary file, to be closed by the caller.

    Example:
      >>> import tempfile
      >>> with tempfile.NamedTemporaryFile(suffix=".gz") as file:
      ...     size = file.write(gzip.compress(b"packed"))
      ...     file.flush()
      ...     with open_bytes(file.name) as unpacked:
      ...         unpacked.read()
      b'packed'
    """
    file = open(path, "rb")
    magic = file.read(len(_GZIP_MAGIC))
    file.seek(0)
    if magic != _GZIP_MAGIC:
        return file
    file.close()
    return gzip.open(path, "rb")


def last_line_end(data: np.ndarray) -> int:
    """Finds where the last whole line ends.

    Args:
      data: uint8 [n].

    Returns:
      One past the last newline; 0 if there is none.

    Example:
      >>> last_line_end(np.frombuffer(b"one\\ntw", np.uint8))
      4
    """
    for stop in range(len(data), 0, -(1 << 16)):
        start = max(0, stop - (1 << 16))
        at = np.flatnonzero(data[start:stop] == _NEWLINE)
        if len(at):
            return start + int(at[-1]) + 1
    return 0


@dataclass(frozen=True)
class Block:
    """Some whole lines of a text file.

    Attributes:
      path: the file.
      data: uint8 [size + 32]: the lines, each ended by a newline, even the last of a
        file that has none; then zeros, so that a parser may read words at its end.
      size: bytes in the lines.
      first_line: number of the first line in the file, from 1.
      lines: how many lines there are.
    """

    path: str
    data: np.ndarray
    size: int
    first_line: int
    lines: int

    def line_number(self, at: int) -> int:
        """Counts lines up to a byte.

        Args:
          at: a position in `data`.

        Returns:
          The number of its line in the file, from 1.
        """
        return self.first_line + _count_newlines(self.data[:at])


def read_blocks(
    path: str,
    block_bytes: int = BLOCK_BYTES,
    find_end: Callable[[np.ndarray], int] = last_line_end,
) -> Iterator[Block]:
    """Reads a text file, gzip or not, in blocks of whole lines.

    A block ends with the last line that ends within `block_bytes` of its start, so
    blocks depend on the file and `block_bytes` alone. Memory is bounded by a few blocks
    or the longest line. A byte order mark is left out.

    Args:
      path: the file.
      block_bytes: size of a block; a line that is longer makes a longer block.
      find_end: finds where the last whole line in some bytes ends, 0 if none does; for
        formats in which a newline need not end a line.

    Returns:
      An iterator over blocks, none of them empty. Each has its own memory.

    Raises:
      OSError: if the file cannot be read or unpacked; the error names it.
      ValueError: if `block_bytes` is not positive or a line exceeds 64 MiB.

    Example:
      >>> import tempfile
      >>> with tempfile.NamedTemporaryFile() as file:
      ...     size = file.write(b"one\\ntwo\\nthree")
      ...     file.flush()
      ...     for block in read_blocks(file.name, block_bytes=10):
      ...         print(block.first_line, bytes(block.data[: block.size]))
      1 b'one\\ntwo\\n'
      3 b'three\\n'
    """
    if block_bytes < 1:
        raise ValueError(f"`block_bytes` must be positive, got {block_bytes}")
    with open_bytes(path) as file:
        carried = np.empty(0, np.uint8)
        first_line = 1
        at_start = True
        ended = False
        while not ended:
            # A line longer than the block is tried again with twice the room.
            room = max(block_bytes, 2 * len(carried))
            data = np.empty(room + _PADDING, np.uint8)
            data[: len(carried)] = carried
            size = len(carried) + _fill(path, file, data[len(carried) : room])
            ended = size < room
            if at_start and data[:size][:3].tobytes() == _BYTE_ORDER_MARK:
                data, size = data[3:], size - 3
            at_start = at_start and size < len(_BYTE_ORDER_MARK)
            if ended and size and data[size - 1] != _NEWLINE:
                data[size] = _NEWLINE
                size += 1
            end = size if ended else find_end(data[:size])
            if end == 0 and size >= _MAX_LINE_BYTES:
                raise ValueError(
                    f"{path}: line {first_line} must end within {_MAX_LINE_BYTES >> 20}"
                    " MiB, and does not. Is this a text file, with its quotes closed?"
                )
            carried = data[end:size].copy()
            if end:
                data[end : end + _PADDING] = 0
                lines = _count_newlines(data[:end])
                yield Block(path, data[: end + _PADDING], end, first_line, lines)
                first_line += lines


def map_in_order(
    function: Callable[[_In], _Out], items: Iterable[_In], threads: int
) -> Iterator[_Out]:
    """Maps a function over items in threads, with a few results ahead at most.

    Args:
      function: what to call; it should release the GIL to gain anything.
      items: what to call it on; taken in the caller's thread.
      threads: how many calls run at once; 1 calls in the caller's thread.

    Returns:
      An iterator over results in the order of the items. An exception of a call
      surfaces in its place.

    Raises:
      ValueError: if `threads` is not positive.

    Example:
      >>> list(map_in_order(abs, [-1, -2, -3], threads=2))
      [1, 2, 3]
    """
    if threads < 1:
        raise ValueError(f"`threads` must be positive, got {threads}")
    if threads == 1:
        yield from map(function, items)
        return
    pool = ThreadPoolExecutor(threads)
    pending = deque()
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _fill(path: str, file: BufferedIOBase, buffer: np.ndarray) -> int:
    """Reads until the buffer is full or the file ends; returns the bytes read."""
    filled = 0
    try:
        while filled < len(buffer):
            count = file.readinto(buffer.data[filled:])
            if not count:
                break
            filled += count
    except (EOFError, OSError, zlib.error) as error:
        raise OSError(f"{path}: cannot be read: {error}") from error
    return filled


def _natural_order(path: str) -> list:
    """A sort key under which the numbers in a name count by value."""
    parts = re.split(r"(\d+)", path)
    # Text and numbers alternate, so two keys compare like with like.
    return [int(part) if i % 2 else part for i, part in enumerate(parts)] + [path]


@numba.njit(nogil=True, cache=True)
def _count_newlines(data):
    count = 0
    for byte in data:
        count += byte == _NEWLINE
    return count
