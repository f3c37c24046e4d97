"""Rows of Parquet and Arrow IPC files by number.

Rows are stored in row groups (Parquet) or record batches (Arrow IPC). A group is decoded as a
whole to take any of its rows, so it pays to take many at once; the groups used last are
kept, up to a budget of bytes. A record batch that is not compressed is mapped into memory:
its rows are found without reading the others. What becomes keys and numbers is only the rows
that were asked for.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shardjax.data.arrow_schema import check_schema
from shardjax.data.arrow_types import is_text
from shardjax.data.batch import Batch
from shardjax.data.columns import Columns
from shardjax.data.indexable import gather
from shardjax.data.permutation import check_rows
from shardjax.data.rows import ArrowColumn, make_batch

CACHE_BYTES = 256 << 20
"""How many bytes of decoded groups are kept, if not said otherwise."""


@dataclass(frozen=True)
class _Layout:
    """Where rows lie.

    Attributes:
      groups: the file of each group, its number in it, and its first row there, from 0.
      begins: int64 [groups + 1], the first row of each group of all.
    """

    groups: list[tuple[str, int, int]]
    begins: np.ndarray


@dataclass(frozen=True)
class ArrowRows:
    """Takes rows of files by number.

    Attributes:
      files: paths, of Parquet or of the file format of Arrow IPC.
      columns: what each column is for.
      format: "parquet" or "arrow".
      use_threads: whether Arrow decodes columns in its own threads.
      cache_bytes: how many bytes of groups to keep.

    Raises:
      ValueError: while reading, if a file cannot be read, or a row is bad.
    """

    files: tuple[str, ...]
    columns: Columns
    format: Literal["parquet", "arrow"]
    use_threads: bool = False
    cache_bytes: int = CACHE_BYTES
    _cache: OrderedDict[int, pa.Table] = field(
        default_factory=OrderedDict, init=False, repr=False, compare=False
    )

    @property
    def count(self) -> int:
        """The number of rows."""
        return int(self._layout.begins[-1])

    def group_sizes(self) -> list[int]:
        """Gives the number of rows of each group, in order."""
        return np.diff(self._layout.begins).tolist()

    def take(self, index: np.ndarray) -> Batch:
        """Gives rows by number, in the order asked for.

        Args:
          index: integers [n].

        Returns:
          A batch of n rows.

        Raises:
          IndexError: if there is no such row.
          ValueError: if one of the rows is bad.
        """
        index = check_rows(index, self.count)
        if not len(index):
            return self._none
        return gather(index, self._layout.begins, self._read)

    def _read(self, wanted: Sequence[tuple[int, np.ndarray]]) -> Batch:
        """Rows of groups, one after the other: each file is opened once."""
        batches, taken, place = [], [], []
        with ExitStack() as stack:
            opened, load = None, None
            for number, rows in wanted:
                path, group, first = self._layout.groups[number]
                if path != opened:
                    batches += self._convert(opened, taken, place)
                    stack.close()
                    opened, load, taken, place = path, None, [], []
                table = self._cache.get(number)
                if table is None:
                    if load is None:
                        load = stack.enter_context(_File(self, path)).load
                    table = _plain(load(group))
                self._keep(number, table)
                taken.append(table.take(pa.array(rows)))
                place.append(first + 1 + rows)
            batches += self._convert(opened, taken, place)
        return Batch.concat(batches)

    def _keep(self, number: int, table: pa.Table) -> None:
        cache = self._cache
        cache[number] = table
        cache.move_to_end(number)
        held = sum(table.nbytes for table in cache.values())
        while cache and held > self.cache_bytes:
            _, oldest = cache.popitem(last=False)
            held -= oldest.nbytes

    def _convert(self, path, tables, place) -> Iterator[Batch]:
        if not tables:
            return
        numbers, at = np.concatenate(place), 0
        for data in pa.concat_tables(tables).combine_chunks().to_batches():
            yield self._batch(data, path, numbers[at : at + data.num_rows])
            at += data.num_rows

    def _batch(self, data: pa.RecordBatch, path: str, numbers: np.ndarray) -> Batch:
        names = self.columns.used
        return make_batch(
            self.columns,
            {name: ArrowColumn(data.column(name)) for name in names},
            data.num_rows,
            skip=False,
            place=lambda row: f"{path}, row {numbers[row]}",
        )

    @cached_property
    def _layout(self) -> _Layout:
        groups, sizes = [], []
        for path in self.files:
            with _File(self, path) as file:
                first = 0
                for number, size in enumerate(file.sizes()):
                    groups.append((path, number, first))
                    sizes.append(size)
                    first += size
        return _Layout(groups, np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]))

    @cached_property
    def _none(self) -> Batch:
        """A batch of no rows, of the features that others have."""
        with _File(self, self.files[0]) as file:
            schema = file.schema
        arrays = [pa.array([], schema.field(name).type) for name in self.columns.used]
        data = _plain(pa.table(arrays, list(self.columns.used)))
        data = pa.record_batch([c.combine_chunks() for c in data.columns], data.schema)
        return self._batch(data, self.files[0], np.zeros(0, np.int64))


class _File:
    """A file while it is open."""

    def __init__(self, rows: ArrowRows, path: str):
        self._rows, self._path, self._stack = rows, path, ExitStack()
        self.load: Callable[[int], pa.Table]
        self.sizes: Callable[[], list[int]]
        self.schema: pa.Schema

    def __enter__(self) -> "_File":
        try:
            open_ = _open_parquet if self._rows.format == "parquet" else _open_ipc
            self.schema, self.sizes, load = open_(self._stack, self._path, self._rows)
            check_schema(self._path, self.schema, self._rows.columns)
        except FileNotFoundError:
            raise
        except (pa.ArrowException, OSError, EOFError) as error:
            self._stack.close()
            raise self._unreadable(error) from error
        self.load = self._guarded(load)
        return self

    def __exit__(self, *error) -> None:
        self._stack.close()

    def _guarded(self, load: Callable[[int], pa.Table]) -> Callable[[int], pa.Table]:
        def guarded(group: int) -> pa.Table:
            try:
                return load(group)
            except (pa.ArrowException, OSError, EOFError) as error:
                raise self._unreadable(error) from error

        return guarded

    def _unreadable(self, error: BaseException) -> ValueError:
        return ValueError(
            f"{self._path}: cannot be read as {self._rows.format}: {error}. Rows by"
            " number need whole files, Parquet or the file format of Arrow IPC."
        )


def _open_parquet(stack: ExitStack, path: str, rows: ArrowRows):
    file = stack.enter_context(pq.ParquetFile(path, memory_map=True))
    names = list(rows.columns.used)
    meta = file.metadata

    def sizes():
        return [meta.row_group(g).num_rows for g in range(meta.num_row_groups)]

    def load(group):
        return file.read_row_group(group, names, use_threads=rows.use_threads)

    return file.schema_arrow, sizes, load


def _open_ipc(stack: ExitStack, path: str, rows: ArrowRows):
    file = stack.enter_context(pa.memory_map(path))
    schema = pa.ipc.open_file(file).schema

    def reader(names):
        fields = sorted(map(schema.get_field_index, names))
        options = pa.ipc.IpcReadOptions(
            included_fields=fields, use_threads=rows.use_threads
        )
        file.seek(0)
        return pa.ipc.open_file(file, options=options)

    def sizes():
        labels = reader([rows.columns.label])
        return [labels.get_batch(g).num_rows for g in range(labels.num_record_batches)]

    def load(group):
        return pa.Table.from_batches([used.get_batch(group)])

    used = reader(rows.columns.used)
    return schema, sizes, load


def _plain(table: pa.Table) -> pa.Table:
    """Columns in one piece each, of types that rows can be taken of."""
    for at, column in enumerate(table.schema):
        if is_text(column.type) and "view" in str(column.type):
            table = table.set_column(
                at, column.name, table.column(at).cast(pa.large_binary())
            )
    return table.combine_chunks()
