"""Memory that is taken when it is first written to."""

import mmap
import sys
from typing import Any

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


def give_back(array: np.ndarray, first: int, stop: int) -> None:
    """Gives the memory of ``array[first:stop]`` of `reserve` back; it reads zeros then.

    What shares a page with other rows stays.
    """
    space: Any = array
    while isinstance(space, np.ndarray | memoryview):
        space = space.base if isinstance(space, np.ndarray) else space.obj
    if not isinstance(space, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    size = array.strides[0]
    start = -(-first * size // mmap.PAGESIZE) * mmap.PAGESIZE
    end = stop * size // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start:
        space.madvise(mmap.MADV_DONTNEED, start, end - start)
