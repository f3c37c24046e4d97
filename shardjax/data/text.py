"""Cells of text, such as those of a CSV file, to keys, numbers and bags of keys."""

from collections.abc import Iterable
from dataclasses import dataclass

import numba
import numpy as np
import pyarrow as pa

from shardjax.data.hashing import MISSING_KEY, xxh64

_MISSING = np.uint64(MISSING_KEY)
_NOT_A_NUMBER = frozenset(
    ["nan", "NaN", "NAN", "NA", "N/A", "null", "NULL", "None", "\\N"]
)
_TRUTH = {"true": 1.0, "True": 1.0, "TRUE": 1.0}
_TRUTH |= {"false": 0.0, "False": 0.0, "FALSE": 0.0}
_INFINITY = frozenset(["inf", "infinity"])
_PLUS, _MINUS, _DOT, _ZERO, _SPACE, _TAB = 43, 45, 46, 48, 32, 9
_NINE = np.uint64(9)
_TEN = np.uint64(10)
_POWERS_OF_TEN = np.array([float(f"1e{i}") for i in range(23)])
_DONE, _UNSURE = 0, 1


@dataclass(frozen=True)
class Cells:
    """Pieces of text in one buffer.

    Attributes:
      data: uint8 [total], made read-only.
      starts: int32 or int64 [n], where each cell starts in `data`.
      stops: as `starts`, where it stops; an empty cell is a missing one.

    Example:
      >>> data = np.frombuffer(b"a,bc", np.uint8)
      >>> cells = Cells(data, starts=np.array([0, 2]), stops=np.array([1, 4]))
      >>> cells[1]
      'bc'
    """

    data: np.ndarray
    starts: np.ndarray
    stops: np.ndarray

    def __post_init__(self):
        # Kernels are compiled for read-only data or for other; let one kind be enough.
        data = self.data.view()
        data.flags.writeable = False
        object.__setattr__(self, "data", data)

    @staticmethod
    def of(texts: Iterable[str]) -> "Cells":
        """Makes cells of strings.

        Args:
          texts: [n].

        Returns:
          Cells with a buffer of their own.

        Example:
          >>> len(Cells.of(["a", "bc"]))
          2
        """
        encoded = [text.encode() for text in texts]
        offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
        data = np.frombuffer(b"".join(encoded), np.uint8)
        return Cells(data, offsets[:-1], offsets[1:])

    def to_arrow(self) -> pa.Array:
        """Copies the cells into an Arrow array.

        Returns:
          large_binary [n]; an empty cell is null.

        Example:
          >>> Cells.of(["a", ""]).to_arrow().to_pylist()
          [b'a', None]
        """
        lengths = (self.stops - self.starts).astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        at = np.repeat(self.starts - offsets[:-1], lengths) + np.arange(offsets[-1])
        present = np.packbits(lengths > 0, bitorder="little")
        buffers = [present, offsets, self.data[at]]
        return pa.Array.from_buffers(
            pa.large_binary(), len(self), [pa.py_buffer(b) for b in buffers]
        )

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, at: int) -> str:
        cell = self.data[self.starts[at] : self.stops[at]]
        return cell.tobytes().decode("utf-8", "backslashreplace")


def parse_keys(cells: Cells, integers: bool = True) -> np.ndarray:
    """Turns cells into keys.

    A number in the way it is commonly written ("42", "-1", but not "042", "+1" or
    "1e3"), that fits 64 bits, is its own key, as by `as_keys`. Any other text is hashed
    as by `hash_strings`. So equal text gives equal keys, wherever it stands.

    Args:
      cells: [n].
      integers: False hashes numbers too.

    Returns:
      uint64 [n]; `MISSING_KEY` for an empty cell.

    Example:
      >>> parse_keys(Cells.of(["42", ""])).tolist() == [42, MISSING_KEY]
      True
    """
    return _parse_keys(cells.data, cells.starts, cells.stops, integers)


