"""Items in RAM: a column per leaf, all in one block of bytes.

Leaves of up to 64 bytes, such as rewards, actions and small observations, lie next to each
other, so that a row of them is a cache line or two; larger ones in columns of their own.
Either way leaf c of row r starts at ``starts[c] + r * strides[c]``. With the small leaves lie
what the replay knows of a row: its id and its priority. Whoever draws a row thus has
everything about it in the cache.
"""

from typing import Any

import jax
import numba
import numpy as np

from shardjax.rl.prefetch import copy_bytes, prefetch

_LINE = 64  # bytes of a cache line
_SMALL = 64
_SPARE = 16
_AHEAD = 64  # rows


@numba.njit(inline="always")
def _copy(block, start, stride, slots, first, last, out, to, width):
    """Copies rows `first` to `last` of a column; a loop for each width that is constant."""
    for i in range(first, last):
        row = start + slots[i] * stride
        copy_bytes(out, to + i * width, block, row, width)  # pyright: ignore[reportCallIssue]


@numba.njit(nogil=True, cache=True)
def _gather(block, starts, strides, widths, slots, out, out_starts):
    """Copies rows of all columns to columns in `out`."""
    rows, columns = slots.shape[0], starts.shape[0]
    for first in range(0, rows, _AHEAD):
        last = min(first + _AHEAD, rows)
        for c in range(columns):
            start, stride = starts[c], strides[c]
            for i in range(first, last):
                prefetch(block, start + slots[i] * stride)  # pyright: ignore[reportCallIssue]
        for c in range(columns):
            start, stride, width, to = starts[c], strides[c], widths[c], out_starts[c]
            if width == 4:
                _copy(block, start, stride, slots, first, last, out, to, 4)
            elif width == 1:
                _copy(block, start, stride, slots, first, last, out, to, 1)
            elif width == 16:
                _copy(block, start, stride, slots, first, last, out, to, 16)
            else:
                _copy(block, start, stride, slots, first, last, out, to, width)


class Columns:
    """Rows of a pytree: leaf l of the row in slot s is ``leaves[l][s]``.

    Args:
      example: A pytree of arrays, one row: shapes and dtypes.
      rows: How many.

    Attributes:
      ids: uint64 [rows].
      priorities: float64 [rows].
    """

    def __init__(self, example: Any, rows: int):
        paths, self._treedef = jax.tree_util.tree_flatten_with_path(example)
        if not paths:
            raise ValueError(
                "`example` must have at least one array, got a pytree without leaves:"
                f" {example!r}. Give one item as it is stored."
            )
        self.names = [jax.tree_util.keystr(path) or "item" for path, _ in paths]
        arrays = [
            _as_array(name, x) for name, (_, x) in zip(self.names, paths, strict=True)
        ]
        self._dtypes = [x.dtype for x in arrays]
        self._shapes = [x.shape for x in arrays]
        self._widths = np.array([x.nbytes for x in arrays], np.int64)
        shapes = [(), (), *self._shapes]
        dtypes = [np.dtype(np.uint64), np.dtype(np.float64), *self._dtypes]
        widths = np.array([8, 8, *self._widths], np.int64)
        starts, strides, size = _lay_out(widths, dtypes, rows)
        block = np.zeros(size + _LINE, np.uint8)  # large columns take no RAM yet
        self._block = block[-block.ctypes.data % _LINE :]
        self.ids, self.priorities, *self.leaves = (
            _column(self._block, *layout, rows)
            for layout in zip(
                shapes, dtypes, starts.tolist(), strides.tolist(), strict=True
            )
        )
        self._starts, self._strides = starts[2:], strides[2:]
        self._layouts: dict[int, tuple[np.ndarray, int]] = {}

    def tree(self, leaves: list) -> Any:
        """The pytree of an item with other leaves."""
        return jax.tree.unflatten(self._treedef, leaves)

    def take(self, slots: np.ndarray, shape: tuple[int, ...]) -> Any:
        """Copies of the rows in `slots`, int64 [n], as a pytree of arrays [*shape, ...]."""
        rows = len(slots)
        layout = self._layouts.get(rows)
        if layout is None:
            layout = _starts(self._widths, rows)
            if len(self._layouts) < 64:
                self._layouts[rows] = layout
        starts, size = layout
        out = np.empty(size, np.uint8)
        _gather(
            self._block, self._starts, self._strides, self._widths, slots, out, starts
        )
        return self.tree(
            [
                np.ndarray((*shape, *own), dtype, out, start)
                for own, dtype, start in zip(
                    self._shapes, self._dtypes, starts.tolist(), strict=True
                )
            ]
        )

    def check(self, items: Any) -> tuple[list[np.ndarray], int]:
        """The leaves of `items`, [n, ...] each, as they can be stored; and n.

        Raises:
          ValueError: if they are not like the example, with all leaves that are not.
        """
        leaves, treedef = jax.tree.flatten(items)
        if treedef != self._treedef:
            raise ValueError(
                f"`items` must have the structure of the example, {self._treedef}, got"
                f" {treedef}."
            )
        arrays = [np.asarray(x) for x in leaves]
        wrong, lengths = [], set()
        for i, x in enumerate(arrays):
            if x.ndim == 0 or x.shape[1:] != self._shapes[i]:
                wanted = ", ".join(["n", *map(str, self._shapes[i])])
                wrong.append(f"{self.names[i]} must be [{wanted}], got {list(x.shape)}")
                continue
            lengths.add(len(x))
            if x.dtype != self._dtypes[i]:
                try:
                    arrays[i] = _cast(x, self._dtypes[i])
                except ValueError as error:
                    wrong.append(f"{self.names[i]} {error}")
        if not wrong and len(lengths) > 1:
            each = (
                f"{name} {len(x)}" for name, x in zip(self.names, arrays, strict=True)
            )
            wrong.append("all must have the same length, got " + ", ".join(each))
        if wrong:
            raise ValueError(
                "`items` must be arrays like the example, with a first dimension of the"
                " number of items:\n- " + "\n- ".join(wrong)
            )
        return arrays, lengths.pop()

    def check_exactly(self, items: Any) -> list[np.ndarray]:
        """The leaves of `items`, [n, ...] each, of exactly these shapes and dtypes."""
        arrays, n = self.check(items)
        wrong = [
            f"{name} must be {dtype}, got {np.asarray(x).dtype}"
            for name, dtype, x in zip(
                self.names, self._dtypes, jax.tree.leaves(items), strict=True
            )
            if np.asarray(x).dtype != dtype
        ]
        if n > len(self.leaves[0]):
            wrong.append(f"at most {len(self.leaves[0])} rows, got {n}")
        if wrong:
            raise ValueError("The items of the state differ:\n- " + "\n- ".join(wrong))
        return arrays

    def write(self, start: int, arrays: list[np.ndarray]) -> None:
        """Writes rows to the slots from `start` on, around the end."""
        for column, x in zip(self.leaves, arrays, strict=True):
            first = len(column) - start
            column[start : start + len(x)] = x[:first]
            if len(x) > first:
                column[: len(x) - first] = x[first:]

    def put(self, slots: np.ndarray, arrays: list[np.ndarray]) -> None:
        """Writes rows to slots, int64 [n]; of one given twice the last."""
        for column, x in zip(self.leaves, arrays, strict=True):
            column[slots] = x


