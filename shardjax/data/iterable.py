"""Any Python iterable of dicts of arrays as a source: Grain, tf.data, a list."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import numpy as np

from shardjax.data.batch import Batch
from shardjax.data.dense import DenseTransform, check_dense_transform
from shardjax.data.hashing import MISSING_KEY, hash_strings
from shardjax.data.tokens import dense_matrix
from shardjax.embed.jagged import Jagged, as_keys

Dicts = Iterable[Mapping[str, Any]]
"""Batches of examples: arrays by name, each with one entry per example."""

_ALL_BITS = 2**64 - 1


def from_dicts(
    dicts: Dicts | Callable[[], Dicts],
    *,
    label: str,
    dense: Sequence[str] = (),
    categorical: Sequence[str] = (),
    bags: Sequence[str] = (),
    weight: str | None = None,
    group: str | None = None,
    dense_transform: DenseTransform = "none",
) -> "DictSource":
    """Makes a source of an iterable of dicts of arrays.

    Every dict holds a batch of examples of any size, and makes a chunk. Entries that
    are not named here are passed over.

    Keys are integers, which keep their bits (-1 is 2**64 - 1), or strings or bytes,
    which are hashed by `hash_strings`; None is `MISSING_KEY`. Floats are refused.

    An epoch is a pass over the iterable, so it must give its dicts again: a list does,
    a Grain or tf.data pipeline, or a function that returns a new iterator. A generator
    can be read once; a second pass is an error.

    Args:
      dicts: the iterable, or a function that returns one. The first dict is read here.
      label: name of the labels, numbers [batch].
      dense: names of numbers [batch] or [batch, n]; NaN becomes 0.
      categorical: names of keys [batch], one for each example.
      bags: names of any number of keys for each example: a `Jagged`; an array
        [batch, n], n for each; a list or an object array of sequences, None for an
        empty one; what has `values` and `row_splits`, as a ragged tensor; or keys
        [batch], one for each.
      weight: name of example weights [batch].
      group: name of keys [batch] that group examples for per-group metrics.
      dense_transform: "none" or "log"; see `DenseTransform`.

    Returns:
      A source of batches.

    Raises:
      TypeError: if `dicts` is neither iterable nor a function; while reading, if an
        entry is not of its kind.
      ValueError: if `dicts` is empty or a name has two roles; while reading, if an
        entry lacks or is not of its shape.
      RuntimeError: while reading, if a later pass gives nothing.

    Example:
      >>> rows = [{"click": [0, 1], "item": np.array([7, 8]), "tags": [["a"], []]}]
      >>> source = from_dicts(rows, label="click", categorical=["item"], bags=["tags"])
      >>> batch = next(source.chunks())
      >>> batch.fixed.tolist(), batch.jagged["tags"].lengths.tolist()
      ([[7, 8]], [1, 0])
    """
    check_dense_transform(dense_transform)
    if isinstance(dicts, Mapping) or hasattr(dicts, "columns"):
        raise TypeError(
            "`dicts` must give dicts of arrays, one after the other, got one"
            f" {type(dicts).__name__}. Put it into a list: [dict(x.items())]"
        )
    if not isinstance(dicts, Iterable) and not callable(dicts):
        raise TypeError(
            "`dicts` must be an iterable of dicts, or a function that returns one, got"
            f" {type(dicts).__name__}"
        )
    for option, names in (
        ("dense", dense),
        ("categorical", categorical),
        ("bags", bags),
    ):
        if isinstance(names, str):
            raise TypeError(
                f"`{option}` must be a list of names, got the string {names!r}. Give"
                f" [{names!r}]."
            )
    used = [label, *dense, *categorical, *bags, *([] if weight is None else [weight])]
    for name in used:
        if used.count(name) > 1:
            raise ValueError(f"the entry {name!r} must have one role, got two")
    passes = _Passes(dicts)
    reader = _Reader(
        label,
        tuple(dense),
        tuple(categorical),
        tuple(bags),
        weight,
        group,
        dense_transform == "log",
    )
    return DictSource(reader, reader.read(0, passes.first).n_dense, passes)


@dataclass(frozen=True)
class DictSource:
    """A source of dicts; `from_dicts` makes it."""

    _reader: "_Reader"
    n_dense: int
    _passes: "_Passes" = field(repr=False)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The categorical entries, then the bags."""
        return self._reader.categorical + self._reader.bags

    def chunks(self, start_chunk: int = 0) -> Iterator[Batch]:
        """Starts a pass over the dicts.

        Args:
          start_chunk: how many dicts to pass over.

        Yields:
          A chunk for each dict.

        Raises:
          RuntimeError: if the dicts can only be read once, and were.
        """
        dicts = islice(enumerate(self._passes.start()), start_chunk, None)
        for number, entries in dicts:
            batch = self._reader.read(number, entries)
            if batch.n_dense != self.n_dense:
                raise ValueError(
                    f"dict {number} must have {self.n_dense} dense features in all, as"
                    f" the first, got {batch.n_dense}"
                )
            yield batch


