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
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

BUCKET = 16
EMPTY = 0
NO_SLOT = 1
FIRST_TAG = 2

_SMALL = 128  # a short array is not worth its making below this


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
    reach: int = _static()  # of `init_device_table`

    @property
    def buckets(self) -> int:
        """Buckets of a device."""
        return buckets_for(self.capacity)

    @property
    def rounds(self) -> int:
        """Buckets that a probe looks at, at most: all of them if `reach` covers the slots."""
        return self.buckets if self.capacity <= BUCKET * self.reach else self.reach


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
    zero: jax.Array  # int32 [n]: what loops begin with


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
        zero=zero,
    )


class _Walk(NamedTuple):
    """How far the probe of each key has come."""

    active: jax.Array  # bool [n]: not yet settled
    bucket: jax.Array  # int32 [n]: where it is
    turn: jax.Array  # int32 [n]: how many buckets lie behind it
    lane: jax.Array  # int32 [n]: slots of the bucket before this are not the key's
    slot: jax.Array  # int32 [n]: the answer; -1 for none
    first: jax.Array  # bool [n]: was inserted, as the first of equal keys


def _start(asked, active):
    zero = asked.zero
    return _Walk(active, asked.home, zero, zero, zero - 1, zero > 0)


def _until_settled(step, keys, shared, walk):
    """Steps all keys until an eighth is left, and then those in a short array.

    Args:
      step: (keys, shared, walk) -> (shared, walk).
      keys: a pytree of arrays [n].
      shared: what steps change beside the walk: an array, or None.
      walk: a tuple of arrays [n] with `active`.
    """

    def loop(keys, shared, walk, few):
        return jax.lax.while_loop(
            lambda carry: jnp.sum(carry[1].active, dtype=jnp.int32) > few,
            lambda carry: step(keys, *carry),
            (shared, walk),
        )

    size = walk.active.size
    few = size // 8
    if few < _SMALL:
        return loop(keys, shared, walk, 0)

    def settle_few(carry):
        shared, walk = carry
        number = jnp.cumsum(walk.active, dtype=jnp.int32) - 1
        number = jnp.where(walk.active, number, few)
        at = jnp.full(few, size, jnp.int32)
        at = at.at[number].set(_positions(number), mode="drop")
        keys_there, there = jax.tree.map(lambda x: _read(x, at), (keys, walk))
        there = there._replace(active=at < size)
        shared, there = loop(keys_there, shared, there, 0)
        there = jax.tree.map(lambda x, y: x.at[at].set(y, mode="drop"), walk, there)
        return shared, there

    # A loop of one round, or none: a cond might copy what is shared.
    return jax.lax.while_loop(
        lambda carry: jnp.any(carry[1].active),
        settle_few,
        loop(keys, shared, walk, few),
    )


def search(table: DeviceTable, asked: Asked) -> tuple[jax.Array, jax.Array]:
    """Finds the slots of keys.

    Returns:
      The slots, int32 [n], -1 for keys that are absent or not valid, and how many buckets
      the keys that are there have passed, int32 [n].
    """
    step = partial(_search_step, table)
    _, walk = _until_settled(step, asked, None, _start(asked, asked.valid))
    return walk.slot, walk.turn


def _search_step(table, asked, _, walk):
    """Looks at the next slot of the bucket whose tag fits, or goes on to the next bucket."""
    lanes = jax.lax.broadcasted_iota(jnp.int32, (asked.tag.size, BUCKET), 1)
    fits = _tags_of(table.tags, walk.bucket) == asked.tag[:, None]
    at = jnp.min(jnp.where(fits & (lanes >= walk.lane[:, None]), lanes, BUCKET), axis=1)
    one_fits = walk.active & (at < BUCKET)
    slot = walk.bucket * BUCKET + jnp.minimum(at, BUCKET - 1)
    same = (_read(table.hi, slot) == asked.hi) & (_read(table.lo, slot) == asked.lo)
    onward = walk.active & ~one_fits & (_read(table.passed, walk.bucket) > 0)
    onward &= walk.turn + 1 < table.rounds
    return None, _Walk(
        active=onward | one_fits & ~same,
        bucket=_next_bucket(table, asked.stride, walk.bucket, onward),
        turn=walk.turn + onward,
        lane=jnp.where(onward, 0, at + 1),
        slot=jnp.where(one_fits & same, slot, walk.slot),
        first=walk.first,
    )


