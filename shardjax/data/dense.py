"""The one transform of dense features, for every file format the same to the bit."""

import math
from typing import Literal

import numba
import numpy as np

DenseTransform = Literal["log", "none"]
"""What to do with dense values: "log" takes sign(x) * log(1 + |x|), "none" keeps them.

A missing value becomes 0 either way. The logarithm tames counts, which are
heavy-tailed, and keeps the sign of the few negative ones.
"""

_SMALL = np.array([math.log1p(x) for x in range(4096)], np.float32)


def check_dense_transform(dense_transform: str) -> None:
    """Refuses a choice that is not a `DenseTransform`.

    Args:
      dense_transform: the choice.

    Raises:
      ValueError: if it is neither "log" nor "none".

    Example:
      >>> check_dense_transform("log")
    """
    if dense_transform not in ("log", "none"):
        raise ValueError(
            f"`dense_transform` must be 'log' or 'none', got {dense_transform!r}"
        )


@numba.njit(nogil=True, cache=True)
def signed_log(x):
    """Takes sign(x) * log(1 + |x|) of a float64, float32; for use inside kernels.

    Example:
      >>> signed_log(0.0), round(float(signed_log(-1.0)), 4)
      (0.0, -0.6931)
    """
    size = abs(x)
    # Small counts are the most of all; the table holds what log1p would give.
    if size < 4096.0 and size == np.int64(size):
        log = _SMALL[np.int64(size)]
    else:
        log = np.float32(math.log1p(size))
    return log if x >= 0 else -log
