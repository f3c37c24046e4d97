"""Rows of a collection's tables as files for other programs."""

import importlib.metadata
import os
from collections.abc import Callable, Sequence

import numpy as np

from shardjax.embed import EmbeddingCollection, EmbeddingState, TableRows
from shardjax.export.formats import (
    Format,
    TableWriter,
    check_format,
    write_description,
)
from shardjax.folders import whole_folder

Filter = Callable[[str, TableRows], np.ndarray]


def chosen_tables(
    tables: Sequence[str] | None, known: Sequence[str]
) -> tuple[str, ...]:
    """Names of the tables to export, all for None.

    Raises:
      TypeError: for a single name.
      KeyError: for a table that there is not.
      ValueError: for none at all, or one that comes twice.
    """
    if tables is None:
        return tuple(known)
    if isinstance(tables, str):
        raise TypeError(
            f"`tables` to export must be a sequence of names, got the text {tables!r}."
            f" Write tables=[{tables!r}]"
        )
    tables = tuple(tables)
    for name in tables:
        if name not in known:
            raise KeyError(f"no table is named {name!r}; the tables are {list(known)}")
    if not tables or len(set(tables)) != len(tables):
        raise ValueError(
            f"`tables` to export must name at least one table, and each once, got"
            f" {list(tables)}. Leave it out for all"
        )
    return tables


def kept_rows(filter: Filter | None, table: str, rows: TableRows) -> TableRows:
    """The rows of a table that a filter wants, all without one.

    Raises:
      TypeError, ValueError: if it returns something else than a bool per row.
    """
    if filter is None:
        return rows
    mask = np.asarray(filter(table, rows))
    rule = f"`filter` must return a bool per row, [{len(rows.keys)}] for this part of"
    if mask.dtype != bool:
        raise TypeError(
            f"{rule} table {table!r}, got dtype {mask.dtype}. Compare, such as"
            " rows.uses >= 5"
        )
    if mask.shape != rows.keys.shape:
        raise ValueError(f"{rule} table {table!r}, got shape {mask.shape}")
    return rows.take(mask)


def export_rows(
    collection: EmbeddingCollection,
    state: EmbeddingState,
    directory: str | os.PathLike,
    *,
    format: Format = "arrow",
    tables: Sequence[str] | None = None,
    filter: Filter | None = None,
    step: int | None = None,
    replace: bool = False,
    chunk: int = 65536,
) -> dict[str, int]:
    """Writes the rows of tables, wherever they lie, into files for other programs.

    Each row is there once, in no particular order: its key (uint64), its vector [dim] and,
    of tables with an `evict` or a storage, its last step (int32) and its uses (uint32) or,
    with the policy ShowClick, its score (float64). With format "arrow" that is a file
    TABLE.arrow, for `pandas.read_feather`, and with "npy" the arrays TABLE.keys.npy,
    TABLE.vectors.npy, and so on, for `numpy.load(mmap_mode="r")`. Vectors have the table's
    dtype; of dtypes that NumPy lacks, such as bfloat16, they are float32 of the same value.
    rows.json tells what the tables are. Optimizer state stays behind.

    In memory are the keys of one table, 8 bytes each, and one part of its rows.

    Args:
      collection: the tables.
      state: of the devices, `state.tables` of a TrainState; no training meanwhile.
      directory: of the files. It appears whole at the end, or not at all.
      format: "arrow" or "npy".
      tables: names of those to write; None for all.
      filter: `f(table name, rows)` says which rows to write, bool [n], of a part of a
        table, `TableRows` of n rows; None for all.
      step: that the rows are of, for rows.json.
      replace: whether the directory may take the place of one with files.
      chunk: rows of a part, at most.

    Returns:
      How many rows were written, by table.

    Raises:
      FileExistsError: if there is something in the directory already.
      OSError: if it cannot be written.
      KeyError: for an unknown table.
      TypeError, ValueError: for another format, filter or kind of state.

    Example:
      >>> import tempfile, shardjax as sj
      >>> item = sj.embed.TableSpec("item", dim=2)
      >>> collection = sj.embed.EmbeddingCollection(
      ...     {"item_id": sj.embed.FeatureSpec(item)}, mesh=sj.make_mesh("1x1")
      ... )
      >>> values = np.array([[1.0, 2.0], [3.0, 4.0]])
      >>> state = collection.load_rows(collection.init(), "item", [7, 9], values)
      >>> with tempfile.TemporaryDirectory() as above:
      ...     export_rows(collection, state, f"{above}/rows", format="npy")
      ...     np.load(f"{above}/rows/item.vectors.npy").shape
      {'item': 2}
      (2, 2)
    """
    check_format(format)
    by_name = {t.spec.name: (g, t) for g in collection.groups for t in g.tables}
    names = chosen_tables(tables, list(by_name))
    described, counts = [], {}
    with whole_folder(directory, "an export", replace=replace) as folder:
        for name in names:
            group, table = by_name[name]
            parts = collection.export(state, name, chunk)
            facts = collection.facts(name)
            with TableWriter(
                folder, format, name, group.dim, group.dtype, facts
            ) as writer:
                for rows in parts:
                    writer.write(kept_rows(filter, name, rows))
            features = {f: collection.features[f].combiner for f in table.features}
            more = {"vocabulary": table.spec.vocabulary, "features": features}
            described.append(writer.description() | more)
            counts[name] = writer.count
        about = {"step": step, "seed": collection.seed, "versions": versions()}
        write_description(folder, described, about)
    return counts


def versions(packages: Sequence[str] = ("shardjax", "jax", "numpy")) -> dict[str, str]:
    """Those of packages that are installed, by name."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # runs from its source folder
            continue
    return found
