"""Columns of a table, of text or Arrow arrays, to the rows of a Batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numba
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shardjax.data.arrow_types import is_list, is_text
from shardjax.data.batch import Batch
from shardjax.data.columns import Columns
from shardjax.data.dense import signed_log
from shardjax.data.hashing import MISSING_KEY, hash_strings
from shardjax.data.text import Cells, parse_bags, parse_keys, parse_numbers
from shardjax.embed.jagged import Jagged

_NOT_A_NUMBER = "is not a number"
_NOT_FINITE = "is not finite in float32"
_NOT_A_KEY = "is not a whole number below 2**53, so it cannot be a key"
_MOST = np.finfo(np.float32).max


class ColumnReader(Protocol):
    """Protocol: gives the values of a column as what its kind needs.

    Masks are bool [rows], or None if they hold nowhere.
    """

    def numbers(self) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Reads numbers of any dtype, [rows].

        Also where they are missing, as they also are where they are NaN; and wrong.
        """
        ...

    def write_keys(self, out: np.ndarray) -> np.ndarray | None:
        """Writes uint64 [rows], `MISSING_KEY` where missing; says where it is wrong."""
        ...

    def bags(self, separator: str) -> tuple[Jagged, np.ndarray | None]:
        """Reads bags of keys, empty where missing; and where they are wrong."""
        ...

    def show(self, row: int) -> str:
        """Shows a value in an error."""
        ...


@dataclass(frozen=True)
class TextColumn:
    """Reads a column of text cells, as `parse_keys` and its like do.

    Attributes:
      cells: [rows].
    """

    cells: Cells

    def numbers(self) -> tuple[np.ndarray, None, np.ndarray]:
        """Reads float64 [rows], NaN where missing or wrong; and where it is wrong."""
        values, wrong = parse_numbers(self.cells)
        return values, None, wrong

    def write_keys(self, out: np.ndarray) -> None:
        """Writes uint64 [rows]; no text is wrong."""
        out[:] = parse_keys(self.cells)

    def bags(self, separator: str) -> tuple[Jagged, None]:
        """Reads bags of keys; no text is wrong."""
        return Jagged(*parse_bags(self.cells, separator)), None

    def show(self, row: int) -> str:
        """Shows a cell."""
        return repr(self.cells[row])


class ArrowColumn:
    """Reads an Arrow array: text is hashed, integers and true and false are kept.

    Args:
      array: [rows]; dictionaries, lists of all sorts and extension types as well.
    """

    def __init__(self, array: pa.Array):
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        if isinstance(array, pa.DictionaryArray) and not is_text(array.type.value_type):
            array = array.dictionary_decode()
        if pa.types.is_decimal(array.type) or pa.types.is_float16(array.type):
            array = array.cast(pa.float64())
        if pa.types.is_boolean(array.type):
            array = array.cast(pa.uint8())
        self._array = array
        self._missing = (
            array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
        )

    def numbers(self) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """Reads numbers [rows], where they are missing, and where they are wrong."""
        array = self._array
        if pa.types.is_null(array.type):
            return np.full(len(array), np.nan), None, None
        if _is_text_array(array):
            values, wrong = parse_numbers(self._cells())
            return values, None, wrong
        return _raw(array), self._missing, None

    def write_keys(self, out: np.ndarray) -> np.ndarray | None:
        """Writes uint64 [rows]; a float that is no whole number is wrong."""
        array = self._array
        if pa.types.is_null(array.type) or _is_text_array(array):
            out[:] = hash_strings(array)
            return None
        values = _raw(array)
        missing = self._missing
        wrong = None
        if values.dtype.kind == "f":
            nan = np.isnan(values)
            missing = nan if missing is None else nan | missing
            whole = (np.trunc(values) == values) & (np.abs(values) < 2.0**53)
            wrong = ~missing & ~whole
            values = np.where(whole, values, 0).astype(np.int64)
        # A signed key keeps its bits.
        np.copyto(out if values.dtype.kind == "u" else out.view(np.int64), values)
        if missing is not None:
            np.copyto(out, np.uint64(MISSING_KEY), where=missing)
        return wrong

    def bags(self, separator: str) -> tuple[Jagged, np.ndarray | None]:
        """Reads bags: lists, text between separators, or one key or none."""
        array = self._array
        if is_list(array.type):
            # Null lists may span values; flatten leaves them out.
            flat = array.flatten()
            values, wrong = _keys_of(ArrowColumn(flat), len(flat))
            lengths = pc.call_function("list_value_length", [array])
            lengths = lengths.fill_null(0).to_numpy()
            if wrong is not None:
                rows = np.repeat(np.arange(len(array)), lengths)
                wrong = np.bincount(rows[wrong], minlength=len(array)) > 0
            return Jagged(values, lengths), wrong
        if _is_text_array(array):
            return Jagged(*parse_bags(self._cells(), separator, integers=False)), None
        values, wrong = _keys_of(self, len(array))
        present = array.is_valid().to_numpy(zero_copy_only=False)
        if pa.types.is_floating(array.type):
            present &= ~np.isnan(_raw(array))
        return Jagged(values[present], present.astype(np.int32)), wrong

    def show(self, row: int) -> str:
        """Shows a value."""
        return repr(self._array[row].as_py())

    def _cells(self) -> Cells:
        array = self._array
        if isinstance(array, pa.DictionaryArray):
            array = array.dictionary_decode()
        array = array.cast(pa.large_binary())
        if len(array) == 0:
            return Cells.of([])
        _, offsets, data = array.buffers()
        offsets = np.frombuffer(offsets, np.int64)
        offsets = offsets[array.offset : array.offset + len(array) + 1]
        if offsets[-1] < 2**31:
            offsets = offsets.astype(np.int32)  # As of CSV: one kernel serves both.
        stops = offsets[1:]
        if self._missing is not None:
            stops = np.where(self._missing, offsets[:-1], stops)
        return Cells(np.frombuffer(data or b"", np.uint8), offsets[:-1], stops)


