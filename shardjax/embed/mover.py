"""Carries out the moves of rows on the devices, in the order in which they were planned."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardjax.embed.eviction import Evicted
from shardjax.embed.groups import Group
from shardjax.embed.moves import (
    Fill,
    Move,
    SlabState,
    fill_new,
    fill_stored,
    gather_records,
    padded,
    slab_spec,
    unpack_records,
)
from shardjax.embed.span import DeviceSpan
from shardjax.embed.spec import TableSpec

# (group, evicted, numbers of rows) to records, int32 [n, words]
ReadEvicted = Callable[[int, Evicted, np.ndarray], np.ndarray]
_PART = 65536  # rows that a callback gets at a time


class Mover:
    """Moves rows to, from and on the devices of a mesh.

    Args:
      groups: of the collection.
      mesh: slots lie over all of its axes.
    """

    def __init__(self, groups: tuple[Group, ...], mesh: jax.sharding.Mesh):
        self._groups = groups
        self._mesh = mesh
        self._span = DeviceSpan.of_mesh(mesh)
        # Rows move without the other processes: programs run on this one's devices alone.
        self._own_mesh = mesh
        if not self._span.is_whole:
            own = mesh.devices.reshape(-1)[self._span.first :][: self._span.count]
            types = (jax.sharding.AxisType.Auto,)
            self._own_mesh = jax.sharding.Mesh(own, ("own",), axis_types=types)

    def spec(self, group: Group) -> jax.P:
        """How the slots of a group lie over the mesh."""
        return _slots_over(group, self._mesh)

    def own(self, g: int, slab: SlabState) -> SlabState:
        """What this process's devices have of a group's slab, as arrays of theirs alone,
        in the same memory."""
        if self._span.is_whole:
            return slab
        return self._view(g, slab, self._own_mesh, self._span.count)

    def whole(self, g: int, slab: SlabState) -> SlabState:
        """The slab of all processes that this one has `own` of; in the same memory."""
        if self._span.is_whole:
            return slab
        return self._view(g, slab, self._mesh, self._span.total)

    def write(
        self,
        g: int,
        slab: SlabState,
        slots: np.ndarray,
        rows: np.ndarray,
        row_state: Sequence[np.ndarray] | None,
    ) -> SlabState:
        """A group's slab, donated, with rows at some slots of this process's devices:
        int32 [n], numbered through; past all of them for rows that are not to be written.
        Without `row_state`, that of the slots stays."""
        own = self.own(g, slab)
        _, sharding = self._options(self._groups[g])

        def put(x: jax.Array, values: np.ndarray) -> jax.Array:
            return _set_rows(x, slots, jnp.asarray(values, x.dtype), sharding)

        state = own.row_state
        if row_state is not None:
            state = [put(x, values) for x, values in zip(state, row_state, strict=True)]
        return self.whole(g, SlabState(put(own.rows, rows), state, own.shared))

    def copy(self, g: int, slab: SlabState) -> SlabState:
        """A group's slab in memory of its own."""
        return self.whole(g, jax.tree.map(jnp.copy, self.own(g, slab)))

    def _view(self, g: int, slab: SlabState, mesh, owners: int) -> SlabState:
        """A slab's parts on this process's devices, as parts of arrays over a mesh."""
        specs = slab_spec(self._groups[g], _slots_over(self._groups[g], mesh))

        def view(x: jax.Array, spec: jax.P) -> jax.Array:
            parts = {shard.device: shard.data for shard in x.addressable_shards}
            own = [parts[device] for device in self._own_mesh.devices.flat]
            shape = own[0].shape
            if spec != jax.P():
                shape = (shape[0] * owners, *shape[1:])
            sharding = jax.NamedSharding(mesh, spec)
            return jax.make_array_from_single_device_arrays(shape, sharding, own)

        return jax.tree.map(view, slab, specs)

    def move(self, slab: SlabState, move: Move) -> SlabState:
        """Gathers the rows that leave for RAM, writes those that come.

        Args:
          slab: of the move's group; donated.
        """
        moved = self.move_own(self.own(move.group, slab), move)
        return self.whole(move.group, moved)

    def move_own(self, slab: SlabState, move: Move) -> SlabState:
        """Like `move`, of `own`."""
        group = self._groups[move.group]
        options, sharding = self._options(group)

        def put(x):
            return jax.device_put(x.reshape(-1, *x.shape[2:]), sharding)

        if move.write_back is not None:
            slots = put(move.write_back.slots)
            records = gather_records(slab, slots, **options)
            records.copy_to_host_async()
            move.write_back.records = records
        if move.stored is not None:
            records = put(move.stored.complete())
            slab = fill_stored(slab, put(move.stored.slots), records, **options)
        for fill in move.fills:
            slab = self._fill(slab, fill, sharding, options)
        return slab

    def _options(self, group: Group) -> tuple[dict[str, Any], jax.NamedSharding]:
        """What the programs need to know of a group, and where its arrays go."""
        spec = _slots_over(group, self._own_mesh)
        options = {"group": group, "mesh": self._own_mesh, "spec": spec}
        return options, jax.NamedSharding(self._own_mesh, spec)

    def wants(self, move: Move) -> bool:
        """Whether somebody wants rows that leave for good with a move."""
        return any(self._wants(move.group, evicted) for evicted in move.evicted)

    def hand_over(self, slab: SlabState, move: Move, read: ReadEvicted) -> None:
        """Gives rows that are about to leave for good to their tables' `on_evict`.

        Args:
          slab: of the move's group, before the move; stays as it is.
          move: that has not been carried out.
          read: reads those that are not on the devices.

        Raises:
          RuntimeError: if an `on_evict` raises an error.
        """
        group = self._groups[move.group]
        for evicted in move.evicted:
            if self._wants(move.group, evicted):
                gathered = self._gather(self.own(move.group, slab), group, evicted)
                self._hand_over(move.group, group, evicted, gathered, read)

    def _gather(self, slab: SlabState, group: Group, evicted: Evicted):
        """Records of the rows on the devices, int32 [owners * n, words]; None for none."""
        parts = self._own_slots(group, evicted)
        if not any(len(x) for x in parts):
            return None
        return self._gather_slots(group, slab, parts)

    def gather(self, g: int, slab: SlabState, parts: Sequence[np.ndarray]) -> jax.Array:
        """Records of slots of a group by owner, int32 [n] each: int32 [owners * m, words],
        m at least the longest n; undefined past each."""
        return self._gather_slots(self._groups[g], self.own(g, slab), parts)

    def _gather_slots(self, group: Group, slab: SlabState, parts) -> jax.Array:
        options, sharding = self._options(group)
        slots = jax.device_put(padded(parts).reshape(-1), sharding)
        return gather_records(slab, slots, **options)

    def _hand_over(
        self, g: int, group: Group, evicted: Evicted, gathered, read
    ) -> None:
        place = np.full(len(evicted), -1, np.int64)  # in what was gathered
        own = self._own_rows(group, evicted)
        longest = 0 if gathered is None else len(gathered) // len(own)
        for o, rows in enumerate(own):
            place[rows] = o * longest + np.arange(len(rows))
        records = None if gathered is None else np.asarray(gathered)
        for t in np.unique(evicted.tables):
            table = group.tables[t]
            if table.spec.on_evict is None:
                continue
            rows = np.flatnonzero(evicted.tables == t)
            for start in range(0, len(rows), _PART):
                part = rows[start : start + _PART]
                away = place[part] < 0
                words = read(g, evicted, part[away])
                if records is not None:
                    both = np.empty((len(part), records.shape[1]), np.int32)
                    both[~away] = records[place[part[~away]]]
                    if away.any():
                        both[away] = words
                    words = both
                values, *row_state = unpack_records(group, jnp.asarray(words))
                call_on_evict(
                    table.spec,
                    evicted.keys[part] - table.salt,
                    np.asarray(values),
                    [np.asarray(x) for x in row_state],
                )

    def _wants(self, g: int, evicted: Evicted) -> bool:
        """Whether somebody wants the rows."""
        tables = self._groups[g].tables
        return any(
            tables[t].spec.on_evict is not None for t in np.unique(evicted.tables)
        )

    def _own_rows(self, group: Group, evicted: Evicted) -> list[np.ndarray]:
        """Numbers of the rows on each device."""
        owners = 1 if group.replicated else self._span.count
        return [
            np.flatnonzero((evicted.slots >= 0) & (evicted.owners == o))
            for o in range(owners)
        ]

    def _own_slots(self, group: Group, evicted: Evicted) -> list[np.ndarray]:
        return [evicted.slots[x] for x in self._own_rows(group, evicted)]

    def grow(self, g: int, slab: SlabState, slots: int) -> SlabState:
        """A slab of a group with more slots, `slots` per owner."""
        return self.whole(g, self.grow_own(g, self.own(g, slab), slots))

    def grow_own(self, g: int, slab: SlabState, slots: int) -> SlabState:
        """Like `grow`, of `own`."""
        mesh = self._own_mesh
        spec = slab_spec(self._groups[g], _slots_over(self._groups[g], mesh))

        @jax.jit  # a longer array cannot reuse the old one's memory: nothing to donate
        @partial(jax.shard_map, mesh=mesh, in_specs=(spec,), out_specs=spec)
        def grow(slab):
            def longer(x):
                more = jnp.zeros((slots - x.shape[0], *x.shape[1:]), x.dtype)
                if not self._groups[g].replicated:
                    more = jax.lax.pcast(more, mesh.axis_names, to="varying")
                return jnp.concatenate([x, more])

            return SlabState(
                longer(slab.rows), [longer(x) for x in slab.row_state], slab.shared
            )

        return grow(slab)

    def _fill(self, slab: SlabState, fill: Fill, sharding, options) -> SlabState:
        words = fill.words.reshape(-1).view(np.uint32).reshape(-1, 2)
        return fill_new(
            slab,
            jax.device_put(fill.slots.reshape(-1), sharding),
            jax.device_put(words, sharding),
            initializer=fill.initializer,
            **options,
        )


@partial(jax.jit, static_argnames="sharding", donate_argnames="rows")
def _set_rows(rows, at, values, sharding):
    written = rows.at[at].set(values, mode="drop", unique_indices=False)
    return jax.lax.with_sharding_constraint(written, sharding)


def _slots_over(group: Group, mesh: jax.sharding.Mesh) -> jax.P:
    """How the slots of a group lie over a mesh."""
    return jax.P() if group.replicated else jax.P(tuple(mesh.axis_names))


def call_on_evict(spec: TableSpec, keys, rows, row_state) -> None:
    """Calls the `on_evict` of a table.

    Raises:
      RuntimeError: if it raises an error.
    """
    assert spec.on_evict is not None
    try:
        spec.on_evict(spec.name, keys, rows, row_state)
    except Exception as error:
        raise RuntimeError(
            f"`on_evict` of table {spec.name!r} raised {error!r} when it was given"
            f" {len(keys)} rows. Nothing has changed: the rows that leave before this step"
            " are all still there, and are given again, from the first, when this batch or"
            " a later one is stepped on"
        ) from error
