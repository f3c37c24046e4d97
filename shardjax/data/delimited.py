"""Delimited text: fields, perhaps quoted, of the rows of a block."""

from dataclasses import dataclass

import numba
import numpy as np

from shardjax.data.files import Block, last_line_end
from shardjax.data.text import Cells, check_separator

_NEWLINE, _RETURN = 10, 13
_NO_QUOTE = -1
_NOT_CLOSED, _AFTER_QUOTE = -1, -2


@dataclass(frozen=True)
class Fields:
    """The fields of some rows.

    Attributes:
      data: uint8, the block's.
      starts, stops: int32 [columns, rows], where each field lies in it.
      row_starts: int32 [rows], where each row starts in it.
      bad_rows: how many rows between them were left out.
      stopped_at: where the bad row starts at which splitting stopped, or -1.
      stopped_by: what is wrong with it.
    """

    data: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    row_starts: np.ndarray
    bad_rows: int = 0
    stopped_at: int = -1
    stopped_by: str = ""

    def column(self, at: int) -> Cells:
        """Gives the cells of a column.

        Args:
          at: which one, from 0.

        Returns:
          As many cells as there are rows.
        """
        return Cells(self.data, self.starts[at], self.stops[at])


@dataclass(frozen=True)
class Dialect:
    """How fields are told apart, after RFC 4180.

    A field that starts with a quote ends at the next one, and may hold delimiters, line
    breaks and doubled quotes, each of which means one. A quote elsewhere is text.

    Attributes:
      delimiter: one ASCII character.
      quote: one ASCII character, or None.

    Raises:
      ValueError: if they are not that, or are the same.

    Example:
      >>> from shardjax.data.files import Block
      >>> data = np.frombuffer(b'1;"a;""b"\\n', np.uint8).copy()
      >>> Dialect(";").first_row(Block("file", data, len(data), 1, 1))
      (('1', 'a;"b'), 10)
    """

    delimiter: str
    quote: str | None = '"'

    def __post_init__(self):
        check_separator(self.delimiter, "delimiter")
        if self.quote is not None:
            check_separator(self.quote, "quote")
        if self.quote == self.delimiter:
            raise ValueError(
                f"`quote` and `delimiter` must differ, got {self.quote!r} for both"
            )

    def last_row_end(self, data: np.ndarray) -> int:
        """Finds where the last whole row ends, for `read_blocks`.

        Args:
          data: uint8 [n], from the start of a row.

        Returns:
          One past the newline that ends it; 0 if there is none.
        """
        if self.quote is None or not (data == ord(self.quote)).any():
            return last_line_end(data)
        return _last_row_end(data, *self._bytes)

    def first_row(self, block: Block) -> tuple[tuple[str, ...], int]:
        """Reads the first row that is not blank.

        Args:
          block: whole rows.

        Returns:
          Its fields, none if all rows are blank; and where it ends in the block.

        Raises:
          ValueError: if its quotes are wrong.
        """
        n_fields, end = _count_fields(block.data, block.size, *self._bytes)
        if not n_fields:
            return (), end
        fields = self.split(block, 0, end, n_fields, skip=False)
        if fields.stopped_by:
            line = block.line_number(fields.stopped_at)
            raise ValueError(f"{block.path}, line {line}: {fields.stopped_by}")
        return tuple(fields.column(at)[0] for at in range(n_fields)), end

    def split(
        self, block: Block, start: int, stop: int, n_columns: int, *, skip: bool
    ) -> Fields:
        """Splits whole rows into fields; writes to the block where it undoes quoting.

        Args:
          block: where they lie.
          start: where they start in the block.
          stop: where they end.
          n_columns: how many fields a row must have.
          skip: whether to go on after a bad row.

        Returns:
          The fields of the rows up to `stop`, or to the first bad one.
        """
        starts = np.empty((n_columns, block.lines), np.int32)
        stops = np.empty((n_columns, block.lines), np.int32)
        row_starts = np.empty(block.lines, np.int32)
        rows, bad_rows, bad_start, problem = _split(
            block.data, start, stop, *self._bytes, skip, starts, stops, row_starts
        )
        stopped_by = ""
        if bad_rows and not skip:
            bad_rows = 0
            stopped_by = {
                _NOT_CLOSED: "a quote is not closed",
                _AFTER_QUOTE: "a closing quote must end its field, and text follows",
            }.get(problem, f"expected {n_columns} fields, got {problem}")
        return Fields(
            block.data,
            starts[:, :rows],
            stops[:, :rows],
            row_starts[:rows],
            bad_rows,
            bad_start if stopped_by else -1,
            stopped_by,
        )

    @property
    def _bytes(self) -> tuple[int, int]:
        quote = _NO_QUOTE if self.quote is None else ord(self.quote)
        return ord(self.delimiter), quote


