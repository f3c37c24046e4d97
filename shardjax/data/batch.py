"""The one type in which data travels on the host: a batch of labelled examples."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shardjax.embed.jagged import Jagged, as_keys


@dataclass(frozen=True)
class Batch:
    """Examples as host arrays; a chunk of a file or a training batch alike.

    Attributes:
      labels: float32 [batch].
      dense: float32 [batch, n_dense]; n_dense may be 0.
      fixed: uint64 [n_fixed, batch], C-contiguous: features with exactly one key per
        example, one row per feature. Other integers are widened as by `as_keys`.
      fixed_names: names of the rows of `fixed`.
      jagged: features with any number of keys per example, by name.
      weights: float32 [batch] example weights, or None (all one).
      groups: uint64 [batch], what per-group metrics group by (a user id), or None.
      bad_lines: how many lines of a file were skipped while these rows were read;
        only sources that were told to skip bad lines make it non-zero.

    Raises:
      TypeError: if an array is not of the kind named above.
      ValueError: if the shapes do not fit together or a name comes twice.

    Example:
      >>> batch = Batch([1, 0], np.zeros((2, 3)), np.array([[7, 8]]), ("item",))
      >>> batch.size, batch.dense.dtype, batch.fixed
      (2, dtype('float32'), array([[7, 8]], dtype=uint64))
    """

    labels: np.ndarray
    dense: np.ndarray
    fixed: np.ndarray
    fixed_names: tuple[str, ...] = ()
    jagged: dict[str, Jagged] = field(default_factory=dict)
    weights: np.ndarray | None = None
    groups: np.ndarray | None = None
    bad_lines: int = 0

    def __post_init__(self):
        labels = _as_float32(self.labels, "labels")
        if labels.ndim != 1:
            raise ValueError(f"`labels` must have one dim, got shape {labels.shape}")
        size = len(labels)
        dense = _as_float32(self.dense, "dense")
        if dense.ndim != 2 or len(dense) != size:
            raise ValueError(
                f"`dense` must have shape [{size}, n_dense] as there are {size} labels,"
                f" got {dense.shape}"
            )
        fixed = np.ascontiguousarray(as_keys(self.fixed, "fixed"))
        names = tuple(self.fixed_names)
        if fixed.shape != (len(names), size):
            raise ValueError(
                f"`fixed` must have shape [{len(names)}, {size}] as there are"
                f" {len(names)} `fixed_names` and {size} labels, got {fixed.shape}"
            )
        all_names = (*names, *self.jagged)
        if len(set(all_names)) != len(all_names):
            twice = next(n for n in all_names if all_names.count(n) > 1)
            raise ValueError(
                f"feature names must be unique in a batch, got '{twice}' twice"
            )
        for name, bags in self.jagged.items():
            if not isinstance(bags, Jagged):
                raise TypeError(
                    f"jagged feature '{name}' must be a Jagged, got"
                    f" {type(bags).__name__}"
                )
            if len(bags.lengths) != size:
                raise ValueError(
                    f"jagged feature '{name}' must have {size} lengths as there are"
                    f" {size} labels, got {len(bags.lengths)}"
                )
        for attribute, convert in (("weights", _as_float32), ("groups", as_keys)):
            value = getattr(self, attribute)
            if value is None:
                continue
            value = convert(value, attribute)
            if value.shape != (size,):
                raise ValueError(
                    f"`{attribute}` must have shape [{size}] as there are {size}"
                    f" labels, got {value.shape}"
                )
            object.__setattr__(self, attribute, value)
        object.__setattr__(self, "labels", labels)
        object.__setattr__(self, "dense", dense)
        object.__setattr__(self, "fixed", fixed)
        object.__setattr__(self, "fixed_names", names)
        object.__setattr__(self, "bad_lines", operator.index(self.bad_lines))

    @property
    def size(self) -> int:
        """The number of examples."""
        return len(self.labels)

    @property
    def n_dense(self) -> int:
        """The number of dense features."""
        return self.dense.shape[1]

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The names of all keyed features: the fixed ones, then the jagged ones."""
        return (*self.fixed_names, *self.jagged)

    def take(self, index) -> "Batch":
        """Copies rows in the given order.

        Args:
          index: integer [n], which rows; a row may come more than once.

        Returns:
          A batch of n rows. Its `bad_lines` is 0: whoever regroups rows carries the
          count along (`dataclasses.replace(batch, bad_lines=n)`).

        Raises:
          TypeError: if `index` is not integer, [n].
          IndexError: if a row is not in the batch.

        Example:
          >>> batch = Batch([0, 1, 2], np.zeros((3, 0)), np.zeros((0, 3), int))
          >>> batch.take([2, 0]).labels
          array([2., 0.], dtype=float32)
        """
        index = np.asarray(index)
        if index.size == 0:
            index = index.astype(np.int64)
        if index.dtype.kind not in "iu" or index.ndim != 1:
            raise TypeError(
                "`index` must be row numbers, integers in one dim, got dtype"
                f" {index.dtype} of shape {index.shape}. For a mask give"
                " np.flatnonzero(mask)."
            )
        return Batch(
            labels=self.labels[index],
            dense=np.take(self.dense, index, axis=0),
            fixed=np.take(self.fixed, index, axis=1),
            fixed_names=self.fixed_names,
            jagged={
                name: _take_bags(bags, index) for name, bags in self.jagged.items()
            },
            weights=None if self.weights is None else self.weights[index],
            groups=None if self.groups is None else self.groups[index],
        )

    def slice(self, start: int, stop: int) -> "Batch":
        """Returns rows start to stop; arrays are views where they can be.

        Args:
          start: first row.
          stop: one past the last row; bounds are those of a Python slice.

        Returns:
          A batch. `bad_lines` goes to the slice that starts at row 0, so a batch cut
          into slices keeps its count.

        Example:
          >>> batch = Batch([0, 1, 2], np.zeros((3, 0)), np.zeros((0, 3), int))
          >>> batch.slice(1, 3).labels
          array([1., 2.], dtype=float32)
        """
        start, stop, _ = slice(start, stop).indices(self.size)
        stop = max(start, stop)
        rows = slice(start, stop)
        return Batch(
            labels=self.labels[rows],
            dense=self.dense[rows],
            fixed=self.fixed[:, rows],
            fixed_names=self.fixed_names,
            jagged={
                name: _slice_bags(bags, start, stop)
                for name, bags in self.jagged.items()
            },
            weights=None if self.weights is None else self.weights[rows],
            groups=None if self.groups is None else self.groups[rows],
            bad_lines=self.bad_lines if start == 0 else 0,
        )

    @staticmethod
    def concat(batches: Sequence["Batch"]) -> "Batch":
        """Joins batches of the same features one after the other.

        Args:
          batches: at least one.

        Returns:
          A batch of all rows, with the sum of `bad_lines`.

        Raises:
          ValueError: if there is no batch, or if feature names, the number of dense
            features, or which of the optional arrays are given differ.

        Example:
          >>> batch = Batch([0, 1], np.zeros((2, 0)), np.zeros((0, 2), int))
          >>> Batch.concat([batch, batch]).labels
          array([0., 1., 0., 1.], dtype=float32)
        """
        batches = list(batches)
        if not batches:
            raise ValueError("concat needs at least one batch, got none")
        first = batches[0]
        if len(batches) == 1:
            return first
        for at, batch in enumerate(batches[1:], 1):
            expected, got = _layout(first), _layout(batch)
            for what in expected:
                if expected[what] != got[what]:
                    raise ValueError(
                        f"batches to concat must have the same {what}, got"
                        f" {expected[what]} in batch 0 and {got[what]} in batch {at}"
                    )
        return Batch(
            labels=np.concatenate([b.labels for b in batches]),
            dense=np.concatenate([b.dense for b in batches]),
            fixed=np.concatenate([b.fixed for b in batches], axis=1),
            fixed_names=first.fixed_names,
            jagged={
                name: _concat_bags([b.jagged[name] for b in batches])
                for name in first.jagged
            },
            weights=_concat_optional([b.weights for b in batches]),
            groups=_concat_optional([b.groups for b in batches]),
            bad_lines=sum(b.bad_lines for b in batches),
        )


