"""CSV and TSV files as a source of batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Unpack

import numpy as np
import pyarrow as pa

from shardjax.data.batch import Batch
from shardjax.data.columns import (
    LABEL_NAMES,
    Columns,
    TableOptions,
    check_names,
    infer_columns,
)
from shardjax.data.delimited import Dialect, guess_delimiter
from shardjax.data.files import (
    BLOCK_BYTES,
    Block,
    Paths,
    find_files,
    map_in_order,
    read_blocks,
)
from shardjax.data.rows import TextColumn, make_batch
from shardjax.data.source import OnBadLine, check_on_bad_line
from shardjax.data.text import Cells, are_integers, parse_keys, parse_numbers

_FEW_CELLS = 64
_TRUTH = {None, b"true", b"false", b"True", b"False", b"TRUE", b"FALSE"}


def csv(
    paths: Paths,
    *,
    delimiter: str | None = None,
    header: bool | None = None,
    names: Sequence[str] | None = None,
    quote: str | None = '"',
    on_bad_line: OnBadLine = "error",
    block_bytes: int = BLOCK_BYTES,
    threads: int = 1,
    **options: Unpack[TableOptions],
) -> "CsvSource":
    """Reads CSV, TSV and the like, as RFC 4180 has it, with LF or CRLF.

    What each column is for is given by options or inferred, see `infer_columns`; print
    `source.columns` to see. Cells become keys as of `parse_keys`: a usual integer is
    its own key, all else is hashed, so ids may be wider than a float can hold. Cells
    become numbers as of `parse_numbers`. An empty categorical cell is `MISSING_KEY`, an
    empty bag has no keys, an empty dense cell is 0; a label or weight may not be empty.
    Blank lines are passed over.

    Args:
      paths: files, plain or gzip, as of `find_files`.
      delimiter: one character; None takes the most frequent of comma, tab and semicolon
        in the first line of the first file.
      header: whether the first row of each file names its columns. None takes it as
        names if all its cells differ and none is a number.
      names: what to call the columns, if there is no header or in its stead; otherwise
        they are column_0, column_1, ..., and the first one is the label if no other is
        given.
      quote: what encloses fields with delimiters, line breaks or (doubled) quotes in
        them; None if nothing does.
      on_bad_line: "error" raises at the first row with too few or too many fields, or
        with a value that is not of its column's kind; "skip" leaves it out and counts
        it in `Batch.bad_lines`.
      block_bytes: how much text makes a chunk; columns are inferred from the first.
      threads: how many chunks are parsed at once.
      **options: see `TableOptions`.

    Returns:
      A source of batches.

    Raises:
      FileNotFoundError: if a file is missing or a glob matches none.
      ValueError: if an option does not fit the files or they are empty; while reading,
        if a row is bad: the error names file, line and what is wrong.

    Example:
      >>> import tempfile
      >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
      ...     size = file.write('click,item_id,tags\\n1,7,"a|b"\\n0,8,\\n')
      ...     file.flush()
      ...     source = csv(file.name)
      ...     batch = next(source.chunks())
      >>> print(source.columns)
      column   kind         values   why
      click    label        integer  a label's name
      item_id  categorical  integer  an id's name
      tags     bag          text     text with '|' in it
      >>> batch.fixed.tolist(), batch.jagged["tags"].lengths.tolist()
      ([[7, 8]], [2, 0])
    """
    check_on_bad_line(on_bad_line)
    files = find_files(paths)
    if delimiter is None:
        delimiter = guess_delimiter(_first_block(files, block_bytes))
    dialect = Dialect(delimiter, quote)
    block = _first_block(files, block_bytes, dialect)
    cells, end = dialect.first_row(block)
    separator = options.get("bag_separator", "|")
    if separator == delimiter:
        raise ValueError(
            f"`bag_separator` and `delimiter` must differ, got {delimiter!r} for both: keys"
            " of a bag could not be told from columns"
        )
    if header is None:
        header = names is None and _are_names(cells)
        if names is None and not header:
            _refuse_repeated_names(block.path, cells, options.get("label"))
    if names is not None:
        by_name = False
        names = tuple(names)
        if len(names) != len(cells):
            raise ValueError(
                f"`names` must have one for each of the {len(cells)} columns of"
                f" {block.path}, got {len(names)}"
            )
    elif header:
        by_name = True
        names = cells
    else:
        by_name = False
        names = tuple(f"column_{i}" for i in range(len(cells)))
    start = end if header else 0
    fields = dialect.split(block, start, block.size, len(names), skip=True)
    sample = pa.table([_typed(fields.column(i)) for i in range(len(names))], names)
    return CsvSource(
        files,
        infer_columns(sample, **options),
        names,
        dialect,
        header,
        by_name,
        on_bad_line,
        block_bytes,
        threads,
    )


@dataclass(frozen=True)
class CsvSource:
    """A source of CSV files; `csv` makes it.

    Attributes:
      files: paths.
      columns: what each column is for; print it.
      names: the columns of the first file, from left to right.
      dialect: how fields are told apart.
      header: whether each file has a header.
      by_name: whether headers say where the columns are; else they are as in `names`.
      on_bad_line, block_bytes, threads: as of `csv`.
    """

    files: tuple[str, ...]
    columns: Columns
    names: tuple[str, ...]
    dialect: Dialect
    header: bool
    by_name: bool
    on_bad_line: OnBadLine
    block_bytes: int
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
          start_chunk: how many chunks to pass over without parsing them.

        Returns:
          An iterator over one chunk for each block of rows.
        """
        blocks = (b for path in self.files for b in self._blocks(path))
        return map_in_order(
            self._parse, islice(blocks, start_chunk, None), self.threads
        )

    def _blocks(self, path: str) -> Iterator[tuple[Block, int, tuple[str, ...]]]:
        """Reads blocks, where their first row starts and the file's columns."""
        names = self.names
        for block in read_blocks(path, self.block_bytes, self.dialect.last_row_end):
            start = 0
            if self.header and block.first_line == 1:
                cells, start = self.dialect.first_row(block)
                if self.by_name:
                    names = cells
                    check_names(path, names, self.columns)
            yield block, start, names

    def _parse(self, item: tuple[Block, int, tuple[str, ...]]) -> Batch:
        block, start, names = item
        skip = self.on_bad_line == "skip"
        fields = self.dialect.split(block, start, block.size, len(names), skip=skip)
        batch = make_batch(
            self.columns,
            {
                name: TextColumn(fields.column(names.index(name)))
                for name in self.columns.used
            },
            len(fields.row_starts),
            skip=skip,
            place=lambda row: _place(block, fields.row_starts[row]),
        )
        if fields.stopped_by:
            raise ValueError(
                f"{_place(block, fields.stopped_at)}: {fields.stopped_by}. Give"
                " on_bad_line='skip' to leave such lines out and count them."
            )
        return replace(batch, bad_lines=batch.bad_lines + fields.bad_rows)


