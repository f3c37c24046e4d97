"""Memory that is taken when it is first written to."""

import mmap
import sys

import numpy as np

can_reserve = hasattr(mmap, "MAP_ANONYMOUS")
# Python names it from 3.13 on; the kernel then lets address space exceed its memory
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def reserve(shape: tuple[int, ...], dtype) -> np.ndarray:
    """An array of zeros whose pages take memory when they are first written to."""
    if not can_reserve:
        return np.zeros(shape, dtype)
    count = int(np.prod(shape, dtype=np.int64))
    size = max(count * np.dtype(dtype).itemsize, 1)
    space = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        space.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(space, dtype, count).reshape(shape)
