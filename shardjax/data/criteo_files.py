"""Criteo click logs: tab-separated label, 13 integers and 26 hexadecimal ids."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numba
import numpy as np

from shardjax.data.batch import Batch
from shardjax.data.dense import DenseTransform, check_dense_transform, signed_log
from shardjax.data.files import (
    BLOCK_BYTES,
    Block,
    Paths,
    find_files,
    map_in_order,
    read_blocks,
)
from shardjax.data.hashing import MISSING_KEY
from shardjax.data.source import OnBadLine, check_on_bad_line

DENSE_NAMES = tuple(f"I{i}" for i in range(1, 14))
CATEGORICAL_NAMES = tuple(f"C{i}" for i in range(1, 27))

_FIELDS = ("label", *DENSE_NAMES, *CATEGORICAL_NAMES)
_N_DENSE = len(DENSE_NAMES)
_N_CATEGORICAL = len(CATEGORICAL_NAMES)
_TAB, _NEWLINE, _RETURN, _MINUS, _ZERO = 9, 10, 13, 45, 48
_MISSING = np.uint64(MISSING_KEY)
_NOT_HEX = 255
_HEX = np.full(256, _NOT_HEX, np.uint8)
for _digit in range(16):
    _HEX[ord(f"{_digit:x}")] = _HEX[ord(f"{_digit:X}")] = _digit


def criteo(
    paths: Paths,
    *,
    on_bad_line: OnBadLine = "error",
    dense_transform: DenseTransform = "log",
    block_bytes: int = BLOCK_BYTES,
    threads: int = 1,
) -> "CriteoSource":
    """Reads Criteo click logs: Kaggle's `train.txt`, the Terabyte set's `day_*`.

    A line has 40 fields between tabs: a label, 0 or 1; 13 integers, which may be empty
    or negative; 26 ids of up to 16 hexadecimal digits, which may be empty. It may end
    in one more tab, or in CRLF. Blank lines are passed over.

    The integers become dense features I1 to I13, see `DenseTransform`; the ids become
    features C1 to C26: the number itself is the key, so a Parquet file of the same ids
    as integers gives the same keys; a missing one is `MISSING_KEY`.

    Args:
      paths: files, plain or gzip, as of `find_files`.
      on_bad_line: "error" raises at the first line that is not of this form; "skip"
        leaves it out and counts it in `Batch.bad_lines`.
      dense_transform: "log" or "none".
      block_bytes: how much text makes a chunk.
      threads: how many chunks are parsed at once.

    Returns:
      A source of batches with 13 dense and 26 fixed features.

    Raises:
      FileNotFoundError: if a file is missing or a glob matches none.
      ValueError: if an option is not one of those above; while reading, if a line is
        malformed: the error names file, line and what is wrong.

    Example:
      >>> import tempfile
      >>> with tempfile.NamedTemporaryFile("w", suffix=".tsv") as file:
      ...     size = file.write("\\t".join(["1", "5", *[""] * 12, "ff", *["a"] * 25]))
      ...     file.flush()
      ...     batch = next(criteo(file.name).chunks())
      >>> batch.labels.tolist(), batch.fixed[:2, 0].tolist()
      ([1.0], [255, 10])
      >>> batch.dense[0, :2].round(3).tolist() == np.float32([1.792, 0]).tolist()
      True
    """
    check_on_bad_line(on_bad_line)
    check_dense_transform(dense_transform)
    return CriteoSource(
        find_files(paths), on_bad_line, dense_transform, block_bytes, threads
    )


@dataclass(frozen=True)
class CriteoSource:
    """A source of Criteo logs; `criteo` makes it and says what the attributes mean."""

    files: tuple[str, ...]
    on_bad_line: OnBadLine
    dense_transform: DenseTransform
    block_bytes: int
    threads: int

    @property
    def feature_names(self) -> tuple[str, ...]:
        """C1 to C26."""
        return CATEGORICAL_NAMES

    @property
    def n_dense(self) -> int:
        """13."""
        return _N_DENSE

    def chunks(self, start_chunk: int = 0) -> Iterator[Batch]:
        """Starts a fresh pass over the files.

        Args:
          start_chunk: how many chunks to pass over without parsing them.

        Returns:
          An iterator over one chunk for each block of lines.
        """
        blocks = (
            block
            for path in self.files
            for block in read_blocks(path, self.block_bytes)
        )
        return map_in_order(
            self._parse, islice(blocks, start_chunk, None), self.threads
        )

    def _parse(self, block: Block) -> Batch:
        labels = np.empty(block.lines, np.float32)
        dense = np.empty((block.lines, _N_DENSE), np.float32)
        fixed = np.empty((_N_CATEGORICAL, block.lines), np.uint64)
        skip = self.on_bad_line == "skip"
        rows, bad_lines, bad_start = _parse_lines(
            block.data,
            block.size,
            self.dense_transform == "log",
            skip,
            labels,
            dense,
            fixed,
        )
        if bad_lines and not skip:
            line = bytes(block.data[bad_start : block.size]).split(b"\n", 1)[0]
            raise ValueError(
                f"{block.path}, line {block.line_number(bad_start)}: {_explain(line)}."
                " Give on_bad_line='skip' to leave such lines out and count them."
            )
        return Batch(
            labels[:rows],
            dense[:rows],
            fixed[:, :rows],
            CATEGORICAL_NAMES,
            bad_lines=bad_lines,
        )


def _explain(line: bytes) -> str:
    """Says what is wrong with a line that the kernel refused."""
    fields = line.removesuffix(b"\r").split(b"\t")
    n_fields = len(fields)
    if n_fields == len(_FIELDS) + 1 and not fields[-1]:
        fields.pop()
    if len(fields) != len(_FIELDS):
        return f"expected {len(_FIELDS)} fields between tabs, got {n_fields}"
    for number, (name, text) in enumerate(zip(_FIELDS, fields, strict=True), 1):
        if name == "label":
            wrong = "is not 0 or 1" if text not in (b"0", b"1") else ""
        elif name in DENSE_NAMES:
            wrong = _explain_integer(text)
        else:
            wrong = _explain_hex(text)
        if wrong:
            shown = repr(text.decode("utf-8", "backslashreplace"))
            return f"field {number} ({name}): {shown} {wrong}"
    raise AssertionError(f"the kernel refused a good line: {line!r}")


def _explain_integer(text: bytes) -> str:
    digits = text.removeprefix(b"-")
    if not text or (digits.isdigit() and int(digits) < 2**63 and len(digits) < 20):
        return ""
    return "is not a 64-bit integer" if digits.isdigit() else "is not an integer"


def _explain_hex(text: bytes) -> str:
    if any(_HEX[byte] == _NOT_HEX for byte in text):
        return "is not a hexadecimal number"
    return "has more than 16 hexadecimal digits" if len(text) > 16 else ""


@numba.njit(nogil=True, cache=True)
def _parse_lines(data, size, log, skip, labels, dense, fixed):
    """Parses lines into rows; returns rows, bad lines, and where the last bad one is.

    Every read of `data` stays within it: a line is left at its newline at the latest,
    the last byte before `size` is one, and 32 bytes follow it.
    """
    row = 0
    bad_lines = 0
    bad_start = -1
    at = 0
    while at < size:
        start = at
        if data[at] == _NEWLINE or (data[at] == _RETURN and data[at + 1] == _NEWLINE):
            at += 1 if data[at] == _NEWLINE else 2
            continue
        label = np.int64(data[at]) - _ZERO
        if (label == 0 or label == 1) and data[at + 1] == _TAB:
            labels[row] = label
            at = _parse_integers(data, at + 2, log, dense[row])
        else:
            at = -1
        if at >= 0:
            at = _parse_ids(data, at, fixed, row)
        if at >= 0:
            row += 1
            continue
        bad_lines += 1
        bad_start = start
        if not skip:
            break
        at = start
        while data[at] != _NEWLINE:
            at += 1
        at += 1
    return row, bad_lines, bad_start


@numba.njit(nogil=True, cache=True, inline="always")
def _parse_integers(data, at, log, values):
    """Parses 13 integers, each ended by a tab; returns where the next field starts.

    Returns -1 if one of them is malformed.
    """
    for j in range(_N_DENSE):
        negative = data[at] == _MINUS
        if negative:
            at += 1
        first = at
        size = np.uint64(0)
        digit = np.uint64(data[at]) - np.uint64(_ZERO)
        while digit <= np.uint64(9):
            size = size * np.uint64(10) + digit
            at += 1
            digit = np.uint64(data[at]) - np.uint64(_ZERO)
        digits = at - first
        if data[at] != _TAB or (negative and digits == 0):
            return -1
        # 19 digits cannot overflow a uint64, but may an int64.
        if digits > 19 or size > np.uint64(2**63 - 1):
            return -1
        at += 1
        value = -float(size) if negative else float(size)
        values[j] = signed_log(value) if log else np.float32(value)
    return at


@numba.njit(nogil=True, cache=True, inline="always")
def _parse_ids(data, at, fixed, row):
    """Parses 26 ids and the end of the line; returns where the next line starts.

    Returns -1 if one of them is malformed or the line goes on.
    """
    for j in range(_N_CATEGORICAL):
        key = np.uint64(0)
        first = at
        word = _load_word(data, at)
        if _are_hex(word):
            key = _hex_value(word)
            at += 8
        digit = _HEX[data[at]]
        while digit != _NOT_HEX:
            key = key << np.uint64(4) | np.uint64(digit)
            at += 1
            digit = _HEX[data[at]]
        if at - first > 16:
            return -1
        fixed[j, row] = key if at > first else _MISSING
        if data[at] == _TAB:
            at += 1
        elif j < _N_CATEGORICAL - 1:
            return -1
    if data[at] == _RETURN:
        at += 1
    return at + 1 if data[at] == _NEWLINE else -1


@numba.njit(nogil=True, cache=True, inline="always")
def _load_word(data, at):
    """Loads 8 bytes, the first one lowest; LLVM makes one load of it."""
    word = np.uint64(0)
    for i in range(8):
        word |= np.uint64(data[at + i]) << np.uint64(8 * i)
    return word


@numba.njit(nogil=True, cache=True, inline="always")
def _are_hex(word):
    """Says whether all 8 bytes are hexadecimal digits.

    Adding 0x80 - c to a byte below 0x80 sets its high bit if it is c or more.
    """
    high = np.uint64(0x8080808080808080)
    low = word | np.uint64(0x2020202020202020)
    digits = (word + np.uint64(0x5050505050505050)) & ~(
        word + np.uint64(0x4646464646464646)
    )
    letters = (low + np.uint64(0x1F1F1F1F1F1F1F1F)) & ~(
        low + np.uint64(0x1919191919191919)
    )
    return word & high == 0 and (digits | letters) & high == high


@numba.njit(nogil=True, cache=True, inline="always")
def _hex_value(word):
    """Reads 8 hexadecimal digits as a number: nibbles to bytes, to halves, to one."""
    value = (word & np.uint64(0x0F0F0F0F0F0F0F0F)) + np.uint64(9) * (
        word >> np.uint64(6) & np.uint64(0x0101010101010101)
    )
    value = (value << np.uint64(4) | value >> np.uint64(8)) & np.uint64(
        0x00FF00FF00FF00FF
    )
    value = (value << np.uint64(8) | value >> np.uint64(16)) & np.uint64(
        0x0000FFFF0000FFFF
    )
    return (value << np.uint64(16) | value >> np.uint64(32)) & np.uint64(0xFFFFFFFF)
