"""Lines of words between blanks, such as `label 3:1 10:0.5`, as flat arrays."""

from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np

from shardjax.data.dense import signed_log
from shardjax.data.files import Block
from shardjax.data.text import Cells, parse_keys, parse_numbers
from shardjax.embed.jagged import Jagged

_TAB, _NEWLINE, _RETURN, _SPACE, _HASH, _COLON, _ZERO = 9, 10, 13, 32, 35, 58, 48
_MOST = np.finfo(np.float32).max


@dataclass(frozen=True)
class Tokens:
    """The words of the lines of a block, lines without words left out.

    Attributes:
      block: where they are.
      lines: int32 [n_tokens], the line of each word, numbered from 0 without gaps.
      firsts: int32 [n_lines], the first word of each line.
      starts: int32 [n_tokens], where each word starts in the block.
      stops: int32 [n_tokens], where it stops.
      colons: int32 [n_tokens, 2], its first two colons; `stops` where it has fewer.
      n_colons: int32 [n_tokens], how many it has.
    """

    block: Block
    lines: np.ndarray
    firsts: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    colons: np.ndarray
    n_colons: np.ndarray

    @property
    def n_lines(self) -> int:
        """How many lines there are."""
        return len(self.firsts)

    def cells(self, at: np.ndarray | None = None) -> Cells:
        """Gives words whole.

        Args:
          at: which; all by default.

        Returns:
          Cells [n].
        """
        at = np.arange(len(self.starts)) if at is None else at
        return Cells(self.block.data, self.starts[at], self.stops[at])

    def parts(self, part: int, at: np.ndarray) -> Cells:
        """Gives what is before, between or after the first two colons of words.

        Args:
          part: 0, 1 or 2.
          at: which words.

        Returns:
          Cells [n].
        """
        starts = self.starts if part == 0 else self.colons[:, part - 1] + 1
        stops = self.stops if part == 2 else self.colons[:, part]
        return Cells(self.block.data, starts[at], stops[at])

    def show(self, at: int) -> str:
        """Shows a word in an error, cut if it is long."""
        word = self.cells()[at]
        return repr(word if len(word) <= 60 else word[:57] + "...")

    def place(self, line: int) -> str:
        """Says where a line is, for an error."""
        number = self.block.line_number(int(self.starts[self.firsts[line]]))
        return f"{self.block.path}, line {number}"


def split_block(block: Block, comments: bool = False) -> Tokens:
    """Splits the lines of a block at spaces and tabs.

    Args:
      block: what to split.
      comments: whether a `#` ends a line.

    Returns:
      The words.

    Example:
      >>> data = np.frombuffer(b"1 3:1\\n\\n0 # none\\n" + bytes(32), np.uint8)
      >>> tokens = split_block(Block("a", data, 16, 1, 3), comments=True)
      >>> [tokens.cells()[i] for i in range(3)], tokens.lines.tolist()
      (['1', '3:1', '0'], [0, 0, 1])
    """
    n_lines, n_tokens = _count(block.data, block.size, comments)
    tokens = Tokens(
        block,
        lines=np.empty(n_tokens, np.int32),
        firsts=np.empty(n_lines, np.int32),
        starts=np.empty(n_tokens, np.int32),
        stops=np.empty(n_tokens, np.int32),
        colons=np.empty((n_tokens, 2), np.int32),
        n_colons=np.empty(n_tokens, np.int32),
    )
    _split(
        block.data,
        block.size,
        comments,
        tokens.lines,
        tokens.firsts,
        tokens.starts,
        tokens.stops,
        tokens.colons,
        tokens.n_colons,
    )
    return tokens


def renumber(
    lines: np.ndarray, n_lines: int, good: np.ndarray | None
) -> tuple[np.ndarray, int]:
    """Numbers the good lines, which become rows.

    Args:
      lines: integer [n], lines.
      n_lines: how many lines there are.
      good: the good ones, in order; None for all.

    Returns:
      integer [n], the row of each line, -1 if it is not good; and the number of rows.

    Example:
      >>> renumber(np.array([0, 1, 2, 2]), 3, good=np.array([0, 2]))
      (array([ 0, -1,  1,  1]), 2)
    """
    if good is None:
        return lines, n_lines
    rows = np.full(n_lines, -1)
    rows[good] = np.arange(len(good))
    return rows[lines], len(good)


