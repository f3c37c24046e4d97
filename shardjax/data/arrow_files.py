"""Parquet and Arrow IPC files as sources of batches."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Literal, NamedTuple, Unpack

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shardjax.data.arrow_rows import CACHE_BYTES, ArrowRows
from shardjax.data.arrow_schema import check_schema
from shardjax.data.batch import Batch
from shardjax.data.columns import Columns, TableOptions, infer_columns
from shardjax.data.files import Paths, find_files, map_in_order, open_bytes
from shardjax.data.rows import ArrowColumn, make_batch
from shardjax.data.source import OnBadLine, check_on_bad_line

CHUNK_ROWS = 32_768
"""How many rows make a chunk, if not said otherwise."""

_ROWS_AT_ONCE = 1 << 20
_IPC_FILE_MAGIC = b"ARROW1"


def parquet(
    paths: Paths,
    *,
    on_bad_line: OnBadLine = "error",
    chunk_rows: int = CHUNK_ROWS,
    threads: int = 1,
    **options: Unpack[TableOptions],
) -> "ArrowSource":
    """Reads Parquet files, a part of a row group at a time, and only columns in use.

    What each column is for is given by options or inferred, see `infer_columns`; print
    `source.columns` to see. Integers, true and false are their own keys; text and bytes
    are hashed as by `hash_strings`, dictionary-encoded or not; a float is a key if it
    is a whole number below 2**53. A missing categorical value is `MISSING_KEY`, a
    missing bag has no keys, a missing dense value is 0; a label or weight may not be
    missing. Bags are lists, text between separators, or single values.

    Args:
      paths: files, as of `find_files`.
      on_bad_line: "error" raises at the first row with a value that is not of its
        column's kind; "skip" leaves it out and counts it in `Batch.bad_lines`.
      chunk_rows: how many rows make a chunk; columns are inferred from the first.
      threads: how many chunks are converted at once; more than 1 also lets Arrow decode
        columns in its own threads.
      **options: see `TableOptions`.

    Returns:
      A source of batches.

    Raises:
      FileNotFoundError: if a file is missing or a glob matches none.
      ValueError: if an option does not fit the files, or a file is not Parquet or has
        other columns than the first; while reading, if a row is bad: the error names
        file, row (from 1) and what is wrong.
      TypeError: if a column's type does not fit its kind.

    Example:
      >>> import os, tempfile
      >>> table = pa.table({"click": [1, 0], "item": ["a", "b"], "tags": [[7, 8], []]})
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = os.path.join(folder, "log.parquet")
      ...     pq.write_table(table, path)
      ...     source = parquet(path)
      ...     batch = next(source.chunks())
      >>> print(source.columns)
      column  kind         values           why
      click   label        integer          a label's name
      item    categorical  text             text
      tags    bag          list of integer  lists
      >>> batch.jagged["tags"].values
      array([7, 8], dtype=uint64)
    """
    return _make_source("parquet", paths, on_bad_line, chunk_rows, threads, options)


def arrow(
    paths: Paths,
    *,
    on_bad_line: OnBadLine = "error",
    chunk_rows: int = CHUNK_ROWS,
    threads: int = 1,
    **options: Unpack[TableOptions],
) -> "ArrowSource":
    """Reads Arrow IPC files, also called Feather, and streams, batch by batch.

    Args:
      paths: files, as of `find_files`; those in the stream format may be gzip.
      on_bad_line, chunk_rows, threads, **options: as of `parquet`. Large record batches
        are cut into chunks.

    Returns:
      A source of batches.

    Raises:
      FileNotFoundError, ValueError, TypeError: as of `parquet`.

    Example:
      >>> import os, tempfile
      >>> table = pa.table({"click": [1, 0], "item": ["a", "b"]})
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = os.path.join(folder, "log.arrow")
      ...     with pa.ipc.new_file(path, table.schema) as writer:
      ...         writer.write_table(table)
      ...     next(arrow(path).chunks()).labels
      array([1., 0.], dtype=float32)
    """
    return _make_source("arrow", paths, on_bad_line, chunk_rows, threads, options)


@dataclass(frozen=True)
class ArrowSource:
    """A source of Parquet or Arrow IPC files; `parquet` and `arrow` make it.

    Attributes:
      files: paths.
      columns: what each column is for; print it.
      format: "parquet" or "arrow".
      on_bad_line, chunk_rows, threads: as of `parquet`.
    """

    files: tuple[str, ...]
    columns: Columns
    format: Literal["parquet", "arrow"]
    on_bad_line: OnBadLine
    chunk_rows: int
    threads: int

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The categorical columns, then the bags."""
        return self.columns.feature_names

    @property
    def n_dense(self) -> int:
        """The number of dense columns."""
        return len(self.columns.names("dense"))

    def chunks(self, start_chunk: int = 0) -> Iterator[Batch]:
        """Starts a fresh pass over the files.

        Args:
          start_chunk: how many chunks to pass over without converting them; whole row
            groups of Parquet are not even read.

        Returns:
          An iterator over chunks of `chunk_rows` rows, or less at the end of a row
          group or record batch.
        """
        return map_in_order(self._convert, self._pieces(start_chunk), self.threads)

    def _pieces(self, skip: int) -> Iterator[tuple[str, pa.RecordBatch, int]]:
        """Reads chunks, each with its file and the number of its first row, from 1."""
        for path in self.files:
            first_row = 1
            for group in _groups(
                self.format, path, self.chunk_rows, self.threads > 1, self.columns
            ):
                n_chunks = -(-group.rows // self.chunk_rows)
                if skip < n_chunks:
                    starts = range(first_row, first_row + group.rows, self.chunk_rows)
                    chunks = zip(group.read(), starts, strict=True)
                    for data, start in islice(chunks, skip, None):
                        yield path, data, start
                skip = max(0, skip - n_chunks)
                first_row += group.rows

    def _convert(self, item: tuple[str, pa.RecordBatch, int]) -> Batch:
        path, data, first_row = item
        return make_batch(
            self.columns,
            {name: ArrowColumn(data.column(name)) for name in self.columns.used},
            data.num_rows,
            skip=self.on_bad_line == "skip",
            place=lambda row: f"{path}, row {first_row + row}",
        )


@dataclass(frozen=True)
class IndexedArrowSource(ArrowSource):
    """Files whose rows can be had by number: an `Indexable` source.

    `parquet` and `arrow` make it where no bad rows are to be skipped, which would change
    the numbers, and files are not streams. See `shardjax.data.arrow_rows` for its costs.

    Attributes:
      cache_bytes: how many bytes of decoded row groups to keep, of those used last; files
        that fit are decoded once (`dataclasses.replace(source, cache_bytes=2 << 30)`).
    """

    cache_bytes: int = CACHE_BYTES

    @property
    def rows_at_once(self) -> int:
        """Many, as row groups are decoded as a whole."""
        return _ROWS_AT_ONCE

    def row_count(self) -> int:
        """Gives the number of rows, as the files say; reads no rows."""
        return self._rows.count

    def chunk_sizes(self) -> Iterator[int]:
        """Gives the number of rows of each chunk, as the files say.

        Yields:
          `chunk_rows`, and what remains at the end of each row group or record batch.
        """
        for rows in self._rows.group_sizes():
            for start in range(0, rows, self.chunk_rows):
                yield min(self.chunk_rows, rows - start)

    def take(self, index: np.ndarray) -> Batch:
        """Gives rows by number, in the order asked for.

        Args:
          index: integers [n], each at least 0 and below `row_count()`.

        Returns:
          A batch of n rows.

        Raises:
          IndexError: if there is no such row.
          ValueError: if a row is bad, or a file cannot be read.
        """
        return self._rows.take(index)

    @cached_property
    def _rows(self) -> ArrowRows:
        return ArrowRows(
            self.files, self.columns, self.format, self.threads > 1, self.cache_bytes
        )


class _Group(NamedTuple):
    """Rows that are stored together: how many, and a way to read them in chunks."""

    rows: int
    read: Callable[[], Iterator[pa.RecordBatch]]


def _make_source(format, paths, on_bad_line, chunk_rows, threads, options):
    check_on_bad_line(on_bad_line)
    if chunk_rows < 1:
        raise ValueError(f"`chunk_rows` must be positive, got {chunk_rows}")
    files = find_files(paths)
    sample = None
    for path in files:
        for group in _groups(format, path, chunk_rows, threads > 1):
            if group.rows:
                sample = next(group.read())
                break
        if sample is not None:
            break
    if sample is None:
        raise ValueError(
            f"there must be a row to infer columns from, got none in {files}"
        )
    columns = infer_columns(sample, **options)
    check_schema(path, sample.schema, columns)
    indexed = on_bad_line == "error" and (format == "parquet" or _are_files(files))
    kind = IndexedArrowSource if indexed else ArrowSource
    return kind(files, columns, format, on_bad_line, chunk_rows, threads)


def _are_files(paths: tuple[str, ...]) -> bool:
    """Whether none of these is in the stream format."""
    for path in paths:
        with open(path, "rb") as file:
            if file.read(len(_IPC_FILE_MAGIC)) != _IPC_FILE_MAGIC:
                return False
    return True


def _groups(
    format: str,
    path: str,
    chunk_rows: int,
    use_threads: bool,
    columns: Columns | None = None,
) -> Iterator[_Group]:
    """Opens a file; gives its row groups or record batches, of columns in use only."""
    try:
        if format == "parquet":
            yield from _parquet_groups(path, chunk_rows, use_threads, columns)
        else:
            yield from _ipc_groups(path, chunk_rows, use_threads, columns)
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, EOFError) as error:
        raise ValueError(f"{path}: cannot be read as {format}: {error}") from error


