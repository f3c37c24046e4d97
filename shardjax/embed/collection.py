"""An embedding collection: tables over a mesh, their planner, and the device functions.

The collection itself holds the static description and the host's planner. What the
devices hold is a separate pytree, `EmbeddingState`, that goes in and out of functions::

    collection = EmbeddingCollection(features, mesh=mesh)
    state = collection.init()
    plan = collection.plan(features_of_a_batch, batch=..., train=True)     # host
    state = collection.apply_fills(state, plan)                            # new rows
    ... a step: gather_rows, embed, update_rows inside jax.shard_map ...   # devices
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardjax.embed.exchange import Sequence, embed_group, gather_rows, scatter_rows
from shardjax.embed.groups import Group, plan_groups
from shardjax.embed.jagged import Jagged, as_keys
from shardjax.embed.layout import Layout
from shardjax.embed.plan import Fill, Plan, Planner
from shardjax.embed.spec import FeatureSpec, Initializer
from shardjax.embed.translate import find_owners


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


EmbeddingState = tuple[SlabState, ...]


class EmbeddingCollection:
    """Embedding tables and the features that read them, partitioned over a mesh.

    Args:
      features: by name. Features may share a table.
      mesh: a `jax.sharding.Mesh`; rows lie over all of its axes, and so do examples.
      seed: of the rows' initial values, each a function of (seed, table name, key).
      device_rows: slots to allocate per device and slab at the start; slabs grow by
        doubling as rows appear.
      threads: of the host that translate keys.

    Raises:
      ValueError, TypeError: for specs that do not fit together.
      RowOptimizerError: for an optimizer that does not work row by row.

    Example:
      >>> import shardjax as sj
      >>> item = sj.embed.TableSpec("item", dim=4)
      >>> collection = sj.embed.EmbeddingCollection(
      ...     {"item_id": sj.embed.FeatureSpec(item)}, mesh=sj.make_mesh("1x1")
      ... )
      >>> plan = collection.plan({"item_id": np.array([7, 9, 7])}, batch=3, train=True)
      >>> plan.counters["unique_ids"], plan.counters["inserted"]
      (2, 2)
      >>> collection.apply_fills(collection.init(), plan)[0].rows.shape
      (1024, 4)
    """

    def __init__(
        self,
        features: Mapping[str, FeatureSpec],
        *,
        mesh: jax.sharding.Mesh,
        seed: int = 0,
        device_rows: int = 1024,
        threads: int = 1,
    ):
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
            raise TypeError(f"`seed` must be an integer, got {seed!r}")
        if device_rows < 1:
            raise ValueError(f"`device_rows` must be positive, got {device_rows}")
        if threads < 1:
            raise ValueError(f"`threads` must be positive, got {threads}")
        self.features = dict(features)
        self.mesh = mesh
        self.axes = tuple(mesh.axis_names)
        self.devices = mesh.size
        self.groups = plan_groups(self.features, self.devices)
        self.planner = Planner(
            self.groups, self.features, self.devices, int(seed), threads=threads
        )
        self._device_rows = device_rows

    def spec(self, group: Group) -> jax.P:
        """How the slots of a group lie over the mesh."""
        return jax.P() if group.replicated else jax.P(self.axes)

    def state_spec(self) -> EmbeddingState:
        """The PartitionSpec of every leaf of the state."""
        return tuple(_slab_spec(g, self.spec(g)) for g in self.groups)

    def state_sharding(self) -> EmbeddingState:
        """The NamedSharding of every leaf of the state."""
        return jax.tree.map(
            lambda spec: jax.NamedSharding(self.mesh, spec),
            self.state_spec(),
            is_leaf=lambda x: isinstance(x, jax.P),
        )

    def init(self) -> EmbeddingState:
        """Slabs without a row, zeros, on their devices.

        Raises:
          RuntimeError: if the collection has been trained: its planner knows rows that a
            new state would not have.
        """
        if self.planner.started:
            raise RuntimeError(
                "this collection's rows belong to the state it was trained with. To train"
                " from scratch, make a new EmbeddingCollection"
            )

        @partial(jax.jit, out_shardings=self.state_sharding())
        def make():
            return tuple(self._empty_slab(g) for g in self.groups)

        return make()

    def _empty_slab(self, group: Group) -> SlabState:
        slots = self._device_rows * (1 if group.replicated else self.devices)
        leaves = group.optimizer.row_leaves
        _, shared = group.optimizer.init(jnp.zeros((1, group.dim), group.dtype))
        return SlabState(
            jnp.zeros((slots, group.dim), group.dtype),
            [jnp.zeros((slots, *x.shape), x.dtype) for x in leaves],
            shared,
        )

    def slots(self, state: EmbeddingState, group: int) -> int:
        """Slots per device that a group's slab has at present."""
        owners = 1 if self.groups[group].replicated else self.devices
        return state[group].rows.shape[0] // owners

    def example_embeddings(self, examples: int = 1) -> dict[str, jax.Array | Sequence]:
        """Zeros shaped as what a model gets, for `module.init` of a linen module.

        Args:
          examples: how many.

        Returns:
          By feature: [examples, dim] of the table's dtype, or for combiner `none` a
          `Sequence` of `max_length` (1 where there is none) masked positions.

        Example:
          >>> import shardjax as sj
          >>> item = sj.embed.TableSpec("item", dim=4)
          >>> collection = sj.embed.EmbeddingCollection(
          ...     {"item_id": sj.embed.FeatureSpec(item)}, mesh=sj.make_mesh("1x1")
          ... )
          >>> collection.example_embeddings(2)["item_id"].shape
          (2, 4)
        """
        examples_by_name: dict[str, jax.Array | Sequence] = {}
        for name, feature in self.features.items():
            dim, dtype = feature.table.dim, feature.table.dtype
            if feature.combiner == "none":
                length = feature.max_length or 1
                examples_by_name[name] = Sequence(
                    jnp.zeros((examples, length, dim), dtype),
                    jnp.zeros((examples, length), bool),
                )
            else:
                examples_by_name[name] = jnp.zeros((examples, dim), dtype)
        return examples_by_name

    def plan(
        self,
        features: Mapping[str, np.ndarray | Jagged],
        batch: int,
        *,
        train: bool,
    ) -> Plan:
        """Plans a batch on the host; see `shardjax.embed.plan.Planner.plan`."""
        return self.planner.plan(features, batch, train=train)

    def apply_fills(self, state: EmbeddingState, plan: Plan) -> EmbeddingState:
        """Makes the rows that a training plan brought: grows slabs, writes first values.

        Plans must come in the order in which they were made.

        Args:
          state: donated.
          plan: of `plan(..., train=True)`.

        Returns:
          The state with which the plan's step can run.

        Raises:
          RuntimeError: for a plan that has been applied, or that is older than one.
        """
        fills = self.planner.take_fills(plan)
        slabs = list(state)
        for g, used in enumerate(plan.slots_used):
            slots = self.slots(state, g)
            if used.max() > slots:
                while slots < used.max():
                    slots *= 2
                slabs[g] = self._grow(g, slabs[g], slots)
        for fill in fills:
            slabs[fill.group] = self._fill(slabs[fill.group], fill)
        return tuple(slabs)

    def _grow(self, g: int, slab: SlabState, slots: int) -> SlabState:
        spec = self.state_spec()[g]

        @jax.jit  # a longer array cannot reuse the old one's memory: nothing to donate
        @partial(jax.shard_map, mesh=self.mesh, in_specs=(spec,), out_specs=spec)
        def grow(slab):
            def longer(x):
                more = jnp.zeros((slots - x.shape[0], *x.shape[1:]), x.dtype)
                if not self.groups[g].replicated:
                    more = jax.lax.pcast(more, self.axes, to="varying")
                return jnp.concatenate([x, more])

            return SlabState(
                longer(slab.rows), [longer(x) for x in slab.row_state], slab.shared
            )

        return grow(slab)

    def _fill(self, slab: SlabState, fill: Fill) -> SlabState:
        group = self.groups[fill.group]
        sharding = jax.NamedSharding(self.mesh, self.spec(group))
        words = fill.words.reshape(-1).view(np.uint32).reshape(-1, 2)
        return _fill_slab(
            slab,
            jax.device_put(fill.slots.reshape(-1), sharding),
            jax.device_put(words, sharding),
            group=group,
            initializer=fill.initializer,
            mesh=self.mesh,
            spec=self.spec(group),
        )

    def gather_rows(
        self, state: EmbeddingState, arrays: dict[str, jax.Array]
    ) -> tuple[jax.Array, ...]:
        """Each group's unique rows of the batch; inside shard_map.

        Returns:
          Per group [rows, dim], of this device as an owner.
        """
        return tuple(
            gather_rows(slab.rows, arrays[f"{g.name}/slots"])
            for g, slab in zip(self.groups, state, strict=True)
        )

    def embed(
        self,
        rows: tuple[jax.Array, ...],
        arrays: dict[str, jax.Array],
        layout: Layout,
    ) -> dict[str, jax.Array]:
        """Rows to blocks of vectors; inside shard_map, differentiable in `rows`.

        Args:
          rows: of `gather_rows`.
          arrays: of this device, by field name.
          layout: of the plan.

        Returns:
          Blocks with the examples first: differentiate with respect to them, and give
          them to `shardjax.embed.split_features` for vectors by feature.
        """
        blocks: dict[str, jax.Array] = {}
        for group, r in zip(layout.groups, rows, strict=True):
            blocks.update(embed_group(group, layout, r, arrays, self.axes))
        return blocks

    def update_rows(
        self,
        state: EmbeddingState,
        rows: tuple[jax.Array, ...],
        grads: tuple[jax.Array, ...],
        arrays: dict[str, jax.Array],
    ) -> EmbeddingState:
        """One optimizer step for the unique rows; inside shard_map.

        Args:
          state: of this device.
          rows: of `gather_rows`: the rows before the step.
          grads: like `rows`; of replicated groups, this device's part.
          arrays: of this device, by field name.
        """
        slabs = []
        for group, slab, r, grad in zip(self.groups, state, rows, grads, strict=True):
            if group.replicated:
                grad = jax.lax.psum(grad, self.axes)
            slots = arrays[f"{group.name}/slots"]
            row_state = [gather_rows(x, slots) for x in slab.row_state]
            r, row_state, shared = group.optimizer.update(
                grad, row_state, slab.shared, r
            )
            slabs.append(
                SlabState(
                    scatter_rows(slab.rows, slots, r),
                    [
                        scatter_rows(x, slots, new)
                        for x, new in zip(slab.row_state, row_state, strict=True)
                    ],
                    shared,
                )
            )
        return tuple(slabs)

    def keys(self, table: str) -> np.ndarray:
        """The keys that have a row in a table, uint64 [n], in no particular order.

        Keys of plans that have not been applied have none yet.
        """
        g, entry = self._table(table)
        salted, slots = entry.index.items()
        _, found = self._locate(g, entry, salted, slots)
        return salted[found] - entry.table.salt

    def read_rows(
        self, state: EmbeddingState, table: str, keys: np.ndarray
    ) -> dict[str, np.ndarray | list[np.ndarray]]:
        """The rows of some keys, copied to the host.

        Args:
          state: of the devices.
          table: its name.
          keys: integers [n], widened by `as_keys`.

        Returns:
          `rows` [n, dim], `row_state` (a list of [n, ...]) and `found` bool [n]; a key
          without a row (also one whose plan has not been applied) reads zeros.

        Raises:
          KeyError: for an unknown table.
          TypeError: for keys that are not integers.
        """
        g, entry = self._table(table)
        salted = as_keys(keys, table) + entry.table.salt
        where = entry.index.lookup(salted)
        owners, found = self._locate(g, entry, salted, where)
        at = owners.astype(np.int64) * self.slots(state, g) + where
        slots = np.where(found, at, np.iinfo(np.int32).max).astype(np.int32)

        def read(x):
            return np.asarray(x.at[slots].get(mode="fill", fill_value=0))

        slab = state[g]
        return {
            "rows": read(slab.rows),
            "row_state": [read(x) for x in slab.row_state],
            "found": found,
        }

    def _locate(self, g: int, entry, salted, slots):
        """Owners of keys, and whether their slots hold a row on the devices."""
        owners = np.zeros(len(salted), np.int32)
        devices = 1 if self.groups[g].replicated else self.devices
        find_owners(salted, entry.table.owner, devices, owners)
        return owners, (slots >= 0) & (slots < self.planner.applied[g][owners])

    def _table(self, name: str):
        for g, tables in enumerate(self.planner.tables):
            for state in tables:
                if state.table.spec.name == name:
                    return g, state
        known = [s.table.spec.name for tables in self.planner.tables for s in tables]
        raise KeyError(f"no table is named {name!r}; the tables are {known}")


def _slab_spec(group: Group, spec: Any) -> SlabState:
    """A slab whose leaves are PartitionSpecs: `spec` for rows, copies for the rest."""
    row_state: list[Any] = [spec] * len(group.optimizer.row_leaves)
    shared: list[Any] = [jax.P()] * group.optimizer.is_row.count(False)
    return SlabState(spec, row_state, shared)


@partial(
    jax.jit,
    static_argnames=("group", "initializer", "mesh", "spec"),
    donate_argnames="slab",
)
def _fill_slab(
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
    slab_spec = _slab_spec(group, spec)

    @partial(
        jax.shard_map, mesh=mesh, in_specs=(slab_spec, spec, spec), out_specs=slab_spec
    )
    def fill(slab, slots, words):
        keys = jax.random.wrap_key_data(words, impl="threefry2x32")
        rows = jax.vmap(lambda k: initializer(k, (group.dim,), group.dtype))(keys)
        row_state, _ = group.optimizer.init(rows)
        return SlabState(
            scatter_rows(slab.rows, slots, rows),
            [
                scatter_rows(x, slots, new)
                for x, new in zip(slab.row_state, row_state, strict=True)
            ],
            slab.shared,
        )

    return fill(slab, slots, words)