def _place(block: Block, at: int) -> str:
    return f"{block.path}, line {block.line_number(at)}"


def _first_block(
    files: Sequence[str], block_bytes: int, dialect: Dialect | None = None
) -> Block:
    options = () if dialect is None else (dialect.last_row_end,)
    for path in files:
        for block in read_blocks(path, block_bytes, *options):
            return block
    raise ValueError(f"there must be a row to infer columns from, got none in {files}")


def _are_names(cells: Sequence[str]) -> bool:
    numbers, wrong = parse_numbers(Cells.of(cells))
    is_number = ~wrong & ~np.isnan(numbers)
    return len(set(cells)) == len(cells) and not is_number.any()


def _refuse_repeated_names(path: str, cells: Sequence[str], label: str | None) -> None:
    """Raises if a first row that names the label cannot be a header."""
    named = [c for c in cells if c == label or c.strip().lower() in LABEL_NAMES]
    twice = next((c for c in cells if cells.count(c) > 1), None)
    if named and twice is not None:
        raise ValueError(
            f"{path}, line 1: column names must differ, got {twice!r} twice in what looks"
            f" like a header (it has {named[0]!r}). Rename one, or give `header=False` if"
            " this is data, or `names` and `header=True` to replace them"
        )


def _typed(cells: Cells) -> pa.Array:
    """Makes an Arrow array of the narrowest type that holds all cells."""
    empty = cells.starts == cells.stops
    texts = cells.to_arrow()
    if empty.all():
        return texts
    if (are_integers(cells) | empty).all():
        keys = parse_keys(cells)
        if (cells.data[cells.starts[~empty]] == ord("-")).any():
            keys = keys.view(np.int64)
        return pa.array(keys, mask=empty)
    if set(texts.unique().to_pylist()) <= _TRUTH:
        return texts.cast(pa.string()).cast(pa.bool_())
    # A few cells tell most text from numbers; all of them would take long.
    for stop in (_FEW_CELLS, len(cells)):
        some = Cells(cells.data, cells.starts[:stop], cells.stops[:stop])
        numbers, wrong = parse_numbers(some)
        if wrong.any():
            return texts
    return pa.array(numbers, from_pandas=True)
