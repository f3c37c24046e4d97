"""Snapshots of a collection's rows, taken and gone on from."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from shardjax.embed.changes import Mark, SlotChanges, written_slots
from shardjax.embed.draft import TableState
from shardjax.embed.groups import Group
from shardjax.embed.mover import Mover
from shardjax.embed.moves import SlabState
from shardjax.embed.outline import Outline
from shardjax.embed.plan import Plan, PlanError, Planner, WaitingPlan
from shardjax.embed.restoring import (
    Restoring,
    TableRecords,
    describe,
    layout_of,
    sizes_of,
)
from shardjax.embed.snapshot import Removed, Snapshot


class Snapshots:
    """Takes snapshots of the tables of a collection, and restores them.

    Args:
      groups, planner, mover: of the collection.
      seed: of the collection.
      together: calls something in all processes, and returns what it gives in each.
    """

    def __init__(
        self,
        groups: tuple[Group, ...],
        planner: Planner,
        mover: Mover,
        seed: int,
        together: Callable[[Callable[[], Any]], list[Any]],
    ):
        self._groups, self._planner, self._mover = groups, planner, mover
        self._seed = seed
        self._together = together
        self._active: list[Snapshot] = []
        self._changes: list[SlotChanges | None] | None = None  # by group, if wanted

    def keep_changes(self) -> None:
        """From now on it is known what changes, for `take` with `since`.

        That takes 4 bytes for each row of groups without a storage whose tables have no
        `evict`, and 12 for each row that leaves for good.
        """
        if self._changes is None:
            self._planner.keep_removals()
            self._changes = [
                None if tier.residents.tracked else SlotChanges(tier.owners)
                for tier in self._planner.tiers
            ]

    @property
    def ahead(self) -> int:
        """Batches that have been planned and wait for their steps."""
        return self._planner.ahead

    def announce(self, batches: int, every: int | None = None) -> int:
        """Says that a snapshot will be taken after so many more batches.

        Where rows lie in a storage, or `admit` or `evict` go by what has been, a snapshot
        can only be taken at a moment that was announced before batches after it were
        planned.

        Args:
          batches: from now on, at least 1.
          every: with it, snapshots will be taken so many batches apart from then on.

        Returns:
          After how many it can be taken: more than asked for, if planning is further.
        """
        return self._planner.announce(batches, every)

    def take(
        self, state: Sequence[SlabState], since: Mark | None = None
    ) -> tuple[Snapshot, dict[str, Any]]:
        """Begins a snapshot of the rows as they are now; training may go on.

        Where there are several processes, all of them take it, at the same place of their
        programs; each gets the rows of its own devices, and the first one those of
        replicated tables. Somebody has to go through `Snapshot.records` in another thread,
        and to call its `close` in the end. The devices' rows are read at each `apply_fills`
        from now on, or by `Snapshot.complete`.

        Args:
          state: of the tables, after the last step.
          since: `Snapshot.mark` of an earlier one: only the rows that have changed since
            are read, if it is known which these are and they are less than half of all.

        Returns:
          It, and what it is of, as JSON has it; counts of keys without a row are in
          `Snapshot.outline`.

        Raises:
          RuntimeError: if planning is ahead, and nobody has announced the snapshot.
        """
        outline = self._planner.outline()
        for group, tier in zip(self._groups, outline.tiers, strict=True):
            if group.replicated and self._planner.span.first:
                tier.leave_out()
        described = describe(self._groups, outline, self._seed, self._planner.devices)
        removed = None if since is None else self._narrow(outline, since)
        snapshot = Snapshot(outline, self._mover.gather, removed)
        self._active.append(snapshot)
        return snapshot, described

    def _narrow(self, outline: Outline, since: Mark) -> list[Removed] | None:
        """Leaves the rows out that have not changed; returns those that have left, or
        None if it leaves out nothing."""
        removed, changed = [], []
        if self._changes is not None:
            removed = self._planner.removed(since, outline.mark)
        if removed:
            changed = [
                tier.device.changed(since.sequence, slots)
                for tier, slots in zip(outline.tiers, self._changes or (), strict=True)
            ]
        late = sum(int(x.sum()) for x in changed) + sum(len(x[0]) for x in removed)
        rows = sum(tier.count for tier in outline.tiers)
        known = self._together(lambda: [bool(removed), late, rows])
        if not all(x[0] for x in known):
            return None
        if sum(x[1] for x in known) > sum(x[2] for x in known) / 2:
            return None
        for tier, own in zip(outline.tiers, changed, strict=True):
            tier.narrow(since.sequence, own)
        return [
            (keys - tier.salts[tables], tables)
            for tier, (keys, tables) in zip(outline.tiers, removed, strict=True)
        ]

    def forget(self, mark: Mark) -> None:
        """Says that nobody will `take` a snapshot since a moment before this one."""
        self._planner.drop_removals(mark)

    def protect(
        self, state: Sequence[SlabState], plans: Sequence[WaitingPlan], plan: Plan
    ) -> None:
        """Lets snapshots read what plans and the step of the last one overwrite."""
        self._active = [s for s in self._active if s.left and not s.is_closed]
        if not self._active and self._changes is None:
            return
        moves = [move for p in plans for move in p.moves]
        slots = [plan.arrays[f"{group.name}/slots"] for group in self._groups]
        for g, changes in enumerate(self._changes or ()):
            if changes is not None:
                changes.reserve(int(plan.slots_used[g].max()))
                changes.note(plan.sequence, written_slots(g, moves, slots[g]))
        for snapshot in self._active:
            snapshot.protect(state, moves, slots)

    def restore(
        self,
        state: Sequence[SlabState],
        described: Mapping[str, Any],
        records: Iterable[tuple[int, np.ndarray]],
        counts: Mapping[str, Mapping[str, np.ndarray]],
        *,
        ignore: Sequence[str] = (),
        cast: bool = False,
    ) -> tuple[tuple[SlabState, ...], Mark | None]:
        """Puts the rows of a snapshot into a collection that has none.

        The collection may lie on another mesh, in other tiers and placements; shared
        optimizer state is not part of it.

        Args:
          state: of `EmbeddingCollection.init`; donated.
          described: what `take` returned.
          records: of `Snapshot.records`, in any order.
          counts: of `Snapshot.outline`.
          ignore, cast: as of `Restoring`.

        Returns:
          The state with the rows; and `Snapshot.mark` of the snapshot, for `take`, unless
          the rows are other ones here.

        Raises:
          ValueError: for a snapshot of other tables; all differences are listed.
          PlanError: for a table that does not hold its rows.
          RuntimeError: for a collection that has rows.
          MemoryError, OSError: if the storage does not hold them.
        """
        planner = self._planner
        if planner.started or any(s.rows for states in planner.tables for s in states):
            raise RuntimeError(
                "a checkpoint can be restored into a collection that has no rows yet, and"
                " this one has. Make a new EmbeddingCollection"
            )
        slabs = [self._mover.own(g, slab) for g, slab in enumerate(state)]

        def adopt() -> list[int]:
            restoring = Restoring(self._groups, described, self._seed, ignore, cast)
            for number, part in records:
                for found in restoring.records(number, part):
                    own = self._own(found)
                    if len(own.keys):
                        slabs[own.group] = self._adopt(slabs[own.group], own)
            return [self._slots(g, slab) for g, slab in enumerate(slabs)]

        most = np.max(self._together(adopt), 0).tolist()
        for g, slots in enumerate(most):
            slabs[g] = self._grow(g, slabs[g], slots)
            slabs[g] = self._mover.whole(g, slabs[g])
        counts = {
            entry.table.spec.name: self._own_counts(
                g, entry, counts[entry.table.spec.name]
            )
            for g, entries in enumerate(planner.tables)
            for entry in entries
            if entry.table.spec.name in counts
        }
        same = described["devices"] == planner.devices and [
            g["tables"] for g in described["groups"]
        ] == [[t.spec.name for t in g.tables] for g in self._groups]
        sizes = sizes_of(described) if same else {}
        mark = planner.adopt({**described, "sizes": sizes}, counts)
        layout = [
            {name: group[name] for name in ("name", "tables", "leaves")}
            for group in described["groups"]
        ]
        alike = layout == layout_of(self._groups) and not ignore
        return tuple(slabs), mark if alike else None

    def _own(self, found: TableRecords) -> TableRecords:
        """Those of some rows of one table that this process's devices own."""
        own, _ = self._planner.tiers[found.group].own(int(found.tables[0]), found.keys)
        if own.all():
            return found
        return TableRecords(
            found.group, found.keys[own], found.tables[own], found.last_steps[own],
            found.tallies[own], found.words[own],
        )  # fmt: skip

    def _own_counts(self, g: int, entry: TableState, counts: Mapping[str, np.ndarray]):
        """Those counts of keys without a row that this process goes on with."""
        if "keys" not in counts:  # a filter of all keys
            return counts
        own, _ = self._planner.tiers[g].own(entry.number, counts["keys"])
        return {name: x[own] for name, x in counts.items()}

    def _slots(self, g: int, slab: SlabState) -> int:
        """Slots per owner of a slab of this process."""
        return slab.rows.shape[0] // self._planner.tiers[g].owners

    def _grow(self, g: int, slab: SlabState, slots: int) -> SlabState:
        if slots > self._slots(g, slab):
            return self._mover.grow_own(g, slab, slots)
        return slab

    def _adopt(self, slab: SlabState, own: TableRecords) -> SlabState:
        """Puts rows of one table where there is room for them."""
        g = own.group
        tier = self._planner.tiers[g]
        entry = self._planner.tables[g][int(own.tables[0])]
        spec = entry.table.spec
        entry.rows += len(own.keys)
        if entry.rows > spec.max_rows:
            raise PlanError(
                f"table {spec.name!r} holds {spec.max_rows} rows and the checkpoint has more"
                " of it. Enlarge `capacity`"
            )
        keys = own.keys - entry.table.salt
        if spec.vocabulary is not None and (keys >= np.uint64(spec.vocabulary)).any():
            raise PlanError(
                f"table {spec.name!r} has the vocabulary [0, {spec.vocabulary}), and the"
                f" checkpoint a row of key {int(keys.max())}. Enlarge `vocabulary`"
            )
        move = tier.adopt(
            own.keys, own.tables, own.last_steps, own.tallies, own.words,
            self._planner.drafter.room(tier),
        )  # fmt: skip
        slots = self._slots(g, slab)
        while slots < tier.residents.next_slot.max():
            slots *= 2
        slab = self._grow(g, slab, slots)
        if move is None:
            return slab
        slab = self._mover.move_own(slab, move)
        jax.block_until_ready(slab.rows)  # records of many parts would pile up
        return slab
