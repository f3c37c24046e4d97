"""The planner: a batch's keys, on the host, to the index arrays of a device step.

Examples of a batch are dealt to the devices in order; a device that needs rows is a
*requester*, the one whose slab holds a row is its *owner*. Per group (slab) a plan says:

    slots  [devices, rows]              the unique rows each owner gathers and updates
    merge  [devices, devices, send]     which of them it sends each requester
    fixed / values / sequence/...       where a requester finds the row of each id

Sums over repeated ids follow these arrays: by requester, then by place within what it
asked for, which is the order in which its batch first names the keys. Slot numbers do
not matter, so neither arrival order nor storage changes a bit.

Planning does not touch the devices. `train=True` plans have an effect on the planner
(keys get rows), so they have to be made and carried out in the same order.
"""

import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from shardjax.embed import translate as kernels
from shardjax.embed.groups import Group, Table
from shardjax.embed.index import MAX_LOAD, Index, mix64
from shardjax.embed.inputs import Input, normalize
from shardjax.embed.jagged import Jagged
from shardjax.embed.layout import GroupLayout, SequenceLayout, rung
from shardjax.embed.spec import FeatureSpec, Initializer

COUNTERS = (
    "ids", "unique_ids", "inserted", "unseen", "rejected", "bad_ids", "padding_ids",
    "truncated", "unused_ids",
)  # fmt: skip


class PlanError(ValueError):
    """A batch that cannot be planned: bad ids, or a full table. Nothing has changed."""


@dataclass(frozen=True)
class Fill:
    """New rows of one group: where they go and their random bits.

    Attributes:
      group: number of the group.
      initializer: of these rows.
      slots: int32 [owners, n]; past the end of any slab for padding.
      words: uint64 [owners, n], a function of (seed, table, key).
    """

    group: int
    initializer: Initializer
    slots: np.ndarray
    words: np.ndarray


@dataclass(frozen=True)
class Plan:
    """A batch's plan: data, nothing happens until it is applied.

    Attributes:
      examples: per device, padding included.
      groups: the static half, one per group.
      arrays: int32 or float32 [devices, ...] by name.
      fills: rows to be made before the step.
      slots_used: per group, slots each owner has given out, int32 [owners].
      sequence: number of this training plan, from 1; 0 for evaluation.
      counters: what the batch had, by name.
    """

    examples: int
    groups: tuple[GroupLayout, ...]
    arrays: dict[str, np.ndarray]
    fills: tuple[Fill, ...]
    slots_used: tuple[np.ndarray, ...]
    sequence: int
    counters: dict[str, float] = field(default_factory=dict)


class _TableState:
    """A table's index, and its scratch memory for the batch being planned."""

    def __init__(self, table: Table, requesters: int):
        self.table = table
        self.index = Index()
        self.requesters = requesters
        self.counters = np.zeros(kernels.N_COUNTERS, np.int64)
        self.local_count = np.zeros(requesters, np.int32)
        self._scratch = -1  # ids there is room for

    def begin(self, ids: int) -> None:
        """Makes room for a batch with `ids` ids."""
        if ids > self._scratch:
            self._scratch = rung(ids, 1024)
            n, p = self._scratch, self.requesters
            self.unique_entry = np.empty(n, np.int32)
            self.slots = np.empty(n, np.int32)
            self.owners = np.empty(n, np.int32)
            self.own_position = np.empty(n, np.int32)
            self.local_position = np.empty((n, p), np.int32)
            self.local_unique = np.empty((p, n), np.int32)
        self.counters[:] = 0
        self.counters[kernels.COUNT] = self.index.count
        self.counters[kernels.CAPACITY] = self.table.spec.max_rows
        self.local_count[:] = 0

    def translate(self, x: Input, insert: bool) -> np.ndarray:
        """Runs the kernel over one feature, growing the index where needed."""
        raw = np.empty(len(x.keys), np.int32)
        spec = x.spec
        bad_row = kernels.DROPPED if spec.on_bad_id == "drop" else kernels.NO_ROW
        start = 0
        while True:
            self.counters[kernels.LIMIT] = int(len(self.index.table) * MAX_LOAD)
            start = kernels.translate(
                x.keys, x.bounds, start, raw, self.index.table, self.counters,
                self.unique_entry, self.local_position, self.local_unique,
                self.local_count, self.table.salt, insert,
                np.uint64(self.table.spec.vocabulary or 0), bad_row,
                np.uint64((spec.padding_id or 0) % 2**64), spec.padding_id is not None,
            )  # fmt: skip
            self.index.count = int(self.counters[kernels.COUNT])
            if start == len(raw):
                return raw
            before = self.index.table
            self.index.reserve(2 * self.index.count)
            kernels.relink(before, self.index.table, self.unique_entry, self.unique)

    @property
    def unique(self) -> int:
        return int(self.counters[kernels.UNIQUE])