def guess_delimiter(block: Block) -> str:
    """Guesses the delimiter of a file.

    Args:
      block: its beginning.

    Returns:
      Tab, comma or semicolon, whichever is the most frequent in the first line; a comma
      if there is none.

    Example:
      >>> data = np.frombuffer(b"a;b,c;d\\n", np.uint8)
      >>> guess_delimiter(Block("file", data, len(data), 1, 1))
      ';'
    """
    line = block.data[: block.size].tobytes().split(b"\n", 1)[0]
    return max(",\t;", key=lambda delimiter: line.count(delimiter.encode()))


@numba.njit(nogil=True, cache=True)
def _closing_quote(data, at, size, quote):
    """Finds the quote that closes a field, -1 if none does; and if others are in it."""
    doubled = False
    while at < size:
        if data[at] == quote:
            if at + 1 == size or data[at + 1] != quote:
                return at, doubled
            doubled = True
            at += 1
        at += 1
    return -1, doubled


@numba.njit(nogil=True, cache=True)
def _last_row_end(data, delimiter, quote):
    end = 0
    at = 0
    starts_field = True
    while at < len(data):
        byte = data[at]
        if starts_field and byte == quote:
            at = _closing_quote(data, at + 1, len(data), quote)[0]
            if at < 0:
                break
            starts_field = False
        elif byte == _NEWLINE:
            end = at + 1
            starts_field = True
        else:
            starts_field = byte == delimiter
        at += 1
    return end


@numba.njit(nogil=True, cache=True)
def _count_fields(data, size, delimiter, quote):
    """Counts the fields of the first row that is not blank; says where it ends."""
    at = 0
    while at < size and (data[at] == _NEWLINE or data[at] == _RETURN):
        at += 1
    if at == size:
        return 0, at
    fields = 1
    starts_field = True
    while at < size and data[at] != _NEWLINE:
        if starts_field and data[at] == quote:
            close = _closing_quote(data, at + 1, size, quote)[0]
            at = close if close >= 0 else at
            starts_field = False
        else:
            starts_field = data[at] == delimiter
            fields += starts_field
        at += 1
    return fields, at + 1


@numba.njit(nogil=True, cache=True)
def _split(data, at, size, delimiter, quote, skip, starts, stops, row_starts):
    """Splits rows; returns rows, bad rows, where the last bad one starts and why."""
    n_columns = len(starts)
    row = 0
    bad_rows = 0
    bad_start = -1
    bad_problem = 0
    while at < size:
        start = at
        if data[at] == _NEWLINE or (data[at] == _RETURN and data[at + 1] == _NEWLINE):
            at += 1 if data[at] == _NEWLINE else 2
            continue
        column = 0
        problem = 0
        ended = False
        while not ended:
            first = at
            stop = at
            if data[at] == quote:
                first = at + 1
                close, doubled = _closing_quote(data, first, size, quote)
                if close < 0:
                    problem = _NOT_CLOSED
                    break
                stop = _undouble(data, first, close, quote) if doubled else close
                at = close + 1
                after = data[at]
                if after == _RETURN:
                    after = data[at + 1]
                    if after != _NEWLINE:
                        problem = _AFTER_QUOTE
                elif after != delimiter and after != _NEWLINE:
                    problem = _AFTER_QUOTE
                while data[at] != delimiter and data[at] != _NEWLINE:
                    at += 1
            else:
                while data[at] != delimiter and data[at] != _NEWLINE:
                    at += 1
                stop = at
                if data[at] == _NEWLINE and stop > first and data[at - 1] == _RETURN:
                    stop -= 1
            if column < n_columns:
                starts[column, row] = first
                stops[column, row] = stop
            column += 1
            ended = data[at] == _NEWLINE
            at += 1
        if problem == 0 and column != n_columns:
            problem = column
        if problem == 0:
            row_starts[row] = start
            row += 1
            continue
        bad_rows += 1
        bad_start = start
        bad_problem = problem
        if not skip:
            break
        if problem == _NOT_CLOSED:
            # The quote would swallow the rest of the file; take it for one bad line.
            at = start
            while data[at] != _NEWLINE:
                at += 1
            at += 1
    return row, bad_rows, bad_start, bad_problem


@numba.njit(nogil=True, cache=True)
def _undouble(data, first, stop, quote):
    """Makes one quote of each two, in place; returns the new end."""
    to = first
    at = first
    while at < stop:
        data[to] = data[at]
        at += 2 if data[at] == quote else 1
        to += 1
    # No newline may be left behind: lines are counted by them.
    data[to:stop] = 0
    return to