class _Passes:
    """Starts passes over an iterable, and refuses one that would give nothing."""

    def __init__(self, dicts: Dicts | Callable[[], Dicts]):
        self._dicts = dicts
        self._last = self._iterate()
        none = object()
        self.first: Any = next(self._last, none)
        if self.first is none:
            raise ValueError("`dicts` must give at least one dict, got none")
        self._is_first = True

    def start(self) -> Iterator[Any]:
        """Starts a pass."""
        if self._is_first:
            # The one whose first dict was read to see what is in it.
            self._is_first = False
            yield self.first
            yield from self._last
            return
        dicts = self._iterate()
        if dicts is self._last:
            raise RuntimeError(
                "the dicts must be given again for a second pass, such as a second"
                f" epoch, and this {type(dicts).__name__} can only be read once. Give a"
                " list, or a function that returns a new iterator."
            )
        self._last = dicts
        empty = True
        for entries in dicts:
            empty = False
            yield entries
        if empty:
            raise RuntimeError(
                "the dicts must be given again for a second pass, such as a second"
                f" epoch, and this {type(self._dicts).__name__} gave none. Give a list,"
                " or a function that returns a new iterator over all of them."
            )

    def _iterate(self) -> Iterator[Any]:
        dicts = self._dicts
        return iter(dicts if isinstance(dicts, Iterable) else dicts())


@dataclass(frozen=True)
class _Reader:
    """Makes batches of dicts."""

    label: str
    dense: tuple[str, ...]
    categorical: tuple[str, ...]
    bags: tuple[str, ...]
    weight: str | None
    group: str | None
    log: bool

    def read(self, number: int, entries: Any) -> Batch:
        """Makes a batch of dict `number`."""
        if not isinstance(entries, Mapping):
            raise TypeError(
                f"`dicts` must give dicts of arrays, got {type(entries).__name__} as"
                f" number {number}"
            )

        def get(name: str) -> tuple[Any, str]:
            if name not in entries:
                raise ValueError(
                    f"dict {number} must have the entry {name!r}, got only:"
                    f" {', '.join(map(repr, entries))}"
                )
            return entries[name], f"{name!r} of dict {number}"

        labels = _numbers(*get(self.label))
        size = len(labels)
        dense = [_dense(*get(name), size, self.log) for name in self.dense]
        keys = [_column(*get(name), size) for name in self.categorical]
        weights = groups = None
        if self.weight is not None:
            weights = _numbers(*get(self.weight), size)
            if (weights < 0).any():
                raise ValueError(
                    f"{self.weight!r} of dict {number} must not be negative, got"
                    f" {weights.min()}"
                )
        if self.group is not None:
            groups = _column(*get(self.group), size)
        return Batch(
            labels,
            np.concatenate([np.zeros((size, 0), np.float32), *dense], axis=1),
            np.stack(keys) if keys else np.zeros((0, size), np.uint64),
            self.categorical,
            {name: _bags(*get(name), size) for name in self.bags},
            weights,
            groups,
        )


def _numbers(value: Any, name: str, size: int | None = None) -> np.ndarray:
    """Labels or weights: float [batch], all finite."""
    values = _flat(np.asarray(value), name, size)
    if values.dtype.kind not in "fiub":
        raise TypeError(f"{name} must be numbers, got dtype {values.dtype}")
    with np.errstate(over="ignore"):
        values = values.astype(np.float32)
    if not np.isfinite(values).all():
        at = int(np.argmin(np.isfinite(values)))
        raise ValueError(f"{name} must be finite, got {values[at]} in row {at}")
    return values


def _dense(value: Any, name: str, size: int, log: bool) -> np.ndarray:
    """float32 [batch, n]."""
    values = np.asarray(value)
    if values.dtype.kind not in "fiub":
        raise TypeError(f"{name} must be numbers, got dtype {values.dtype}")
    if values.ndim == 1:
        values = values[:, None]
    if values.ndim != 2 or len(values) != size:
        raise ValueError(
            f"{name} must have shape [{size}] or [{size}, n], as there are {size}"
            f" labels, got {values.shape}"
        )
    numbers = values.astype(np.float64).reshape(-1)
    numbers[np.isnan(numbers)] = 0
    dense = dense_matrix(numbers, size, values.shape[1], log)
    if not np.isfinite(dense).all():
        at = int(np.argmin(np.isfinite(dense).all(1)))
        raise ValueError(
            f"{name} must be finite in float32, got {values[at]} in row {at}"
        )
    return dense


def _flat(values: np.ndarray, name: str, size: int | None) -> np.ndarray:
    """Checks for shape [batch] or [batch, 1], and gives [batch]."""
    expected = "batch" if size is None else size
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1 or (size is not None and len(values) != size):
        reason = "" if size is None else f", as there are {size} labels"
        raise ValueError(
            f"{name} must have shape [{expected}]{reason}, got {values.shape}"
        )
    return values


