"""Rows of a table in files that other programs read, written a part at a time.

Of a table NAME (what is no plain character in it is written as in a URL) there are

    NAME.arrow          format "arrow": an Arrow IPC file, also known as Feather, with the
                        columns `key`, `vector` and what is known of each row
    NAME.keys.npy, NAME.vectors.npy, ...    format "npy": an array for each of these
                        columns, which NumPy can map into memory

and for all of them one `rows.json`, which says what the tables are.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, Protocol, get_args
from urllib.parse import quote

import numpy as np

from shardjax.embed import TableRows

Format = Literal["arrow", "npy"]
DESCRIPTION = "rows.json"
_VERSION = 1
# by field of TableRows: the column's name, and its dtype
_FACTS = {
    "last_step": ("last_step", np.dtype(np.int32)),
    "uses": ("uses", np.dtype(np.uint32)),
    "scores": ("score", np.dtype(np.float64)),
}
_ARRAYS = {"key": "keys", "vector": "vectors", "score": "scores"}  # names of npy files


def check_format(format: Format) -> None:
    """Raises unless a format is one that there is."""
    if format not in get_args(Format):
        raise ValueError(
            f"`format` of an export must be 'arrow' or 'npy', got {format!r}"
        )


def written_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype in which numbers of another are written: the same where NumPy has it by
    itself, else float32, which has each bfloat16 and each float8."""
    return dtype if dtype.isbuiltin == 1 else np.dtype(np.float32)


class _Files(Protocol):
    """The files of one table, being written."""

    names: list[str]

    def write(self, columns: Mapping[str, np.ndarray]) -> None: ...

    def close(self) -> None: ...


class TableWriter:
    """Writes the rows of one table; a context, at whose end the files are complete.

    Args:
      folder: in which to write.
      format: of the files.
      name: of the table.
      dim: numbers per row.
      dtype: of the numbers.
      facts: fields of `TableRows` that are known of its rows.

    Attributes:
      count: rows so far.

    Raises:
      OSError: if something cannot be written; here and below.
    """

    def __init__(
        self,
        folder: Path,
        format: Format,
        name: str,
        dim: int,
        dtype: np.dtype,
        facts: Sequence[str],
    ):
        self.count = 0
        self._facts = {field: _FACTS[field] for field in facts}
        self._dtype = written_dtype(dtype)
        columns = {"key": np.dtype(np.uint64), "vector": self._dtype}
        columns |= dict(self._facts.values())
        files = {"arrow": _ArrowFile, "npy": _NpyFiles}[format]
        self._files: _Files = files(folder, quote(name, safe=" "), dim, columns)
        self._description = {
            "name": name,
            "dim": dim,
            "dtype": dtype.name,
            "columns": {column: dtype.name for column, dtype in columns.items()},
            "files": self._files.names,
        }

    def write(self, rows: TableRows) -> None:
        """Appends rows."""
        if not len(rows.keys):
            return
        columns = {
            "key": rows.keys,
            "vector": rows.rows.astype(self._dtype, copy=False),
        }
        for field, (column, dtype) in self._facts.items():
            columns[column] = getattr(rows, field).astype(dtype, copy=False)
        self._files.write(columns)
        self.count += len(rows.keys)

    def description(self) -> dict[str, Any]:
        """What there is, as JSON has it."""
        return {**self._description, "rows": self.count}

    def __enter__(self) -> "TableWriter":
        return self

    def __exit__(self, *_) -> None:
        self._files.close()


class _ArrowFile:
    """An Arrow IPC file; each part is a record batch."""

    def __init__(
        self, folder: Path, stem: str, dim: int, columns: Mapping[str, np.dtype]
    ):
        import pyarrow as pa

        types = {name: pa.from_numpy_dtype(dtype) for name, dtype in columns.items()}
        types["vector"] = pa.list_(types["vector"], dim)
        self._schema = pa.schema(list(types.items()))
        path = folder / f"{stem}.arrow"
        self.names = [path.name]
        self._file = pa.ipc.new_file(str(path), self._schema)

    def write(self, columns: Mapping[str, np.ndarray]) -> None:
        import pyarrow as pa

        arrays = []
        for field in self._schema:
            values = pa.array(columns[field.name].reshape(-1))
            if field.name == "vector":
                values = pa.FixedSizeListArray.from_arrays(values, type=field.type)
            arrays.append(values)
        self._file.write_batch(pa.record_batch(arrays, schema=self._schema))

    def close(self) -> None:
        self._file.close()


class _NpyFiles:
    """A .npy file per column."""

    def __init__(
        self, folder: Path, stem: str, dim: int, columns: Mapping[str, np.dtype]
    ):
        paths = {
            name: folder / f"{stem}.{_ARRAYS.get(name, name)}.npy" for name in columns
        }
        self.names = [path.name for path in paths.values()]
        self._shapes = {name: (dim,) if name == "vector" else () for name in columns}
        self._dtypes = columns
        self._count = 0
        self._files: dict[str, IO[bytes]] = {}
        for name, path in paths.items():
            self._files[name] = path.open("xb")
            self._write_header(name)

    def _write_header(self, name: str) -> None:
        """Writes how many rows there are; it takes as many bytes whatever the number."""
        np.lib.format.write_array_header_1_0(
            self._files[name],
            {
                "descr": np.lib.format.dtype_to_descr(self._dtypes[name]),
                "fortran_order": False,
                "shape": (self._count, *self._shapes[name]),
            },
        )

    def write(self, columns: Mapping[str, np.ndarray]) -> None:
        for name, file in self._files.items():
            file.write(np.ascontiguousarray(columns[name]).data)
        self._count += len(columns["key"])

    def close(self) -> None:
        for name, file in self._files.items():
            file.seek(0)
            self._write_header(name)
            file.close()


def write_description(
    folder: Path, tables: Sequence[Mapping[str, Any]], more: Mapping[str, Any]
) -> None:
    """Writes `rows.json`.

    Args:
      folder: of the files.
      tables: `TableWriter.description`, and what else is known of each.
      more: what is known of all.
    """
    described = {"format": _VERSION, **more, "tables": list(tables)}
    text = json.dumps(described, indent=2, allow_nan=False)
    (folder / DESCRIPTION).write_text(text + "\n")
