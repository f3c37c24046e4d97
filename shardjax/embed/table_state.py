"""A table of a model in training: its state, and how rows are read and moved.

Rows are split over devices by blocks: device i has the rows [i * n, (i + 1) * n). All but
`init_table` runs inside jit and, over several devices, inside `jax.shard_map`; `axes` are
the mesh axes of the devices, () for one.

The exchange is exact whatever the ids: each device sends the ids that it wants to all
others, and each adds its rows to a sum of which everyone keeps its part. Gradients go the
other way, to all, and their owner adds up those of its rows.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from shardjax.embed.in_graph import PADDING, RowBlock, first_places, read_rows
from shardjax.embed.optimizers import RowOptimizer
from shardjax.embed.probing import DeviceTable
from shardjax.partition import leaf_path

Axes = tuple[str, ...]


@dataclass(frozen=True)
class TableLeaf:
    """A table among the parameters.

    Attributes:
      path: of the leaf.
      shape: [..., rows, dim]; leading dims are those of layers.
      dtype: of the rows.
      optimizer: of the rows.
      vocabulary: a `DeviceVocabulary` if keys get rows as they come, else None.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    optimizer: RowOptimizer
    vocabulary: Any = None

    @property
    def rows(self) -> int:
        """Rows in all layers."""
        return int(np.prod(self.shape[:-1]))

    @property
    def dim(self) -> int:
        """Numbers per row."""
        return self.shape[-1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TableState:
    """A table in training, split over devices by blocks of rows. Donate it to the step."""

    rows: jax.Array  # [padded rows, dim]
    row_state: list[jax.Array]  # per-row leaves of the optimizer, [padded rows, ...]
    shared: list[jax.Array]  # other leaves of the optimizer; on all devices
    places: jax.Array  # int32 [devices * rows], of an id among those of a device
    merged: jax.Array  # int32 [padded rows], of a row among what a device is sent
    # of the table among the parameters, [..., rows, dim]
    shape: tuple[int, ...] = field(metadata={"static": True})
    # what the leaves of row_state and of shared are in the state of the optimizer
    names: tuple[tuple[str, ...], tuple[str, ...]] = field(metadata={"static": True})
    keys: DeviceTable | None = None  # slots of keys, each the number of its row

    @property
    def count(self) -> int:
        """Rows in all layers, without padding."""
        return int(np.prod(self.shape[:-1]))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowGradients:
    """Gradients of rows; leading dims of the fields (of microbatches, say) are joined."""

    ids: jax.Array  # int32 [ids], -1 for none
    grads: jax.Array  # [ids, dim]
    bad_ids: jax.Array  # int32 [], ids outside of the table that this device met


def by_path(params: PyTree) -> dict[str, Any]:
    """The leaves of parameters by their paths."""
    return {leaf_path(p): x for p, x in jax.tree_util.tree_leaves_with_path(params)}


def init_table(leaf: TableLeaf, table: jax.Array, devices: int) -> TableState:
    """The state of a table, of the shape of its leaf, before the first step; in jit."""
    rows = table.reshape(leaf.rows, leaf.dim)
    rows = jnp.pad(rows, ((0, -leaf.rows % devices), (0, 0)))
    row_state, shared = leaf.optimizer.init(rows)
    places = jnp.zeros(devices * leaf.rows, jnp.int32)
    merged = jnp.zeros(rows.shape[0], jnp.int32)
    kept = jnp.copy(rows), row_state, shared, places, merged
    return TableState(*kept, leaf.shape, leaf.optimizer.names)


def read_block(table: TableState, ids: jax.Array, axes: Axes) -> RowBlock:
    """Reads the rows of ids, int32 [ids]; negative for none."""
    first, places = first_places(table.places, ids)
    wanted = jnp.where(first, ids, PADDING)
    rows = _fetch(table.rows, wanted, axes)
    # duplicates are summed in the dtype of the block
    rows = rows.astype(jnp.promote_types(rows.dtype, jnp.float32))
    return RowBlock(ids, wanted, places, rows)


def block_gradients(block: RowBlock, grads: jax.Array) -> RowGradients:
    """What `move_rows` takes, of the gradient with respect to the rows of a block."""
    return RowGradients(block.wanted, grads, block.bad_ids)


def move_rows(
    leaf: TableLeaf,
    table: TableState,
    grads: RowGradients,
    axes: Axes,
    finite: jax.Array | None,
) -> TableState:
    """One step of the row optimizer, on the rows that have a gradient.

    Args:
      leaf: the table.
      table: its state.
      grads: of several microbatches, if they have more dims.
      axes: of the devices.
      finite: bool [], False to leave everything as it is; None for True.
    """
    ids, sums, merged = sum_gradients(leaf, table, grads, axes)
    keep = ids >= 0 if finite is None else (ids >= 0) & finite
    count = table.rows.shape[0]
    # out of range, where nothing is written, yet each another
    slots = jnp.where(keep, ids, count + jnp.arange(len(ids), dtype=jnp.int32))
    read = partial(_read_slots, slots=slots)
    rows, row_state, shared = leaf.optimizer.update(
        sums.astype(leaf.dtype),
        [read(x) for x in table.row_state],
        table.shared,
        read(table.rows),
    )
    if finite is not None:
        shared = [
            jnp.where(finite, new, old)
            for new, old in zip(shared, table.shared, strict=True)
        ]
    return replace(
        table,
        rows=_write_slots(table.rows, rows, slots),
        row_state=[
            _write_slots(old, new, slots)
            for old, new in zip(table.row_state, row_state, strict=True)
        ],
        shared=shared,
        merged=merged,
    )


def sum_gradients(
    leaf: TableLeaf, table: TableState, grads: RowGradients, axes: Axes
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds up what microbatches and devices have of each row.

    Args:
      leaf, table, grads, axes: as of `move_rows`.

    Returns:
      Rows of this device, int32 [ids], each at one place and -1 elsewhere; the sums of
      their gradients, [ids, dim]; and `merged` for the next call.
    """
    ids, sums = grads.ids.reshape(-1), grads.grads.reshape(-1, leaf.dim)
    if axes:
        ids = jax.lax.all_gather(ids, axes, tiled=True)
        sums = jax.lax.all_gather(sums, axes, tiled=True)
        ids = own_rows(table.rows, ids, axes)
    elif grads.ids.ndim == 1:  # of one block
        return ids, sums, table.merged
    first, merged = first_places(table.merged, ids)
    place = jnp.where(ids < 0, len(ids), read_rows(merged, ids, 0))
    sums = jnp.zeros_like(sums).at[place].add(sums, mode="drop")
    return jnp.where(first, ids, PADDING), sums, merged


def _fetch(local_rows: jax.Array, wanted: jax.Array, axes: Axes) -> jax.Array:
    if not axes:
        return read_rows(local_rows, wanted, 0)
    everyone = jax.lax.all_gather(wanted, axes, tiled=True)
    rows = read_rows(local_rows, own_rows(local_rows, everyone, axes), 0)
    return jax.lax.psum_scatter(rows, axes, tiled=True)


def own_rows(local_rows: jax.Array, ids: jax.Array, axes: Axes) -> jax.Array:
    """Rows of this device by id, negative for those of others."""
    count = local_rows.shape[0]
    here = ids - jax.lax.axis_index(axes) * count
    return jnp.where((ids >= 0) & (here >= 0) & (here < count), here, PADDING)


def _read_slots(x: jax.Array, slots: jax.Array) -> jax.Array:
    return x.at[slots].get(mode="fill", fill_value=0, unique_indices=True)


def _write_slots(old: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    return old.at[slots].set(new.astype(old.dtype), mode="drop", unique_indices=True)
