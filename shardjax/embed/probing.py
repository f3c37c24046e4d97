"""How a hash table on devices is probed: see `shardjax.embed.device_table`.

Open addressing in buckets of 16 slots. A byte per slot, its *tag*, says whether it is empty
and else has some bits of the hash, so that a step of a probe reads the 16 bytes of one
bucket and, where a tag fits, one key (the idea of Google's Swiss tables)::

    tags    0 empty, 1 no slot (what fills up the last buckets), from 2 on: in use
    hi, lo  the words of the key; whatever was there last where a slot is empty
    passed  per bucket, how many keys of the table found it full and went on

A probe ends at a bucket that nobody has passed. Erasing a key takes it out of those counts
(as Facebook's F14 does), so there are no tombstones and a table does not wear out. The
number of buckets is a prime and a key's stride is another part of its hash (double hashing):
every probe meets every bucket once.

Tags and counts are flat: a small last dim would be padded on TPUs.
"""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

BUCKET = 16
EMPTY = 0
NO_SLOT = 1
FIRST_TAG = 2


def _static():
    return field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceTable:
    """The state of a hash table; made by `init_device_table`.

    Over a mesh each device has a table of its own, and arrays lie behind each other,
    dim 0 over the axes: `P(axis)` is the spec of the whole.
    """

    hi: jax.Array  # uint32 [devices * buckets * 16]
    lo: jax.Array  # uint32, like hi
    tags: jax.Array  # uint8, like hi
    passed: jax.Array  # int32 [devices * buckets]
    count: jax.Array  # int32 [devices]: keys
    capacity: int = _static()  # slots of a device
    reach: int = _static()  # buckets that a probe looks at, at most

    @property
    def buckets(self) -> int:
        """Buckets of a device."""
        return buckets_for(self.capacity)


