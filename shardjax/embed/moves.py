"""Rows that come to the devices and rows that leave them, between two windows.

A row moves whole, as a *record*: its numbers and optimizer state as 32-bit words. What is
in a record does not concern the host. The order of effects is the order of dispatch: the
rows that leave are gathered after the last step that used them, those that come are
written before the first step that does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardjax.embed.eviction import Evicted
from shardjax.embed.exchange import gather_rows, scatter_rows
from shardjax.embed.groups import Group
from shardjax.embed.spec import Initializer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlabState:
    """One group's rows and their optimizer state.

    A slab has the same number of slots on each of P devices; with placement
    `data_parallel` all devices hold the same slots.
    """

    rows: (
        jax.Array
    )  # [P * slots, dim], dim 0 over all mesh axes; or [slots, dim], copied
    row_state: list[jax.Array]  # [P * slots, ...] each, like rows
    shared: list[jax.Array]  # any shape, on all devices: step counts, schedules


@dataclass(frozen=True)
class Fill:
    """New rows of one group: where they go and their random bits.

    Attributes:
      initializer: of these rows.
      slots: int32 [owners, n]; past the end of any slab for padding.
      words: uint64 [owners, n], a function of (seed, table, key).
    """

    initializer: Initializer
    slots: np.ndarray
    words: np.ndarray

    @property
    def rows(self) -> int:
        """How many they are."""
        return int((self.slots < 2**30).sum())  # padding is past that


@dataclass(eq=False)
class WriteBack:
    """Rows that leave the devices for the RAM tier.

    Attributes:
      slots: int32 [owners, n]; past the end of any slab for padding.
      rows: int32 [owners, n], rows of the RAM tier; -1 for padding and for what has been
        fetched again meanwhile.
      keys, tables: uint64 and int32 [rows that leave], in order of owner and place.
      owners, places: int32 [rows that leave].
      records: int32 [owners * n, words] on the devices, once the gather is dispatched.
    """

    slots: np.ndarray
    rows: np.ndarray
    keys: np.ndarray
    tables: np.ndarray
    owners: np.ndarray
    places: np.ndarray
    records: jax.Array | None = None

    @property
    def has_arrived(self) -> bool:
        """Whether the records are on the host and can be read without waiting."""
        records: Any = self.records
        return records is not None and records.is_ready()

    def parts(self) -> list[np.ndarray]:
        """The records by owner, int32 [n, words] each; waits for them."""
        assert self.records is not None, "the gather has not been dispatched"
        owners, n = self.slots.shape
        parts: list[Any] = [None] * owners
        for shard in self.records.addressable_shards:
            parts[(shard.index[0].start or 0) // n] = np.asarray(shard.data)
        return parts


@dataclass(eq=False)
class Stored:
    """Rows that come back to the devices.

    Attributes:
      slots: int32 [owners, n]; past the end of any slab for padding.
      records: int32 [owners, n, words]; of `late` rows not filled in yet.
      late: (write-back, owners, its places, places here): rows that were on their way to
        the RAM tier when they were wanted again, int32 [..] each.
    """

    slots: np.ndarray
    records: np.ndarray
    late: list[tuple[WriteBack, np.ndarray, np.ndarray, np.ndarray]] = field(
        default_factory=list
    )

    def complete(self) -> np.ndarray:
        """The records, with those late ones whose write-back has been dispatched."""
        for late in list(self.late):
            write_back, owners, sources, places = late
            if write_back.records is None:
                continue
            parts = write_back.parts()
            for o in np.unique(owners):
                own = owners == o
                self.records[o, places[own]] = parts[o][sources[own]]
            self.late = [x for x in self.late if x is not late]
        return self.records


@dataclass(frozen=True)
class Move:
    """What has to be done to one group's slab before a plan's step, in this order.

    Attributes:
      group: its number.
      write_back: rows that leave, or None.
      stored: rows that come back, or None.
      fills: rows that are new.
      keys, tables: uint64 and int32 [rows that come], new ones too; empty where nobody
        keeps track.
      places: int32 [rows that come]: of those that come back, place in `stored`, -1 for
        those that are new.
      owners: int32 [rows that come].
      evicted: rows that leave for good, before all else.
    """

    group: int
    write_back: WriteBack | None
    stored: Stored | None
    fills: tuple[Fill, ...]
    keys: np.ndarray
    tables: np.ndarray
    places: np.ndarray
    owners: np.ndarray
    evicted: tuple[Evicted, ...] = ()


def padded(parts: Sequence[np.ndarray], smallest: int = 512) -> np.ndarray:
    """Slots by owner as one array [owners, n], n a power of two, padded past any slab."""
    n = smallest
    while n < max(len(x) for x in parts):
        n *= 2
    out = np.full((len(parts), n), np.iinfo(np.int32).max, np.int32)
    out -= np.arange(n, dtype=np.int32)
    for o, x in enumerate(parts):
        out[o, : len(x)] = x
    return out


def record_words(group: Group) -> int:
    """32-bit words of a record of a group's rows."""
    return sum(_words(shape, dtype) for shape, dtype in record_leaves(group))


def row_words(group: Group) -> int:
    """How many of them, the first ones, are the row's own numbers."""
    return _words((group.dim,), group.dtype)


