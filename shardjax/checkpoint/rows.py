"""Rows of embedding tables in a checkpoint: arrays of records, written as they come.

One array per group of tables, in Zarr v3 and without compression, so that a chunk's file
is its bytes: int32 [rows, 5 + words], of `shardjax.embed.outline`. A chunk of about 16 MB
is written when it is full; two are in memory at a time. Beside it lie the counts that
`admit` goes by, an array each. An increment has the records of changed rows only, and for
each group the keys of rows that have left: int32 [n, 3], the key in two words and the
number of its table.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardjax.embed.admission import merge_counts
from shardjax.embed.snapshot import Removed

_CHUNK_BYTES = 16 << 20
# Files are synced to the medium once, when the step is committed.
_CONTEXT = {"file_io_sync": False, "cache_pool": {"total_bytes_limit": 0}}


def _open(path: Path, create: Mapping[str, Any] | None = None) -> Any:
    import tensorstore as ts

    spec: dict[str, Any] = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{path}/"},
    }
    if create is not None:
        spec |= {"metadata": create, "store_data_equal_to_fill_value": True}
    context = ts.Context(_CONTEXT)
    return ts.open(spec, create=create is not None, context=context).result()


def _metadata(shape: Sequence[int], chunk: Sequence[int], dtype: str) -> dict[str, Any]:
    grid = {"name": "regular", "configuration": {"chunk_shape": list(chunk)}}
    codec = {"name": "bytes", "configuration": {"endian": "little"}}
    if np.dtype(dtype).itemsize == 1:
        codec = {"name": "bytes"}
    return {
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": grid,
        "chunk_key_encoding": {"name": "default"},
        "codecs": [codec],
        "fill_value": 0,
    }


class _Records:
    """One array being written, of at most `rows` records."""

    def __init__(self, path: Path, rows: int, words: int):
        self.path = path
        self.words = words
        self.chunk = max(min(_CHUNK_BYTES // (4 * words), rows), 1)
        self._most = rows
        self._array: Any = None
        self._buffers = [np.zeros((self.chunk, words), np.int32) for _ in range(2)]
        self._writes: list[Any] = [None, None]
        self._chunks = self._filled = 0
        self.known: dict[str, tuple[int, int]] = {}

    @property
    def written(self) -> int:
        """Rows so far."""
        return self._chunks * self.chunk + self._filled

    def write(self, records: np.ndarray) -> None:
        """Appends records."""
        while len(records):
            turn = self._chunks % 2
            if not self._filled and self._writes[turn] is not None:
                self._writes[turn].result()
            n = min(self.chunk - self._filled, len(records))
            self._buffers[turn][self._filled : self._filled + n] = records[:n]
            self._filled += n
            records = records[n:]
            if self._filled == self.chunk:
                self._flush()

    def _flush(self) -> None:
        turn, start = self._chunks % 2, self._chunks * self.chunk
        data = self._buffers[turn]
        data[self._filled :] = 0
        if self._array is None:
            shape = max(self._most, self._filled), self.words
            self._array = _open(
                self.path, _metadata(shape, (self.chunk, self.words), "int32")
            )
        size = data.nbytes, zlib.crc32(data.data)
        self.known[f"c/{self._chunks}/0"] = size
        part = data[: self._filled]
        self._writes[turn] = self._array[start : start + len(part)].write(
            part, can_reference_source_data_indefinitely=True
        )
        self._chunks, self._filled = self._chunks + 1, 0

    def finish(self) -> None:
        """Writes the rest, and waits."""
        written = self.written
        if not self._chunks and self._filled:  # no chunk is larger than it has to be
            self._buffers[0] = self._buffers[0][: self._filled].copy()
            self.chunk = self._most = self._filled
        if self._filled:
            self._flush()
        for write in self._writes:
            if write is not None:
                write.result()
        if self._array is not None and written != self._array.shape[0]:
            self._array.resize(exclusive_max=(written, self.words)).result()


class RowWriter:
    """Writes the rows of a snapshot.

    Args:
      path: a folder in which to write; made if it is not there.
      groups: of `shardjax.embed.restoring.describe`; no more rows than these have.

    Attributes:
      written: rows of each group so far.

    Raises:
      OSError, ValueError: if something cannot be written; here and below.
    """

    def __init__(self, path: Path, groups: Sequence[Mapping[str, Any]]):
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._groups = groups
        self._arrays = [
            _Records(path / g["name"], g["rows"], g["words"]) for g in groups
        ]
        self.written = [0] * len(groups)

    def write(self, group: int, records: np.ndarray) -> None:
        """Writes table records, int32 [n, 5 + words], of a group, by number."""
        self.written[group] += len(records)
        rows = self._groups[group]["rows"]
        if self.written[group] > rows:
            raise ValueError(
                f"group {group} has {rows} rows, and {self.written[group]} came: this is an"
                " error in shardjax; please report it"
            )
        self._arrays[group].write(records)

    def write_removed(self, removed: Sequence[Removed] | None) -> list[int] | None:
        """Writes which keys have left, by group; returns how many, None if all rows that
        there are have been written."""
        if removed is None:
            return None
        for group, (keys, tables) in zip(self._groups, removed, strict=True):
            if len(keys):
                records = np.empty((len(keys), 3), np.int32)
                records[:, :2] = keys.view(np.int32).reshape(-1, 2)
                records[:, 2] = tables
                path = self.path / "removed" / group["name"]
                made = _open(path, _metadata(records.shape, records.shape, "int32"))
                made.write(records).result()
        return [len(keys) for keys, _ in removed]

    def write_counts(self, counts: Mapping[str, Mapping[str, np.ndarray]]) -> list:
        """Writes what has been counted of keys without a row, by table.

        Returns:
          Names for `read_counts`, as JSON has them.
        """
        names = []
        for number, (table, arrays) in enumerate(counts.items()):
            for name, x in arrays.items():
                names.append([table, name, str(number)])
                if len(x):
                    path = self.path / "counts" / str(number) / name
                    made = _open(path, _metadata(x.shape, x.shape, x.dtype.name))
                    made.write(x).result()
                else:
                    names[-1].append(x.dtype.name)
        return names

    def finish(self) -> dict[str, tuple[int, int]]:
        """Waits until all is written.

        Returns:
          By path below the folder: size and CRC-32 of the files with rows.
        """
        known = {}
        for array in self._arrays:
            array.finish()
            folder = array.path.relative_to(self.path).as_posix()
            known |= {f"{folder}/{k}": v for k, v in array.known.items()}
        return known


def read_records(
    path: Path, groups: Sequence[Mapping[str, Any]], written: Sequence[int]
) -> Iterator[tuple[int, np.ndarray]]:
    """The number of a group and its table records, a part at a time.

    Args:
      path, groups: as of `RowWriter`.
      written: rows of each group in the files.
    """
    for number, (group, rows) in enumerate(zip(groups, written, strict=True)):
        if not rows:
            continue
        array = _open(path / group["name"])
        chunk = array.chunk_layout.read_chunk.shape[0]
        starts = range(0, rows, chunk)
        ahead = array[: min(chunk, rows)].read()
        for start in starts:
            part = ahead.result()
            stop = start + chunk
            if stop < rows:
                ahead = array[stop : min(stop + chunk, rows)].read()
            yield number, np.ascontiguousarray(part)


def read_removed(
    path: Path, groups: Sequence[Mapping[str, Any]], counts: Sequence[int]
) -> Iterator[tuple[int, np.ndarray]]:
    """The number of a group and the keys that have left, int32 [n, 3].

    Args:
      path, groups: as of `RowWriter`.
      counts: that `write_removed` returned.
    """
    for number, (group, count) in enumerate(zip(groups, counts, strict=True)):
        if count:
            found = _open(path / "removed" / group["name"]).read().result()
            yield number, np.ascontiguousarray(found)


def read_all_counts(
    parts: Sequence[tuple[Path, Sequence]],
) -> dict[str, dict[str, np.ndarray]]:
    """What several processes have counted, each in a folder and under names as of
    `read_counts`, as one."""
    found = [read_counts(path, names) for path, names in parts]
    tables = dict.fromkeys(name for own in found for name in own)
    return {
        name: merge_counts([own[name] for own in found if name in own])
        for name in tables
    }


def read_counts(path: Path, names: Sequence) -> dict[str, dict[str, np.ndarray]]:
    """What `RowWriter.write_counts` has written under the names that it returned."""
    counts: dict[str, dict[str, np.ndarray]] = {}
    for table, name, number, *empty in names:
        x = np.zeros(0, empty[0]) if empty else None
        if x is None:
            x = _open(path / "counts" / number / name).read().result()
        counts.setdefault(table, {})[name] = x
    return counts
