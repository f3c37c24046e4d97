"""Tables in training taken elsewhere: to other devices, or to the host."""

from typing import Any

import jax
import numpy as np

from shardjax.embed import device_table
from shardjax.embed.key_words import join_keys
from shardjax.embed.table_rows import TableRows
from shardjax.embed.table_state import TableLeaf, TableState
from shardjax.sharded import fetch, place


def export_table(table: TableState) -> TableRows:
    """The rows of a table on the host, by key; see `TablePlan.export`."""
    rows, *row_state = fetch([table.rows, *table.row_state])
    keys = np.arange(len(rows), dtype=np.uint64)
    used: Any = slice(table.count)
    if table.keys is not None:
        hi, lo, used = fetch(device_table.export(table.keys))
        keys = join_keys(hi, lo)
    return TableRows(keys, rows, row_state).take(used)


def place_table(leaf: TableLeaf, old: TableState, like: TableState) -> TableState:
    """A table on other devices; see `TablePlan.place`.

    Args:
      leaf: the table.
      old: its state, of NumPy arrays.
      like: shapes, dtypes and shardings that are wanted, None for one device.
    """

    def pad(x, like) -> Any:
        more = like.shape[0] - leaf.rows
        out = np.pad(x[: leaf.rows], [(0, more)] + [(0, 0)] * (x.ndim - 1))
        return put(out, like)

    return TableState(
        pad(old.rows, like.rows),
        [pad(*x) for x in zip(old.row_state, like.row_state, strict=True)],
        [put(np.asarray(x), y) for x, y in zip(old.shared, like.shared, strict=True)],
        put(np.zeros(like.places.shape, like.places.dtype), like.places),
        put(np.zeros(like.merged.shape, like.merged.dtype), like.merged),
        leaf.shape,
        leaf.optimizer.names,
    )


def put(x: np.ndarray, like: Any) -> jax.Array:
    """A NumPy array where another lies; all processes give the whole."""
    if isinstance(like.sharding, jax.NamedSharding):
        return place(x, like.sharding)
    return jax.device_put(x, like.sharding, may_alias=False)