class Faults:
    """Collects which lines are wrong, and what is wrong with the first.

    Args:
      tokens: the lines.
    """

    def __init__(self, tokens: Tokens):
        self._tokens = tokens
        self._wrong = np.zeros(tokens.n_lines, bool)
        self._first: tuple[int, str] | None = None

    def add_words(self, at: np.ndarray, rule: str) -> None:
        """Notes words that are wrong.

        Args:
          at: which, in order.
          rule: what they are not.
        """
        if len(at):
            word = int(at[0])
            self._add(self._tokens.lines[at], f"{self._tokens.show(word)} {rule}")

    def add_lines(self, at: np.ndarray, rule: str) -> None:
        """Notes lines that are wrong.

        Args:
          at: which, in order.
          rule: what is wrong with them.
        """
        if len(at):
            self._add(at, rule)

    def settle(self, skip: bool) -> np.ndarray | None:
        """Raises if a line is wrong, or says which lines are not.

        Args:
          skip: whether to leave wrong lines out instead of raising.

        Returns:
          int64 [n_good], the good lines; None if all are good.

        Raises:
          ValueError: if a line is wrong and `skip` is False: file, line and the fault.
        """
        if self._first is None:
            return None
        if not skip:
            line, fault = self._first
            raise ValueError(
                f"{self._tokens.place(line)}: {fault}. Give on_bad_line='skip' to leave"
                " such lines out and count them."
            )
        return np.flatnonzero(~self._wrong)

    def _add(self, lines: np.ndarray, fault: str) -> None:
        if self._first is None or lines[0] < self._first[0]:
            self._first = int(lines[0]), fault
        self._wrong[lines] = True


class Names:
    """Finds the numbers of known names, such as those of slots.

    Args:
      names: [n], all different.

    Example:
      >>> Names(["a", "b"]).find(Cells.of(["b", "c"]))
      array([ 1, -1])
    """

    def __init__(self, names: Sequence[str]):
        hashes = parse_keys(Cells.of(names), integers=False)
        self._order = np.argsort(hashes)
        self._hashes = hashes[self._order]

    def find(self, cells: Cells) -> np.ndarray:
        """Finds names.

        Args:
          cells: [n].

        Returns:
          int64 [n], the number of each name; -1 if it is not known.
        """
        if not len(self._hashes):
            return np.full(len(cells), -1)
        hashes = parse_keys(cells, integers=False)
        at = np.searchsorted(self._hashes, hashes)
        at[at == len(self._hashes)] = 0
        return np.where(self._hashes[at] == hashes, self._order[at], -1)


def parse_unsigned(cells: Cells) -> tuple[np.ndarray, np.ndarray]:
    """Turns cells of digits into keys, up to 2**64 - 1.

    Args:
      cells: [n].

    Returns:
      uint64 [n]; and bool [n], where a cell is something else.

    Example:
      >>> keys, wrong = parse_unsigned(Cells.of(["18446744073709551615", "-1"]))
      >>> keys.tolist(), wrong.tolist()
      ([18446744073709551615, 0], [False, True])
    """
    return _parse_unsigned(cells.data, cells.starts, cells.stops)


def parse_finite(cells: Cells) -> tuple[np.ndarray, np.ndarray]:
    """Turns cells into numbers.

    Args:
      cells: [n].

    Returns:
      float64 [n]; and bool [n], where a cell is no number that float32 holds.

    Example:
      >>> parse_finite(Cells.of(["0.5", "nan"]))[1]
      array([False,  True])
    """
    values, wrong = parse_numbers(cells)
    return values, wrong | ~(np.abs(values) <= _MOST)