def make_batch(
    columns: Columns,
    readers: Mapping[str, ColumnReader],
    size: int,
    *,
    skip: bool,
    place: Callable[[int], str],
) -> Batch:
    """Makes rows of columns.

    Args:
      columns: what each is for.
      readers: by name, for all `columns.used`.
      size: how many rows.
      skip: True leaves out wrong rows and counts them; False raises at the first.
      place: says where a row stands, for an error.

    Returns:
      A batch: dense and categorical features in the order of the table.

    Raises:
      ValueError: if a value is wrong and `skip` is False.

    Example:
      >>> table = pa.table({"click": [1, 0], "item": ["a", None]})
      >>> from shardjax.data.columns import infer_columns
      >>> columns = infer_columns(table)
      >>> readers = {
      ...     name: ArrowColumn(table[name].combine_chunks()) for name in columns.used
      ... }
      >>> batch = make_batch(columns, readers, 2, skip=False, place=str)
      >>> batch.labels.tolist(), batch.fixed[0, 1] == MISSING_KEY
      ([1.0, 0.0], np.True_)
    """
    wrong = _WrongRows(size)

    def required_numbers(name: str, rule: str) -> np.ndarray:
        values, missing, bad = readers[name].numbers()
        values = values.astype(np.float64)
        wrong.add(name, bad, _NOT_A_NUMBER)
        wrong.add(name, missing, rule)
        wrong.add(name, np.isnan(values), rule)
        wrong.add(name, np.abs(values) > _MOST, _NOT_FINITE)
        return values

    labels = required_numbers(columns.label, "is missing, and a label may not be")
    if columns.label_threshold is not None:
        labels = labels >= columns.label_threshold
    dense_names = columns.names("dense")
    dense = np.empty((size, len(dense_names)), np.float32)
    for at, name in enumerate(dense_names):
        out = dense[:, at]
        values, missing, bad = readers[name].numbers()
        wrong.add(name, bad, _NOT_A_NUMBER)
        finite = _write_dense(values, columns.dense_transform == "log", out)
        if missing is not None:
            np.copyto(out, 0, where=missing)
        if not finite:
            wrong.add(name, ~np.isfinite(out), _NOT_FINITE)
    fixed_names = columns.names("categorical")
    fixed = np.empty((len(fixed_names), size), np.uint64)
    for at, name in enumerate(fixed_names):
        wrong.add(name, readers[name].write_keys(fixed[at]), _NOT_A_KEY)
    jagged = {}
    for name in columns.names("bag"):
        jagged[name], bad = readers[name].bags(columns.bag_separator)
        wrong.add(name, bad, _NOT_A_KEY)
    weights = None
    if columns.weight is not None:
        weights = required_numbers(
            columns.weight, "is missing, and a weight may not be"
        )
        wrong.add(columns.weight, weights < 0, "is negative, and a weight may not be")
    groups = None
    if columns.group is not None:
        groups, bad = _keys_of(readers[columns.group], size)
        wrong.add(columns.group, bad, _NOT_A_KEY)

    if wrong.any and not skip:
        row, name, rule = wrong.first()
        raise ValueError(
            f"{place(row)}, column {name!r}: {readers[name].show(row)} {rule}. Give"
            " on_bad_line='skip' to leave such lines out and count them."
        )
    with np.errstate(over="ignore"):  # Of rows that are left out below.
        batch = Batch(labels, dense, fixed, fixed_names, jagged, weights, groups)
    if not wrong.any:
        return batch
    good = np.flatnonzero(~wrong.rows)
    return replace(batch.take(good), bad_lines=size - len(good))


class _WrongRows:
    """Collects which rows are wrong and why."""

    def __init__(self, size: int):
        self.rows = np.zeros(size, bool)
        self.any = False
        self._found: list[tuple[np.ndarray, str, str]] = []

    def add(self, name: str, wrong: np.ndarray | None, rule: str) -> None:
        """Notes rows in which a column breaks a rule."""
        if wrong is not None and wrong.any():
            self.rows |= wrong
            self.any = True
            self._found.append((wrong, name, rule))

    def first(self) -> tuple[int, str, str]:
        """Gives the first wrong row, the column and the rule it breaks."""
        row = int(np.argmax(self.rows))
        return next((row, name, rule) for rows, name, rule in self._found if rows[row])


def _keys_of(reader: ColumnReader, size: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Keys in an array of their own, and where they are wrong."""
    keys = np.empty(size, np.uint64)
    wrong = reader.write_keys(keys)
    return keys, wrong


def _is_text_array(array: pa.Array) -> bool:
    return is_text(array.type) or isinstance(array, pa.DictionaryArray)


def _raw(array: pa.Array) -> np.ndarray:
    """The values of a numeric array without a copy; those of nulls are arbitrary."""
    _, data = array.buffers()
    return pa.Array.from_buffers(
        array.type, len(array), [None, data], offset=array.offset
    ).to_numpy()


@numba.njit(nogil=True, cache=True)
def _write_dense(values, log, out):
    """Transforms numbers to float32, NaN to 0; says whether all results are finite."""
    finite = True
    for i in range(len(values)):
        value = np.float64(values[i])
        if np.isnan(value):
            out[i] = 0
        else:
            out[i] = signed_log(value) if log else np.float32(value)
            finite &= np.isfinite(out[i])
    return finite
