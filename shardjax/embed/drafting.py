"""Batches looked up, and taken into the window that is being planned."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from shardjax.embed import translate as kernels
from shardjax.embed.draft import Draft, TableState
from shardjax.embed.groups import Group
from shardjax.embed.inputs import normalize
from shardjax.embed.jagged import Jagged
from shardjax.embed.moves import record_words
from shardjax.embed.residents import commit
from shardjax.embed.spec import FeatureSpec
from shardjax.embed.storage import Storage
from shardjax.embed.tier import Tier

COUNTERS = (
    "ids", "unique_ids", "inserted", "unseen", "rejected", "bad_ids", "padding_ids",
    "truncated", "unused_ids",
)  # fmt: skip
TIER_COUNTERS = (
    "device_hits", "host_hits", "disk_hits", "fetched_rows", "written_back_rows",
    "moved_bytes", "windows", "shortened_windows",
)  # fmt: skip


class PlanError(ValueError):
    """A batch that cannot be planned: bad ids, or a full table. Nothing has changed."""


class Drafter:
    """Looks batches up in the tables of a collection.

    Args:
      groups, features, devices, threads, storage: as of `Planner`.
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
        storage: Storage | None,
    ):
        self.groups, self.features = groups, features
        self.tables, self.tiers = tables, tiers
        self.devices = devices
        self.storage = storage
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def draft(
        self,
        features: Mapping[str, np.ndarray | Jagged],
        batch: int,
        examples: int,
        *,
        train: bool,
    ) -> Draft:
        """Looks up a batch's keys; raises before any change that lasts.

        Args:
          features, batch, train: as of `Planner.plan`.
          examples: per requester, at least; more if the batch has more.
        """
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
        states = [s for states in self.tables for s in states]
        run = self._pool.map if self._pool else map
        # evaluation numbers keys that may be on disk, and forgets them again
        insert = [
            train or (tier.disk is not None)
            for tier, states in zip(self.tiers, self.tables, strict=True)
            for _ in states
        ]
        results = list(run(lambda s, i: s.look_up(inputs, i), states, insert))
        problems = [p for _, more in results for p in more]
        raws = {name: raw for found, _ in results for name, raw in found.items()}
        tables = [[s.draft() for s in states] for states in self.tables]
        draft = Draft(examples, inputs, raws, tables, counters)
        full = self._beyond(draft, problems) if train else []
        if problems:
            self.forget(draft)
            raise PlanError(
                "; ".join(problems)
                if len(problems) == 1
                else "\n- ".join(["", *problems])
            )
        for state, table, hidden in full:
            state.drop(table, hidden)
            counters["rejected"] += draft.hide(table, hidden)
        for state in states:
            counters["unseen"] += int(state.counters[kernels.UNSEEN])
            counters["bad_ids"] += int(state.counters[kernels.BAD])
            counters["padding_ids"] += int(state.counters[kernels.PADDING])
            counters["unique_ids"] += int(state.local_count.sum())
        return draft

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
                    on_disk = self._on_disk(tier, state, state.new_keys(table))
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
                    state.forget_new(table.entries)

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
                    f" device_rows={per_device * tier.owners}, or smaller batches"
                )
        return None

    def commit(self, draft: Draft, first_step: int, step: int) -> None:
        """Takes a draft into the window."""
        if self.storage is not None:
            draft.counters |= dict.fromkeys(TIER_COUNTERS, 0)
        for states, tables, tier in zip(
            self.tables, draft.tables, self.tiers, strict=True
        ):
            residents = tier.residents
            for state, table in zip(states, tables, strict=True):
                residents.coming.reserve(table.unique)
                before = residents.coming.count
                residents.coming.count = commit(
                    state.index.table, table.entries, table.unique, state.table.owner,
                    tier.owners, state.number, step, first_step, residents.max_uses,
                    residents.slots, residents.words, residents.pinned, table.where,
                    table.owners, residents.coming.columns, before,
                )  # fmt: skip
                state.rows += table.new
                came = residents.coming.count - before
                draft.counters["inserted"] += table.new
                if self.storage is not None:
                    draft.counters["host_hits"] += came - table.new
                    draft.counters["device_hits"] += table.unique - came
            draft.ends.append(residents.coming.count)

    def room(self, tier: Tier) -> int | None:
        """RAM that a tier's rows may take, in bytes: what the others leave it."""
        if self.storage is None or self.storage.host_bytes is None or tier.host is None:
            return None
        found_by = sum(t.found_by for t in self.tiers if t.host is not None)
        others = sum(
            t.host.bytes for t in self.tiers if t.host is not None and t is not tier
        )
        return max(int(self.storage.host_bytes) - found_by - others, 0)

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
