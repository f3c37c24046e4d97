"""A random order of n rows, without a table of n numbers.

A row's place is worked out by a Feistel network: a number below `a * b >= n` is written as
two digits, `left` below a and `right` below b, and in turns one digit is turned by a hash of
the other. Each turn can be turned back, so that the whole is a permutation of a * b numbers,
whatever the hash. What lands beyond n is sent through again (cycle walking) until it does
not; as a and b are near the square root of n, that happens to about one number in sqrt(n).

Which row is at which place depends on n, the seed and the epoch alone, so that processes
that share them agree on the order without a word.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numba
import numpy as np

from shardjax.data.shuffling import check_count

MOST_ROWS = 2**62
"""The most rows that can be put into an order."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 6
# Few rows have few different hashes of a digit, and take more turns to mix.
_FEW_ROWS, _ROUNDS_OF_FEW = 4096, 48


@dataclass(frozen=True)
class Permutation:
    """A random order of the rows 0 to `rows` - 1; calling it gives the rows at places.

    It takes the same memory for any number of rows.

    Attributes:
      rows: how many there are, at most 2**62.
      seed: non-negative; with `epoch` (and `rows`) it determines the order.
      epoch: non-negative; each epoch has an order of its own.

    Raises:
      TypeError: if a number is not an integer.
      ValueError: if a number is negative, or there are too many rows.

    Example:
      >>> order = Permutation(5, seed=0)
      >>> rows = order(np.arange(5))
      >>> sorted(rows.tolist()), order.inverse(rows).tolist()
      ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    """

    rows: int
    seed: int
    epoch: int = 0

    def __post_init__(self):
        for name in ("rows", "seed", "epoch"):
            check_count(name, getattr(self, name), least=0)
        if self.rows > MOST_ROWS:
            raise ValueError(
                f"`rows` of a permutation must be at most 2**62, got {self.rows}. Split"
                " them."
            )

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """Gives the rows at some places of the order.

        Args:
          places: integers [n], each at least 0 and below `rows`.

        Returns:
          int64 [n].

        Raises:
          TypeError: if `places` are not integers, [n].
          IndexError: if one is not within the order.
        """
        numbers = check_rows(places, self.rows, "places")
        out = np.empty(len(numbers), np.int64)
        _forward(numbers, self._keys, self._left, self._right, self.rows, out)
        return out

    def inverse(self, rows: np.ndarray) -> np.ndarray:
        """Gives the places of some rows in the order.

        Args:
          rows: integers [n], each at least 0 and below `self.rows`.

        Returns:
          int64 [n].

        Raises:
          TypeError: if `rows` are not integers, [n].
          IndexError: if one is not a row.
        """
        numbers = check_rows(rows, self.rows, "rows")
        out = np.empty(len(numbers), np.int64)
        _backward(numbers, self._keys, self._left, self._right, self.rows, out)
        return out

    @cached_property
    def _keys(self) -> np.ndarray:
        rounds = _ROUNDS_OF_FEW if self.rows <= _FEW_ROWS else _ROUNDS
        # SeedSequence gives the same numbers in every version of NumPy.
        sequence = np.random.SeedSequence([self.seed, self.epoch])
        return sequence.generate_state(rounds, np.uint64)

    @cached_property
    def _left(self) -> int:
        """Values of the left digit."""
        return math.isqrt(max(self.rows - 1, 0)) + 1

    @cached_property
    def _right(self) -> int:
        """Values of the right digit."""
        return max(1, -(-self.rows // self._left))


def check_rows(rows: np.ndarray, below: int, name: str = "index") -> np.ndarray:
    """Refuses what are not numbers of rows.

    Args:
      rows: integers [n].
      below: how many rows there are.
      name: what to call the numbers in an error.

    Returns:
      int64 [n].

    Raises:
      TypeError: if they are not integers, [n].
      IndexError: if one is negative, or not below `below`.

    Example:
      >>> check_rows([2, 0], 3)
      array([2, 0])
    """
    rows = np.asarray(rows)
    if rows.size == 0:
        rows = rows.astype(np.int64)
    if rows.dtype.kind not in "iu" or rows.ndim != 1:
        raise TypeError(
            f"`{name}` must be numbers of rows, integers in one dim, got dtype"
            f" {rows.dtype} of shape {rows.shape}"
        )
    if len(rows) and not (0 <= (least := rows.min()) and rows.max() < below):
        bad = least if least < 0 else rows.max()
        raise IndexError(
            f"`{name}` must be at least 0 and below {below}, the number of rows, got"
            f" {bad}"
        )
    return np.ascontiguousarray(rows, np.int64)


@numba.njit(nogil=True, cache=True, inline="always")
def _turn(digit, key, size):
    """How far to turn the other digit: a hash of this one, below `size` < 2**32."""
    x = np.uint64(digit) * _GOLDEN + key
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    x = (x ^ (x >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return ((x >> np.uint64(32)) * size) >> np.uint64(32)


@numba.njit(nogil=True, cache=True)
def _forward(numbers, keys, left_size, right_size, rows, out):
    a, b, n = np.uint64(left_size), np.uint64(right_size), np.uint64(rows)
    for i in range(len(numbers)):
        x = np.uint64(numbers[i])
        while True:
            left = x // b
            right = x - left * b
            for r in range(0, len(keys), 2):
                left += _turn(right, keys[r], a)
                left -= a if left >= a else np.uint64(0)
                right += _turn(left, keys[r + 1], b)
                right -= b if right >= b else np.uint64(0)
            x = left * b + right
            if x < n:
                break
        out[i] = x


@numba.njit(nogil=True, cache=True)
def _backward(numbers, keys, left_size, right_size, rows, out):
    a, b, n = np.uint64(left_size), np.uint64(right_size), np.uint64(rows)
    for i in range(len(numbers)):
        x = np.uint64(numbers[i])
        while True:
            left = x // b
            right = x - left * b
            for r in range(len(keys) - 2, -1, -2):
                right += b - _turn(left, keys[r + 1], b)
                right -= b if right >= b else np.uint64(0)
                left += a - _turn(right, keys[r], a)
                left -= a if left >= a else np.uint64(0)
            x = left * b + right
            if x < n:
                break
        out[i] = x
