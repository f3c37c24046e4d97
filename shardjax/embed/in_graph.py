"""Rows of a table by ids that exist only inside of a jitted function.

In a training step something else stands in the place of the table (`TableHandle`): at first
what notes the ids, then the rows of those ids, read once as a block [ids, dim]. A loss is
differentiated with respect to the block, so that no gradient as large as a table exists;
and because a block is an array like any other, lookups work wherever JAX's transformations
go. `shardjax.embed.table_plan` puts it together.

Duplicates are found without sorting: each id writes its position into an array of int32 with
an entry per row of the table, and reads which position is there. Whatever was in it before
does not matter, so nothing clears it; it is donated from step to step.

See docs/design/0011-in-graph-embeddings.md for what else was considered.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardjax.embed.noting import note_rows

BAD_IDS = ("nan", "zero")
COMBINERS = ("sum", "mean", "sqrtn")
PADDING, BAD = -1, -2  # what ids become that name no row


def lookup(
    table: "jax.Array | TableHandle",
    ids: jax.Array | np.ndarray,
    *,
    padding_id: int | None = None,
    bad_ids: str = "nan",
) -> jax.Array:
    """Reads rows of a table.

    Args:
      table: [rows, dim], or what stands for it in a training step.
      ids: any integers, [...].
      padding_id: reads zeros and trains nothing; it may be a row of the table or not.
      bad_ids: what other ids outside of [0, rows) read: "nan" or "zero". Negative ids do
        not count from the end.

    Returns:
      [..., dim], in the dtype of the table.

    Raises:
      ValueError: for ids that are no integers, or another word for bad ids.

    Example:
      >>> lookup(jnp.eye(2), jnp.array([1, 7, -1]), padding_id=-1)
      Array([[ 0.,  1.],
             [nan, nan],
             [ 0.,  0.]], dtype=float32)
    """
    check_bad_ids(bad_ids)
    clean = _clean(ids, table.shape[-2], padding_id)
    if isinstance(table, TableHandle):
        rows = table.read(clean)
    else:
        rows = read_rows(table, clean, 0)
    if bad_ids == "nan":
        rows = jnp.where((clean == BAD)[..., None], jnp.nan, rows)
    return rows


def _clean(ids, rows: int, padding_id: int | None) -> jax.Array:
    """Ids as int32: rows of the table, `PADDING` or `BAD`."""
    dtype = getattr(ids, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            f"ids must be an array of integers, got {dtype or type(ids).__name__}. Cast"
            " them, or look up keys of other kinds through an EmbeddingCollection"
        )
    if isinstance(ids, jax.Array):
        xp, ids = jnp, ids if dtype.itemsize >= 4 else ids.astype(jnp.int32)
    else:
        xp = np  # on the host, where 64 bits are 64 bits
    named = (ids >= 0) & (ids < rows)
    clean = xp.where(named, ids, 0).astype(np.int32)
    clean = xp.where(named, clean, np.int32(BAD))
    clean = xp.where(_is_padding(ids, padding_id), np.int32(PADDING), clean)
    return jnp.asarray(clean)


def _is_padding(ids, padding_id: int | None):
    limits = jnp.iinfo(ids.dtype)
    if padding_id is None or not limits.min <= padding_id <= limits.max:
        return np.False_
    return ids == padding_id


def check_bad_ids(bad_ids: str) -> None:
    """Refuses what is no way to treat ids outside of a table.

    Raises:
      ValueError: naming those that there are.
    """
    if bad_ids not in BAD_IDS:
        raise ValueError(f"`bad_ids` must be one of {BAD_IDS}, got {bad_ids!r}")


def check_combiner(combiner: str) -> None:
    """Refuses what is no way to pool a bag.

    Raises:
      ValueError: naming those that there are.
    """
    if combiner not in COMBINERS:
        raise ValueError(f"`combiner` must be one of {COMBINERS}, got {combiner!r}")


def pool(
    rows: jax.Array,
    ids: jax.Array | np.ndarray,
    weights: jax.Array | np.ndarray | None,
    combiner: str,
    padding_id: int | None,
) -> jax.Array:
    """Pools the rows of bags, as `shardjax.embed.lookup.lookup` does.

    Args:
      rows: [..., ids, dim].
      ids: [..., ids]; those that are `padding_id` have no weight.
      weights: floats [..., ids], or None for all one.
      combiner: "sum", "mean" or "sqrtn".
      padding_id: as of `lookup`.

    Returns:
      [..., dim]; zeros where the weights have a zero sum.

    Raises:
      ValueError: for weights of another shape.

    Example:
      >>> rows, ids = jnp.array([[4.0], [2.0], [0.0]]), jnp.array([1, 2, -1])
      >>> pool(rows, ids, None, "mean", -1)
      Array([3.], dtype=float32)
    """
    w = jnp.ones(ids.shape, rows.dtype)
    if weights is not None:
        if weights.shape != ids.shape:
            raise ValueError(
                f"`weights` must have one for each id, shape {ids.shape}, got"
                f" {weights.shape}"
            )
        w = jnp.asarray(weights, rows.dtype)
    w = jnp.where(_is_padding(ids, padding_id), 0, w)
    sums = jnp.sum(rows * w[..., None], -2)
    if combiner == "sum":
        return sums
    squared = combiner == "sqrtn"
    divisor = jnp.sum(w * w if squared else w, -1, keepdims=True)
    safe = jnp.where(divisor == 0, 1, divisor)
    return jnp.where(divisor == 0, 0, sums / (jnp.sqrt(safe) if squared else safe))


def read_rows(table: jax.Array, ids: jax.Array, fill: float) -> jax.Array:
    """Rows by id; `fill` for ids that are negative or too large."""
    ids = jnp.where(ids < 0, table.shape[0], ids)
    return table.at[ids].get(mode="fill", fill_value=fill)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowBlock:
    """The rows that a device looks up in a step; what is read of them is `rows`."""

    ids: jax.Array  # int32 [ids]; -1 and -2 for no row
    wanted: jax.Array  # int32 [ids], the id at its first place, else -1
    places: jax.Array  # int32 [rows of the table], where in `ids` an id is
    rows: jax.Array  # [ids, dim], float32 or wider; zeros where nothing is wanted

    @property
    def bad_ids(self) -> jax.Array:
        """How many ids are outside of the table, int32 []."""
        return jnp.sum(self.ids == BAD, dtype=jnp.int32)


class NotedRows:
    """Source of rows while ids are looked for."""

    def __init__(self, table: str, dim: int, dtype):
        self.table, self.dim, self.dtype = table, dim, dtype

    def read(self, ids: jax.Array) -> jax.Array:
        """Rows that stand for those of ids, int32 [...]."""
        return note_rows(ids, table=self.table, dim=self.dim, dtype=self.dtype)


class BlockRows:
    """Source of rows in a step."""

    def __init__(self, block: RowBlock, rows: jax.Array, dtype):
        self.block, self.rows, self.dtype = block, rows, dtype

    def read(self, ids: jax.Array) -> jax.Array:
        """Rows of ids, int32 [...]; zeros of negative ones."""
        block = self.block
        place = block.places.at[jnp.maximum(ids, 0)].get(mode="clip")
        # an id that was not found before (a loss that draws ids anew) reads NaN
        here = read_rows(block.ids, place, -9) == ids
        none = self.rows.shape[0]
        rows = read_rows(self.rows, jnp.where(here, place, none), jnp.nan)
        rows = jnp.where((ids < 0)[..., None], 0, rows)
        return rows.astype(self.dtype)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["first"],
    meta_fields=["shape", "source"],
)
@dataclass(frozen=True, eq=False)
class TableHandle:
    """Stands for a table in the parameters that a loss gets.

    Loops over layers take it apart as they do a stack of tables. Its rows are in `source`,
    which is none of its leaves, so that they can be read anywhere.
    """

    first: jax.Array  # int32 [...], number of the first row of each layer
    shape: tuple[int, int]  # rows of a layer, dim
    source: Any  # has `read(ids)`

    def read(self, clean: jax.Array) -> jax.Array:
        """Rows of ids in [0, rows), or -1 and -2 for zeros."""
        if self.first.shape:
            raise ValueError(
                f"a table of {list(self.first.shape)} layers must be looked up in one of"
                " them, got it whole. Take it apart by nnx.scan, nnx.vmap or jax.lax.scan"
            )
        return self.source.read(jnp.where(clean < 0, clean, clean + self.first))

    def __jax_array__(self):
        self._refuse()

    def __getitem__(self, index):
        self._refuse()

    def _refuse(self):
        raise TypeError(
            "in a training step of `plan_tables` a table can only be looked up: as an array"
            " (`attend`, a tied output head) it has a gradient as large as itself. Leave it"
            " to the optimizer of the other parameters: Embed(..., sparse=False)"
        )


def first_places(places: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Finds one place of each different id, without sorting.

    Args:
      places: int32 [rows], of any content; donate it.
      ids: int32 [ids], below the number of rows; negative for none.

    Returns:
      bool [ids], True at one place of each id and nowhere else, and `places` with that
      place for each id.

    Example:
      >>> first, places = first_places(jnp.zeros(9, jnp.int32), jnp.array([7, 2, 7, -1]))
      >>> int(first.sum()), int(places[2])
      (2, 1)
    """
    own = jnp.arange(len(ids), dtype=jnp.int32)
    slots = jnp.where(ids < 0, len(places), ids)
    places = places.at[slots].set(own, mode="drop")
    return places.at[slots].get(mode="fill", fill_value=-1) == own, places