def _parquet_groups(path, chunk_rows, use_threads, columns) -> Iterator[_Group]:
    with pq.ParquetFile(path, memory_map=True) as file:
        names = None
        if columns is not None:
            check_schema(path, file.schema_arrow, columns)
            names = list(columns.used)
        for at in range(file.num_row_groups):
            yield _Group(
                file.metadata.row_group(at).num_rows,
                partial(
                    file.iter_batches,
                    chunk_rows,
                    row_groups=[at],
                    columns=names,
                    use_threads=use_threads,
                ),
            )


def _ipc_groups(path, chunk_rows, use_threads, columns) -> Iterator[_Group]:
    with ExitStack() as stack:
        file = stack.enter_context(open_bytes(path))
        is_file = file.read(len(_IPC_FILE_MAGIC)) == _IPC_FILE_MAGIC
        if is_file:
            # Mapped, so that columns that are not in use are not read.
            file = stack.enter_context(pa.memory_map(path))
        else:
            file.seek(0)
        open_ipc = pa.ipc.open_file if is_file else pa.ipc.open_stream
        schema = open_ipc(file).schema
        fields = None
        if columns is not None:
            check_schema(path, schema, columns)
            fields = sorted(map(schema.get_field_index, columns.used))
        file.seek(0)
        options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=use_threads)
        reader = open_ipc(file, options=options)
        batches = (
            map(reader.get_batch, range(reader.num_record_batches))
            if is_file
            else reader
        )
        for batch in batches:
            yield _Group(batch.num_rows, partial(_cut, batch, chunk_rows))


def _cut(batch: pa.RecordBatch, chunk_rows: int) -> Iterator[pa.RecordBatch]:
    return (batch.slice(at, chunk_rows) for at in range(0, batch.num_rows, chunk_rows))
