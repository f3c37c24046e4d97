"""Batches looked up, and taken into the window that is being planned."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from shardjax.embed import translate as kernels
from shardjax.embed.draft import Draft, TableDraft, TableState
from shardjax.embed.groups import Group
from shardjax.embed.inputs import AskedKeys, count_inputs, normalize
from shardjax.embed.jagged import Jagged
from shardjax.embed.moves import record_words
from shardjax.embed.residents import commit
from shardjax.embed.spec import FeatureSpec
from shardjax.embed.tier import Tier
from shardjax.embed.translate import owners_of

COUNTERS = (
    "ids", "unique_ids", "inserted", "unseen", "rejected", "bad_ids", "padding_ids",
    "truncated", "unused_ids", "refused", "forgotten_candidates", "evicted_rows",
)  # fmt: skip
TIER_COUNTERS = (
    "device_hits", "host_hits", "disk_hits", "fetched_rows", "written_back_rows",
    "moved_bytes", "windows", "shortened_windows",
)  # fmt: skip


_ONES = np.zeros(0, np.int64)  # `commit` takes it for ones


class PlanError(ValueError):
    """A batch that cannot be planned: bad ids, or a full table. Nothing has changed."""


def plan_error(problems: Sequence[str]) -> PlanError:
    """An error that tells all that is wrong with a batch."""
    one = len(problems) == 1
    return PlanError(problems[0] if one else "\n- ".join(["", *problems]))


def check_clicks(
    clicks: np.ndarray | None, batch: int, tables: Sequence[Sequence[TableState]]
) -> np.ndarray | None:
    """The labels of the examples as float64, if a table counts them.

    Raises:
      PlanError: if they are not there, or not labels.
    """
    names = [
        s.table.spec.name
        for states in tables
        for s in states
        if s.table.spec.show_click is not None
    ]
    if not names:
        return None
    if clicks is None:
        raise PlanError(
            f"table {names[0]!r} has the policy ShowClick, which counts clicks, and the"
            f" batch of {batch} examples came without labels. Give `clicks`"
        )
    found = np.asarray(clicks, np.float64)
    good = found.shape == (batch,)
    if not good or not ((found >= 0) & (found <= 1)).all():
        got = f"shape {found.shape}"
        if good:
            got = f"{found[~((found >= 0) & (found <= 1))][0]}"
        raise PlanError(
            f"`clicks` for the policy ShowClick of table {names[0]!r} must be {batch}"
            f" labels in [0, 1], got {got}"
        )
    return found


class Drafter:
    """Looks batches up in the tables of a collection.

    Args:
      groups, features, devices, threads: as of `Planner`.
      tables: per group, the states of its tables.
      tiers: per group.
    """

    def __init__(
        self,
        groups: tuple[Group, ...],
        features: Mapping[str, FeatureSpec],
        tables: Sequence[Sequence[TableState]],
        tiers: Sequence[Tier],
        devices: int,
        threads: int,
    ):
        self.groups, self.features = groups, features
        self.tables, self.tiers = tables, tiers
        self.devices = devices
        self.tiered = any(tier.host is not None for tier in tiers)
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def draft(
        self,
        features: Mapping[str, np.ndarray | Jagged],
        batch: int,
        examples: int,
        step: int,
        clicks: np.ndarray | None = None,
        *,
        admit: bool = False,
    ) -> Draft:
        """Looks up a batch's keys; raises before any change that lasts.

        Args:
          features, batch, clicks: as of `Planner.plan`.
          examples: per requester, at least; more if the batch has more.
          step: of the batch, from 1; 0 for evaluation.
          admit: whether every key gets a row, whatever its table's `admit` says.
        """
        train = step > 0
        asked = any(isinstance(x, AskedKeys) for x in features.values())
        if train and not asked:
            clicks = check_clicks(clicks, batch, self.tables)
        examples = max(examples, -(-batch // self.devices))
        inputs = normalize(features, self.features, batch, examples, self.devices)
        counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        counters |= count_inputs(inputs, features)
        states = [s for states in self.tables for s in states]
        run = self._pool.map if self._pool else map
        # evaluation numbers keys that may be on disk, or about to leave for good, or have a
        # place in what another process gets, and forgets them again
        insert = [
            train or asked or tier.disk is not None or tier.departures.pending_rows > 0
            for tier, states in zip(self.tiers, self.tables, strict=True)
            for _ in states
        ]
        results = list(run(lambda s, i: s.look_up(inputs, i), states, insert))
        problems = [p for _, more in results for p in more]
        raws = {name: raw for found, _ in results for name, raw in found.items()}
        tables = [[s.draft() for s in states] for states in self.tables]
        self._find_owners(tables, asked)
        draft = Draft(examples, inputs, raws, tables, counters, clicks=clicks)
        full = []
        try:
            if train and not problems:
                counters["refused"] = self._refuse(draft, step, admit)
            full = self._beyond(draft, problems) if train else []
        except BaseException:  # such as a file that cannot be read
            self.forget(draft)
            raise
        if problems:
            self.forget(draft)
            raise plan_error(problems)
        for state, table, hidden in full:
            if table.asked is not None:  # what finds no room has not passed
                keys, counts, admitted = table.asked
                refused = state.index.table[table.entries[hidden], 0]
                table.asked = keys, counts, admitted & ~np.isin(keys, refused)
            state.drop(table, hidden)
            ids = draft.hide(table, hidden)
            counters["rejected"] += ids * state.is_counted
        drafted = [table for tables in draft.tables for table in tables]
        for state, table in zip(states, drafted, strict=True):
            found_none = int(state.counters[kernels.UNSEEN])
            unseen = draft.unseen(table, found_none)
            counters["unseen"] += unseen * state.is_counted
            counters["bad_ids"] += int(state.counters[kernels.BAD])
            counters["padding_ids"] += int(state.counters[kernels.PADDING])
            counters["unique_ids"] += int(state.local_count.sum())
        return draft

    def _find_owners(self, tables: list[list[TableDraft]], always: bool) -> None:
        """Writes who owns the keys that may stay without a row: they have a place in what
        owners send nevertheless."""
        for tier, states, drafts in zip(self.tiers, self.tables, tables, strict=True):
            for state, table in zip(states, drafts, strict=True):
                full = state.table.spec.capacity is not None
                if always or full or not state.gate.is_open:
                    salted = state.index.table[table.entries, 0]
                    table.owners = owners_of(salted, state.table.owner, tier.span)

    def _refuse(self, draft: Draft, step: int, admit: bool) -> int:
        """Takes the keys out of a draft that get no row yet, unless all are admitted;
        returns how many ids."""
        ids = 0
        for tier, states, tables in zip(
            self.tiers, self.tables, draft.tables, strict=True
        ):
            for state, table in zip(states, tables, strict=True):
                if state.gate.is_open or not table.new:
                    continue
                new, keys = state.new(table)
                if tier.disk is not None:  # those have a row
                    absent = ~self._on_disk(tier, state, keys)
                    new, keys = new[absent], keys[absent]
                counts = draft.occurrences(table)[new]
                admitted = np.ones(len(keys), bool)
                if not admit:
                    admitted = state.gate.admits(keys, counts, step)
                table.asked = keys, counts, admitted
                hidden = np.zeros(table.unique, bool)
                hidden[new[~admitted]] = True
                if hidden.any():
                    ids += draft.hide(table, hidden) * state.is_counted
                    state.drop(table, hidden)
        return ids

    def _beyond(self, draft: Draft, problems: list[str]):
        """The new keys that full tables have no room for; or what is wrong with that."""
        full = []
        for tier, states, tables in zip(
            self.tiers, self.tables, draft.tables, strict=True
        ):
            for state, table in zip(states, tables, strict=True):
                hidden = state.beyond(table)
                if hidden is not None and tier.disk is not None:
                    # keys on disk have a row; so may those that are to come
                    earlier = tier.residents.coming.new_keys(state.number)
                    known = self._on_disk(tier, state, earlier)
                    on_disk = self._on_disk(tier, state, state.new(table)[1])
                    hidden = state.beyond(table, int(known.sum()), on_disk)
                if hidden is None:
                    continue
                spec = state.table.spec
                if spec.on_full == "error":
                    problems.append(
                        f"table {spec.name!r} is full: {draft.hide(table, hidden)} ids of"
                        f" this batch have no row and its `capacity` is {spec.capacity}."
                        " Enlarge `capacity`, or set `on_full` of the table to 'reject'"
                    )
                full.append((state, table, hidden))
        return full

    def _on_disk(self, tier: Tier, state: TableState, keys: np.ndarray) -> np.ndarray:
        """Which of some keys are on disk, bool [n]."""
        assert tier.disk is not None
        return tier.disk.read(keys, np.full(len(keys), state.number, np.int32)).mask

    def forget(self, draft: Draft) -> None:
        """Undoes a draft."""
        for states, tables in zip(self.tables, draft.tables, strict=True):
            for state, table in zip(states, tables, strict=True):
                if table.new:
                    state.forget_new(table)

    def lacking(self, draft: Draft, first_step: int) -> PlanError | None:
        """What is wrong if a draft's rows do not fit on the devices with the window's."""
        for group, tier, states, tables in zip(
            self.groups, self.tiers, self.tables, draft.tables, strict=True
        ):
            residents = tier.residents
            unique = sum(t.unique for t in tables)
            most_bytes = self.room(tier)
            if tier.full(residents.coming.count + unique, most_bytes):
                return PlanError(
                    f"the RAM tier is full: `host_bytes` of the storage, {most_bytes} of"
                    f" them for rows, does not hold {len(tier.host or ())} rows and those of"
                    " another batch. Give more, or a folder as `disk`"
                )
            if residents.surely_fit(unique):
                continue
            needed = np.zeros(tier.owners, np.int64)
            for state, table in zip(states, tables, strict=True):
                state.survey(table, residents, first_step, needed)
            lacking = residents.lacking(needed)
            if lacking:
                per_device = lacking + (residents.capacity or 0)
                names = ", ".join(repr(t.spec.name) for t in group.tables[:3])
                more = ", ..." if len(group.tables) > 3 else ""
                return PlanError(
                    f"a batch needs {per_device} rows of the tables {names}{more} on one"
                    f" device, and `device_rows` of the storage gives each"
                    f" {residents.capacity}. Give at least"
                    f" device_rows={per_device * tier.span.total}, or smaller batches"
                )
        return None

    def commit(self, draft: Draft, first_step: int, step: int) -> None:
        """Takes a draft into the window."""
        if self.tiered:
            draft.counters |= dict.fromkeys(TIER_COUNTERS, 0)
        for states, tables, tier in zip(
            self.tables, draft.tables, self.tiers, strict=True
        ):
            residents = tier.residents
            for state, table in zip(states, tables, strict=True):
                residents.coming.reserve(table.unique)
                policy = state.table.spec.show_click
                amounts = _ONES if policy is None else draft.scores(table, policy)
                if table.asked is not None:
                    forgotten = state.gate.passed(*table.asked)
                    draft.counters["forgotten_candidates"] += (
                        forgotten * state.is_counted
                    )
                before = residents.coming.count
                residents.coming.count = commit(
                    state.index.table, table.entries, table.unique, state.table.owner,
                    tier.span.total, tier.span.first, state.number, step, first_step,
                    residents.max_uses, amounts, residents.slots, residents.words,
                    residents.pinned, table.where, table.owners,
                    residents.coming.columns, before,
                )  # fmt: skip
                state.rows += table.new
                came = residents.coming.count - before
                draft.counters["inserted"] += table.new * state.is_counted
                if tier.host is not None:
                    draft.counters["host_hits"] += came - table.new
                    here = int((table.where >= 0).sum())  # refused keys have no row
                    draft.counters["device_hits"] += here - came
            draft.ends.append(residents.coming.count)

    def room(self, tier: Tier) -> int | None:
        """RAM that a tier's rows may take, in bytes: what the others leave it."""
        storage = tier.group.storage
        if storage is None or storage.host_bytes is None:
            return None
        sharing = [t for t in self.tiers if t.group.storage == storage]
        found_by = sum(t.found_by for t in sharing)
        others = sum(t.host.bytes for t in sharing if t.host and t is not tier)
        return max(int(storage.host_bytes) - found_by - others, 0)

    def count_disk_hits(self, drafts: list[Draft], from_disk: list[np.ndarray]):
        """Rows that were taken for new and are on disk are not new."""
        for g, hits in enumerate(from_disk):
            if not hits.any():
                continue
            start = 0
            for draft in drafts:
                count = int(hits[start : draft.ends[g]].sum())
                draft.counters["inserted"] -= count
                draft.counters["disk_hits"] += count
                start = draft.ends[g]
            tables = self.tiers[g].residents.coming.tables[hits]
            counts = np.bincount(tables, minlength=len(self.tables[g]))
            for state, count in zip(self.tables[g], counts, strict=True):
                state.rows -= int(count)

    def count_moves(self, counters, moves, shortened: bool) -> None:
        """Adds what moves at a window's start to its first batch's counters."""
        counters["windows"] += 1
        counters["shortened_windows"] += shortened
        for move in moves:
            fetched = int((move.places >= 0).sum())
            back = 0 if move.write_back is None else len(move.write_back.keys)
            counters["fetched_rows"] += fetched
            counters["written_back_rows"] += back
            words = record_words(self.groups[move.group])
            counters["moved_bytes"] += (fetched + back) * 4 * words