def record_leaves(group: Group) -> list[tuple[tuple[int, ...], Any]]:
    """Shape and dtype of what a record is made of: the row, then its per-row state."""
    leaves = group.optimizer.row_leaves
    return [((group.dim,), group.dtype), *((x.shape, x.dtype) for x in leaves)]


def _words(shape: tuple[int, ...], dtype) -> int:
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return -(-size // 4)


def to_words(x: jax.Array) -> jax.Array:
    """Numbers [n, ...] of any plain dtype as int32 [n, words], bit by bit."""
    x = x.reshape(len(x), -1)
    if x.dtype == bool:
        x = x.astype(jnp.uint8)
    size = x.dtype.itemsize
    if size < 4:
        per_word = 4 // size
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % per_word)))
        x = x.reshape(len(x), x.shape[1] // per_word, per_word)
    return jax.lax.bitcast_convert_type(x, jnp.int32).reshape(len(x), -1)


def from_words(words: jax.Array, shape: tuple[int, ...], dtype) -> jax.Array:
    """The inverse of `to_words`: int32 [n, words] as [n, *shape] of a dtype."""
    n, dtype = len(words), jnp.dtype(dtype)
    kind = jnp.dtype(jnp.uint8) if dtype.kind == "b" else dtype
    if kind.itemsize > 4:
        words = words.reshape(n, -1, kind.itemsize // 4)
    x = jax.lax.bitcast_convert_type(words, kind).reshape(n, -1)
    size = int(np.prod(shape, dtype=np.int64))
    return x[:, :size].reshape(n, *shape).astype(dtype)


def unpack_records(group: Group, records: jax.Array) -> list[jax.Array]:
    """The row and its per-row state of each record, int32 [n, words]: [n, ...] each."""
    return unpack_leaves(record_leaves(group), records)


def unpack_leaves(
    leaves: Sequence[tuple[tuple[int, ...], Any]], records: jax.Array
) -> list[jax.Array]:
    """The leaves, shape and dtype each, that records, int32 [n, words], are made of."""
    out, at = [], 0
    for shape, dtype in leaves:
        words = _words(shape, dtype)
        out.append(from_words(records[:, at : at + words], shape, dtype))
        at += words
    return out


def slab_spec(group: Group, spec: Any) -> SlabState:
    """A slab whose leaves are PartitionSpecs: `spec` for rows, copies for the rest."""
    row_state: list[Any] = [spec] * len(group.optimizer.row_leaves)
    shared: list[Any] = [jax.P()] * group.optimizer.is_row.count(False)
    return SlabState(spec, row_state, shared)


def _write(slab: SlabState, slots, rows, row_state) -> SlabState:
    return SlabState(
        scatter_rows(slab.rows, slots, rows),
        [
            scatter_rows(x, slots, new)
            for x, new in zip(slab.row_state, row_state, strict=True)
        ],
        slab.shared,
    )


@partial(
    jax.jit,
    static_argnames=("group", "initializer", "mesh", "spec"),
    donate_argnames="slab",
)
def fill_new(
    slab: SlabState,
    slots: jax.Array,
    words: jax.Array,
    *,
    group: Group,
    initializer: Initializer,
    mesh: jax.sharding.Mesh,
    spec: jax.P,
) -> SlabState:
    """Writes first values: int32 [owners * n] slots, uint32 [owners * n, 2] bits."""
    slabs = slab_spec(group, spec)

    @partial(jax.shard_map, mesh=mesh, in_specs=(slabs, spec, spec), out_specs=slabs)
    def fill(slab, slots, words):
        keys = jax.random.wrap_key_data(words, impl="threefry2x32")
        rows = jax.vmap(lambda k: initializer(k, (group.dim,), group.dtype))(keys)
        row_state, _ = group.optimizer.init(rows)
        return _write(slab, slots, rows, row_state)

    return fill(slab, slots, words)


@partial(jax.jit, static_argnames=("group", "mesh", "spec"), donate_argnames="slab")
def fill_stored(
    slab: SlabState,
    slots: jax.Array,
    records: jax.Array,
    *,
    group: Group,
    mesh: jax.sharding.Mesh,
    spec: jax.P,
) -> SlabState:
    """Writes records, int32 [owners * n, words], at slots, int32 [owners * n]."""
    slabs = slab_spec(group, spec)

    @partial(jax.shard_map, mesh=mesh, in_specs=(slabs, spec, spec), out_specs=slabs)
    def fill(slab, slots, records):
        rows, *row_state = unpack_records(group, records)
        return _write(slab, slots, rows, row_state)

    return fill(slab, slots, records)


@partial(jax.jit, static_argnames=("group", "mesh", "spec"))
def gather_records(
    slab: SlabState,
    slots: jax.Array,
    *,
    group: Group,
    mesh: jax.sharding.Mesh,
    spec: jax.P,
) -> jax.Array:
    """The records at slots, int32 [owners * n]: int32 [owners * n, words]."""
    slabs = slab_spec(group, spec)

    @partial(jax.shard_map, mesh=mesh, in_specs=(slabs, spec), out_specs=spec)
    def gather(slab, slots):
        leaves = [slab.rows, *slab.row_state]
        return jnp.concatenate([to_words(gather_rows(x, slots)) for x in leaves], 1)

    return gather(slab, slots)
