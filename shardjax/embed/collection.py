"""An embedding collection: tables over a mesh, their planner, and the device functions.

The collection itself holds the static description and the host's planner. What the
devices hold is a separate pytree, `EmbeddingState`, that goes in and out of functions::

    collection = EmbeddingCollection(features, mesh=mesh)
    state = collection.init()
    plan = collection.plan(features_of_a_batch, batch=..., train=True)     # host
    state = collection.apply_fills(state, plan)                            # new rows
    ... a step: gather_rows, embed, update_rows inside jax.shard_map ...   # devices
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardjax.embed import exchange
from shardjax.embed.draft import TableState
from shardjax.embed.exchange import embed_group, gather_rows, scatter_rows
from shardjax.embed.facts import collection_facts
from shardjax.embed.groups import Group, plan_groups
from shardjax.embed.jagged import Jagged, as_keys
from shardjax.embed.joint import JointBatch, JointPlanner
from shardjax.embed.key_exchange import KeyExchange
from shardjax.embed.layout import Layout
from shardjax.embed.mover import Mover
from shardjax.embed.moves import SlabState, from_words, slab_spec, unpack_records
from shardjax.embed.optimizers import RowView
from shardjax.embed.plan import Plan, PlanError, Planner, WaitingPlan, WindowBatch
from shardjax.embed.policies import check_integer
from shardjax.embed.records import hashes_of
from shardjax.embed.snapshots import Snapshots
from shardjax.embed.span import DeviceSpan
from shardjax.embed.spec import FeatureSpec
from shardjax.embed.storage import Storage
from shardjax.embed.stream import PlanStream
from shardjax.embed.table_rows import TableRows, as_facts, facts_of
from shardjax.precision import choose
from shardjax.processes import Channel, check_agreement
from shardjax.together import together

EmbeddingState = tuple[SlabState, ...]
# of collections, in the order in which all processes make them
_NUMBERS = itertools.count()


def _alone(call: Callable[[], Any]) -> list[Any]:
    return [call()]


class EmbeddingCollection:
    """Embedding tables and the features that read them, partitioned over a mesh.

    Args:
      features: by name. Features may share a table.
      mesh: a `jax.sharding.Mesh`; rows lie over all of its axes, and so do examples.
      seed: of the rows' initial values, each a function of (seed, table name, key).
      initial_rows: slots to allocate per device and slab at the start; without a
        `storage` slabs grow by doubling as rows appear.
      threads: of the host that translate keys and copy rows.
      storage: how many rows the devices hold, and where the others lie; None for all on
        the devices. A table may have one of its own.

    Raises:
      ValueError, TypeError: for specs that do not fit together, or of several processes
        are not the same in all.
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
        initial_rows: int = 1024,
        threads: int = 1,
        storage: Storage | None = None,
    ):
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
            raise TypeError(f"`seed` must be an integer, got {seed!r}")
        if storage is not None and not isinstance(storage, Storage):
            raise TypeError(
                f"`storage` must be a Storage(device_rows=...) or None, got {storage!r}"
            )
        if initial_rows < 1:
            raise ValueError(f"`initial_rows` must be positive, got {initial_rows}")
        if threads < 1:
            raise ValueError(f"`threads` must be positive, got {threads}")
        self.features = dict(features)
        self.mesh = mesh
        self.axes = tuple(mesh.axis_names)
        self.devices = mesh.size
        self.seed = int(seed)
        self.groups = plan_groups(self.features, self.devices, storage)
        self.span = DeviceSpan.of_mesh(mesh)
        self._joint: JointPlanner | None = None
        if self.span.is_whole:
            self.planner = Planner(
                self.groups, self.features, self.devices, self.seed, threads=threads
            )
        else:
            facts = collection_facts(self.features, self.groups, mesh, self.seed)
            check_agreement({"collection": facts})
            self._joint = JointPlanner(
                self.groups, self.features, self.span, self.seed, threads
            )
            self.planner = self._joint.core
            self._exchange = KeyExchange(mesh, self.span)
            self._name = f"tables{next(_NUMBERS)}"
            self._streams = itertools.count()
            self._direct = Channel(f"{self._name}-direct")
        # what a call gives in all processes; no method, which would refer to the collection
        self._together = _alone
        if self._joint is not None:
            self._together = partial(together, self._direct.exchange)
        self._initial_rows = initial_rows
        self._mover = Mover(self.groups, mesh)
        self.snapshots = Snapshots(
            self.groups, self.planner, self._mover, self.seed, self._together
        )

    def spec(self, group: Group) -> jax.P:
        """How the slots of a group lie over the mesh."""
        return self._mover.spec(group)

    def state_spec(self) -> EmbeddingState:
        """The PartitionSpec of every leaf of the state."""
        return tuple(slab_spec(g, self.spec(g)) for g in self.groups)

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
            return tuple(self._empty_slab(g) for g in range(len(self.groups)))

        return make()

    def _empty_slab(self, g: int) -> SlabState:
        group = self.groups[g]
        slots = self.planner.tiers[g].residents.capacity or self._initial_rows
        slots *= 1 if group.replicated else self.devices
        leaves = group.optimizer.row_leaves
        _, shared = group.optimizer.init(jnp.zeros((1, group.dim), group.dtype))
        return SlabState(
            jnp.zeros((slots, group.dim), group.dtype),
            [jnp.zeros((slots, *x.shape), x.dtype) for x in leaves],
            shared,
        )

    def slots(self, state: EmbeddingState, group: int) -> int:
        """Slots per device that a group's slab has at present."""
        self._check_state(state)
        owners = 1 if self.groups[group].replicated else self.devices
        return state[group].rows.shape[0] // owners

    def example_embeddings(
        self, examples: int = 1
    ) -> dict[str, jax.Array | exchange.Sequence]:
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
        examples_by_name: dict[str, jax.Array | exchange.Sequence] = {}
        for name, feature in self.features.items():
            dim, dtype = feature.table.dim, feature.table.dtype
            if feature.combiner == "none":
                length = feature.max_length or 1
                examples_by_name[name] = exchange.Sequence(
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
        clicks: np.ndarray | None = None,
        *,
        train: bool,
    ) -> Plan:
        """Plans a batch on the host; see `shardjax.embed.plan.Planner.plan`.

        Where there are several processes, all of them call it at the same place of their
        programs, in the main thread, each with the examples of its own devices.
        """
        if self._joint is None:
            return self.planner.plan(features, batch, clicks, train=train)
        [plan] = self._plan_jointly([(features, batch, clicks)], train=train)
        return plan

    def plan_window(self, batches: Sequence[WindowBatch]) -> Iterator[Plan]:
        """Plans training batches that follow one another, whose rows shall be on the
        devices together; see `shardjax.embed.plan.Planner.plan_window`, and `plan` for
        several processes."""
        if self._joint is None:
            return self.planner.plan_window(batches)
        return self._plan_jointly(batches, train=True)

    def _plan_jointly(
        self, batches: Sequence[WindowBatch], *, train: bool, admit: bool = False
    ) -> Iterator[Plan]:
        """Plans a window with the other processes, at once."""
        joint = self._joint
        assert joint is not None
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "where there are several processes, batches are planned in the main thread,"
                " in the same order in all of them. To plan ahead in a thread, give the"
                " Loader `stream=shardjax.prepare_stream(collection, train=...)`"
            )
        agree = self._direct.exchange
        parts = []
        for features, size, *clicks in batches:
            examples = joint.common_examples(size, agree, train)
            own = clicks[0] if clicks else None
            parts.append(JointBatch(features, size, examples, own))
        ask = joint.ask(parts, agree, train=train, admit=admit)
        self._exchange.send(ask)
        yield from joint.answer(ask, agree)
        if ask.error is not None:
            raise ask.error

    def examples_per_device(self, size: int, *, train: bool) -> int:
        """Examples per device, padding included, of a batch of `size` in all of several
        processes: never fewer than a batch before had."""
        assert self._joint is not None, "one process deals them out itself"
        return self._joint.examples(size, train)

    @property
    def sent_key_bytes(self) -> int:
        """Bytes of keys that this process's devices have sent to all devices, their own
        too, for rows to be planned by their owners; 0 in one process."""
        return 0 if self._joint is None else self._exchange.sent_bytes

    def plan_stream(
        self, windows: Iterable[Sequence[JointBatch]], *, train: bool
    ) -> PlanStream:
        """Plans windows ahead together with the other processes; see `PlanStream`.

        Call it in the main thread, at the same place in all processes.

        Raises:
          RuntimeError: where there is only one process: `plan_window` is all it takes.
        """
        if self._joint is None:
            raise RuntimeError(
                "`plan_stream` is for several processes, and this is the only one. Use"
                " `plan_window`"
            )
        channel = Channel(f"{self._name}-stream{next(self._streams)}")
        return PlanStream(
            self._joint, self._exchange.send, channel, windows, train=train
        )

    def apply_fills(self, state: EmbeddingState, plan: Plan) -> EmbeddingState:
        """Brings the rows of a training plan: grows slabs, moves rows, writes first values.

        Plans must come in the order in which they were made.

        Args:
          state: donated.
          plan: of `plan(..., train=True)`.

        Returns:
          The state with which the plan's step can run.

        Raises:
          RuntimeError: for a plan that has been applied, or that is older than one; or if
            an `on_evict` raises an error. The state and the plan are as before then.
        """
        self._check_state(state)
        plans = self.planner.waiting_upto(plan)
        self._hand_over(state, plans)
        self.snapshots.protect(state, plans, plan)
        slabs = list(state)
        with self.planner.moving(plans):
            self._grow(slabs, plan.slots)  # no plan before it needs more
            for waiting in plans:
                self._move(slabs, waiting)
        return tuple(slabs)

    def _grow(self, slabs: list[SlabState], slots_needed: Sequence[int]) -> None:
        """Sees to it that slabs have so many slots per owner, by group."""
        for g, needed in enumerate(slots_needed):
            owners = 1 if self.groups[g].replicated else self.devices
            slots = known = slabs[g].rows.shape[0] // owners
            while slots < needed:
                slots *= 2
            if slots > known:
                slabs[g] = self._mover.grow(g, slabs[g], slots)

    def _move(self, slabs: list[SlabState], plan: WaitingPlan) -> None:
        """Carries out the moves of a plan."""
        for move in plan.moves:
            slabs[move.group] = self._mover.move(slabs[move.group], move)

    def _hand_over(self, state: EmbeddingState, plans: Sequence[WaitingPlan]) -> None:
        """Gives rows that leave for good to `on_evict`, before anything has changed."""
        wanted = [any(self._mover.wants(m) for m in p.moves) for p in plans]
        if not any(wanted):
            return
        last = len(plans) - 1 - wanted[::-1].index(True)
        slabs = list(state)
        if last:  # they leave from where plans that nobody steps on bring them
            slabs = [self._mover.copy(g, slab) for g, slab in enumerate(slabs)]
        for n, plan in enumerate(plans[: last + 1]):
            for move in plan.moves:
                slab = slabs[move.group]
                self._mover.hand_over(slab, move, self.planner.read_evicted)
            if n < last:
                self._grow(slabs, [int(used.max()) for used in plan.slots_used])
                self._move(slabs, plan)

    def gather_rows(
        self,
        state: EmbeddingState,
        arrays: dict[str, jax.Array],
        view: RowView | None = None,
    ) -> tuple[jax.Array, ...]:
        """Each group's unique rows of the batch; inside shard_map.

        Args:
          state: of this device.
          arrays: of this device, by field name.
          view: reads something else of each row than its value, such as
            `shardjax.rl.read_target`; of training batches only.

        Returns:
          Per group [rows, dim], of this device as an owner.
        """
        out = []
        for g, slab in zip(self.groups, state, strict=True):
            slots = arrays[f"{g.name}/slots"]
            rows = gather_rows(slab.rows, slots)
            if view is not None:
                assert f"{g.name}/stored" not in arrays, "only values come with a batch"
                row_state = [gather_rows(x, slots) for x in slab.row_state]
                seen = g.optimizer.view(view, rows, row_state, slab.shared)
                is_row = (slots < slab.rows.shape[0])[:, None]
                rows = jnp.where(is_row, seen, 0)  # as for padding that is read
            if f"{g.name}/stored" in arrays:
                words = arrays[f"{g.name}/stored"]
                stored = from_words(words, (g.dim,), g.dtype)
                rows = scatter_rows(rows, arrays[f"{g.name}/stored_at"], stored)
            out.append(rows)
        return tuple(out)

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
        finite: jax.Array | None = None,
    ) -> EmbeddingState:
        """One optimizer step for the unique rows; inside shard_map.

        Args:
          state: of this device.
          rows: of `gather_rows`: the rows before the step.
          grads: like `rows`; of replicated groups, this device's part.
          arrays: of this device, by field name.
          finite: bool [], the same on all devices: where it is False, rows and their state
            stay as they are. None for True.
        """
        slabs = []
        for group, slab, r, grad in zip(self.groups, state, rows, grads, strict=True):
            if group.replicated:
                grad = jax.lax.psum(grad, self.axes)
            slots = arrays[f"{group.name}/slots"]
            row_state = [gather_rows(x, slots) for x in slab.row_state]
            old = (r, row_state, slab.shared)
            new = group.optimizer.update(grad, row_state, slab.shared, r)
            r, row_state, shared = choose(finite, new, old)
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

    def map_row_state(self, state: EmbeddingState, change: RowView) -> EmbeddingState:
        """Changes the optimizer state of all rows that lie on the devices.

        Inside a jitted step, such as one that copies targets (`shardjax.rl.copy_targets`).

        Args:
          state: whole, or inside shard_map of this device.
          change: of (optimizer, rows [slots, dim], its state of all slots), returns the
            state; row by row.
        """
        slabs = []
        for group, slab in zip(self.groups, state, strict=True):
            optimizer = group.optimizer
            changed = optimizer.view(change, slab.rows, slab.row_state, slab.shared)
            slabs.append(SlabState(slab.rows, *optimizer.split(changed)))
        return tuple(slabs)

    def load_rows(
        self,
        state: EmbeddingState,
        table: str,
        keys: np.ndarray,
        values: np.ndarray,
        row_state: Sequence[np.ndarray] | None = None,
    ) -> EmbeddingState:
        """Writes rows, such as vectors trained elsewhere; between training steps.

        Keys without a row get one, whatever the table's `admit` says; to its `evict` this
        is a step that uses them, with a click.

        Args:
          state: donated.
          table: its name.
          keys: integers [n], each once.
          values: [n, dim], cast to the table's dtype.
          row_state: the rows' optimizer state: its leaves [n, ...], as `lookup_rows` and
            `export` give them, cast to the dtypes they have here. Without it the state of
            a row that is new is as at the start, that of one that is there stays. What
            all rows of a slab share, such as the steps that Adam counts, is for
            `map_row_state`.

        Returns:
          The state with the rows.

        Raises:
          KeyError: for an unknown table.
          PlanError: for keys outside a fixed vocabulary, or more than the table holds;
            the rows before are in the state that was given.
          TypeError, ValueError: for keys that are not integers or not unique, another
            shape of values or of optimizer state, or another kind of state.
          RuntimeError: while batches that have been prepared wait for their steps: they
            are planned without these rows. So call it between two loops over a loader,
            not in a hook. Also if an `on_evict` raises an error.

        Example:
          >>> import shardjax as sj
          >>> item = sj.embed.TableSpec("item", dim=2)
          >>> collection = sj.embed.EmbeddingCollection(
          ...     {"item_id": sj.embed.FeatureSpec(item)}, mesh=sj.make_mesh("1x1")
          ... )
          >>> values = np.array([[1.0, 2.0], [3.0, 4.0]])
          >>> state = collection.load_rows(collection.init(), "item", [7, 9], values)
          >>> collection.lookup_rows(state, "item", np.array([9]))["rows"].tolist()
          [[3.0, 4.0]]
        """
        self._check_state(state)
        g, entry = self._table(table)
        group = self.groups[g]
        keys = as_keys(np.asarray(keys), table)
        values = np.asarray(values)
        if keys.ndim != 1 or values.shape != (len(keys), group.dim):
            raise ValueError(
                f"rows of table {table!r} need one vector of {group.dim} numbers per key,"
                f" got keys of shape {keys.shape} and values of shape {values.shape}"
            )
        if len(np.unique(keys)) != len(keys):
            raise ValueError(
                f"keys of rows to load into table {table!r} must be unique"
            )
        if row_state is not None:
            row_state = self._checked_row_state(state, g, table, len(keys), row_state)
        with self.planner.loading():
            self._together(lambda: self._check_loadable(g, entry, keys))
            # few enough to lie on one device
            chunk = min(self.planner.tiers[g].residents.capacity or 65536, 65536)
            for start in range(0, len(keys), chunk):
                own = slice(start, start + chunk)
                part = None if row_state is None else [x[own] for x in row_state]
                state = self._load(state, g, entry, keys[own], values[own], part)
        return state

    def _checked_row_state(
        self, state: EmbeddingState, g: int, table: str, n: int, leaves
    ) -> list[np.ndarray]:
        """Leaves of the optimizer state of n rows to load.

        Raises:
          ValueError: for others than the optimizer has.
        """
        needed = [(n, *x.shape[1:]) for x in state[g].row_state]
        leaves = [np.asarray(x) for x in leaves]
        given = [x.shape for x in leaves]
        if given != needed:
            raise ValueError(
                f"`row_state` of rows to load into table {table!r} must be the leaves that"
                f" its optimizer keeps per row, of shapes {needed}, got {given}."
                " `lookup_rows` shows them"
            )
        return leaves

    def _load(
        self,
        state: EmbeddingState,
        g: int,
        entry: TableState,
        keys: np.ndarray,
        values: np.ndarray,
        row_state: list[np.ndarray] | None,
    ) -> EmbeddingState:
        """Writes rows that lie on the devices together."""
        nothing = Jagged(np.zeros(0, np.uint64), np.zeros(len(keys), np.int32))
        batch: dict[str, Any] = dict.fromkeys(self.features, nothing)
        batch[self._reader(entry)] = Jagged(keys, np.ones(len(keys), np.int32))
        clicks = np.ones(len(keys))
        if self._joint is None:
            plan = self.planner.plan(batch, len(keys), clicks, train=True, admit=True)
        else:  # the first process asks for all
            size = 0 if self.span.first else len(keys)
            part = (batch, size, clicks)
            if self.span.first:
                nobody = Jagged(np.zeros(0, np.uint64), np.zeros(0, np.int32))
                part = (dict.fromkeys(self.features, nobody), 0, clicks[:0])
            [plan] = self._plan_jointly([part], train=True, admit=True)
        self.planner.forget_sizes()
        state = self.apply_fills(state, plan)
        salted = keys + entry.table.salt
        own, owners = self.planner.tiers[g].own(entry.number, salted)
        slots, _, _ = self.planner.find(g, entry, salted[own], owners)
        nowhere = np.iinfo(np.int32).max
        at = np.full(len(keys), nowhere, np.int64)
        here = owners.astype(np.int64) * self.slots(state, g) + slots
        at[own] = np.where(slots < 0, nowhere, here)
        slabs = list(state)
        at = at.astype(np.int32)
        slabs[g] = self._mover.write(g, slabs[g], at, values, row_state)
        return tuple(slabs)

    def _reader(self, entry: TableState) -> str:
        """The first feature that reads a table."""
        name = entry.table.spec.name
        return next(f for f, x in self.features.items() if x.table.name == name)

    def _check_loadable(self, g: int, entry: TableState, keys: np.ndarray) -> None:
        """Raises for keys that could not get a row."""
        spec = entry.table.spec
        reader = self.features[self._reader(entry)]
        if spec.vocabulary is not None and (keys >= np.uint64(spec.vocabulary)).any():
            raise PlanError(
                f"keys to load must be in the vocabulary [0, {spec.vocabulary}) of table"
                f" {spec.name!r}, got {int(keys.max())}"
            )
        padding = reader.padding_id
        if padding is not None and (keys == np.uint64(padding % 2**64)).any():
            raise PlanError(
                f"key {padding} cannot be loaded into table {spec.name!r}: it is the"
                f" `padding_id` of feature {self._reader(entry)!r} and has no row"
            )
        salted = keys + entry.table.salt
        own, owners = self.planner.tiers[g].own(entry.number, salted)
        salted = salted[own]
        slots, elsewhere, _ = self.planner.find(g, entry, salted, owners)
        slots[elsewhere] = 0
        new = int((slots < 0).sum())
        if entry.rows + new > spec.max_rows:
            raise PlanError(
                f"table {spec.name!r} is full: {len(keys)} rows to load have {new} new keys,"
                f" and of its {spec.max_rows} rows {entry.rows} are taken. Enlarge"
                " `capacity`, or load fewer"
            )

    def export(
        self, state: EmbeddingState, table: str, chunk: int = 65536
    ) -> Iterator[TableRows]:
        """All rows of a table with all that is known of them, a part at a time.

        Where there are several processes, each gives the rows of its own devices, and the
        first one those of replicated tables. They come in no particular order. In memory
        are the keys, 8 bytes each, and one part.

        Args:
          state: of the devices; no training while the iterator is used.
          table: its name.
          chunk: rows at a time, at most.

        Returns:
          An iterator over `TableRows`.

        Raises:
          KeyError: for an unknown table.
          TypeError, ValueError: for a chunk that is no positive integer, or another kind of
            state.

        Example:
          >>> import shardjax as sj
          >>> item = sj.embed.TableSpec("item", dim=2)
          >>> collection = sj.embed.EmbeddingCollection(
          ...     {"item_id": sj.embed.FeatureSpec(item)}, mesh=sj.make_mesh("1x1")
          ... )
          >>> values = np.array([[1.0, 2.0], [3.0, 4.0]])
          >>> state = collection.load_rows(collection.init(), "item", [7, 9], values)
          >>> [part] = collection.export(state, "item")
          >>> sorted(zip(part.keys.tolist(), part.rows.tolist()))
          [(7, [1.0, 2.0]), (9, [3.0, 4.0])]
        """
        self._check_state(state)
        check_integer("`chunk` of rows to export", chunk, 1)
        g, entry = self._table(table)
        return self._export(state, g, entry, chunk)

    def _export(self, state, g: int, entry: TableState, chunk: int):
        name = entry.table.spec.name
        names = self.facts(name)
        salted = self.planner.keys(g, entry)
        if self.groups[g].replicated and self.span.first:
            salted = salted[:0]
        salted = salted[np.argsort(hashes_of(salted))]  # as they lie on disk
        for start in range(0, len(salted), chunk):
            part = salted[start : start + chunk]
            keys = part - entry.table.salt
            read: Any = self._lookup_own(state, g, entry, part)
            facts: dict[str, np.ndarray] = {}
            if names:
                _, owners = self.planner.tiers[g].own(entry.number, part)
                known = self.planner.facts(g, entry, part, owners)
                facts = as_facts(names, *known)
            yield TableRows(keys, read["rows"], read["row_state"], **facts)

    def facts(self, table: str) -> tuple[str, ...]:
        """What `export` tells of the rows of a table beside their numbers.

        Args:
          table: its name.

        Returns:
          Names of fields of `TableRows`: none, or "last_step" and "uses" or "scores".

        Raises:
          KeyError: for an unknown table.
        """
        g, entry = self._table(table)
        tracked = self.planner.tiers[g].residents.tracked
        return facts_of(entry.table.spec, tracked)

    def stats(self) -> dict[str, dict[str, int]]:
        """How many rows are where, as planned, by slab; of this process's devices.

        Returns:
          By the slab's name: `tables`; `rows`, of them `coming_rows`, the new ones of plans
          that have not been applied; `leaving_rows`, which such plans let leave for good;
          `device_rows`, `host_rows`, `disk_rows`; the bytes of RAM that rows
          (`host_bytes`) and finding rows (`index_bytes`) take, and of files
          (`disk_bytes`); and `candidates`, keys without a row whose occurrences `admit`
          counts.
        """
        return self.planner.stats()

    def total_stats(self) -> list[dict[str, int]]:
        """`stats` by slab, of all processes, which all ask at the same place."""
        found = self._together(lambda: list(self.stats().values()))
        total = []
        for g, group in enumerate(self.groups):
            own = [x[g] for x in found]
            copied = set(own[0]) if group.replicated else {"tables"}
            total.append(
                {
                    k: n if k in copied else sum(x[k] for x in own)
                    for k, n in own[0].items()
                }
            )
        return total

    def shrink(self) -> dict[str, int]:
        """Lets rows leave by the `evict` policies of their tables now, due or not.

        To be called at the end of a day or a pass, between two loops over a loader: it is
        before the next batch that is planned. Scores of `ShowClick` decay. The rows can be
        read until the next training step or `load_rows`, which gives them to `on_evict`.

        Returns:
          By table that has such a policy, how many rows leave.

        Example:
          >>> import shardjax as sj
          >>> item = sj.embed.TableSpec("item", dim=2, evict=sj.embed.LRU(rows=2))
          >>> collection = sj.embed.EmbeddingCollection(
          ...     {"item_id": sj.embed.FeatureSpec(item)}, mesh=sj.make_mesh("1x1")
          ... )
          >>> plan = collection.plan({"item_id": np.arange(5)}, batch=5, train=True)
          >>> collection.shrink()
          {'item': 3}
        """
        counts = self._together(self.planner.shrink)
        copied = {t.spec.name for g in self.groups if g.replicated for t in g.tables}
        return {
            name: max(x.get(name, 0) for x in counts)
            if name in copied
            else sum(x.get(name, 0) for x in counts)
            for name in counts[0]
        }

    def close(self) -> None:
        """Removes the files of the disk tier, and with them the rows in them.

        Call it when the rows are no longer wanted: another collection of this process can
        then use the folder. Without a disk it does nothing.
        """
        self.planner.close()

    def keys(self, table: str) -> np.ndarray:
        """The keys that have a row in a table, uint64 [n], in no particular order.

        Of several processes, each gives those of its own devices. Keys of plans that have
        not been applied have none yet.
        """
        g, entry = self._table(table)
        return self.planner.keys(g, entry) - entry.table.salt

    def lookup_rows(
        self,
        state: EmbeddingState,
        table: str,
        keys: np.ndarray,
        view: RowView | None = None,
    ) -> dict[str, np.ndarray | list[np.ndarray]]:
        """The rows of some keys, wherever they are, copied to the host.

        Where there are several processes, all of them ask for the same keys, at the same
        place of their programs.

        Args:
          state: of the devices.
          table: its name.
          keys: integers [n], widened by `as_keys`.
          view: what to read of each row for `rows`, None for its value; see `gather_rows`.

        Returns:
          `rows` [n, dim], `row_state` (a list of [n, ...]) and `found` bool [n]; a key
          without a row (also one whose plan has not been applied) reads zeros.

        Raises:
          KeyError: for an unknown table.
          TypeError: for keys that are not integers, or another kind of state.
        """
        self._check_state(state)
        g, entry = self._table(table)
        salted = as_keys(keys, table) + entry.table.salt
        if self._joint is None:
            return self._lookup_own(state, g, entry, salted, view)
        own, _ = self.planner.tiers[g].own(entry.number, salted)
        if self.groups[g].replicated and self.span.first:
            own[:] = False
        read = self._lookup_own(state, g, entry, salted[own], view)

        def spread(x):
            out = np.zeros((len(salted), *x.shape[1:]), x.dtype)
            out[own] = x
            return out

        return self._exchange.add(jax.tree.map(spread, read))

    def _lookup_own(
        self,
        state: EmbeddingState,
        g: int,
        entry: TableState,
        salted: np.ndarray,
        view: RowView | None = None,
    ) -> dict[str, np.ndarray | list[np.ndarray]]:
        """The rows of some keys of this process."""
        _, owners = self.planner.tiers[g].own(entry.number, salted)
        where, elsewhere, records = self.planner.find(g, entry, salted, owners)
        found = where >= 0
        at = owners.astype(np.int64) * self.slots(state, g) + where
        slots = np.where(found, at, np.iinfo(np.int32).max).astype(np.int32)
        found[elsewhere] = True
        slab = self._mover.own(g, state[g])
        stored: list[Any] = [None] * (1 + len(slab.row_state))
        if len(elsewhere):
            stored = list(unpack_records(self.groups[g], jnp.asarray(records)))

        def read(x, more):
            out = np.array(x.at[slots].get(mode="fill", fill_value=0))
            if more is not None:
                out[elsewhere] = more
            return out

        rows = read(slab.rows, stored[0])
        row_state = [
            read(x, more) for x, more in zip(slab.row_state, stored[1:], strict=True)
        ]
        if view is not None:
            shared = [np.asarray(x) for x in slab.shared]
            seen = self.groups[g].optimizer.view(view, rows, row_state, shared)
            rows = np.where(found[:, None], np.asarray(seen), 0)
        return {"rows": rows, "row_state": row_state, "found": found}

    def _check_state(self, state: EmbeddingState) -> None:
        """Raises for something else than the slabs of the tables."""
        if not isinstance(state, tuple) or len(state) != len(self.groups):
            kind = type(state).__name__
            raise TypeError(
                f"`state` must be the state of the tables, a tuple of {len(self.groups)}"
                f" SlabState as `init` returns it, got a {kind}. Of a TrainState, give"
                " `state.tables`"
            )

    def _table(self, name: str):
        for g, tables in enumerate(self.planner.tables):
            for state in tables:
                if state.table.spec.name == name:
                    return g, state
        known = [s.table.spec.name for tables in self.planner.tables for s in tables]
        raise KeyError(f"no table is named {name!r}; the tables are {known}")
