"""Keys of 64 bits to rows of a table that a model looks up itself, inside jit.

A table with a `DeviceVocabulary` has its keys in a `DeviceTable` beside its rows. Device i
has both the keys whose hash it owns and the rows [i * n, (i + 1) * n), so that the slot of a
key is the number of its row. A batch holds `Keys`; before the loss sees it they become row
numbers, and keys that are new get a row: all of it in the step.

See docs/design/0011-in-graph-embeddings.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from shardjax.embed import device_table
from shardjax.embed.groups import table_salt
from shardjax.embed.index import mix64 as host_mix64
from shardjax.embed.key_words import Words, mix64, split_keys
from shardjax.embed.probing import DeviceTable
from shardjax.embed.spec import Initializer, uniform
from shardjax.embed.table_state import PADDING, Axes, TableLeaf, TableState, own_rows


@dataclass(frozen=True)
class DeviceVocabulary:
    """Says that the rows of a table are given to keys as they come.

    Attributes:
      name: of the table. The first value of a row is a function of the seed, the name and
        the key: that of a `TableSpec` of this name in a collection of this seed.
      initializer: of rows; what the parameter had before is not used.
      seed: of their first values.

    Raises:
      TypeError: for an initializer that is no function.
    """

    name: str
    initializer: Initializer = uniform()
    seed: int = 0

    def __post_init__(self):
        if not callable(self.initializer):
            raise TypeError(
                f"`initializer` of the vocabulary {self.name!r} must be a function of (key,"
                f" shape, dtype), got {self.initializer!r}"
            )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Keys:
    """Keys in a batch, of a table with a vocabulary; see `keys_for`.

    A loss gets row numbers in its place, int32 [...]: -1 for keys that are not valid or, in
    an evaluation, not there; and the number of rows, an id that is bad, for a key that a
    full table has no room for. So give the layer `padding_id=-1`.
    """

    hi: jax.Array | np.ndarray  # uint32 [examples, ...]
    lo: jax.Array | np.ndarray  # uint32 [examples, ...]
    valid: jax.Array | np.ndarray  # bool [examples, ...]
    table: str = field(metadata={"static": True})  # its path


def keys_for(table: str, keys: np.ndarray, valid: np.ndarray | None = None) -> Keys:
    """Keys of a batch, from 64-bit integers on the host.

    Args:
      table: path of the table, as of `table_paths`.
      keys: uint64 [examples, ...], or other integers as of `as_keys`.
      valid: bool like the keys, which of them are keys; None for all.

    Example:
      >>> keys_for("item/embedding/value", np.array([7, 2**64 - 1], np.uint64)).lo
      array([         7, 4294967295], dtype=uint32)
    """
    hi, lo = split_keys(keys)
    return Keys(hi, lo, np.ones(hi.shape, bool) if valid is None else valid, table)


def init_vocabulary(leaf: TableLeaf, mesh: Mesh | None, axes: Axes) -> DeviceTable:
    """An empty table of keys, with a slot for each row.

    Raises:
      ValueError: if the rows do not divide by the devices, or are those of layers.
    """
    parts = 1 if mesh is None else int(np.prod([mesh.shape[axis] for axis in axes]))
    if len(leaf.shape) != 2 or leaf.rows % parts:
        raise ValueError(
            f"a table with a vocabulary must have the shape [rows, dim], of a multiple of"
            f" {parts} rows for as many devices, got {list(leaf.shape)} for {leaf.path!r}."
            f" Give it {-(-leaf.rows // parts) * parts} rows"
        )
    return device_table.init_device_table(leaf.rows // parts, mesh=mesh, axis=axes)


def rows_of_keys(
    leaf: TableLeaf, table: TableState, keys: Words, valid, axes: Axes, insert: bool
) -> tuple[TableState, jax.Array, jax.Array]:
    """Numbers of the rows of keys; new ones get a row, with its first value.

    Inside jit and, over several devices, inside `jax.shard_map`; collective.

    Args:
      leaf: the table.
      table: its state.
      keys: (hi, lo), uint32 of one shape.
      valid: bool like the keys.
      axes: of the devices.
      insert: whether new keys get rows.

    Returns:
      The state, int32 ids like the keys, as `Keys` says, and how many valid keys of this
      device have no row, int32 [].
    """
    axis = axes or None
    assert table.keys is not None
    if not insert:
        ids = device_table.find(table.keys, keys, valid, axis=axis)
        return table, ids, _count(valid & (ids < 0))
    after, ids, is_new, _ = device_table.find_or_insert(
        table.keys, keys, valid, axis=axis
    )
    refused = valid & (ids < 0)
    flat = [jnp.where(is_new, ids, PADDING), *keys]
    flat = [x.reshape(-1) for x in flat]
    if axes:
        flat = [jax.lax.all_gather(x, axes, tiled=True) for x in flat]
    new, *words = flat
    if axes:
        new = own_rows(table.rows, new, axes)
    # a cond of the values alone: one of the table might copy it
    rows = jax.lax.cond(
        jnp.any(new >= 0),
        lambda words: first_rows(leaf, *words),
        lambda words: jnp.zeros((words[0].size, leaf.dim), leaf.dtype),
        words,
    )
    row_state, _ = leaf.optimizer.init(rows)
    past = table.rows.shape[0] + jnp.arange(len(new), dtype=jnp.int32)
    slots = jnp.where(new >= 0, new, past)

    def write(old, values):
        return old.at[slots].set(values, mode="drop", unique_indices=True)

    table = replace(
        table,
        rows=write(table.rows, rows),
        row_state=[write(*x) for x in zip(table.row_state, row_state, strict=True)],
        keys=after,
    )
    return table, jnp.where(refused, leaf.rows, ids), _count(refused)


def _count(which) -> jax.Array:
    return jnp.sum(which, dtype=jnp.int32)


def first_rows(leaf: TableLeaf, hi: jax.Array, lo: jax.Array) -> jax.Array:
    """First values of the rows of keys, uint32 [n] both: [n, dim]."""
    vocabulary = leaf.vocabulary
    assert vocabulary is not None
    salt_hi, salt_lo = _words(table_salt(vocabulary.name))
    seed = np.uint64((vocabulary.seed + 0x9E3779B97F4A7C15) % 2**64)
    seed_hi, seed_lo = _words(host_mix64(seed))
    salted = lo + salt_lo
    hi, lo = mix64(hi + salt_hi + (salted < lo).astype(jnp.uint32), salted)
    hi, lo = mix64(hi ^ seed_hi, lo ^ seed_lo)
    keys = jax.random.wrap_key_data(jnp.stack([lo, hi], -1), impl="threefry2x32")
    make = vocabulary.initializer
    return jax.vmap(lambda key: make(key, (leaf.dim,), leaf.dtype))(keys)


def _words(number: Any) -> Words:
    return split_keys(np.asarray(number, np.uint64))


def translate(
    leaves: tuple[TableLeaf, ...],
    tables: Mapping[str, TableState],
    batch: PyTree,
    axes: Axes,
    insert: bool,
) -> tuple[PyTree, dict[str, TableState], jax.Array]:
    """The batch with row numbers in the place of `Keys`; see `TablePlan.translate`."""
    known = {leaf.path: leaf for leaf in leaves if leaf.vocabulary is not None}
    after, missing = dict(tables), jnp.int32(0)

    def one(x: Any) -> Any:
        nonlocal missing
        if not isinstance(x, Keys):
            return x
        if x.table not in known:
            raise ValueError(
                f"the batch has keys of {x.table!r}, and the tables with a vocabulary are"
                f" {sorted(known)}. Give `plan_tables` a DeviceVocabulary for it"
            )
        leaf, words = known[x.table], (x.hi, x.lo)
        after[x.table], ids, more = rows_of_keys(
            leaf, after[x.table], words, x.valid, axes, insert
        )
        missing += more
        return ids

    batch = jax.tree.map(one, batch, is_leaf=lambda x: isinstance(x, Keys))
    return batch, after, missing