def parse_labels(
    cells: Cells, threshold: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """Turns cells into labels.

    Args:
      cells: [n].
      threshold: labels are 1 where the number is at least this, else 0; None if they
        are 0 or -1, and 1, as they stand.

    Returns:
      float64 [n], 0 and 1; and bool [n], where a cell is no label.

    Example:
      >>> parse_labels(Cells.of(["-1", "+1", "2"]), None)
      (array([0., 1., 0.]), array([False, False,  True]))
    """
    values, wrong = parse_finite(cells)
    if threshold is not None:
        return (values >= threshold).astype(np.float64), wrong
    return (values == 1).astype(np.float64), ~np.isin(values, (-1, 0, 1))


def label_rule(threshold: float | None) -> str:
    """Says what a label is not, for an error."""
    if threshold is not None:
        return "is not a number, and so not a label"
    return "is not a label, 0 or 1 or -1 (or give label_threshold)"


def group_bags(
    names: Sequence[str],
    columns: np.ndarray,
    rows: np.ndarray,
    n_rows: int,
    keys: np.ndarray,
    weights: np.ndarray | None = None,
) -> dict[str, Jagged]:
    """Makes a jagged feature of the keys of each column.

    Args:
      names: [n_columns].
      columns: integer [n], the column of each key.
      rows: integer [n], its row; not decreasing.
      n_rows: how many rows there are.
      keys: uint64 [n].
      weights: float [n], or None.

    Returns:
      A feature for each name; the keys of a row stay in their order.

    Example:
      >>> columns, rows = np.array([1, 0, 1]), np.array([0, 0, 1])
      >>> bags = group_bags(["a", "b"], columns, rows, 2, np.array([5, 6, 7]))
      >>> bags["b"].values.tolist(), bags["b"].lengths.tolist()
      ([5, 7], [1, 1])
    """
    lengths = np.bincount(columns * n_rows + rows, minlength=len(names) * n_rows)
    lengths = lengths.reshape(len(names), n_rows)
    # numpy sorts integers of 16 bits by radix: in linear time.
    dtype = np.int16 if len(names) < 2**15 else np.int64
    order = np.argsort(columns.astype(dtype), kind="stable")
    ends = np.cumsum(lengths.sum(1))[:-1]
    values = np.split(keys[order], ends)
    if weights is None:
        bags = map(Jagged, values, lengths)
    else:
        bags = map(Jagged, values, lengths, np.split(weights[order], ends))
    return dict(zip(names, bags, strict=True))


def dense_matrix(values: np.ndarray, n_rows: int, width: int, log: bool) -> np.ndarray:
    """Makes dense features of numbers that come row by row.

    Args:
      values: float64 [n_rows * width].
      n_rows: how many rows there are.
      width: how many numbers a row has.
      log: whether to take sign(x) * log(1 + |x|).

    Returns:
      float32 [n_rows, width].

    Example:
      >>> dense_matrix(np.array([1.0, 2.0]), 1, 2, log=False)
      array([[1., 2.]], dtype=float32)
    """
    dense = np.empty(n_rows * width, np.float32)
    _transform(values, log, dense)
    return dense.reshape(n_rows, width)


@numba.njit(nogil=True, cache=True)
def _transform(values, log, out):
    for i in range(len(values)):
        out[i] = signed_log(values[i]) if log else np.float32(values[i])


@numba.njit(nogil=True, cache=True, inline="always")
def _is_blank(byte):
    return byte == _SPACE or byte == _TAB or byte == _RETURN


@numba.njit(nogil=True, cache=True)
def _count(data, size, comments):
    """Counts lines that have words, and words."""
    lines = 0
    tokens = 0
    in_word = False
    in_comment = False
    has_words = False
    for at in range(size):
        byte = data[at]
        if byte == _NEWLINE:
            lines += has_words
            in_word = in_comment = has_words = False
        elif in_comment:
            pass
        elif comments and byte == _HASH:
            in_comment = True
        elif _is_blank(byte):
            in_word = False
        elif not in_word:
            in_word = has_words = True
            tokens += 1
    return lines, tokens


@numba.njit(nogil=True, cache=True)
def _split(data, size, comments, lines, firsts, starts, stops, colons, n_colons):
    """Fills in the words that `_count` has counted; `data` ends in a newline."""
    line = 0
    token = 0
    at = 0
    while at < size:
        first = token
        while data[at] != _NEWLINE:
            byte = data[at]
            if comments and byte == _HASH:
                while data[at] != _NEWLINE:
                    at += 1
                break
            if _is_blank(byte):
                at += 1
                continue
            starts[token] = at
            found = 0
            while True:
                byte = data[at]
                if byte == _COLON:
                    if found < 2:
                        colons[token, found] = at
                    found += 1
                elif (
                    byte == _NEWLINE or _is_blank(byte) or (comments and byte == _HASH)
                ):
                    break
                at += 1
            for part in range(found, 2):
                colons[token, part] = at
            stops[token] = at
            n_colons[token] = found
            lines[token] = line
            token += 1
        if token > first:
            firsts[line] = first
            line += 1
        at += 1


@numba.njit(nogil=True, cache=True)
def _parse_unsigned(data, starts, stops):
    keys = np.zeros(len(starts), np.uint64)
    wrong = np.zeros(len(starts), np.bool_)
    most = np.uint64(1844674407370955161)  # (2**64 - 1) // 10
    for i in range(len(starts)):
        key = np.uint64(0)
        good = stops[i] > starts[i]
        for at in range(starts[i], stops[i]):
            digit = np.uint64(data[at]) - np.uint64(_ZERO)
            if digit > np.uint64(9) or key > most:
                good = False
                break
            if key == most and digit > np.uint64(5):
                good = False
                break
            key = key * np.uint64(10) + digit
        if good:
            keys[i] = key
        else:
            wrong[i] = True
    return keys, wrong