def _as_float32(values, name: str) -> np.ndarray:
    values = np.asarray(values)
    if values.dtype.kind not in "fiub":
        raise TypeError(f"`{name}` must be numbers, got dtype {values.dtype}")
    return np.ascontiguousarray(values, np.float32)


def _layout(batch: Batch) -> dict:
    """What two batches must share to be joined."""
    return {
        "fixed features": batch.fixed_names,
        "jagged features": tuple(sorted(batch.jagged)),
        "number of dense features": batch.n_dense,
        "weighted jagged features": tuple(
            sorted(n for n, bags in batch.jagged.items() if bags.weights is not None)
        ),
        "optional arrays": tuple(
            n for n in ("weights", "groups") if getattr(batch, n) is not None
        ),
    }


def _take_bags(bags: Jagged, index: np.ndarray) -> Jagged:
    lengths = bags.lengths[index]
    starts = bags.offsets[:-1][index]
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    at = np.repeat(starts - (ends - lengths), lengths) + np.arange(total)
    weights = None if bags.weights is None else bags.weights[at]
    return Jagged(bags.values[at], lengths, weights)


def _slice_bags(bags: Jagged, start: int, stop: int) -> Jagged:
    offsets = bags.offsets
    span = slice(offsets[start], offsets[stop])
    weights = None if bags.weights is None else bags.weights[span]
    return Jagged(bags.values[span], bags.lengths[start:stop], weights)


def _concat_bags(parts: list[Jagged]) -> Jagged:
    return Jagged(
        np.concatenate([p.values for p in parts]),
        np.concatenate([p.lengths for p in parts]),
        _concat_optional([p.weights for p in parts]),
    )


def _concat_optional(arrays: list) -> np.ndarray | None:
    return None if arrays[0] is None else np.concatenate(arrays)
