"""Columns of a table, of text or Arrow arrays, to the rows of a Batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numba
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shardjax.data.batch import Batch
from shardjax.data.columns import Columns, is_list, is_text
from shardjax.data.dense import signed_log
from shardjax.data.hashing import MISSING_KEY, hash_strings
from shardjax.data.text import Cells, parse_bags, parse_keys, parse_numbers
from shardjax.embed.jagged import Jagged, as_keys

_NOT_A_NUMBER = "is not a number"
_NOT_FINITE = "is not finite in float32"
_NOT_A_KEY = "is not a whole number below 2**53, so it cannot be a key"
_MOST = np.finfo(np.float32).max


class ColumnReader(Protocol):
    """Protocol: gives the values of a column as what its kind needs.

    Each method also gives bool [rows], where a value is wrong, or None if none is.
    """

    def numbers(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Reads float64 [rows], NaN where missing or wrong."""
        ...

    def keys(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Reads uint64 [rows], `MISSING_KEY` where missing."""
        ...

    def bags(self, separator: str) -> tuple[Jagged, np.ndarray | None]:
        """Reads bags of keys, empty where missing."""
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

    def numbers(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Reads float64 [rows], NaN where missing or wrong; and where it is wrong."""
        return parse_numbers(self.cells)

    def keys(self) -> tuple[np.ndarray, None]:
        """Reads uint64 [rows]; no text is wrong."""
        return parse_keys(self.cells), None

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

    def numbers(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Reads float64 [rows], NaN where missing or wrong; and where it is wrong."""
        array = self._array
        if pa.types.is_null(array.type):
            return np.full(len(array), np.nan), None
        if _is_text_array(array):
            return parse_numbers(self._cells())
        values = _raw(array).astype(np.float64)
        if self._missing is not None:
            values[self._missing] = np.nan
        return values, None

    def keys(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Reads uint64 [rows]; a float that is no whole number is wrong."""
        array = self._array
        if pa.types.is_null(array.type) or _is_text_array(array):
            return hash_strings(array), None
        keys = _raw(array)
        missing = self._missing
        wrong = None
        if keys.dtype.kind == "f":
            nan = np.isnan(keys)
            missing = nan if missing is None else nan | missing
            wrong = ~missing & ~((np.trunc(keys) == keys) & (np.abs(keys) < 2.0**53))
            keys = np.where(missing | wrong, 0, keys).astype(np.int64)
        keys = as_keys(keys)
        if missing is not None:
            keys = np.where(missing, np.uint64(MISSING_KEY), keys)
        return keys, wrong if wrong is not None and wrong.any() else None

    def bags(self, separator: str) -> tuple[Jagged, np.ndarray | None]:
        """Reads bags: lists, text between separators, or one key or none."""
        array = self._array
        if is_list(array.type):
            # Null lists may span values that flatten leaves out, so it comes first.
            values, wrong = ArrowColumn(array.flatten()).keys()
            lengths = pc.call_function("list_value_length", [array])
            lengths = lengths.fill_null(0).to_numpy()
            if wrong is not None:
                rows = np.repeat(np.arange(len(array)), lengths)
                wrong = np.bincount(rows[wrong], minlength=len(array)) > 0
            return Jagged(values, lengths), wrong
        if _is_text_array(array):
            return Jagged(*parse_bags(self._cells(), separator, integers=False)), None
        values, wrong = self.keys()
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

    def numbers_of(name: str, missing: str = "") -> np.ndarray:
        values, bad = readers[name].numbers()
        wrong.add(name, bad, _NOT_A_NUMBER)
        if missing:
            wrong.add(name, np.isnan(values), missing)
        wrong.add(name, np.abs(values) > _MOST, _NOT_FINITE)
        return values

    def keys_of(name: str) -> np.ndarray:
        keys, bad = readers[name].keys()
        wrong.add(name, bad, _NOT_A_KEY)
        return keys

    labels = numbers_of(columns.label, "is missing, and a label may not be")
    if columns.label_threshold is not None:
        labels = labels >= columns.label_threshold
    dense_names = columns.names("dense")
    dense = np.empty((size, len(dense_names)), np.float32)
    for at, name in enumerate(dense_names):
        values, bad = readers[name].numbers()
        wrong.add(name, bad, _NOT_A_NUMBER)
        if not _write_dense(values, columns.dense_transform == "log", dense[:, at]):
            wrong.add(name, ~np.isfinite(dense[:, at]), _NOT_FINITE)
    fixed_names = columns.names("categorical")
    fixed = np.empty((len(fixed_names), size), np.uint64)
    for at, name in enumerate(fixed_names):
        fixed[at] = keys_of(name)
    jagged = {}
    for name in columns.names("bag"):
        jagged[name], bad = readers[name].bags(columns.bag_separator)
        wrong.add(name, bad, _NOT_A_KEY)
    weights = None
    if columns.weight is not None:
        weights = numbers_of(columns.weight, "is missing, and a weight may not be")
        wrong.add(columns.weight, weights < 0, "is negative, and a weight may not be")
    groups = None if columns.group is None else keys_of(columns.group)

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
    """Transforms float64 to float32, NaN to 0; says whether all results are finite."""
    finite = True
    for i in range(len(values)):
        value = values[i]
        if np.isnan(value):
            out[i] = 0
        else:
            out[i] = signed_log(value) if log else np.float32(value)
            finite &= np.isfinite(out[i])
    return finite
