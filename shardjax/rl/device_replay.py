"""A replay on a device: pure functions of a state, for use inside `jit` and `scan`.

The twin of `Replay` for items that live on the device. `DeviceReplay` says what is kept and
how it is drawn; it holds no arrays. Its methods take the state and return the new one;
donate the old one, and it is written in place::

    replay = DeviceReplay(capacity=100_000, sampler=Proportional())
    state = replay.init(example)
    state, ids = replay.add(state, items)
    batch = replay.sample(state, key, 256, beta=0.4)
    state, applied = replay.set_priorities(state, batch.ids, priorities)

**Ids.** Without 64-bit integers an id is a pair of int32: the slot, and the *generation* of
the item, which says how often the ring of slots had come round when it was written. A slot
holds the generation of its item, 0 if it has none. A priority is for the item that was
meant or for none, as in `Replay`; 2**32 turns of the ring later, generations repeat.

**What cannot be raised on a device is counted.** A priority that is NaN, infinite, negative
or too large is `refused`: the old one stays, and a new item gets the largest there is. A
stale one is counted in `stale`. A draw from no items gives weights and probabilities of 0
and ids that are stale from the start.

**Over a mesh**, see `ShardedReplay`.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from shardjax.rl.device_tree import (
    Levels,
    init_levels,
    random_points,
    rebuild,
    sample_leaves,
    set_leaves,
    total,
)
from shardjax.rl.samplers import Proportional, Uniform

# 2**31 of these have a sum in float32. An item always has a mass, were it this one.
_LARGEST_MASS = 1e28
_LEAST_MASS = 1e-30
_NOWHERE = 2**31 - 1  # a slot past all, which nothing is written to


class DeviceIds(NamedTuple):
    """Ids of items.

    Attributes:
      slots: int32 [...].
      generations: int32 [...]; 0 for no item.
    """

    slots: Array
    generations: Array


class DeviceBatch(NamedTuple):
    """What is drawn.

    Attributes:
      items: A pytree like the example, arrays [batch_size, ...].
      ids: `DeviceIds` [batch_size].
      probabilities: float32 [batch_size], with which each draw was to give this item.
      weights: float32 [batch_size], importance weights; 1 if items are drawn uniformly.
    """

    items: Any
    ids: DeviceIds
    probabilities: Array
    weights: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceReplayState:
    """The items and their priorities; of a shard each array has a leading dim of 1."""

    items: Any  # the pytree of the example, [capacity, ...] each
    masses: Levels  # the tree of sums; a leaf is 0 if there is no item
    priorities: Array  # float32 [capacity], as they were given; -1 if there is no item
    generations: Array  # int32 [capacity], 0 if there is no item
    counters: Array  # int32 [5]: the properties below, in one array to hand over

    @property
    def next_slot(self) -> Array:
        """Where the next item goes, int32 []."""
        return self.counters[..., 0]

    @property
    def turn(self) -> Array:
        """The generation of the next item, int32 []."""
        return self.counters[..., 1]

    @property
    def size(self) -> Array:
        """Number of items, int32 []."""
        return self.counters[..., 2]

    @property
    def stale(self) -> Array:
        """Priorities that came too late, int32 []."""
        return self.counters[..., 3]

    @property
    def refused(self) -> Array:
        """Priorities that were none, int32 []."""
        return self.counters[..., 4]


@dataclass(frozen=True)
class DeviceReplay:
    """What a replay on a device is like.

    Attributes:
      capacity: Number of items; then the oldest is overwritten.
      sampler: `Uniform()` or `Proportional(...)`. (By rank draws only `Replay`.) An item
        whose mass would be below 1e-30 gets that one.
      weight_norm: As of `Replay`; "buffer" looks at all priorities at each draw.
      stratified: At the top of the tree; see `device_tree.random_points`.
      width: Children to a node of the tree.

    Example:
      >>> replay = DeviceReplay(capacity=4, sampler=Proportional(alpha=1.0))
      >>> state = replay.init({"reward": jnp.zeros(())})
      >>> state, ids = replay.add(state, {"reward": jnp.arange(3.0)}, jnp.array([0., 0, 9]))
      >>> batch = replay.sample(state, jax.random.key(0), 4)
      >>> batch.items["reward"].tolist()
      [2.0, 2.0, 2.0, 2.0]
      >>> state, applied = replay.set_priorities(state, batch.ids, jnp.ones(4))
      >>> int(applied.sum())
      4
    """

    capacity: int
    sampler: Uniform | Proportional = Uniform()
    weight_norm: Literal["batch", "buffer"] | None = "batch"
    stratified: bool = True
    width: int = 16

    def __post_init__(self):
        if self.width < 2:
            raise ValueError(f"`width` must be at least 2, got {self.width}.")
        # So that a number of 31 bits is past the end on each level of the tree.
        largest = (2**31 - 1) // (self.width + 1)
        if not 1 <= self.capacity <= largest:
            raise ValueError(
                f"`capacity` must be from 1 to {largest} items for a tree of width"
                f" {self.width}, got {self.capacity}. Over a mesh it is that of one shard."
            )
        if not isinstance(self.sampler, Uniform | Proportional):
            raise TypeError(
                "`sampler` of DeviceReplay must be Uniform() or Proportional(...), got"
                f" {self.sampler!r}. By rank draws only `Replay`."
            )
        if self.weight_norm not in (None, "batch", "buffer"):
            raise ValueError(
                '`weight_norm` must be "batch", "buffer" or None, got'
                f" {self.weight_norm!r}."
            )
        if getattr(self.sampler, "uniform_prob", 0) > 0:
            raise ValueError(
                "`uniform_prob` of Proportional must be 0 on a device, got"
                f" {self.sampler}. Use a larger `eps` instead, or `Replay`."
            )

    def init(self, example: Any) -> DeviceReplayState:
        """A replay without items.

        Args:
          example: A pytree of arrays, one item: the shapes and dtypes of all.
        """

        return DeviceReplayState(
            items=jax.tree.map(
                lambda x: jnp.zeros((self.capacity, *jnp.shape(x)), jnp.result_type(x)),
                example,
            ),
            masses=init_levels(self.capacity, self.width),
            priorities=jnp.full(self.capacity, -1.0, jnp.float32),
            generations=jnp.zeros(self.capacity, jnp.int32),
            counters=jnp.array([0, 1, 0, 0, 0], jnp.int32),
        )

    def add(
        self,
        state: DeviceReplayState,
        items: Any,
        priorities: Array | None = None,
        valid: Array | None = None,
    ) -> tuple[DeviceReplayState, DeviceIds]:
        """Adds items, over the oldest ones once all slots are taken.

        Args:
          state: The replay.
          items: A pytree like the example, of arrays [n, ...], n at most `capacity`.
          priorities: float32 [n]; by default the largest there is, 1 if there are none:
            to find it, all are read, 4 MB of a million.
          valid: bool [n], False for what is left out: it gets an id that is always stale.
        """
        self._check_items(state, items)
        n = jax.tree.leaves(items)[0].shape[0]
        if valid is None:
            valid = jnp.ones(n, jnp.bool_)
        offsets = jnp.cumsum(valid.astype(jnp.int32)) - 1
        past = state.next_slot - self.capacity + offsets  # of the end, from 0 on
        slots = jnp.where(past >= 0, past, past + self.capacity)
        generations = jnp.where(past >= 0, _after(state.turn), state.turn)
        slots = jnp.where(valid, slots, _NOWHERE)
        generations = jnp.where(valid, generations, 0)
        wrong = jnp.zeros((), jnp.int32)
        if priorities is None:
            given = jnp.full(n, _largest(state.priorities))
        else:
            if isinstance(self.sampler, Uniform):
                raise ValueError(_UNIFORM_HAS_NONE.format("add"))
            given = _as_priorities(priorities, (n,))
            fine = self._are_priorities(given)
            wrong = jnp.sum(valid & ~fine, dtype=jnp.int32)
            initial = jax.lax.cond(
                wrong > 0, _largest, lambda known: known[0], state.priorities
            )
            given = jnp.where(fine, given, initial)
        before = state.generations.at[slots].get(mode="fill", fill_value=1)
        added = jnp.sum(before == 0, dtype=jnp.int32)
        count = jnp.sum(valid, dtype=jnp.int32)
        next_slot = state.next_slot - self.capacity + count
        state = replace(
            state,
            items=jax.tree.map(
                lambda column, x: column.at[slots].set(x, mode="drop"),
                state.items,
                items,
            ),
            generations=state.generations.at[slots].set(
                _once_known(generations, before), mode="drop"
            ),
            counters=jnp.stack(
                [
                    jnp.where(next_slot >= 0, next_slot, next_slot + self.capacity),
                    jnp.where(next_slot >= 0, _after(state.turn), state.turn),
                    state.size + added,
                    state.stale,
                    state.refused + wrong,
                ]
            ),
        )
        state = self._write(state, slots, given, self._masses(given))
        return state, DeviceIds(slots, generations)

    def sample(
        self,
        state: DeviceReplayState,
        key: Array,
        batch_size: int,
        *,
        beta: float | Array = 0.4,
        axis: str | None = None,
    ) -> DeviceBatch:
        """Draws items with replacement.

        Args:
          state: The replay.
          key: A key of `jax.random`.
          batch_size: Number of items (of each shard).
          beta: How much importance weights make up for the priorities.
          axis: Inside `jax.shard_map` with a replay on each device of this mesh axis:
            probabilities and weights are those of one draw from all of them. An item's
            probability is its share in its shard, divided by the number of shards that have
            items; its weight is of the number of all items.
        """
        points = random_points(
            key, state.masses, batch_size, stratified=self.stratified
        )
        slots = sample_leaves(state.masses, points)
        any_there = state.size > 0
        generations = jnp.where(any_there, state.generations[slots], 0)
        leaves = state.masses[0].reshape(-1)
        all_masses = jnp.maximum(total(state.masses), _LEAST_MASS)
        probabilities = leaves[slots] / all_masses
        if self.weight_norm == "buffer":
            least = jnp.min(leaves, where=leaves > 0, initial=jnp.inf) / all_masses
        else:
            least = jnp.min(probabilities, where=probabilities > 0, initial=jnp.inf)
        size = state.size
        if axis is not None:
            shards = jax.lax.psum(any_there.astype(jnp.float32), axis)
            probabilities = probabilities / jnp.maximum(shards, 1.0)
            least = jax.lax.pmin(least / jnp.maximum(shards, 1.0), axis)
            size = jax.lax.psum(size, axis)
        if self.weight_norm is None:
            least = 1.0 / jnp.maximum(size, 1).astype(jnp.float32)
        if isinstance(self.sampler, Uniform) and axis is None:
            weights = any_there.astype(jnp.float32) * jnp.ones(batch_size)
        else:
            weights = (least / jnp.where(any_there, probabilities, 1.0)) ** beta
            weights = jnp.where(any_there, weights, 0.0)
        return DeviceBatch(
            items=jax.tree.map(lambda x: x[slots], state.items),
            ids=DeviceIds(slots, generations),
            probabilities=probabilities,
            weights=weights,
        )

    def set_priorities(
        self, state: DeviceReplayState, ids: DeviceIds, priorities: Array
    ) -> tuple[DeviceReplayState, Array]:
        """Gives items new priorities; of an item given twice the last counts.

        Returns:
          The replay; and whether each was set, bool [n]: not if the id is stale, or the
          priority is none.
        """
        if isinstance(self.sampler, Uniform):
            raise ValueError(_UNIFORM_HAS_NONE.format("set_priorities"))
        priorities = _as_priorities(priorities, ids.slots.shape)
        there, fine = self.contains(state, ids), self._are_priorities(priorities)
        applied = there & fine
        slots = jnp.where(applied, ids.slots, _NOWHERE)
        slots, order = _once_each(slots, self.capacity)
        priorities = priorities[order]
        late = jnp.sum(~there, dtype=jnp.int32)
        wrong = jnp.sum(there & ~fine, dtype=jnp.int32)
        counters = state.counters.at[3].add(late).at[4].add(wrong)
        state = replace(state, counters=counters)
        masses = self._masses(priorities)
        return self._write(state, slots, priorities, masses), applied

    def contains(self, state: DeviceReplayState, ids: DeviceIds) -> Array:
        """Whether the items of ids are there, bool [n]."""
        found = state.generations.at[ids.slots].get(mode="fill", fill_value=0)
        return (found == ids.generations) & (ids.generations != 0)

    def get(self, state: DeviceReplayState, ids: DeviceIds) -> tuple[Any, Array]:
        """The items of ids, and whether they are there, bool [n]; if not, anything."""
        items = jax.tree.map(lambda x: x.at[ids.slots].get(mode="clip"), state.items)
        return items, self.contains(state, ids)

    def delete(
        self, state: DeviceReplayState, ids: DeviceIds
    ) -> tuple[DeviceReplayState, Array]:
        """Deletes the items of ids: they are never drawn again. Returns which were there."""
        there = self.contains(state, ids)
        slots = jnp.where(there, ids.slots, _NOWHERE)
        generations = state.generations.at[slots].set(0, mode="drop")
        slots, _ = _once_each(slots, self.capacity)
        count = jnp.sum(slots < self.capacity, dtype=jnp.int32)
        counters = state.counters.at[2].add(-count)
        state = replace(state, generations=generations, counters=counters)
        gone = jnp.full(slots.shape, -1.0)
        return self._write(state, slots, gone, jnp.zeros_like(gone)), there

    def rebuild(self, state: DeviceReplayState) -> DeviceReplayState:
        """Computes masses and sums from the priorities anew: after `sampler` has changed."""
        priorities = state.priorities
        masses = jnp.where(priorities >= 0, self._masses(priorities), 0.0)
        leaves = state.masses[0]
        padded = jnp.pad(masses, (0, leaves.size - self.capacity))
        return replace(state, masses=rebuild(padded.reshape(leaves.shape)))

    def _check_items(self, state: DeviceReplayState, items: Any) -> None:
        """Refuses items that are not like the example, while it is traced."""
        if jax.tree.structure(items) != jax.tree.structure(state.items):
            raise ValueError(
                "`items` must have the structure of the example,"
                f" {jax.tree.structure(state.items)}, got {jax.tree.structure(items)}."
            )
        wrong, lengths = [], set()
        leaves, _ = jax.tree_util.tree_flatten_with_path(items)
        for (path, x), column in zip(leaves, jax.tree.leaves(state.items), strict=True):
            name = jax.tree_util.keystr(path) or "item"
            if jnp.shape(x)[1:] != column.shape[1:] or not jnp.ndim(x):
                wanted = ", ".join(["n", *map(str, column.shape[1:])])
                wrong.append(f"{name} must be [{wanted}], got {list(jnp.shape(x))}")
                continue
            lengths.add(jnp.shape(x)[0])
            if jnp.result_type(x) != column.dtype:
                wrong.append(f"{name} must be {column.dtype}, got {jnp.result_type(x)}")
        if len(lengths) > 1:
            wrong.append(f"all must have the same length, got {sorted(lengths)}")
        if lengths and max(lengths) > self.capacity:
            wrong.append(f"at most {self.capacity} fit at once, got {max(lengths)}")
        if wrong:
            raise ValueError(
                "`items` must be arrays like the example, with a first dimension of the"
                " number of items:\n- " + "\n- ".join(wrong)
            )

    def _masses(self, priorities: Array) -> Array:
        if isinstance(self.sampler, Uniform):
            return jnp.ones_like(priorities)
        masses = (priorities + self.sampler.eps) ** self.sampler.alpha
        return jnp.maximum(masses, _LEAST_MASS)

    def _are_priorities(self, priorities: Array) -> Array:
        fine = jnp.isfinite(priorities) & (priorities >= 0)
        return fine & (self._masses(priorities) <= _LARGEST_MASS)

    def _write(self, state, slots, priorities, masses) -> DeviceReplayState:
        """Writes slots that differ from each other; those past the last are left out."""
        return replace(
            state,
            masses=set_leaves(state.masses, slots, masses),
            priorities=state.priorities.at[slots].set(priorities, mode="drop"),
        )


_UNIFORM_HAS_NONE = (
    "`{}` got priorities, but the sampler is Uniform(), which has none. Use"
    " Proportional(...)."
)


def _once_each(slots: Array, capacity: int) -> tuple[Array, Array]:
    """Slots in order, int32 [n], and where they were given.

    One that is given again gets in the last place it has; in its others, nowhere.
    """
    n = slots.shape[0]
    slots = jnp.minimum(slots, capacity)
    if (capacity + 1) * n <= 2**32:  # sorting one number takes half the time of two
        places = jnp.arange(n, dtype=jnp.uint32)
        both = jnp.sort(slots.astype(jnp.uint32) * n + places, stable=False)
        order = (both % n).astype(jnp.int32)
        slots = (both // n).astype(jnp.int32)
    else:
        order = jnp.argsort(slots, stable=True)
        slots = slots[order]
    again = jnp.append(slots[1:] == slots[:-1], False)
    return jnp.where(again | (slots == capacity), _NOWHERE, slots), order


def _once_known(values: Array, read: Array) -> Array:
    """The same values; but to the compiler they depend on what was read.

    What is written with them is thus written after the reading, and in place. Where the
    order is open, a program may write first, and read from a copy of the whole array.
    """
    return jnp.where(values == read, read, values)


def _largest(priorities: Array) -> Array:
    """What a new item gets: the largest there is, 1 if there are none."""
    largest = jnp.max(priorities)
    return jnp.where(largest >= 0, largest, 1.0)


def _after(turn: Array) -> Array:
    """The next generation; 0 is none."""
    return jnp.where(turn == -1, 1, turn + 1)


def _as_priorities(priorities: Any, shape: tuple[int, ...]) -> Array:
    array = jnp.asarray(priorities, jnp.float32)
    if array.shape != shape:
        raise ValueError(
            f"`priorities` must be one for each item, {list(shape)}, got"
            f" {list(array.shape)}."
        )
    return array
