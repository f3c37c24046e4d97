"""A file with the state of an optimizer, read and written a group of arrays at a time.

Read and written by calls and not mapped into memory: a mapped file that is cut off, or on
a disk that is full, ends the process by a signal, where a call gives an error.
"""

import errno
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from shardjax.folders import OwnFolder

PATTERN = "*.shardjax-state"
_MOST_BYTES = 1 << 30  # of one call


class DiskStateError(RuntimeError):
    """State on disk that is not what was written, or only half updated."""


@dataclass
class Traffic:
    """Bytes to and from the disk, and the time they took, so far.

    Attributes:
      read_bytes, written_bytes: of the files.
      read_s, write_s: seconds that the threads for it took.
      wait_s: seconds that the devices had nothing to do but wait for them.
    """

    read_bytes: int = 0
    written_bytes: int = 0
    read_s: float = 0.0
    write_s: float = 0.0
    wait_s: float = 0.0

    def since(self, before: "Traffic") -> dict[str, float]:
        """What has come since another, by name."""
        return {f"disk_{k}": v - vars(before)[k] for k, v in vars(self).items()}


class StateFile:
    """Groups of bytes of fixed sizes, one after the other in a file.

    Args:
      folder: for the file.
      sizes: bytes of each group.
    """

    def __init__(self, folder: OwnFolder, sizes: Sequence[int]):
        self.path = folder.path / f"opt_state{PATTERN[1:]}"
        self.traffic = Traffic()
        self._sizes = list(sizes)
        self._offsets = np.cumsum([0, *sizes]).tolist()
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)

    def read(self, group: int) -> np.ndarray:
        """The bytes of a group, uint8 [size].

        Raises:
          DiskStateError: if the file is too short.
          OSError: if it cannot be read.
        """
        start = time.perf_counter()
        data = np.empty(self._sizes[group], np.uint8)
        done = 0
        while done < len(data):
            part = data[done : done + _MOST_BYTES].data
            count = os.preadv(self._file, [part], self._offsets[group] + done)
            if not count:
                raise DiskStateError(
                    f"the file {str(self.path)!r} must have {self._offsets[-1]} bytes, but"
                    f" ends at {self._offsets[group] + done}: something has cut it off."
                    " Start again from a checkpoint"
                )
            done += count
        self.traffic.read_bytes += done
        self.traffic.read_s += time.perf_counter() - start
        return data

    def write(self, group: int, parts: Sequence[np.ndarray]) -> None:
        """Writes a group, its bytes given in parts.

        Raises:
          OSError: if it cannot be written, for want of space or otherwise.
        """
        start = time.perf_counter()
        offset = self._offsets[group]
        for part in parts:
            data = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
            while len(data):
                offset += (count := self._write_some(data, offset))
                data = data[count:]
        self.traffic.written_bytes += offset - self._offsets[group]
        self.traffic.write_s += time.perf_counter() - start

    def _write_some(self, data: memoryview, offset: int) -> int:
        try:
            return os.pwrite(self._file, data[:_MOST_BYTES], offset)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise OSError(
                error.errno,
                f"the state of the optimizer takes {self._offsets[-1]} bytes, and only"
                f" {offset} fit into {str(self.path)!r}: {error.strerror}. Free space, or"
                " give another folder",
            ) from error

    def flush(self) -> None:
        """Waits until the disk has all that was written."""
        os.fsync(self._file)

    def close(self) -> None:
        """Removes the file."""
        os.close(self._file)
        self.path.unlink(missing_ok=True)


@dataclass(frozen=True)
class ArrayOnDisk:
    """How an array lies on disk: this process's shards one after the other, each once.

    Attributes:
      shape, dtype: of the whole.
      sharding: on the devices.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: jax.NamedSharding

    @property
    def shards(self) -> list[tuple[tuple[int, int], ...]]:
        """Start and stop in each dim of each shard."""
        places = self.sharding.addressable_devices_indices_map(self.shape).values()
        return sorted({self._place(index) for index in places})

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        sizes = [np.prod([b - a for a, b in s], dtype=int) for s in self.shards]
        return int(sum(sizes)) * np.dtype(self.dtype).itemsize

    def _place(self, index) -> tuple[tuple[int, int], ...]:
        return tuple(
            s.indices(n)[:2] for s, n in zip(index or (), self.shape, strict=True)
        )

    def views(self, data: np.ndarray) -> dict[tuple, np.ndarray]:
        """The shards, by their place, in the bytes read, uint8 [nbytes]."""
        views, start = {}, 0
        for shard in self.shards:
            shape = tuple(b - a for a, b in shard)
            size = int(np.prod(shape)) * np.dtype(self.dtype).itemsize
            part = data[start : start + size]
            views[shard] = part.view(self.dtype).reshape(shape)
            start += size
        return views

    def to_devices(self, data: np.ndarray) -> jax.Array:
        """The array of the bytes read, on its devices."""
        views = self.views(data)
        return jax.make_array_from_callback(
            self.shape, self.sharding, lambda index: views[self._place(index)]
        )

    def to_host(self, data: np.ndarray) -> np.ndarray:
        """The whole array of the bytes read, where this process has all shards."""
        whole = np.empty(self.shape, self.dtype)
        for shard, view in self.views(data).items():
            whole[tuple(slice(a, b) for a, b in shard)] = view
        return whole

    def parts(self, x: jax.Array) -> list[np.ndarray]:
        """The shards of an array to write, once they are computed."""
        found = {self._place(s.index): s.data for s in x.addressable_shards}
        return [np.asarray(found[shard]) for shard in self.shards]
