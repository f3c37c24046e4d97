"""A hash table on devices: 64-bit keys to slots, inside jit.

Keys are pairs of uint32 words, and all 2**64 of them are legal. All keys of a batch probe
together until the last one is settled (`shardjax.embed.probing`). A key never moves, so its
slot is a row number for as long as the key is there: with a row per slot, a table is the
vocabulary of an embedding whose keys are not known beforehand.

The functions may be called as they are or inside jit; those that change a table have it
donated, and change it where it lies.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, ArrayLike, Bool, Int32

from shardjax.embed.key_words import Words, mix64, owner_of
from shardjax.embed.probing import (
    BUCKET,
    EMPTY,
    FIRST_TAG,
    NO_SLOT,
    DeviceTable,
    ask,
    buckets_for,
    place,
    remove,
    search,
)
from shardjax.mesh import AXES

LARGEST = 2**30

Axis = str | tuple[str, ...]


def init_device_table(
    capacity: int, *, reach: int = 64, mesh: Mesh | None = None, axis: Axis = AXES
) -> DeviceTable:
    """Makes an empty table.

    A key gets no slot if the first `reach` buckets of its probe, of 16 slots each, are
    full. So a table of up to `16 * reach` slots takes as many keys as it has slots; a
    larger one, with a `reach` of 64, turns the first key away when it is some 97 % full.
    However full it is, no probe looks at more buckets than that.

    Args:
      capacity: slots, of each device; in [1, 2**30].
      reach: buckets that a probe looks at, at most.
      mesh: where it lies; None for the default device.
      axis: the axes of `mesh` that partition it, by the hash of the key.

    Returns:
      The table: 9.25 bytes per slot, a little more for a prime number of buckets.

    Raises:
      TypeError: if `capacity` or `reach` is not an integer.
      ValueError: if one is out of range, or there are 2**31 slots or more on all devices.

    Example:
      >>> from shardjax.embed import device_table, init_device_table, split_keys
      >>> table = init_device_table(100)
      >>> keys = split_keys(np.array([7, 2**64 - 1, 7], np.uint64))
      >>> table, slots, is_new, full = device_table.find_or_insert(table, keys)
      >>> bool(slots[0] == slots[2]), is_new.tolist(), int(full)
      (True, [True, True, False], 0)
      >>> table, erased = device_table.erase(table, keys)
      >>> device_table.find(table, keys).tolist()
      [-1, -1, -1]
    """
    for name, value, most in (
        ("capacity", capacity, LARGEST),
        ("reach", reach, LARGEST),
    ):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(
                f"`{name}` of a device table must be an integer, got"
                f" {type(value).__name__} {value!r}"
            )
        if not 1 <= value <= most:
            raise ValueError(
                f"`{name}` of a device table must be in [1, 2**30], got {value}"
            )
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    devices = 1 if mesh is None else int(np.prod([mesh.shape[a] for a in axes]))
    if devices * capacity >= 2**31:
        raise ValueError(
            f"slots are int32, so all devices together have fewer than 2**31, got"
            f" `capacity` {capacity} on each of {devices}. Give each device less."
        )
    buckets = buckets_for(capacity)

    def make():
        size = devices * buckets * BUCKET
        at = jax.lax.iota(jnp.int32, buckets * BUCKET)
        tags = jnp.where(at < capacity, EMPTY, NO_SLOT).astype(jnp.uint8)
        return DeviceTable(
            hi=jnp.zeros(size, jnp.uint32),
            lo=jnp.zeros(size, jnp.uint32),
            tags=jnp.tile(tags, devices),
            passed=jnp.zeros(devices * buckets, jnp.int32),
            count=jnp.zeros(devices, jnp.int32),
            capacity=int(capacity),
            reach=int(reach),
        )

    sharding = None if mesh is None else NamedSharding(mesh, P(axes))
    return jax.jit(make, out_shardings=sharding)()


def find(
    table: DeviceTable,
    keys: Words,
    valid: Bool[ArrayLike, "..."] | None = None,
    *,
    axis: Axis | None = None,
) -> Int32[Array, "..."]:
    """Looks keys up.

    Args:
      table: of one device.
      keys: (hi, lo), uint32 of one shape: any keys, as often as one likes.
      valid: which keys to look up; None for all.
      axis: inside `jax.shard_map`, the axes that partition the table: each device gives
        its own keys, as many on all devices, and gets the answers to them. Keys go to all
        devices (all_gather), answers come back by psum_scatter.

    Returns:
      The slot of each key, -1 for those that are absent or not valid. With `axis`: the
      device times `capacity`, plus its slot there.

    Raises:
      TypeError: if keys are not pairs of uint32, or `valid` is not boolean.
      ValueError: if shapes differ, or the table is not one device's.
    """
    return _find(table, *_checked(table, keys, valid), axis=axis)


def find_or_insert(
    table: DeviceTable,
    keys: Words,
    valid: Bool[ArrayLike, "..."] | None = None,
    *,
    axis: Axis | None = None,
) -> tuple[DeviceTable, Int32[Array, "..."], Bool[Array, "..."], Int32[Array, ""]]:
    """Looks keys up, and gives a slot to those that have none.

    What it does depends on the table, the keys and their order alone: it is the same in
    every run. Slots of erased keys are given away again.

    Args:
      table: as in `find`; donated.
      keys: as in `find`; a key that occurs more than once is inserted once.
      valid: as in `find`; the others are not inserted.
      axis: as in `find`.

    Returns:
      The table, the slots as `find`, at which place each new key occurs first (bool like
      the keys), and how many valid keys got no slot for want of room (each occurrence
      counts; with `axis`, those of all devices).

    Raises:
      TypeError, ValueError: as `find`.
    """
    return _find_or_insert(table, *_checked(table, keys, valid), axis=axis)


def erase(
    table: DeviceTable,
    keys: Words,
    valid: Bool[ArrayLike, "..."] | None = None,
    *,
    axis: Axis | None = None,
) -> tuple[DeviceTable, Bool[Array, "..."]]:
    """Takes keys out.

    Args:
      table: as in `find`; donated.
      keys: as in `find`.
      valid: as in `find`; the others stay.
      axis: as in `find`.

    Returns:
      The table, and which keys were there (bool like the keys; all occurrences).

    Raises:
      TypeError, ValueError: as `find`.
    """
    return _erase(table, *_checked(table, keys, valid), axis=axis)


@jax.jit
def export(table: DeviceTable) -> tuple[jax.Array, jax.Array, jax.Array]:
    """All keys by slot, of one device or, outside of `jax.shard_map`, of all.

    Args:
      table: of one device or of all.

    Returns:
      (hi, lo, used): uint32, uint32 and bool [devices * capacity], by slot; the words of
      slots that are not in use are 0.

    Example:
      >>> from shardjax.embed import device_table, init_device_table
      >>> hi, lo, used = device_table.export(init_device_table(3))
      >>> used.tolist()
      [False, False, False]
    """

    def by_slot(x):
        x = x.reshape(table.count.size, table.buckets * BUCKET)
        return x[:, : table.capacity].reshape(-1)

    used = by_slot(table.tags) >= FIRST_TAG
    zero = jnp.uint32(0)
    return (
        jnp.where(used, by_slot(table.hi), zero),
        jnp.where(used, by_slot(table.lo), zero),
        used,
    )


def _checked(table: DeviceTable, keys: Words, valid):
    """The high words, the low words and what is valid, if they fit."""
    if table.count.shape != (1,):
        raise ValueError(
            f"the table lies on {table.count.size} devices. Call this inside"
            " jax.shard_map with the spec P(axis) for it, and give the same `axis`."
        )
    try:
        hi, lo = keys
        dtypes, shapes = (hi.dtype, lo.dtype), (hi.shape, lo.shape)
    except (AttributeError, TypeError, ValueError):
        raise TypeError(
            "`keys` must be a pair (hi, lo) of uint32 arrays, got"
            f" {type(keys).__name__}. Make it by split_keys(keys)."
        ) from None
    if dtypes != (np.uint32, np.uint32):
        raise TypeError(
            f"`keys` must be a pair (hi, lo) of uint32 arrays, got dtypes {dtypes[0]}"
            f" and {dtypes[1]}. Make it by split_keys(keys)."
        )
    if shapes[0] != shapes[1]:
        raise ValueError(
            "the two words of `keys` must have one shape, got"
            f" {shapes[0]} and {shapes[1]}"
        )
    if valid is None:
        return hi, lo, jnp.ones(shapes[0], bool)
    if np.result_type(valid) != np.bool_:
        raise TypeError(f"`valid` must be boolean, got {np.result_type(valid)}")
    if np.shape(valid) != shapes[0]:
        raise ValueError(
            f"`valid` must have the shape of `keys`, {shapes[0]}, got {np.shape(valid)}"
        )
    return hi, lo, valid


def _ask(table, hi, lo, valid, axis):
    """Keys for which this device answers, of its own or of all devices."""
    hi, lo, valid = hi.reshape(-1), lo.reshape(-1), valid.reshape(-1)
    if axis is not None:
        gather = partial(jax.lax.all_gather, axis_name=axis, tiled=True)
        hi, lo, valid = gather(hi), gather(lo), gather(valid)
    hashed = mix64(hi, lo)
    if axis is not None:
        owner = owner_of(hashed[0], jax.lax.axis_size(axis))
        valid &= owner == jax.lax.axis_index(axis)
    return ask(table, hi, lo, hashed, valid)


def _answer(x, axis, like):
    """Brings answers for all devices, int32 [n] and 0 where others answer, to who asked."""
    if axis is not None:
        x = jax.lax.psum_scatter(x, axis, tiled=True)
    return x.reshape(like.shape)


def _answer_slots(table, slot, axis, like):
    if axis is not None:
        first = jax.lax.axis_index(axis) * table.capacity
        slot = jnp.where(slot < 0, slot, first + slot)
    return _answer(slot + 1, axis, like) - 1


@partial(jax.jit, static_argnames="axis")
def _find(table, hi, lo, valid, axis):
    slot, _ = search(table, _ask(table, hi, lo, valid, axis))
    return _answer_slots(table, slot, axis, hi)


@partial(jax.jit, static_argnames="axis", donate_argnames="table")
def _find_or_insert(table, hi, lo, valid, axis):
    asked = _ask(table, hi, lo, valid, axis)
    slot, _ = search(table, asked)
    table, slot, is_first = place(table, asked, slot)
    full = jnp.sum(asked.valid & (slot < 0), dtype=jnp.int32)
    if axis is not None:
        full = jax.lax.psum(full, axis)
    slots = _answer_slots(table, slot, axis, hi)
    is_new = _answer(is_first.astype(jnp.int32), axis, hi) > 0
    return table, slots, is_new, full


@partial(jax.jit, static_argnames="axis", donate_argnames="table")
def _erase(table, hi, lo, valid, axis):
    asked = _ask(table, hi, lo, valid, axis)
    slot, turn = search(table, asked)
    table = remove(table, asked, slot, turn)
    return table, _answer((slot >= 0).astype(jnp.int32), axis, hi) > 0