def _column(block, shape, dtype, start: int, stride: int, rows: int) -> np.ndarray:
    """A view of a column in a block."""
    strides = (stride, *np.empty(shape, dtype).strides)
    return np.ndarray((rows, *shape), dtype, block, start, strides)


def _lay_out(widths, dtypes, rows: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Where columns start, the bytes from row to row of each, and those of the block."""
    starts, strides = np.zeros_like(widths), widths.copy()
    small = widths <= _SMALL
    record = 0
    for c in np.flatnonzero(small):
        record = _round_up(record, dtypes[c].alignment)
        starts[c] = record
        record += int(widths[c])
    record = _round_up(record, max(dtypes[c].alignment for c in np.flatnonzero(small)))
    if -record % _LINE <= _SPARE:  # whole lines, if that takes little more
        record = _round_up(record, _LINE)
    strides[small] = record
    size = _round_up(record * rows, _LINE)
    starts_of_large, size_of_large = _starts(widths[~small], rows)
    starts[~small] = size + starts_of_large
    return starts, strides, size + size_of_large


def _starts(widths: np.ndarray, rows: int) -> tuple[np.ndarray, int]:
    """Where columns start that lie one after the other, and the bytes of all."""
    sizes = _round_up(widths * rows, _LINE)
    ends = np.cumsum(sizes)
    return ends - sizes, int(sizes.sum())


def _round_up(number, unit):
    return -(-number // unit) * unit


def _as_array(name: str, x: Any) -> np.ndarray:
    array = np.asarray(x)
    if array.dtype.hasobject or array.dtype.kind in "USmM":
        raise TypeError(
            f"{name} of the example must be an array of numbers or bools, got"
            f" {type(x).__name__} of dtype {array.dtype}. Encode it as one."
        )
    return array


def _cast(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`x` as another dtype of the same kind; integers only if they fit."""
    kinds = _kind(x.dtype), _kind(dtype)
    if kinds == ("float", "float"):
        with np.errstate(over="ignore"):  # a number past the largest becomes infinite
            return x.astype(dtype)
    if kinds == ("int", "int"):
        cast = x.astype(dtype)
        if np.array_equal(cast, x):
            return cast
        raise ValueError(f"must fit into {dtype}, got {x.min()} to {x.max()}")
    raise ValueError(f"must be {dtype}, got {x.dtype}")


def _kind(dtype: np.dtype) -> str:
    if dtype.kind in "iu":
        return "int"
    if dtype.kind == "f" or jax.numpy.issubdtype(dtype, np.floating):
        return "float"
    return dtype.name