def buckets_for(capacity: int) -> int:
    """The least prime number of buckets, or 1, with room for so many slots."""
    buckets = -(-capacity // BUCKET)
    while any(buckets % i == 0 for i in range(2, math.isqrt(buckets) + 1)):
        buckets += 1
    return buckets


class Asked(NamedTuple):
    """Flat keys, where their probes begin, and what this device answers for."""

    hi: jax.Array  # uint32 [n]
    lo: jax.Array  # uint32 [n]
    valid: jax.Array  # bool [n]: and owned by this device
    home: jax.Array  # int32 [n]: the first bucket
    stride: jax.Array  # int32 [n]
    tag: jax.Array  # uint8 [n]
    lane: jax.Array  # int32 [n]: the slot of a bucket to try first
    position: jax.Array  # int32 [n]: 0, 1, 2, ..
    zero: jax.Array  # int32 [n]


def ask(table: DeviceTable, hi, lo, hashed, valid) -> Asked:
    """Says where the probes of keys [n] begin; `hashed` are their `mix64`."""
    high, low = hashed
    buckets = table.buckets
    # Inside shard_map, what a loop carries must vary over the mesh from the start.
    zero = (hi * 0 + table.hi[0] * 0).astype(jnp.int32)
    return Asked(
        hi=hi,
        lo=lo,
        valid=valid & (zero == 0),
        home=(low % buckets).astype(jnp.int32) + zero,
        stride=((1 + high % max(buckets - 1, 1)) % buckets).astype(jnp.int32),
        tag=(FIRST_TAG + (high & 0xFF) % (256 - FIRST_TAG)).astype(jnp.uint8),
        lane=(high >> 8 & (BUCKET - 1)).astype(jnp.int32),
        position=jax.lax.iota(jnp.int32, hi.size),
        zero=zero,
    )


class _Walk(NamedTuple):
    """How far the probe of each key has come."""

    active: jax.Array  # bool [n]: not yet settled
    bucket: jax.Array  # int32 [n]: where it is
    turn: jax.Array  # int32 [n]: how many buckets lie behind it
    lane: jax.Array  # int32 [n]: slots of the bucket before this are not the key's
    slot: jax.Array  # int32 [n]: the answer; -1 for none


def search(table: DeviceTable, asked: Asked) -> tuple[jax.Array, jax.Array]:
    """Finds the slots of keys.

    Returns:
      The slots, int32 [n], -1 for keys that are absent or not valid, and how many buckets
      the keys that are there have passed, int32 [n].
    """
    walk = _Walk(
        active=asked.valid,
        bucket=asked.home,
        turn=asked.zero,
        lane=asked.zero,
        slot=asked.zero - 1,
    )
    walk = jax.lax.while_loop(
        lambda walk: jnp.any(walk.active), partial(_search_step, table, asked), walk
    )
    return walk.slot, walk.turn


def _search_step(table, asked, walk):
    """Looks at the next slot of the bucket whose tag fits, or goes on to the next bucket."""
    lanes = jax.lax.broadcasted_iota(jnp.int32, (asked.tag.size, BUCKET), 1)
    fits = _tags_of(table.tags, walk.bucket) == asked.tag[:, None]
    at = jnp.min(jnp.where(fits & (lanes >= walk.lane[:, None]), lanes, BUCKET), axis=1)
    one_fits = walk.active & (at < BUCKET)
    slot = walk.bucket * BUCKET + jnp.minimum(at, BUCKET - 1)
    same = (_read(table.hi, slot) == asked.hi) & (_read(table.lo, slot) == asked.lo)
    found = one_fits & same
    onward = walk.active & ~one_fits & (_read(table.passed, walk.bucket) > 0)
    onward &= walk.turn + 1 < min(table.reach, table.buckets)
    return _Walk(
        active=onward | one_fits & ~same,
        bucket=jnp.where(onward, _next_bucket(table, asked, walk.bucket), walk.bucket),
        turn=walk.turn + onward,
        lane=jnp.where(onward, 0, at + 1),
        slot=jnp.where(found, slot, walk.slot),
    )


def place(
    table: DeviceTable, asked: Asked, slot: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Finds empty slots for valid keys that have none; equal keys get the same one.

    In each round keys bid for an empty slot of the bucket where they are, which one being
    a part of their hash, and the least position wins. The keys equal to it are settled with
    it: they have made the same bids.

    Args:
      slot: int32 [n], of keys that are there, else -1.

    Returns:
      The tags, the slots (-1 where there is no room), which keys have been inserted (the
      first of equal ones), and how many buckets these have passed, int32 [n].
    """
    reach = min(table.reach, table.buckets)
    lanes = jax.lax.broadcasted_iota(jnp.int32, (slot.size, BUCKET), 1)

    def step(carry):
        tags, active, bucket, turn, slot, is_first = carry
        # how far behind the lane of the key's choice an empty one is
        behind = lanes - asked.lane[:, None] & (BUCKET - 1)
        empty = _tags_of(tags, bucket) == EMPTY
        least = jnp.min(jnp.where(empty, behind, BUCKET), axis=1)
        bids = active & (least < BUCKET)
        wanted = bucket * BUCKET + (asked.lane + least & (BUCKET - 1))
        winner = _least_bidder(wanted, bids, asked.position)
        same = (_read(asked.hi, winner) == asked.hi) & (
            _read(asked.lo, winner) == asked.lo
        )
        settled, wins = bids & same, bids & (winner == asked.position)
        at = slot_of(wins, wanted, asked, tags.size)
        tags = tags.at[at].set(asked.tag, mode="drop", unique_indices=True)
        onward = active & ~bids
        turn += onward
        return (
            tags,
            active & ~settled & (turn < reach),
            jnp.where(onward, _next_bucket(table, asked, bucket), bucket),
            turn,
            jnp.where(settled, wanted, slot),
            is_first | wins,
        )

    first, none = asked.home, asked.zero > 0
    carry = table.tags, asked.valid & (slot < 0), first, asked.zero, slot, none
    carry = jax.lax.while_loop(lambda carry: jnp.any(carry[1]), step, carry)
    tags, _, _, turn, slot, is_first = carry
    return tags, slot, is_first, turn


def first_of(slot: jax.Array, asked: Asked) -> jax.Array:
    """Which positions are the first of their slots, int32 [n], bool; none where it is -1."""

    def step(carry):
        active, is_first = carry
        winner = _least_bidder(slot, active, asked.position)
        is_first |= active & (winner == asked.position)
        return active & (_read(slot, winner) != slot), is_first

    carry = slot >= 0, asked.zero > 0
    return jax.lax.while_loop(lambda carry: jnp.any(carry[0]), step, carry)[1]


def count_passing(table: DeviceTable, asked: Asked, which, turn, change: int):
    """Adds `change` to the counts of the buckets passed by `which` keys, all different."""

    def step(carry):
        passed, bucket, turn = carry
        at = jnp.where(turn > 0, bucket, passed.size)
        passed = passed.at[at].add(change, mode="drop")
        return passed, _next_bucket(table, asked, bucket), turn - 1

    carry = table.passed, asked.home, jnp.where(which, turn, 0)
    return jax.lax.while_loop(lambda carry: jnp.any(carry[2] > 0), step, carry)[0]


def slot_of(which, slot, asked: Asked, size: int):
    """Slots to scatter to, int32 [n], all different: past the end for others than `which`."""
    return jnp.where(which, slot, size + asked.position)


def _least_bidder(wanted, bids, position):
    """The least position that bids for what each key wants, or for something else.

    Bids meet in a scratch array twice as long as the batch, by their hash: with some luck
    one cell per slot wanted. In each cell one bid wins, in any order of the scatter.
    """
    bits = (2 * position.size).bit_length()
    cell = wanted.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) >> (32 - bits)
    cell = cell.astype(jnp.int32)
    scratch = jnp.full(1 << bits, position.size, jnp.int32)
    scratch = scratch.at[jnp.where(bids, cell, 1 << bits)].min(position, mode="drop")
    return _read(scratch, cell)


def _next_bucket(table, asked, bucket):
    bucket = bucket + asked.stride
    return jnp.where(bucket < table.buckets, bucket, bucket - table.buckets)


def _read(x, at):
    """x[at], of indices that are in range wherever the result is used."""
    return x.at[at].get(mode="clip")


def _tags_of(tags, bucket):
    """The tags of buckets [n]: uint8 [n, 16]."""
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(), start_index_map=(0,)
    )
    return jax.lax.gather(
        tags,
        bucket[:, None] * BUCKET,
        numbers,
        slice_sizes=(BUCKET,),
        mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
