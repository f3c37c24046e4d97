"""Tables in training taken elsewhere: to other devices, or to the host.

A row of an id lies where its number says, so a table is cut into other blocks. A row of a
key lies in the slot of its key, on the device that owns its hash: on other devices, or in
a table of another size, all keys are inserted anew, and rows follow.
"""

from functools import partial
from typing import Any

import jax
import numpy as np

from shardjax.embed import device_table
from shardjax.embed.key_words import join_keys, mix64, owner_of
from shardjax.embed.layout import rung
from shardjax.embed.probing import DeviceTable
from shardjax.embed.table_rows import TableRows
from shardjax.embed.table_state import TableLeaf, TableState
from shardjax.partition import entry_axes
from shardjax.sharded import fetch, place

_AT_ONCE = 1 << 16  # keys of each device that are inserted together


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
        _zeros(like.places),
        _zeros(like.merged),
        leaf.shape,
        leaf.optimizer.names,
    )


def rehash_table(path: str, old: TableState, like: TableState) -> TableState:
    """A table with a vocabulary on other devices, or with another number of rows.

    Of several processes all must call it, with the same arrays.

    Args:
      path: of the table, for the message.
      old: its state. NumPy arrays are whole, and are moved; what is a `jax.Array` already
        is where it belongs, and stays.
      like: shapes, dtypes and shardings that are wanted, None for one device.

    Returns:
      The state: with the same rows by key, and zeros in rows that no key has.

    Raises:
      ValueError: if a device has no room for its keys.
    """
    assert old.keys is not None and like.keys is not None
    hi, lo, used = fetch(device_table.export(old.keys))
    slots = np.flatnonzero(used)
    hi, lo = hi[slots], lo[slots]
    keys, new = _insert(hi, lo, like.keys)
    if refused := int(np.sum(new < 0)):
        raise ValueError(_no_room(path, hi, lo, refused, like.keys))

    def move(x, like) -> jax.Array:
        if isinstance(x, jax.Array):
            return x
        out = np.zeros(like.shape, like.dtype)
        out[new] = x[slots]
        return put(out, like)

    def keep(x, like) -> jax.Array:
        return x if isinstance(x, jax.Array) else put(x, like)

    return TableState(
        move(old.rows, like.rows),
        [move(*x) for x in zip(old.row_state, like.row_state, strict=True)],
        [keep(*x) for x in zip(old.shared, like.shared, strict=True)],
        _zeros(like.places),
        _zeros(like.merged),
        like.shape,
        like.names,
        keys,
    )


def _insert(hi: np.ndarray, lo: np.ndarray, like: DeviceTable):
    """A table of keys that are all different, and the slot of each, int32 [keys]."""
    over: Any = like.hi.sharding
    if not isinstance(over, jax.NamedSharding):
        over = None
    mesh: Any = None if over is None else over.mesh
    axes = () if over is None else entry_axes(over.spec[0])
    table: Any = device_table.init_device_table(
        like.capacity, reach=like.reach, mesh=mesh, axis=axes
    )
    devices = like.count.size
    count = devices * min(rung(-(-len(hi) // devices)), _AT_ONCE)
    found = [np.zeros(0, np.int32)]
    for start in range(0, len(hi), count):
        parts = [x[start : start + count] for x in (hi, lo)]
        here = len(parts[0])
        asked: Any = [np.pad(x, (0, count - here)) for x in parts]
        asked.append(np.arange(count) < here)
        if over is not None:
            asked = place(asked, over)
        table, slots = _insert_some(table, *asked, over=over)
        found.append(fetch(slots)[:here])
    return table, np.concatenate(found)


@partial(jax.jit, static_argnames="over", donate_argnames="table")
def _insert_some(table, hi, lo, valid, *, over):
    axes = None if over is None else entry_axes(over.spec[0])

    def insert(table, hi, lo, valid):
        return device_table.find_or_insert(table, (hi, lo), valid, axis=axes)[:2]

    if over is not None:
        insert = jax.shard_map(
            insert,
            mesh=over.mesh,
            in_specs=(over.spec,) * 4,
            out_specs=(over.spec,) * 2,
            check_vma=False,
        )
    return insert(table, hi, lo, valid)


def _no_room(path: str, hi, lo, refused: int, like: DeviceTable) -> str:
    devices, capacity = like.count.size, like.capacity
    owners = np.asarray(owner_of(mix64(hi, lo)[0], devices))
    # a table of many slots turns keys away when it is some 97 % full
    enough = devices * (int(np.bincount(owners).max()) * 10 // 9 + 1)
    return (
        f"the table {path!r} has {len(hi)} rows with keys, and {refused} of them find no"
        f" room: its capacity is {devices * capacity} rows, {capacity} on each of {devices}"
        f" devices, and the hash of a key says on which it is. Plan the table with {enough}"
        " rows"
    )


def put(x: np.ndarray, like: Any) -> jax.Array:
    """A NumPy array where another lies; all processes give the whole."""
    if isinstance(like.sharding, jax.NamedSharding):
        return place(x, like.sharding)
    return jax.device_put(x, like.sharding, may_alias=False)


def _zeros(like: Any) -> jax.Array:
    return put(np.zeros(like.shape, like.dtype), like)