def place(
    table: DeviceTable, asked: Asked, slot: jax.Array
) -> tuple[DeviceTable, jax.Array, jax.Array]:
    """Gives slots to valid keys that have none.

    Args:
      slot: int32 [n], of keys that are there, else -1.

    Returns:
      The table, the slots (-1 where there is no room), and which keys have been inserted:
      the first of equal ones.
    """
    step = partial(_place_step, table)
    walk = _start(asked, asked.valid & (slot < 0))._replace(slot=slot)
    tags, walk = _until_settled(step, asked, table.tags, walk)
    at = _slots_of(walk.first, walk.slot, table.hi.size)
    table = replace(
        table,
        hi=table.hi.at[at].set(asked.hi, mode="drop", unique_indices=True),
        lo=table.lo.at[at].set(asked.lo, mode="drop", unique_indices=True),
        tags=tags,
        passed=_count_passing(table, asked, walk.first, walk.turn, 1),
        count=table.count + jnp.sum(walk.first, dtype=jnp.int32),
    )
    return table, walk.slot, walk.first


def _place_step(table, asked, tags, walk):
    """Bids for an empty slot of the bucket, or goes on to the next bucket.

    Which slot a key bids for is a part of its hash, and the least position wins. The keys
    equal to it are settled with it: they have made the same bids in all rounds.
    """
    lanes = jax.lax.broadcasted_iota(jnp.int32, (asked.tag.size, BUCKET), 1)
    # how far behind the lane of the key's choice each lane is
    behind = lanes - asked.lane[:, None] & (BUCKET - 1)
    empty = _tags_of(tags, walk.bucket) == EMPTY
    least = jnp.min(jnp.where(empty, behind, BUCKET), axis=1)
    bids = walk.active & (least < BUCKET)
    wanted = walk.bucket * BUCKET + (asked.lane + least & (BUCKET - 1))
    winner = _least_bidder(wanted, bids)
    same = (_read(asked.hi, winner) == asked.hi) & (_read(asked.lo, winner) == asked.lo)
    settled, wins = bids & same, bids & (winner == _positions(bids))
    at = _slots_of(wins, wanted, tags.size)
    onward = walk.active & ~bids
    turn = walk.turn + onward
    return tags.at[at].set(asked.tag, mode="drop", unique_indices=True), _Walk(
        active=walk.active & ~settled & (turn < table.rounds),
        bucket=_next_bucket(table, asked.stride, walk.bucket, onward),
        turn=turn,
        lane=walk.lane,
        slot=jnp.where(settled, wanted, walk.slot),
        first=walk.first | wins,
    )


def remove(table: DeviceTable, asked: Asked, slot, turn) -> DeviceTable:
    """Empties the slots of keys; `slot` and `turn` as `search` gives them."""

    def step(slot, _, walk):  # finds the first of equal slots
        winner = _least_bidder(slot, walk.active)
        wins = walk.active & (winner == _positions(slot))
        active = walk.active & (_read(slot, winner) != slot)
        return None, walk._replace(active=active, first=walk.first | wins)

    _, walk = _until_settled(step, slot, None, _start(asked, slot >= 0))
    at = _slots_of(walk.first, slot, table.tags.size)
    return replace(
        table,
        tags=table.tags.at[at].set(EMPTY, mode="drop", unique_indices=True),
        passed=_count_passing(table, asked, walk.first, turn, -1),
        count=table.count - jnp.sum(walk.first, dtype=jnp.int32),
    )


def _count_passing(table, asked, which, turn, change):
    """Adds `change` to the counts of the buckets passed by `which` keys, all different."""

    def step(stride, passed, walk):
        at = jnp.where(walk.active, walk.bucket, passed.size)
        bucket = _next_bucket(table, stride, walk.bucket, walk.active)
        left = walk.turn - 1
        passed = passed.at[at].add(change, mode="drop")
        return passed, walk._replace(
            active=walk.active & (left > 0), bucket=bucket, turn=left
        )

    walk = _start(asked, which & (turn > 0))._replace(turn=jnp.where(which, turn, 0))
    return _until_settled(step, asked.stride, table.passed, walk)[0]


def _positions(like):
    return jax.lax.iota(jnp.int32, like.size)


def _slots_of(which, slot, size):
    """Slots to scatter to, int32 [n], all different: past the end for others than `which`."""
    return jnp.where(which, slot, size + _positions(slot))


def _least_bidder(wanted, bids):
    """The least position that bids for what each key wants, or for something else.

    Bids meet in a scratch array twice as long as the batch, by their hash: with some luck
    one cell per slot wanted. In each cell one bid wins, in any order of the scatter.
    """
    size = wanted.size
    bits = (2 * size).bit_length()
    cell = wanted.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) >> (32 - bits)
    cell = cell.astype(jnp.int32)
    scratch = jnp.full(1 << bits, size, jnp.int32)
    cells = jnp.where(bids, cell, 1 << bits)
    return _read(scratch.at[cells].min(_positions(wanted), mode="drop"), cell)


def _next_bucket(table, stride, bucket, onward):
    """The next bucket of the keys that go `onward`."""
    bucket = jnp.where(onward, bucket + stride, bucket)
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
