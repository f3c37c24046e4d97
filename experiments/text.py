"""Bytes of text to train and evaluate a language model on.

By default the sources of Python's own standard library: real text that is on every machine.
The bytes of all files are one array per split, with a `SEPARATOR` before the first file and
after each. About a twentieth of the files, chosen by a hash of their path, is held out.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from shardjax.data.files import find_files

SEPARATOR = 0
"""The byte between files."""

_TEST_FOLDERS = {"test", "tests", "idle_test"}
# pydoc_data: one generated file of prose, which would be most of what is held out
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "pydoc_data"}


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The text."""

    path: str | None = None
    """Files to train on: a path or a quoted glob; without it, the sources of Python's
    standard library."""
    eval_path: str | None = None
    """Files to evaluate on; without them, some of those of --data.path are held out."""
    held_out: float = 0.05
    """Share of the files to hold out, chosen by a hash of their path."""
    tests: bool = False
    """With the standard library's tests, which are more than the rest of it."""

    def __post_init__(self):
        if not 0 < self.held_out < 1:
            raise ValueError(f"`held_out` must lie in (0, 1), got {self.held_out}")
        if self.path is None and self.eval_path is not None:
            raise ValueError("`eval_path` needs a `path` to train on")


@dataclass(frozen=True)
class Text:
    """The bytes of a run.

    Attributes:
      train, held_out: uint8 [n], the files of a split and the separators between them.
      train_files, held_out_files: their paths, in order.
    """

    train: np.ndarray
    held_out: np.ndarray
    train_files: tuple[str, ...]
    held_out_files: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{len(self.train)} bytes of {len(self.train_files)} files to train on,"
            f" {len(self.held_out)} bytes of {len(self.held_out_files)} held out"
        )


def open_text(config: TextConfig) -> Text:
    """Reads what the config names.

    Raises:
      OSError: for files that are not there or cannot be read.
      ValueError: where a split has no file.
    """
    if config.path is None:
        root = sysconfig.get_paths()["stdlib"]
        files = _library_files(root, config.tests)
    else:
        files = find_files(config.path)
        root = _root(config.path)
    if config.eval_path is not None:
        others = find_files(config.eval_path)
        return Text(_read(files), _read(others), tuple(files), tuple(others))
    kept, held_out = [], []
    for file in files:
        chosen = is_held_out(os.path.relpath(file, root), config.held_out)
        (held_out if chosen else kept).append(file)
    for split, name in ((kept, "train on"), (held_out, "hold out")):
        if not split:
            raise ValueError(
                f"there must be files to {name}, and of the {len(files)} files of"
                f" {config.path or root!r} the hash of the path chose none. Give more"
                " files, another --data.held-out, or --data.eval-path"
            )
    return Text(_read(kept), _read(held_out), tuple(kept), tuple(held_out))


