"""The planner: batches' keys, on the host, to the index arrays of device steps.

Examples of a batch are dealt to the devices in order; a device that needs rows is a
*requester*, the one whose slab holds a row is its *owner*. Per group (slab) a plan says:

    slots  [devices, rows]              the unique rows each owner gathers and updates
    merge  [devices, devices, send]     which of them it sends each requester
    fixed / values / sequence/...       where a requester finds the row of each id

Sums over repeated ids follow these arrays: by requester, then by place within what it
asked for, which is the order in which its batch first names the keys. Slot numbers do
not matter, so neither arrival order nor storage changes a bit.

Batches are planned in *windows*: the rows of all of a window's batches are on the devices
from its start, and only the difference to what is there moves, before its first step. A
window that does not fit is ended early, and the next begins.

Planning does not touch the devices. `train=True` plans have an effect on the planner
(keys get rows, rows get other places), so they have to be made and carried out in the
same order.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardjax.embed.changes import Mark, Removals
from shardjax.embed.disk_rows import DiskBudget, DiskFolder
from shardjax.embed.draft import Draft, TableDraft, TableState
from shardjax.embed.drafting import Drafter, PlanError as PlanError
from shardjax.embed.eviction import Evicted, is_due
from shardjax.embed.groups import Group
from shardjax.embed.index import mix64
from shardjax.embed.jagged import Jagged
from shardjax.embed.layout import GroupLayout, rung
from shardjax.embed.moments import Moments
from shardjax.embed.moves import Fill, Move
from shardjax.embed.outline import Outline
from shardjax.embed.policies import Eviction
from shardjax.embed.rate import Rate
from shardjax.embed.residents import resolve
from shardjax.embed.routes import OwnerRoutes, RequesterRoutes
from shardjax.embed.span import DeviceSpan
from shardjax.embed.spec import FeatureSpec
from shardjax.embed.storage import Storage
from shardjax.embed.tier import Tier
from shardjax.embed.translate import owners_of

# features and examples, or features, examples and clicks
WindowBatch = (
    tuple[Mapping[str, np.ndarray | Jagged], int]
    | tuple[Mapping[str, np.ndarray | Jagged], int, np.ndarray | None]
)


@dataclass(frozen=True)
class Plan:
    """A batch's plan: data, nothing happens until it is applied.

    Attributes:
      examples: per device, padding included.
      groups: the static half, one per group.
      arrays: int32 or float32 [devices, ...] by name.
      moves: of rows, to be carried out before the step.
      slots_used: per group, slots each owner has given out, int32 [owners].
      sequence: number of this training plan, from 1; 0 for evaluation.
      version: for evaluation, how often rows had moved when it was made.
      counters: what the batch had, by name.
      seconds: that making it took; the batches of a window share its time evenly.
      slots_needed: per group, slots per owner that there must be, of all processes; None
        for those of `slots_used`.

    Where there are several processes, arrays, moves and slots are those of this process's
    devices; all else is the same in all.
    """

    examples: int
    groups: tuple[GroupLayout, ...]
    arrays: dict[str, np.ndarray]
    moves: tuple[Move, ...]
    slots_used: tuple[np.ndarray, ...]
    sequence: int
    version: int = 0
    counters: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    slots_needed: tuple[int, ...] | None = None

    @property
    def slots(self) -> tuple[int, ...]:
        """Per group, slots that each owner must have for the step."""
        if self.slots_needed is not None:
            return self.slots_needed
        return tuple(int(used.max()) for used in self.slots_used)

    @property
    def fills(self) -> tuple[Fill, ...]:
        """The new rows among the moves."""
        return tuple(fill for move in self.moves for fill in move.fills)


@dataclass(frozen=True, eq=False)
class Settled:
    """A batch whose rows have slots, before it has a plan.

    Attributes:
      draft: the batch.
      moves, used: `Plan.moves` and `Plan.slots_used`.
      sequence, version: of the plan.
      overlays: for evaluation, per group and table the rows that are not on the devices.
    """

    draft: Draft
    moves: tuple[Move, ...]
    used: tuple[np.ndarray, ...]
    sequence: int
    version: int
    overlays: Sequence[Sequence[np.ndarray]] = ()

    @property
    def train(self) -> bool:
        """Whether it is to be trained on."""
        return self.sequence > 0


@dataclass(frozen=True, eq=False)
class WaitingPlan:
    """What is left to do of a training plan that has not been carried out.

    Attributes:
      sequence, moves, slots_used: of the plan.
      plan: gives it, as long as somebody holds it who could step on it.
    """

    sequence: int
    moves: tuple[Move, ...]
    slots_used: tuple[np.ndarray, ...]
    plan: Callable[[], Plan | None]


def _nobody() -> None:
    """Stands for a plan that nobody holds."""


class Planner:
    """Plans batches for a collection's groups on a number of devices."""

    def __init__(
        self,
        groups: tuple[Group, ...],
        features: Mapping[str, FeatureSpec],
        devices: int,
        seed: int,
        threads: int = 1,
        span: DeviceSpan | None = None,
    ):
        """Makes a planner that knows no key.

        Args:
          groups: of `plan_groups`.
          features: of the collection.
          devices: requesters.
          seed: of the rows' initial values.
          threads: that look up keys, one table each, and copy rows of the RAM tier.
          span: the owners; None for the requesters. Where they are not all of this process,
            batches have keys of its owners alone.
        """
        span = DeviceSpan.whole(devices) if span is None else span
        self.groups = groups
        self.features = features
        self.devices = devices
        self.span = span
        mixed = np.uint64(mix64(np.uint64((seed + 0x9E3779B97F4A7C15) % 2**64)))
        self.tables = [
            [
                TableState(n, t, devices, mixed, not (group.replicated and span.first))
                for n, t in enumerate(group.tables)
            ]
            for group in groups
        ]
        self._folders: dict[Path, DiskFolder] = {}
        budgets: dict[Storage, DiskBudget] = {}
        self.tiers = [
            Tier(
                g,
                group,
                [s.index for s in states],
                DeviceSpan.whole(1) if group.replicated else span,
                mixed,
                self._open(group.storage, budgets),
                threads,
            )
            for g, (group, states) in enumerate(zip(groups, self.tables, strict=True))
        ]
        self.applied = [np.zeros(t.owners, np.int32) for t in self.tiers]
        self._planned = 0
        self._applied = 0
        self._evicted_before = 0  # a step: policies have looked for rows
        self._evicted_rows = 0  # that no plan has counted yet
        self._version = 0
        self._broken = ""
        self._closed = False
        self._evictions = [
            p for s in self.tables for t in s for p in t.table.spec.evictions
        ]
        self._pending: deque[WaitingPlan] = deque()
        self._rungs: dict[tuple, int] = {}
        # of the index, and where rows are as planned; `loading` plans while it has it
        self._planning = threading.RLock()
        self._state = threading.Lock()  # which plans have been carried out
        self.drafter = Drafter(
            groups, features, self.tables, self.tiers, devices, threads
        )
        self.moments = Moments()

    def _open(
        self, storage: Storage | None, budgets: dict[Storage, DiskBudget]
    ) -> DiskBudget | None:
        """The disk of a storage: one folder per path, one budget per storage."""
        if storage is None or storage.disk is None:
            return None
        if storage not in budgets:
            path = Path(storage.disk).resolve()
            if not self.span.is_whole:  # processes may share the disk, never a folder
                path /= f"process{self.span.first // self.span.count}"
            if path not in self._folders:
                self._folders[path] = DiskFolder(path)
            most = None if storage.disk_bytes is None else int(storage.disk_bytes)
            mapped = int(storage.map_bytes or 0)
            rate = None if storage.merge_rate is None else Rate(int(storage.merge_rate))
            budgets[storage] = DiskBudget(self._folders[path], most, mapped, rate)
        return budgets[storage]

    def size(self, train: bool, name: tuple, needed: int, smallest: int) -> int:
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

    def examples(self, train: bool) -> int:
        """Examples per requester that batches have had so far; a requester of another
        process is one example."""
        if not self.span.is_whole:
            return 1
        return self._rungs.get((train, "examples"), 1)

    def forget_sizes(self) -> None:
        """Lets static sizes start anew, after a batch that is like no other."""
        with self._planning:
            self._rungs.clear()

    def plan(
        self,
        features: Mapping[str, np.ndarray | Jagged],
        batch: int,
        clicks: np.ndarray | None = None,
        *,
        train: bool,
        admit: bool = False,
    ) -> Plan:
        """Plans one batch.

        Args:
          features: by name: integers [batch] for one key per example, or `Jagged`.
          batch: examples.
          clicks: float [batch], labels of the examples in [0, 1]; for tables with the
            policy ShowClick.
          train: whether unknown keys get a row. Otherwise nothing is inserted, and an
            unknown key reads zeros.
          admit: whether every unknown key gets one, whatever its table's `admit` says.

        Raises:
          PlanError: for ids outside a fixed vocabulary or a full table, unless their
            spec permits it, rows that do not fit on the devices, or bad clicks. The
            planner is as before, also after the other errors.
          ValueError: for a feature that is missing, does not have `batch` examples or
            has a sequence that is too long.
          TypeError: for keys that are not integers.
        """
        if train:
            return next(self.plan_window([(features, batch, clicks)], admit=admit))
        with self._planning:
            began = time.perf_counter()
            plan = self._arrange(self.settle_evaluation(features, batch))
            return replace(plan, seconds=time.perf_counter() - began)

    def plan_window(
        self, batches: Sequence[WindowBatch], *, admit: bool = False
    ) -> Iterator[Plan]:
        """Plans training batches whose rows shall be on the devices together.

        A window ends before a step at which rows leave for good.

        Args:
          batches: (features, batch) or (features, batch, clicks) each, as of `plan`.
          admit: as of `plan`.

        Returns:
          An iterator over their plans, in order; all must be carried out. If the rows
          do not fit together there are several windows. An error of a batch surfaces in
          its place, after the plans of those before it.

        Raises:
          PlanError, ValueError, TypeError: as of `plan`.
        """
        waiting = deque(batches)
        while waiting:
            with self._planning:
                began = time.perf_counter()
                settled, error = self.settle_window(waiting, admit=admit)
                with self.breaking():
                    plans = [self._arrange(x) for x in settled]
                    plans = self.wait_for(plans, began)
            yield from plans
            if error is not None:
                raise error

    @property
    def planning(self) -> threading.RLock:
        """Who has it may call `settle_window`, `settle_evaluation`, `size`, `wait_for`."""
        return self._planning

    @contextmanager
    def breaking(self) -> Iterator[None]:
        """A context in which any error leaves the planner unfit to go on."""
        try:
            yield
        except BaseException as problem:
            self._broken = repr(problem)
            raise

    def settle_window(
        self, waiting: deque[WindowBatch], *, admit: bool = False
    ) -> tuple[list[Settled], Exception | None]:
        """Gives the rows of the next window slots, with `planning`.

        Args:
          waiting: batches; those of the window are taken out.
          admit: as of `plan`.

        Returns:
          They; and an error of the batch after them, if it has one.
        """
        error, shortened = None, False
        self._raise_failure()
        first_step = self._planned + 1
        self.moments.reached(self._planned, self._outline)
        self._evict_if_due(first_step)
        drafts: list[Draft] = []
        for tier in self.tiers:
            tier.residents.begin()
        while waiting and error is None:
            step = first_step + len(drafts)
            if drafts and (self._due(step) or self.moments.is_end(step - 1)):
                break
            features, batch, *clicks = waiting[0]
            try:
                draft = self.drafter.draft(
                    features, batch, self.examples(True), step, *clicks, admit=admit
                )
            except Exception as problem:  # whatever it is, it is this batch's
                error = problem
                break
            lacking = self.drafter.lacking(draft, first_step)
            if lacking is not None:
                self.drafter.forget(draft)
                if not drafts:
                    error = lacking
                shortened = True
                break
            if self.span.is_whole:
                self.size(True, ("examples",), draft.examples, draft.examples)
            self.drafter.commit(draft, first_step, step)
            drafts.append(draft)
            waiting.popleft()
        settled = []
        if drafts:
            with self.breaking():
                settled = self._close(drafts, first_step, shortened)
        return settled, error

    def _due(self, step: int) -> bool:
        """Whether rows may leave for good before a step."""
        return any(is_due(p, step) for p in self._evictions)

    def _evict_if_due(self, step: int) -> None:
        """Takes out the rows that leave before a step, once."""
        for tier in self.tiers:
            tier.departures.clear()
        if step == self._evicted_before or not self._due(step):
            return
        self._evicted_before = step
        self._evict(step, lambda policy: is_due(policy, step))

    def _evict(self, step: int, chosen: Callable[[Eviction], bool]) -> dict[str, int]:
        """Takes out rows by the chosen policies; returns how many of each table."""
        counts = {}
        try:
            for tier, states in zip(self.tiers, self.tables, strict=True):
                for state in states:
                    policies = [p for p in state.table.spec.evictions if chosen(p)]
                    if policies:
                        n = tier.departures.evict(
                            state.number, policies, step, state.rows
                        )
                        state.rows -= n
                        self._evicted_rows += n * state.is_counted
                        counts[state.table.spec.name] = n
        except BaseException as problem:
            self._broken = repr(problem)
            raise
        return counts

    def shrink(self) -> dict[str, int]:
        """Lets rows leave by all policies now; see `EmbeddingCollection.shrink`."""
        with self._planning:
            self._raise_failure()
            return self._evict(self._planned + 1, lambda policy: True)

    def read_evicted(self, g: int, evicted: Evicted, at: np.ndarray) -> np.ndarray:
        """Records of evicted rows, numbers int64 [n], in RAM or on disk."""
        with self._planning:
            return self.tiers[g].departures.read(evicted, at)

    def _check_open(self) -> None:
        """Raises if the rows on disk have been given up."""
        if self._closed:
            raise RuntimeError(
                "this collection has been closed: its rows on disk are gone. Do what is"
                " left to do with it before `close`"
            )

    def _raise_failure(self) -> None:
        """Raises why planning cannot go on; or, once, why rows that should have gone to
        disk are still in RAM."""
        self._check_open()
        if self._broken:
            raise RuntimeError(
                "this collection cannot be trained on: moving rows failed half-way, with"
                f" {self._broken}. Start anew"
            )
        for tier in self.tiers:
            failure, tier.failure = tier.failure, None
            if failure is not None:
                raise failure

    def _close(
        self, drafts: list[Draft], first_step: int, shortened: bool
    ) -> list[Settled]:
        """Ends the window: rows get their slots."""
        closed = [
            tier.close(
                first_step, [draft.ends[g] for draft in drafts], self.drafter.room(tier)
            )
            for g, tier in enumerate(self.tiers)
        ]
        self.drafter.count_disk_hits(drafts, [c[3] for c in closed])
        drafts[0].counters["evicted_rows"] = self._evicted_rows
        self._evicted_rows = 0
        settled = []
        for n, draft in enumerate(drafts):
            moves = tuple(m for c in closed if (m := c[1][n]) is not None)
            if n == 0 and self.drafter.tiered:
                self.drafter.count_moves(draft.counters, moves, shortened)
            for tables, (slots, *_) in zip(draft.tables, closed, strict=True):
                for table in tables:
                    resolve(table.where, table.unique, slots, table.slots)
            self._planned += 1
            used = tuple(c[2][n] for c in closed)
            settled.append(Settled(draft, moves, used, self._planned, self._version))
        return settled

    def wait_for(self, plans: Sequence[Plan], began: float) -> list[Plan]:
        """Notes plans that are to be carried out, and the time since `began` as theirs."""
        if not plans:
            return []
        seconds = (time.perf_counter() - began) / len(plans)
        plans = [replace(plan, seconds=seconds) for plan in plans]
        with self._state:
            self._pending.extend(
                WaitingPlan(p.sequence, p.moves, p.slots_used, weakref.ref(p))
                for p in plans
            )
        return plans

    def abandon(self, settled: Sequence[Settled]) -> None:
        """Notes moves of batches that get no plan: they are carried out with the next."""
        with self._state:
            self._pending.extend(
                WaitingPlan(x.sequence, x.moves, x.used, _nobody)
                for x in settled
                if x.train
            )

    def _arrange(self, settled: Settled) -> Plan:
        """The plan of a batch whose rows have slots."""
        arrays: dict[str, np.ndarray] = {}
        loads = np.zeros(self.devices)
        layouts = []
        draft, train = settled.draft, settled.train
        for g, owner in enumerate(self.owner_routes(settled)):

            def size(name, n, least, g=g):
                return self.size(train, (g, *name), n, least)

            requester = RequesterRoutes(
                owner.group, self.features, draft.inputs, draft.raws, self.devices,
                draft.examples,
            )  # fmt: skip
            rows, stored, send, base, where = owner.write(arrays, size)
            loads += owner.send_count.sum(0)
            layout = requester.layout(rows, stored, send, size)
            missing = layout.received(self.devices)
            requester.write(layout, missing, base, where, arrays)
            layouts.append(layout)
        mean = loads.mean()
        counters = draft.counters
        counters["exchange_imbalance"] = float(loads.max() / mean) if mean else 1.0
        rows = sum(x.rows * (1 if x.replicated else self.devices) for x in layouts)
        counters["padding_rows"] = rows - sum(
            t.unique for tables in draft.tables for t in tables
        )
        return Plan(
            draft.examples,
            tuple(layouts),
            arrays,
            settled.moves,
            settled.used,
            settled.sequence,
            settled.version,
            counters,
        )

    def owner_routes(self, settled: Settled) -> list[OwnerRoutes]:
        """The owners' half of the index arrays, per group."""
        overlays = settled.overlays or [()] * len(self.groups)
        return [
            OwnerRoutes(group, tables, self.span.count, self.devices, overlay)
            for group, tables, overlay in zip(
                self.groups, settled.draft.tables, overlays, strict=True
            )
        ]

    def settle_evaluation(
        self, features: Mapping[str, np.ndarray | Jagged], batch: int
    ) -> Settled:
        """Finds the rows of a batch to evaluate on, with `planning`."""
        with self._state:
            self._check_open()
            draft = self.drafter.draft(features, batch, self.examples(False), 0)
            if self.span.is_whole:
                self.size(False, ("examples",), draft.examples, draft.examples)
            overlays = []
            try:
                for g, (states, tables) in enumerate(
                    zip(self.tables, draft.tables, strict=True)
                ):
                    parts = [
                        self._overlay(g, state, table, draft)
                        for state, table in zip(states, tables, strict=True)
                    ]
                    overlays.append(() if self.tiers[g].host is None else parts)
            finally:
                self.drafter.forget(draft)
            used = tuple(n.copy() for n in self.applied)
            return Settled(draft, (), used, 0, self._version, overlays)

    def _overlay(self, g: int, state: TableState, table: TableDraft, draft: Draft):
        """Writes the slots of a table's rows; returns the rows that are elsewhere."""
        tier = self.tiers[g]
        state.survey(table, tier.residents, 0, np.zeros(tier.owners, np.int64))
        keys = state.index.table[table.entries, 0]
        table.slots, elsewhere, records = self._as_applied(
            g, state, keys, table.where, table.owners
        )
        hidden = table.slots < 0
        hidden[elsewhere] = False
        if hidden.any():
            ids = draft.hide(table, hidden)
            draft.counters["unseen"] += ids * state.is_counted
        words = records[:, : tier.row_words]
        return np.column_stack([elsewhere.astype(np.int32), words])

    def _as_applied(self, g: int, state: TableState, keys, where, owners):
        """Finds rows as the devices have them now: see `Tier.locate`."""
        waiting = [m for p in self._pending for m in p.moves if m.group == g]
        return self.tiers[g].locate(
            state.number, keys, where, owners, self.applied[g], waiting
        )

    def find(self, g: int, state: TableState, salted: np.ndarray, owners: np.ndarray):
        """Finds rows of some keys as the devices have them now: see `Tier.locate`."""
        with self._planning, self._state:
            self._check_open()
            where = state.index.lookup(salted).astype(np.int64)
            return self._as_applied(g, state, salted, where, owners)

    def facts(self, g: int, state: TableState, salted: np.ndarray, owners: np.ndarray):
        """What is known of rows that there are: see `Tier.facts`."""
        with self._planning:
            self._check_open()
            where = state.index.lookup(salted).astype(np.int64)
            return self.tiers[g].facts(state.number, salted, where, owners)

    def stats(self) -> dict[str, dict[str, int]]:
        """How many rows of each group are where; see `EmbeddingCollection.stats`."""
        with self._planning, self._state:
            pending = [move for plan in self._pending for move in plan.moves]
            found = {}
            for g, (group, tier, states) in enumerate(
                zip(self.groups, self.tiers, self.tables, strict=True)
            ):
                host, disk = tier.host, tier.disk
                rows = sum(s.rows for s in states)
                elsewhere = [0 if x is None else len(x) for x in (host, disk)]
                elsewhere[0] -= tier.departures.in_ram
                found[group.name] = {
                    "tables": len(states),
                    "rows": rows,
                    "coming_rows": sum(
                        fill.rows for m in pending if m.group == g for fill in m.fills
                    ),
                    "leaving_rows": tier.departures.pending_rows,
                    "device_rows": rows - sum(elsewhere),
                    "host_rows": elsewhere[0],
                    "disk_rows": elsewhere[1],
                    "host_bytes": 0 if host is None else host.bytes,
                    "index_bytes": tier.found_by,
                    "candidates": sum(s.gate.candidates for s in states),
                    "disk_bytes": 0 if disk is None else disk.file_bytes,
                }
            return found

    def close(self) -> None:
        """Removes the files of the disk tier and gives its folder back."""
        self._closed = bool(self._folders)
        self.moments.clear()
        for tier in self.tiers:
            if tier.disk is not None:
                tier.disk.close()
        for folder in self._folders.values():
            folder.close()

    def keys(self, g: int, state: TableState) -> np.ndarray:
        """Salted keys of a table, uint64 [n], that have a row now."""
        tier = self.tiers[g]
        with self._planning, self._state:
            self._check_open()
            known, _ = state.index.items()
            known = np.union1d(known, tier.departures.keys(state.number))
            owners = owners_of(known, state.table.owner, tier.span)
            where = state.index.lookup(known).astype(np.int64)
            slots, elsewhere, _ = self._as_applied(g, state, known, where, owners)
            slots[elsewhere] = 0
            parts = [known[slots >= 0]]
            if tier.disk is not None:
                parts += [
                    keys[tables == state.number] for keys, tables in tier.disk.keys()
                ]
        return np.unique(np.concatenate(parts))

    def announce(self, batches: int, every: int | None = None) -> int:
        """Asks for an outline of the moment after so many more batches, or, if those have
        been planned already, as soon as there can be one.

        Args:
          batches: from now on.
          every: for all further moments so far apart, too; no others announced before.

        Returns:
          After how many batches that is.
        """
        with self._planning, self._state:
            self._check_open()
            live = [p.sequence for p in self._pending if p.plan() is not None]
            first = live[0] if live else self._planned + 1
            moment = first + batches - 1
            found = self.moments.announce(moment, self._planned, self._outline, every)
            return found - first + 1

    @property
    def ahead(self) -> int:
        """Batches that have been planned and wait for their steps."""
        with self._state:
            return sum(p.plan() is not None for p in self._pending)

    def _outline(self, used: Sequence[np.ndarray] | None = None) -> Outline:
        """What there is now, as planned; or in the slots `used` of devices alone."""
        for tier in self.tiers:
            tier.departures.check_no_one_waits()
        return Outline(
            self._planned if used is None else self._applied,
            self._evicted_before,
            dict(self._rungs),
            [
                tier.outline(None if used is None else used[g])
                for g, tier in enumerate(self.tiers)
            ],
            self._mark(self._planned if used is None else self._applied),
            {
                s.table.spec.name: s.gate.counts()
                for states in self.tables
                for s in states
                if s.gate.has_memory
            },
        )

    @property
    def removals(self) -> list[Removals]:
        """Per group, the keys whose rows have left."""
        return [tier.departures.removals for tier in self.tiers]

    def keep_removals(self) -> None:
        """From now on, the keys of rows that leave are listed."""
        with self._planning:
            for removals in self.removals:
                removals.keep()

    def removed(self, start: Mark, stop: Mark) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per group, salted keys, uint64 [n], and tables, int32 [n], of the rows that have
        left between two moments; nothing if that is not known any more."""
        with self._planning:
            if not start.leads_to(stop) or stop.eras != self._mark(0).eras:
                return []
            spans = zip(self.removals, start.removed, stop.removed, strict=True)
            return [removals.between(a, b) for removals, a, b in spans]

    def drop_removals(self, mark: Mark) -> None:
        """Forgets the rows that have left before a moment."""
        with self._planning:
            if mark.eras == self._mark(0).eras:
                for removals, count in zip(self.removals, mark.removed, strict=True):
                    removals.drop(count)

    def _mark(self, sequence: int) -> Mark:
        return Mark(
            sequence,
            tuple(x.count for x in self.removals),
            tuple(x.era for x in self.removals),
        )

    def outline(self) -> Outline:
        """What there is on the devices now, after the last plan that was carried out.

        Raises:
          RuntimeError: if planning has gone on since, and what it has changed cannot be
            told from what was before.
        """
        with self._planning, self._state:
            self._raise_failure()
            found = self.moments.take(self._applied)
            if found is not None:
                return found
            if self._planned == self._applied:
                return self._outline()
            ahead = any(tier.residents.tracked for tier in self.tiers) or any(
                s.gate.has_memory for states in self.tables for s in states
            )
            if not ahead:
                return self._outline(self.applied)
            raise RuntimeError(
                f"a snapshot of the tables cannot be made after batch {self._applied}:"
                f" {self._planned - self._applied} more have been planned, and rows in a"
                " storage and the counts of `admit` and `evict` are of what is planned."
                " Announce it: `Checkpointer.maybe_save` at every step does, as does"
                " `collection.announce_snapshot(batches)` before that many batches"
            )

    def adopt(self, outline: Mapping[str, Any], counts: Mapping[str, Any]) -> Mark:
        """Goes on from a snapshot, once its rows are there.

        Args:
          outline: `sequence`, `evicted_before` and `sizes` of one.
          counts: of keys without a row, by table.

        Returns:
          The moment that changes are counted from now on.
        """
        with self._planning, self._state:
            self._planned = self._applied = outline["sequence"]
            self._evicted_before = outline["evicted_before"]
            self._rungs = dict(outline["sizes"])
            self.applied = [t.residents.next_slot.copy() for t in self.tiers]
            for states in self.tables:
                for s in states:
                    if s.table.spec.name in counts:
                        s.gate.set_counts(counts[s.table.spec.name])
            return self._mark(self._planned)

    @property
    def started(self) -> bool:
        """Whether a training plan has been carried out: rows lie on the devices."""
        return self._applied > 0

    def check_current(self, plan: Plan) -> None:
        """Raises if rows have moved since an evaluation batch was planned.

        Raises:
          RuntimeError: it would read other keys' rows.
        """
        if not plan.sequence and plan.version != self._version:
            raise RuntimeError(
                "this evaluation batch was prepared before training went on, and rows have"
                " moved since. Prepare evaluation batches after the last training step,"
                " and evaluate all of them before the next"
            )

    def waiting_upto(self, plan: Plan) -> tuple[WaitingPlan, ...]:
        """What has to be carried out before a training plan's step, oldest first.

        The plan itself is the last. Before it come earlier plans that nobody carried out: a
        loop that was left early abandons the batches it had prefetched, but their keys
        have been given rows.

        Raises:
          RuntimeError: if this plan or a later one has been carried out before.
        """
        with self._state:
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
            if not any(p.plan() is plan for p in self._pending):
                raise RuntimeError(
                    "this batch was prepared by another collection than that of the step:"
                    " prepare it with the collection that make_train_step was given"
                )
            return tuple(p for p in self._pending if p.sequence <= plan.sequence)

    @contextmanager
    def moving(self, plans: Sequence[WaitingPlan]) -> Iterator[None]:
        """A context in which to carry out plans; nobody reads rows meanwhile.

        Args:
          plans: of `waiting_upto`.
        """
        with self._state:
            for _ in plans:
                self._pending.popleft()
            moves = [move for plan in plans for move in plan.moves]
            self._applied = plans[-1].sequence
            self._version += any(m.write_back or m.stored or m.evicted for m in moves)
            self.applied = list(plans[-1].slots_used)
            yield
        for move in moves:
            for evicted in move.evicted:
                evicted.is_gone = True

    @contextmanager
    def loading(self) -> Iterator[None]:
        """A context in which to load rows; nobody else plans meanwhile.

        Raises:
          RuntimeError: if batches wait that have been planned without these rows.
        """
        with self._planning:
            waiting = sum(p.plan() is not None for p in self._pending)
            if waiting:
                raise RuntimeError(
                    f"`load_rows` cannot go before {waiting} batches that have been"
                    " prepared and not been stepped on: they were planned without its rows."
                    " Call it between two loops over a loader, not in a hook, or let go of"
                    " the batches that nobody will step on"
                )
            before = self._applied
            try:
                yield
            except BaseException as problem:
                if self._applied > before:  # the state before is gone
                    self._broken = f"`load_rows` and {problem!r}"
                raise
