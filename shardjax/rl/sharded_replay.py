"""A `DeviceReplay` on each device of a mesh axis, as one.

Each device has items, ids and a tree of its own, and draws its part of each batch from
them: nothing but three numbers travels. An item of a shard with the sum of masses T, one of
S that have items, is then drawn with probability ``mass / (S * T)``: not that of one large
tree, where shards with larger masses would give more items. But it is known exactly, and
importance weights are made of it, with the number of all items: with ``beta = 1`` a
weighted mean over batches is that over all items, as it is with one tree.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import Array, P
from jax.sharding import Mesh, NamedSharding

from shardjax.rl.device_replay import (
    DeviceBatch,
    DeviceIds,
    DeviceReplay,
    DeviceReplayState,
)


@dataclass(frozen=True)
class ShardedReplay:
    """A replay over a mesh axis; its methods are those of `DeviceReplay`.

    Arrays of the state have a leading dim of the number of shards, over `axis`. First dims
    of items, ids and priorities are divided over it too: what is in part i of them is in
    shard i. A batch comes so, and priorities are reported so, without moving.

    Attributes:
      replay: That of one shard.
      mesh: The mesh.
      axis: The name of the axis.

    Example:
      >>> from shardjax import make_mesh
      >>> from shardjax.rl import Proportional
      >>> replay = ShardedReplay(DeviceReplay(4, Proportional()), make_mesh("1x1"))
      >>> state = replay.init({"reward": 0.0})
      >>> state, ids = replay.add(state, {"reward": jax.numpy.ones(2)})
      >>> replay.sample(state, jax.random.key(0), 4).weights.tolist()
      [1.0, 1.0, 1.0, 1.0]
    """

    replay: DeviceReplay
    mesh: Mesh
    axis: str = "data"

    def __post_init__(self):
        if self.axis not in self.mesh.shape:
            raise ValueError(
                f"`axis` must be one of the mesh, {list(self.mesh.shape)}, got"
                f" {self.axis!r}."
            )

    @property
    def shards(self) -> int:
        """Number of shards."""
        return self.mesh.shape[self.axis]

    def init(self, example: Any) -> DeviceReplayState:
        """A replay without items, made where it is to be."""

        def init():
            state = self.replay.init(example)
            return jax.tree.map(
                lambda x: jax.numpy.broadcast_to(x, (self.shards, *x.shape)), state
            )

        sharding = NamedSharding(self.mesh, P(self.axis))
        return jax.jit(init, out_shardings=sharding)()

    def add(
        self,
        state: DeviceReplayState,
        items: Any,
        priorities: Array | None = None,
        valid: Array | None = None,
    ) -> tuple[DeviceReplayState, DeviceIds]:
        """As `DeviceReplay.add`; the i-th part of `items` goes to shard i."""
        return self._changed(self.replay.add, state, items, priorities, valid)

    def set_priorities(
        self, state: DeviceReplayState, ids: DeviceIds, priorities: Array
    ) -> tuple[DeviceReplayState, Array]:
        """As `DeviceReplay.set_priorities`, of ids in the order of `sample` or `add`."""
        return self._changed(self.replay.set_priorities, state, ids, priorities)

    def delete(
        self, state: DeviceReplayState, ids: DeviceIds
    ) -> tuple[DeviceReplayState, Array]:
        """As `DeviceReplay.delete`, of ids in the order of `sample` or `add`."""
        return self._changed(self.replay.delete, state, ids)

    def sample(
        self,
        state: DeviceReplayState,
        key: Array,
        batch_size: int,
        *,
        beta: float | Array = 0.4,
    ) -> DeviceBatch:
        """As `DeviceReplay.sample`; `batch_size` in all, the same from each shard."""
        if batch_size % self.shards:
            raise ValueError(
                f"`batch_size` must be divisible by the {self.shards} shards over"
                f" {self.axis!r}, got {batch_size}."
            )
        of_axis = P(self.axis)

        @partial(
            jax.shard_map,
            mesh=self.mesh,
            in_specs=(of_axis, P(), P()),
            out_specs=of_axis,
        )
        def sample(state, key, beta):
            key = jax.random.fold_in(key, jax.lax.axis_index(self.axis))
            own = jax.tree.map(lambda x: x[0], state)
            count = batch_size // self.shards
            return self.replay.sample(own, key, count, beta=beta, axis=self.axis)

        return sample(state, key, jax.numpy.float32(beta))

    def _changed(self, change, state, *args):
        """Applies a method to each shard's state and its part of the arguments."""
        of_axis = P(self.axis)

        @partial(jax.shard_map, mesh=self.mesh, in_specs=of_axis, out_specs=of_axis)
        def apply(state, args):
            new, result = change(jax.tree.map(lambda x: x[0], state), *args)
            return jax.tree.map(lambda x: x[None], new), result

        return apply(state, args)