def is_held_out(path: str, fraction: float) -> bool:
    """Whether a file is held out, by a hash of its relative path.

    Args:
      path: relative to the folder of all files.
      fraction: of the files, about, to hold out.

    Example:
      >>> [is_held_out(f"{i}.py", 0.05) for i in range(100)].count(True)
      5
    """
    digest = hashlib.sha256(Path(path).as_posix().encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def training_batch(
    stream: np.ndarray, *, seed: int, step: int, batch_size: int, seq_len: int
) -> dict[str, np.ndarray]:
    """Random crops: a function of the seed, the step and the index in the batch only.

    Args:
      stream: uint8 [n], as of `Text.train`.
      seed, step: not negative, below 2**64.
      batch_size: crops.
      seq_len: predicted bytes of each.

    Returns:
      "tokens": uint8 [batch_size, seq_len + 1]; "weights": float32 ones
      [batch_size, seq_len]. A larger batch begins with the crops of a smaller one.

    Raises:
      ValueError: if the stream is shorter than a crop.

    Example:
      >>> stream = np.arange(100, dtype=np.uint8)
      >>> batch = training_batch(stream, seed=0, step=7, batch_size=2, seq_len=3)
      >>> batch["tokens"].shape
      (2, 4)
    """
    crops = len(stream) - seq_len
    if crops < 1:
        raise ValueError(
            f"the text to train on must have more bytes than --seq-len {seq_len}, got"
            f" {len(stream)}. Give more text, or shorter sequences"
        )
    draws = np.random.Philox(key=[seed, step]).random_raw(batch_size)
    starts = (draws % np.uint64(crops)).astype(np.int64)
    return {
        "tokens": sliding_window_view(stream, seq_len + 1)[starts],
        "weights": np.ones((batch_size, seq_len), np.float32),
    }


def held_out_batches(
    stream: np.ndarray, *, batch_size: int, seq_len: int
) -> Iterator[dict[str, np.ndarray]]:
    """A pass over text in which each byte after the first is predicted exactly once.

    Windows of `seq_len` bytes overlap by half: the first half of a window is context,
    which the window before has predicted, and its bytes weigh 0. So each byte is predicted
    from at least ``seq_len // 2`` bytes, but for those at the beginning. The first byte of
    the stream, a separator, is context only.

    Args:
      stream: uint8 [n], as of `Text.held_out`.
      batch_size: windows of a batch; the last one is filled up with weight 0.
      seq_len: predicted bytes of a window.

    Yields:
      Batches as of `training_batch`.

    Raises:
      ValueError: if there is no byte to predict.

    Example:
      >>> stream = np.arange(11, dtype=np.uint8)
      >>> [batch] = held_out_batches(stream, batch_size=4, seq_len=4)
      >>> batch["tokens"][1].tolist(), batch["weights"][1].tolist()
      ([2, 3, 4, 5, 6], [0.0, 0.0, 1.0, 1.0])
    """
    predicted = len(stream) - 1
    if predicted < 1:
        raise ValueError(
            f"the text to evaluate on must have a byte to predict, got {len(stream)}"
            " bytes. Give more text"
        )
    context = seq_len // 2
    stride = seq_len - context
    windows = 1 + max(0, -(-(predicted - seq_len) // stride))
    padded = np.full((windows - 1) * stride + seq_len + 1, SEPARATOR, np.uint8)
    padded[: len(stream)] = stream
    view = sliding_window_view(padded, seq_len + 1)[::stride]
    place = np.arange(seq_len)
    for start in range(0, windows, batch_size):
        number = np.arange(start, start + batch_size)[:, None]
        new = (place >= context) | (number == 0)
        inside = number * stride + place < predicted
        # a window past the last one has no place inside
        weights = (new & inside & (number < windows)).astype(np.float32)
        tokens = np.full((batch_size, seq_len + 1), SEPARATOR, np.uint8)
        taken = view[start : start + batch_size]
        tokens[: len(taken)] = taken
        yield {"tokens": tokens, "weights": weights}


def _library_files(root: str, tests: bool) -> list[str]:
    """Python sources below a folder, in the order of their relative paths."""
    skipped = _SKIPPED_FOLDERS | (set() if tests else _TEST_FOLDERS)
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in skipped]
        files += [os.path.join(folder, n) for n in names if n.endswith(".py")]
    if not files:
        raise FileNotFoundError(
            f"there are no .py files in {root!r}, where this Python keeps its standard"
            " library. Name other text with --data.path"
        )
    return sorted(files, key=lambda f: Path(os.path.relpath(f, root)).as_posix())


def _root(pattern: str) -> str:
    """The folder above the first wildcard of a glob, or that of a file."""
    folders = Path(os.path.expanduser(pattern)).parts
    fixed = []
    for part in folders[:-1]:
        if any(c in part for c in "*?["):
            break
        fixed.append(part)
    return os.path.join(*fixed) if fixed else "."


def _read(files) -> np.ndarray:
    """The bytes of files in one array, a separator before the first and after each."""
    sizes = [_trying(file, os.path.getsize) for file in files]
    stream = np.full(1 + sum(sizes) + len(sizes), SEPARATOR, np.uint8)
    at = 1
    for file, size in zip(files, sizes, strict=True):
        stream[at : at + size] = _trying(file, np.fromfile, np.uint8, size)
        at += size + 1
    return stream


def _trying(file: str, read, *arguments):
    """`read(file, *arguments)`; an error that names the file."""
    try:
        return read(file, *arguments)
    except OSError as error:
        raise OSError(
            f"{file}: cannot be read: {error.strerror or error}. Leave it out of the"
            " files, or change who may read it"
        ) from error
