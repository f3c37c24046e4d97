"""Jagged keys: several keys per example, stored flat.

A batch of three examples with the bags ``[7, 9]``, ``[]`` and ``[4]``::

    values   [7, 9, 4]      one key after the other
    lengths  [2, 0, 1]      how many belong to each example
    weights  [w7, w9, w4]   optional, one per value
"""

from dataclasses import dataclass

import numpy as np


def as_keys(values, name: str = "values") -> np.ndarray:
    """Widens an integer array to uint64 keys.

    Signed values keep their two's complement bits: -1 becomes 2**64 - 1.

    Args:
      values: any integer array; uint64 arrays are returned as they are.
      name: what to call the array in an error.

    Returns:
      A uint64 array of the same shape.

    Raises:
      TypeError: if the values are not integers.

    Example:
      >>> as_keys(np.array([0, -1], np.int8))
      array([                   0, 18446744073709551615], dtype=uint64)
    """
    values = np.asarray(values)
    if values.dtype == np.uint64:
        return values
    if values.dtype.kind == "u":
        return values.astype(np.uint64)
    if values.dtype.kind == "i":
        return values.astype(np.int64).view(np.uint64)
    raise TypeError(
        f"keys of `{name}` must be integers, got dtype {values.dtype}. Convert ids to an"
        " integer dtype, or hash strings with shardjax.data.hash_strings."
    )


@dataclass(frozen=True)
class Jagged:
    """Keys of one feature for a batch, any number per example.

    Attributes:
      values: uint64 [total]; other integer dtypes are widened.
      lengths: int32 [batch], non-negative, with sum `total`.
      weights: float32 [total] or None (all one).

    Raises:
      TypeError: if `values` or `lengths` are not integers.
      ValueError: if the shapes, the signs or the sum of `lengths` do not fit.

    Example:
      >>> Jagged(np.array([7, 9, 4]), np.array([2, 0, 1])).offsets
      array([0, 2, 2, 3])
    """

    values: np.ndarray
    lengths: np.ndarray
    weights: np.ndarray | None = None

    def __post_init__(self):
        values = as_keys(self.values)
        lengths = np.asarray(self.lengths)
        if lengths.dtype.kind not in "iu":
            raise TypeError(f"`lengths` must be integers, got dtype {lengths.dtype}")
        if values.ndim != 1 or lengths.ndim != 1:
            raise ValueError(
                "`values` and `lengths` must have one dim each, got shapes"
                f" {values.shape} and {lengths.shape}"
            )
        if lengths.size and int(lengths.min()) < 0:
            at = int(np.argmax(lengths < 0))
            raise ValueError(
                f"`lengths` must not be negative, got {int(lengths[at])} for example {at}"
            )
        total = int(lengths.sum(dtype=np.int64))
        if total != len(values):
            raise ValueError(
                f"`lengths` must add up to the number of `values`, got {total} and"
                f" {len(values)}"
            )
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "lengths", lengths.astype(np.int32))
        if self.weights is not None:
            weights = np.asarray(self.weights, np.float32)
            if weights.shape != values.shape:
                raise ValueError(
                    "`weights` must have one entry per value, got shapes"
                    f" {weights.shape} and {values.shape}"
                )
            object.__setattr__(self, "weights", weights)

    @property
    def offsets(self) -> np.ndarray:
        """int64 [batch + 1]: where each example's values start; the last is `total`."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