def parse_bags(
    cells: Cells, separator: str, integers: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Splits cells at a separator and turns the parts into keys, as `parse_keys` does.

    Args:
      cells: [n].
      separator: one ASCII character. Nothing between two separators, or at an end, is
        no part; so an empty cell is an empty bag.
      integers: False hashes numbers too.

    Returns:
      Keys, uint64 [total], and how many belong to each cell, int32 [n].

    Raises:
      ValueError: if the separator is not one ASCII character.

    Example:
      >>> values, lengths = parse_bags(Cells.of(["7|9|", ""]), "|")
      >>> values.tolist(), lengths.tolist()
      ([7, 9], [2, 0])
    """
    check_separator(separator, "separator")
    return _parse_bags(cells.data, cells.starts, cells.stops, ord(separator), integers)


def parse_numbers(cells: Cells) -> tuple[np.ndarray, np.ndarray]:
    """Turns cells into numbers.

    Numbers of up to 15 digits are those Python reads; longer ones may differ in the
    last bit of the float64.

    Args:
      cells: [n]; decimal numbers, perhaps with an exponent or spaces around; true and
        false are 1 and 0. Empty cells and the words NA, N/A, NaN, nan, NAN, null, NULL,
        None and \\\\N are missing.

    Returns:
      float64 [n], NaN where missing or wrong; and bool [n], where it is wrong.

    Example:
      >>> parse_numbers(Cells.of(["1.5", "x"]))
      (array([1.5, nan]), array([False,  True]))
    """
    values, unsure = _parse_numbers(cells.data, cells.starts, cells.stops)
    wrong = np.zeros(len(values), bool)
    for at in np.flatnonzero(unsure):
        values[at], wrong[at] = _parse_rare(cells[int(at)].strip(" \t"))
    return values, wrong


def are_integers(cells: Cells) -> np.ndarray:
    """Says which cells `parse_keys` takes as numbers.

    Args:
      cells: [n].

    Returns:
      bool [n].

    Example:
      >>> are_integers(Cells.of(["42", "x"]))
      array([ True, False])
    """
    return _are_integers(cells.data, cells.starts, cells.stops)


def check_separator(separator: str, name: str) -> None:
    """Refuses a separator that is not one ASCII character.

    Args:
      separator: what to check.
      name: what to call it in an error.

    Raises:
      ValueError: if it is not one ASCII character, or is one that ends lines.

    Example:
      >>> check_separator("|", "bag_separator")
    """
    if len(separator) != 1 or not separator.isascii() or separator in "\r\n\0":
        raise ValueError(
            f"`{name}` must be one ASCII character that ends no line, got {separator!r}"
        )


def _parse_rare(text: str) -> tuple[float, bool]:
    """Parses a number that takes more care, or a word: value, whether it is wrong."""
    if text in _TRUTH:
        return _TRUTH[text], False
    if text == "" or text in _NOT_A_NUMBER:
        return np.nan, False
    is_word = text[-1].isalpha() and text.lstrip("+-").lower() not in _INFINITY
    if is_word or "_" in text or not text.isascii():
        return np.nan, True  # float() would take 1_000, and digits of all scripts.
    try:
        return float(text), False
    except ValueError:
        return np.nan, True


@numba.njit(nogil=True, cache=True)
def _parse_keys(data, starts, stops, integers):
    keys = np.empty(len(starts), np.uint64)
    for i in range(len(starts)):
        # Positions as int64, so that all kernels share one compiled hash.
        start, stop = np.int64(starts[i]), np.int64(stops[i])
        keys[i] = _parse_key(data, start, stop, integers)
    return keys


@numba.njit(nogil=True, cache=True)
def _parse_key(data, start, stop, integers):
    if start == stop:
        return _MISSING
    if integers:
        is_integer, key = _parse_integer(data, start, stop)
        if is_integer:
            return key
    return xxh64(data, start, stop)


@numba.njit(nogil=True, cache=True)
def _are_integers(data, starts, stops):
    found = np.empty(len(starts), np.bool_)
    for i in range(len(starts)):
        start, stop = np.int64(starts[i]), np.int64(stops[i])
        found[i] = _parse_integer(data, start, stop)[0]
    return found


@numba.njit(nogil=True, cache=True)
def _parse_integer(data, start, stop):
    """Says whether text is an integer in its one usual form, and which."""
    refused = False, np.uint64(0)
    at = start
    negative = at < stop and data[at] == _MINUS
    if negative:
        at += 1
    digits = stop - at
    if digits < 1 or digits > 20:
        return refused
    if data[at] == _ZERO and (digits > 1 or negative):
        return refused
    size = np.uint64(0)
    while at < stop:
        digit = np.uint64(data[at]) - np.uint64(_ZERO)
        if digit > _NINE:
            return refused
        # Only the 20th digit can overflow: 2**64 - 1 is 1844674407370955161 * 10 + 5.
        if at == stop - 1 and digits == 20:
            most = np.uint64(1844674407370955161)
            if size > most or (size == most and digit > np.uint64(5)):
                return refused
        size = size * _TEN + digit
        at += 1
    if not negative:
        return True, size
    if size > np.uint64(2**63):
        return refused
    return True, np.uint64(0) - size


@numba.njit(nogil=True, cache=True)
def _parse_bags(data, starts, stops, separator, integers):
    lengths = np.zeros(len(starts), np.int32)
    total = 0
    for i in range(len(starts)):
        between = True
        for at in range(starts[i], stops[i]):
            if data[at] == separator:
                between = True
            elif between:
                between = False
                lengths[i] += 1
        total += lengths[i]
    values = np.empty(total, np.uint64)
    filled = 0
    for i in range(len(starts)):
        first = np.int64(starts[i])
        for at in range(starts[i], stops[i] + 1):
            if at == stops[i] or data[at] == separator:
                if at > first:
                    values[filled] = _parse_key(data, first, np.int64(at), integers)
                    filled += 1
                first = at + 1
    return values, lengths


@numba.njit(nogil=True, cache=True)
def _parse_numbers(data, starts, stops):
    values = np.empty(len(starts), np.float64)
    unsure = np.zeros(len(starts), np.bool_)
    for i in range(len(starts)):
        start = np.int64(starts[i])
        stop = np.int64(stops[i])
        while start < stop and (data[start] == _SPACE or data[start] == _TAB):
            start += 1
        while start < stop and (data[stop - 1] == _SPACE or data[stop - 1] == _TAB):
            stop -= 1
        if start == stop:
            values[i] = np.nan
            continue
        status, value = _parse_number(data, start, stop)
        values[i] = value
        unsure[i] = status == _UNSURE
    return values, unsure


@numba.njit(nogil=True, cache=True)
def _parse_number(data, start, stop):
    """Parses a plain decimal number; one with many digits or a high power is unsure.

    A float64 holds integers to 2**53 and powers of ten to 1e22, so one product or
    quotient of such is rounded correctly (Clinger 1990). From there to 19 digits, the
    mantissa is rounded first.
    """
    unsure = _UNSURE, np.nan
    at = start
    negative = data[at] == _MINUS
    if negative or data[at] == _PLUS:
        at += 1
    mantissa = np.uint64(0)
    digits = 0
    decimals = 0
    after_dot = False
    while at < stop:
        digit = np.uint64(data[at]) - np.uint64(_ZERO)
        if digit <= _NINE:
            mantissa = mantissa * _TEN + digit
            digits += 1
            decimals += after_dot
        elif data[at] == _DOT and not after_dot:
            after_dot = True
        else:
            break
        at += 1
    if digits == 0 or digits > 19:
        return unsure
    power = -decimals
    if at < stop:
        if data[at] != 101 and data[at] != 69:  # e or E
            return unsure
        at += 1
        falling = at < stop and data[at] == _MINUS
        if falling or (at < stop and data[at] == _PLUS):
            at += 1
        if at == stop or stop - at > 4:
            return unsure
        exponent = 0
        while at < stop:
            digit = np.uint64(data[at]) - np.uint64(_ZERO)
            if digit > _NINE:
                return unsure
            exponent = exponent * 10 + np.int64(digit)
            at += 1
        power += -exponent if falling else exponent
    if power < -22 or power > 22:
        return unsure
    value = np.float64(mantissa)
    if power < 0:
        value /= _POWERS_OF_TEN[-power]
    else:
        value *= _POWERS_OF_TEN[power]
    return _DONE, -value if negative else value