class Planner:
    """Plans batches for a collection's groups on a number of devices."""

    def __init__(
        self,
        groups: tuple[Group, ...],
        features: Mapping[str, FeatureSpec],
        devices: int,
        seed: int,
        threads: int = 1,
    ):
        """Makes a planner that knows no key.

        Args:
          groups: of `plan_groups`.
          features: by name.
          devices: requesters and owners.
          seed: of the rows' initial values.
          threads: that translate keys, one table at a time each.
        """
        self.groups = groups
        self.features = dict(features)
        self.devices = devices
        self.seed = np.uint64(mix64(np.uint64((seed + 0x9E3779B97F4A7C15) % 2**64)))
        self.tables = [
            [_TableState(t, devices) for t in group.tables] for group in groups
        ]
        owners = [1 if g.replicated else devices for g in groups]
        self.next_slot = [np.zeros(n, np.int32) for n in owners]
        self.applied = [np.zeros(n, np.int32) for n in owners]
        self._planned = 0
        self._applied = 0
        self._pending: deque[Plan] = deque()
        self._rungs: dict[tuple, int] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def _size(self, train: bool, name: tuple, needed: int, smallest: int) -> int:
        """A static size that is at least `needed` and never shrinks.

        A size that has to grow takes 3 % more than it needs, so that batches which are
        alike settle on one program.
        """
        key = (train, *name)
        # a first size is `smallest` even for nothing: XLA gathers from no empty array
        size = self._rungs.get(key, -1)
        if needed > size:
            size = rung(needed if needed <= smallest else int(needed * 1.03), smallest)
            self._rungs[key] = size
        return size

    def forget_sizes(self) -> None:
        """Lets static sizes start anew, after a batch that is like no other."""
        with self._lock:
            self._rungs.clear()

    def plan(
        self,
        features: Mapping[str, np.ndarray | Jagged],
        batch: int,
        *,
        train: bool,
    ) -> Plan:
        """Plans one batch.

        Args:
          features: by name: integers [batch] for one key per example, or `Jagged`.
          batch: examples.
          train: whether unknown keys get a row. Otherwise nothing is inserted, and an
            unknown key reads zeros.

        Raises:
          PlanError: for ids outside a fixed vocabulary or a full table, unless their
            spec permits it. The planner is as before, also after the other errors.
          ValueError: for a feature that is missing, does not have `batch` examples or
            has a sequence that is too long.
          TypeError: for keys that are not integers.
        """
        with self._lock:
            examples = self._rungs.get((train, "examples"), 1)
            examples = max(examples, -(-batch // self.devices))
            inputs = normalize(features, self.features, batch, examples, self.devices)
            counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)
            counters["truncated"] = sum(x.truncated for x in inputs.values())
            counters["padding_ids"] = sum(x.padding for x in inputs.values())
            counters["ids"] = sum(len(x.keys) + x.padding for x in inputs.values())
            counters["unused_ids"] = sum(
                len(x.values if isinstance(x, Jagged) else x)
                for name, x in features.items()
                if name not in self.features
            )
            raws = self._translate(inputs, train, counters)
            # from here on nothing fails: only now may the planner change
            self._size(train, ("examples",), examples, examples)
            groups, fills = [], []
            arrays: dict[str, np.ndarray] = {}
            loads = np.zeros(self.devices)
            for g in range(len(self.groups)):
                layout = self._plan_group(
                    g, inputs, raws, examples, train, arrays, fills, counters, loads
                )
                groups.append(layout)
            mean = loads.mean()
            counters["exchange_imbalance"] = float(loads.max() / mean) if mean else 1.0
            rows = sum(g.rows * (1 if g.replicated else self.devices) for g in groups)
            used = sum(t.unique for tables in self.tables for t in tables)
            counters["padding_rows"] = rows - used
            self._planned += train
            plan = Plan(
                examples,
                tuple(groups),
                arrays,
                tuple(fills),
                tuple(n.copy() for n in self.next_slot),
                self._planned if train else 0,
                counters,
            )
            if train:
                self._pending.append(plan)
            return plan

    @property
    def started(self) -> bool:
        """Whether a training plan has been carried out: rows lie on the devices."""
        return self._applied > 0

    def take_fills(self, plan: Plan) -> tuple[Fill, ...]:
        """The fills to carry out before a training plan's step, and notes that they are.

        These are the plan's own and those of earlier plans that nobody carried out: a
        loop that was left early abandons the batches it had prefetched, but their keys
        have been given rows.

        Raises:
          RuntimeError: if this plan or a later one has been carried out before.
        """
        with self._lock:
            if not plan.sequence:
                raise RuntimeError(
                    "a batch prepared for evaluation (train=False) cannot be trained on:"
                    " prepare it with train=True"
                )
            if plan.sequence <= self._applied:
                raise RuntimeError(
                    f"training plan {plan.sequence} cannot be carried out after plan"
                    f" {self._applied}: step on each prepared batch once, in the order in"
                    " which they were prepared (train=True)"
                )
            if not any(p is plan for p in self._pending):
                raise RuntimeError(
                    "this batch was prepared by another collection than that of the step:"
                    " prepare it with the collection that make_train_step was given"
                )
            fills: list[Fill] = []
            while self._pending and self._pending[0].sequence <= plan.sequence:
                fills.extend(self._pending.popleft().fills)
            self._applied = plan.sequence
            self.applied = list(plan.slots_used)
            return tuple(fills)

    def _translate(self, inputs, train, counters) -> dict[str, np.ndarray]:
        """Keys to positions among the unique keys, all tables; raises before any change."""

        def work(state: _TableState):
            table = state.table
            state.begin(sum(len(inputs[f].keys) for f in table.features))
            found, problems = {}, []
            bad = 0
            for name in table.features:
                x = inputs[name]
                state.counters[kernels.BAD] = 0
                found[name] = state.translate(x, train)
                count = int(state.counters[kernels.BAD])
                bad += count
                if count and x.spec.on_bad_id == "error":
                    at = int(state.counters[kernels.FIRST_BAD])
                    value = int(x.keys[at].astype(np.int64))
                    problems.append(
                        f"feature {name!r}: {count} ids outside the vocabulary [0,"
                        f" {table.spec.vocabulary}) of table {table.spec.name!r}, the first"
                        f" is {value}. Enlarge `vocabulary`, or set `on_bad_id` of the"
                        " feature to 'zero' or 'drop'"
                    )
            state.counters[kernels.BAD] = bad
            rejected = int(state.counters[kernels.REJECTED])
            if rejected and table.spec.on_full == "error":
                problems.append(
                    f"table {table.spec.name!r} is full: {rejected} ids of this batch have"
                    f" no row and its `capacity` is {table.spec.capacity}. Enlarge"
                    " `capacity`, or set `on_full` of the table to 'reject'"
                )
            return found, problems

        states = [state for tables in self.tables for state in tables]
        run = self._pool.map if self._pool else map
        results = list(run(work, states))
        problems = [p for _, more in results for p in more]
        if problems:
            for state in states:
                if state.counters[kernels.INSERTED]:
                    state.index.discard_new()
            raise PlanError(
                "; ".join(problems)
                if len(problems) == 1
                else "\n- ".join(["", *problems])
            )
        for state in states:
            counters["inserted"] += int(state.counters[kernels.INSERTED])
            counters["unseen"] += int(state.counters[kernels.UNSEEN])
            counters["rejected"] += int(state.counters[kernels.REJECTED])
            counters["bad_ids"] += int(state.counters[kernels.BAD])
            counters["padding_ids"] += int(state.counters[kernels.PADDING])
            counters["unique_ids"] += int(state.local_count.sum())
        return {name: raw for found, _ in results for name, raw in found.items()}

    def _plan_group(
        self, g, inputs, raws, examples, train, arrays, fills, counters, loads
    ) -> GroupLayout:
        group, states = self.groups[g], self.tables[g]
        p = self.devices
        owners = 1 if group.replicated else p
        new = [
            kernels.assign(
                s.index.table, s.unique_entry, s.unique, s.table.owner, owners,
                self.next_slot[g], s.slots, s.owners,
            )
            for s in states
        ]  # fmt: skip
        if train:
            fills.extend(self._fills(g, new))
        else:
            self._hide_unapplied(g, inputs, raws, counters)
        own_count = np.zeros(owners, np.int32)
        own_slots = np.empty((owners, sum(s.unique for s in states)), np.int32)
        for s in states:
            kernels.list_owned(
                s.slots, s.owners, s.unique, own_count, own_slots, s.own_position
            )
        rows = self._size(train, (g, "rows"), int(own_count.max()), 64)
        slots = np.empty((p, rows), np.int32)
        slots[:] = np.iinfo(np.int32).max - np.arange(rows, dtype=np.int32)
        for o in range(p):
            n = own_count[o % owners]
            slots[o, :n] = own_slots[o % owners, :n]
        arrays[f"{group.name}/slots"] = slots
        exchange = not group.replicated and p > 1
        send, base, where = self._routes(g, train, exchange, arrays, loads)
        layout = self._feature_layout(g, inputs, train, rows, send)
        self._scatter(g, layout, inputs, raws, examples, base, where, arrays)
        return layout

    def _fills(self, g, new) -> list[Fill]:
        by_initializer: dict[int, list[int]] = {}
        for t, count in enumerate(new):
            if count:
                spec = self.tables[g][t].table.spec
                by_initializer.setdefault(id(spec.initializer), []).append(t)
        fills = []
        owners = len(self.next_slot[g])
        for members in by_initializer.values():
            room = sum(new[t] for t in members)
            slots = np.empty((owners, room), np.int32)
            words = np.empty((owners, room), np.uint64)
            used = np.zeros(owners, np.int64)
            for t in members:
                s = self.tables[g][t]
                kernels.list_new(
                    s.index.table, s.unique_entry, s.slots, s.owners, s.unique,
                    self.seed, used, slots, words,
                )  # fmt: skip
            n = 512
            while n < used.max():
                n *= 2
            padded = np.full((owners, n), np.iinfo(np.int32).max, np.int32)
            padded -= np.arange(n, dtype=np.int32)
            bits = np.zeros((owners, n), np.uint64)
            for o, count in enumerate(used):
                padded[o, :count] = slots[o, :count]
                bits[o, :count] = words[o, :count]
            initializer = self.tables[g][members[0]].table.spec.initializer
            fills.append(Fill(g, initializer, padded, bits))
        return fills

    def _hide_unapplied(self, g, inputs, raws, counters) -> None:
        """Evaluation sees no row whose training step has been planned but not taken."""
        for s in self.tables[g]:
            hidden = s.slots[: s.unique] >= self.applied[g][s.owners[: s.unique]]
            if not hidden.any():
                continue
            for name in s.table.features:
                x, raw = inputs[name], raws[name]
                for r in range(self.devices):
                    part = raw[x.bounds[r] : x.bounds[r + 1]]
                    unseen = part >= 0
                    unseen[unseen] = hidden[s.local_unique[r, part[unseen]]]
                    part[unseen] = kernels.NO_ROW
                    counters["unseen"] += int(unseen.sum())

    def _routes(self, g, train, exchange, arrays, loads):
        """What owners send whom, and where requesters find their rows."""
        group, states, p = self.groups[g], self.tables[g], self.devices
        base = np.zeros((len(states), p), np.int32)
        base[1:] = np.cumsum([s.local_count for s in states], 0)[:-1]
        total = int((base[-1] + states[-1].local_count).max())
        where = np.empty((p, max(total, 1)), np.int32)
        if not exchange:
            for t, s in enumerate(states):
                for r in range(p):
                    n, at = s.local_count[r], base[t, r]
                    where[r, at : at + n] = s.own_position[s.local_unique[r, :n]]
            return 0, base, where
        send_count = np.zeros((p, p), np.int32)  # requester, owner
        places = []
        for s in states:
            for r in range(p):
                place = np.empty(s.local_count[r], np.int32)
                kernels.route(
                    s.local_unique[r], s.local_count[r], s.owners, send_count[r], place
                )
                places.append(place)
        loads += send_count.sum(0)
        send = self._size(train, (g, "send"), int(send_count.max()), 16)
        merge = np.full((p, p, send), np.iinfo(np.int32).max, np.int32)
        for t, s in enumerate(states):
            for r in range(p):
                kernels.fill_routes(
                    s.local_unique[r], s.local_count[r], s.owners, s.own_position,
                    places[t * p + r], send, merge[:, r], where[r, base[t, r] :],
                )  # fmt: skip
        arrays[f"{group.name}/merge"] = merge
        return send, base, where

    def _feature_layout(self, g, inputs, train, rows, send) -> GroupLayout:
        group = self.groups[g]
        fixed, pooled, sequences = [], [], []
        values = np.zeros(self.devices, np.int64)
        weighted = False
        for name, spec in self.features.items():
            if not any(name in t.features for t in group.tables):
                continue
            x = inputs[name]
            if spec.combiner == "none":
                length = spec.max_length or self._size(
                    train, (name, "length"), x.longest, 1
                )
                sequences.append(SequenceLayout(name, length))
            elif x.lengths is None:
                fixed.append(name)
            else:
                pooled.append((name, spec.combiner))
                values += np.diff(x.bounds)
                weighted = weighted or x.weights is not None
        key = (g, "weighted", tuple(pooled))
        weighted = bool(self._size(train, key, int(weighted), 0)) if pooled else False
        size = self._size(train, (g, "values"), int(values.max()), 64) if pooled else 0
        return GroupLayout(
            group.name, group.replicated, rows, send, tuple(fixed), tuple(pooled),
            size, weighted, tuple(sequences),
        )  # fmt: skip

    def _scatter(self, g, layout, inputs, raws, examples, base, where, arrays) -> None:
        """Writes the requesters' index arrays."""
        p, name = self.devices, layout.name
        missing = layout.received(p)
        table_of = {
            f: t for t, s in enumerate(self.tables[g]) for f in s.table.features
        }
        if layout.fixed:
            columns = len(layout.fixed)
            out = np.empty((p, examples * columns), np.int32)
            for c, f in enumerate(layout.fixed):
                x = inputs[f]
                kernels.scatter_column(
                    raws[f],
                    x.bounds,
                    base[table_of[f]],
                    where,
                    missing,
                    c,
                    columns,
                    out,
                )
            for r in range(p):
                used = int(np.diff(inputs[layout.fixed[0]].bounds)[r])
                out[r, used * columns :] = missing
            arrays[f"{name}/fixed"] = out
        if layout.pooled:
            index = np.full((p, layout.values), missing, np.int32)
            segments = np.full(
                (p, layout.values), len(layout.pooled) * examples, np.int32
            )
            weights = np.zeros((p, layout.values if layout.weighted else 0), np.float32)
            used = np.zeros(p, np.int64)
            for i, (f, _) in enumerate(layout.pooled):
                x = inputs[f]
                has_weights = x.weights is not None
                kernels.scatter_values(
                    raws[f], x.lengths, x.bounds, x.example_bounds, base[table_of[f]],
                    where, missing, i * examples, used, index, segments,
                    x.weights if has_weights else np.zeros(0, np.float32), weights,
                    has_weights,
                )  # fmt: skip
            arrays[f"{name}/values"] = index
            arrays[f"{name}/segments"] = segments
            if layout.weighted:
                arrays[f"{name}/weights"] = weights
        for s in layout.sequences:
            x = inputs[s.name]
            out = np.empty((p, examples * s.length), np.int32)
            kernels.scatter_sequence(
                raws[s.name], x.lengths, x.bounds, x.example_bounds,
                base[table_of[s.name]], where, missing, missing + 1, s.length, out,
            )  # fmt: skip
            arrays[f"{name}/sequence/{s.name}"] = out