def _column(value: Any, name: str, size: int) -> np.ndarray:
    """uint64 [batch]."""
    if isinstance(value, list | tuple):
        if any(isinstance(x, list | tuple | np.ndarray) and np.ndim(x) for x in value):
            raise ValueError(
                f"{name} must have one key for each example, got lists. Name it in"
                " `bags`."
            )
        if len(value) != size:
            raise ValueError(
                f"{name} must have shape [{size}], as there are {size} labels, got"
                f" {(len(value),)}"
            )
        return _list_keys(list(value), name)
    return _array_keys(_flat(np.asarray(value), name, size), name)


def _bags(value: Any, name: str, size: int) -> Jagged:
    """Keys in any of the forms that `from_dicts` lists."""
    if hasattr(value, "row_splits") and hasattr(value, "values"):
        lengths = np.diff(np.asarray(value.row_splits))
        bags = Jagged(_array_keys(np.asarray(value.values), name), lengths)
    elif isinstance(value, Jagged):
        bags = value
    elif isinstance(value, list | tuple) or _is_object_column(value):
        rows = [() if row is None else row for row in value]
        bags = _join(rows, name)
    else:
        values = np.asarray(value)
        if values.ndim not in (1, 2):
            raise ValueError(
                f"{name} must have shape [{size}] or [{size}, n], as there are {size}"
                f" labels, got {values.shape}"
            )
        per_row = 1 if values.ndim == 1 else values.shape[1]
        bags = Jagged(
            _array_keys(values.reshape(-1), name), np.full(len(values), per_row)
        )
    if len(bags.lengths) != size:
        raise ValueError(
            f"{name} must have {size} bags, as there are {size} labels, got"
            f" {len(bags.lengths)}"
        )
    return bags


def _is_object_column(value: Any) -> bool:
    """Whether this is an array [batch] of sequences."""
    return (
        np.ndim(value) == 1
        and getattr(getattr(value, "dtype", None), "kind", "") == "O"
        and any(isinstance(row, list | tuple | np.ndarray) for row in value)
    )


def _join(rows: list, name: str) -> Jagged:
    """Joins the keys of rows: sequences, or keys if none of them is one."""
    are_rows = [isinstance(row, list | tuple) or np.ndim(row) == 1 for row in rows]
    if not any(are_rows) and rows:
        return Jagged(_list_keys(rows, name), np.ones(len(rows), np.int32))
    if not all(are_rows):
        at = are_rows.index(False)
        raise TypeError(
            f"{name} must be sequences of keys, got {rows[at]!r} in row {at}. Split text,"
            " or give a list of one key."
        )
    lengths = np.fromiter(map(len, rows), np.int32, len(rows))
    if rows and all(
        isinstance(row, np.ndarray) and row.dtype.kind in "iu" for row in rows
    ):
        # Joined as keys: numpy makes floats of int64 and uint64 together.
        return Jagged(np.concatenate([as_keys(row) for row in rows]), lengths)
    flat = chain.from_iterable(
        row.tolist() if isinstance(row, np.ndarray) else row for row in rows
    )
    return Jagged(_list_keys(list(flat), name), lengths)


def _array_keys(values: np.ndarray, name: str) -> np.ndarray:
    kind = values.dtype.kind
    if kind in "iu":
        return as_keys(values)
    if kind == "b":
        return as_keys(values.view(np.uint8))
    if kind in "UST":
        return hash_strings(values.tolist())
    if kind == "O":
        return _list_keys(values.tolist(), name)
    raise TypeError(_NOT_KEYS.format(name, f"dtype {values.dtype}"))


def _list_keys(values: list, name: str) -> np.ndarray:
    types = set(map(type, values))
    if float in types:  # NaN, as pandas has for a missing string.
        values = [None if value != value else value for value in values]
        types = set(map(type, values))
    some = types - {type(None)}
    if not some:
        return np.full(len(values), MISSING_KEY, np.uint64)
    if all(issubclass(t, str) for t in some) or some == {bytes}:
        return hash_strings(values)
    if not all(issubclass(t, int | np.integer | np.bool_) for t in some):
        raise TypeError(
            _NOT_KEYS.format(name, " and ".join(sorted(t.__name__ for t in types)))
        )
    if types == some and np.uint64 not in types:
        try:
            return as_keys(np.array(values, np.int64))
        except OverflowError:
            pass  # Larger ones are rare, and take more care.
    integers = [MISSING_KEY if value is None else int(value) for value in values]
    for integer in (min(integers), max(integers)):
        if not -(2**63) <= integer <= _ALL_BITS:
            raise ValueError(f"keys of {name} must fit 64 bits, got {integer}")
    return np.array([integer & _ALL_BITS for integer in integers], np.uint64)


_NOT_KEYS = (
    "keys of {} must be integers or strings, got {}. Convert floats to integers; fill in"
    " missing ones first, or give None."
)
