"""Rows of a step for other programs, without the model and the devices."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardjax.checkpoint.chain import chain_of, read_chain
from shardjax.checkpoint.steps import StepFolder
from shardjax.embed import TableRows
from shardjax.embed.outline import FACT_WORDS
from shardjax.embed.records import keys_of
from shardjax.embed.table_rows import as_facts
from shardjax.export.formats import (
    Format,
    TableWriter,
    check_format,
    write_description,
)
from shardjax.export.rows import Filter, chosen_tables, kept_rows, versions
from shardjax.folders import check_vacant, whole_folder


def export_checkpoint(
    path: str | os.PathLike,
    directory: str | os.PathLike,
    step: int | None = None,
    *,
    format: Format = "arrow",
    tables: Sequence[str] | None = None,
    filter: Filter | None = None,
    replace: bool = False,
    progress: Callable[[int], object] | None = None,
) -> dict[str, int]:
    """Writes the rows that tables have in a checkpoint into files for other programs.

    Neither the model nor its devices are needed. Of an increment the steps that it goes
    on from are read as well; all files are verified before. In memory are a part of the
    rows and, for an increment, 16 to 32 bytes for each row of one.

    Args:
      path: the folder of the checkpoints of a run.
      directory: of the files, which are those of `shardjax.export.export_rows`. It appears
        whole at the end, or not at all.
      step: which; None for the newest.
      format, tables, filter, replace: as of `export_rows`. Parts of a table have any
        number of rows.
      progress: told how many bytes have been read to check them, a part at a time.

    Returns:
      How many rows were written, by table.

    Raises:
      FileNotFoundError: if there is no such step, or none at all.
      CorruptCheckpointError: if it, or one that it needs, is not what was written.
      FileExistsError: if there is something in the directory already.
      OSError: if it cannot be written.
      KeyError: for an unknown table.
      TypeError, ValueError: for a step without tables, another format or filter.

    Example:
      >>> import tempfile, shardjax as sj
      >>> from shardjax.state import TrainState
      >>> item = sj.embed.TableSpec("item", dim=2)
      >>> collection = sj.embed.EmbeddingCollection(
      ...     {"item_id": sj.embed.FeatureSpec(item)}, mesh=sj.make_mesh("1x1")
      ... )
      >>> values = np.array([[1.0, 2.0], [3.0, 4.0]])
      >>> tables = collection.load_rows(collection.init(), "item", [7, 9], values)
      >>> state = TrainState(jnp.int32(5), {}, {}, (), None, tables, {})
      >>> with tempfile.TemporaryDirectory() as above:
      ...     with sj.checkpoint.Checkpointer(above, collection=collection) as saver:
      ...         saver.save(5, state)
      ...         saver.wait(state)
      ...     export_checkpoint(above, f"{above}/rows")
      {'item': 2}
    """
    check_format(format)
    check_vacant(directory, "an export", replace=replace)
    inside, run = Path(directory).resolve(), Path(path).resolve()
    if run == inside or inside in run.parents:
        raise ValueError(
            f"an export must be apart from the checkpoints in {str(path)!r}, got"
            f" {str(directory)!r}. Give a folder beside it"
        )
    reader = StepFolder(path, write=False)
    chain = chain_of(reader, _newest(reader) if step is None else step)
    found = chain[0].details.get("tables")
    if found is None:
        raise ValueError(
            f"step {chain[0].step} in {str(path)!r} has no embedding tables, so there are"
            " no rows to export. Give the folder of a run that has some"
        )
    groups = found["groups"]
    by_name = {name: group for group in groups for name in group["tables"]}
    names = chosen_tables(tables, list(by_name))
    for part in chain:
        reader.verify(part.step, progress)
    with whole_folder(directory, "an export", replace=replace) as folder:
        with ExitStack() as open_files:
            writers = {
                name: open_files.enter_context(
                    _writer(folder, format, name, by_name[name])
                )
                for name in names
            }
            for number, records in read_chain(chain):
                for name, rows in _by_table(groups[number], records, names):
                    writers[name].write(kept_rows(filter, name, rows))
        described = [writer.description() for writer in writers.values()]
        about = {"step": chain[0].step, "seed": found["seed"], "versions": versions()}
        write_description(folder, described, about)
    return {name: writer.count for name, writer in writers.items()}


def _newest(reader: StepFolder) -> int:
    steps = reader.steps()
    if not steps:
        raise FileNotFoundError(
            f"there are no steps in {str(reader.path)!r} to export. Give the folder that"
            " checkpoints have been written to"
        )
    return steps[-1]


def _writer(folder, format, name: str, group: Mapping[str, Any]) -> TableWriter:
    [dim], dtype = group["leaves"][0]
    facts = group["facts"][group["tables"].index(name)]
    return TableWriter(folder, format, name, dim, jnp.dtype(dtype), facts)


def _by_table(
    group: Mapping[str, Any], records: np.ndarray, names: Sequence[str]
) -> Iterator[tuple[str, TableRows]]:
    """Table records of a group, int32 [n, 5 + words], as rows of its tables."""
    for number, name in enumerate(group["tables"]):
        if name not in names:
            continue
        own = records[records[:, 2] == number]
        if not len(own):
            continue
        rows, *row_state = _leaves(group["leaves"], own[:, FACT_WORDS:])
        facts = as_facts(group["facts"][number], own[:, 3], own[:, 4].view(np.uint32))
        yield name, TableRows(keys_of(own), rows, row_state, **facts)


def _leaves(leaves: Sequence, words: np.ndarray) -> list[np.ndarray]:
    """What rows, int32 [n, words], are made of: see `shardjax.embed.moves.to_words`."""
    out, at = [], 0
    for shape, name in leaves:
        dtype = jnp.dtype(name)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        count = -(-size // 4)
        part = np.ascontiguousarray(words[:, at : at + count]).view(np.uint8)
        out.append(part[:, :size].view(dtype).reshape(len(words), *shape))
        at += count
    return out
